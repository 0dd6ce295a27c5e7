"""Where a node begins after a restart."""

from __future__ import annotations

from pathlib import Path

from spes_p2p.ids import RoundNumber
from spes_p2p.node.resume import Checkpoint, drop_damaged, resume
from spes_p2p.protocol.codec import body_hash, encode
from spes_p2p.protocol.head import Head, next_head
from spes_p2p.protocol.statements import Item
from spes_p2p.storage.blobs import DiskBlobs
from spes_p2p.storage.ledger import Ledger, LedgerEntry
from spes_p2p.testing import protocol_cases as cases

FOUNDERS = cases.identities(3)
ME = FOUNDERS[0]


def certify(ledger: Ledger, head: Head, items: list[Item], kept: tuple[int, ...] = ()) -> Head:
    body = cases.body_of(head, cases.transition_of(head, items), merge_lists=b"lists", kept=kept)
    certificate = cases.certificate_of(head, body, FOUNDERS, b"lists" if body.merge_alpha else b"")
    ledger.append(
        LedgerEntry(
            epoch=0, round=RoundNumber(body.round), hash=body_hash(body), body=encode(body),
            certificate=encode(certificate), attachments=b"", final=True,
        )
    )  # fmt: skip
    return next_head(head, body)


def history(ledger: Ledger) -> list[Head]:
    """Genesis, claims, an update of ME with a kept part, and a round without it."""
    heads = [cases.genesis_of(FOUNDERS)]
    heads.append(certify(ledger, heads[-1], [cases.item_of(cases.claim_of(heads[-1], peer)) for peer in FOUNDERS]))
    update = cases.update_of(heads[-1], ME)
    heads.append(certify(ledger, heads[-1], [cases.item_of(update, cases.receipt_of(update, FOUNDERS))], kept=(2,)))
    heads.append(certify(ledger, heads[-1], [cases.item_of(cases.alive_of(heads[-1], peer)) for peer in FOUNDERS]))
    return heads


def checkpoint(head: Head) -> Checkpoint:
    return Checkpoint(round=head.round + 1, base=head.hash)


def test_empty_ledger_begins_at_genesis(ledger: Ledger) -> None:
    genesis = cases.genesis_of(FOUNDERS)
    begin = resume(ledger, genesis, None, ME.peer_id).newest()
    assert (begin.head, begin.certificate, begin.since) == (genesis, None, None)


def test_node_begins_at_the_newest_certificate(ledger: Ledger) -> None:
    heads = history(ledger)
    begin = resume(ledger, heads[0], None, ME.peer_id).newest()
    assert begin.head == heads[-1]
    assert begin.certificate is not None
    assert body_hash(begin.certificate.body) == heads[-1].hash
    assert begin.since is None


def test_checkpoint_of_an_older_round_gets_what_happened_since(ledger: Ledger) -> None:
    heads = history(ledger)
    since = resume(ledger, heads[0], checkpoint(heads[1]), ME.peer_id).newest().since
    assert since is not None
    assert since.before == heads[1]
    assert (since.accepted_update, since.kept_parts) == (2, (2,))


def test_checkpoint_of_the_newest_round_has_nothing_to_catch_up_with(ledger: Ledger) -> None:
    heads = history(ledger)
    since = resume(ledger, heads[0], checkpoint(heads[-1]), ME.peer_id).newest().since
    assert since is not None
    assert (since.before, since.accepted_update, since.named) == (heads[-1], None, False)


def test_damaged_blobs_are_dropped(tmp_path: Path) -> None:
    blobs = DiskBlobs(tmp_path / "blobs")
    sound, damaged = blobs.put(b"sound"), blobs.put(b"damaged")
    with blobs.path(damaged).open("r+b") as file:
        file.write(b"D")
    assert drop_damaged(blobs) == (damaged,)
    assert blobs.ids() == (sound,)
