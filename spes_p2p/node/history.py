"""What a data folder knows of its run: the manifest, and the certified rounds, replayed from the ledger.

Imports neither torch nor hivemind, so that `ledger show` answers at once; works beside a running node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.crypto import peer_text
from spes_p2p.errors import LocalStateError, RemoteProtocolError, UsageError
from spes_p2p.node.files import LEDGER_FILE, MANIFEST_FILE
from spes_p2p.node.stored import Step, walk, walk_to_tip
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.certificate import certificate_terms
from spes_p2p.protocol.codec import bits, decode_signed_run
from spes_p2p.protocol.head import Head, genesis_head
from spes_p2p.protocol.messages import RunManifest, SignedRun
from spes_p2p.protocol.params import PieceSizes
from spes_p2p.protocol.wire import ItemKind, RefusalReason
from spes_p2p.storage.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One certified round, for people and programs."""

    round: int
    view: int
    leader: str
    """Who led the deciding view; nobody in a recovery."""
    final: bool
    updates: int
    """Accepted updates."""
    epoch: int = 0
    """Above that of the round before: a recovery."""
    tokens: int
    loss: float
    """Token-weighted mean training loss of the accepted updates (nats per token)."""
    merge_alpha: float
    """0.0: no merge."""
    owners: dict[int, tuple[str, ...]]
    psi_digest: str
    members: tuple[str, ...]
    kept_parts: int


def read_manifest(data_dir: Path) -> SignedRun | None:
    """The run manifest in a data folder; None if there is none. Raises LocalStateError if it is damaged."""
    path = data_dir / MANIFEST_FILE
    try:
        return decode_signed_run(path.read_bytes()) if path.exists() else None
    except RemoteProtocolError as error:
        raise LocalStateError(f"{path} is damaged ({error.reason})\nMove it away: the run's peers have it.") from error


def sizes_of_nothing(manifest: RunManifest) -> PieceSizes:
    """Piece sizes for reading a history, which depends on none of them."""
    return PieceSizes(
        expert_blob_bytes=0,
        psi_piece_bytes=0,
        part_result_bytes=0,
        num_parts=len(manifest.parts),
        num_shards=len(manifest.shards),
    )


def replay(ledger: Ledger, genesis: Head) -> Iterator[tuple[Head, Certificate, Head]]:
    """(head before, certificate, head after) of every certificate that extends another one here: the final ones, the
    tentative ones that they are built on, and those that lead to the tip.

    Raises LocalStateError if the ledger's certificates are not a chain from this genesis.
    """
    final = genesis
    for step in walk(ledger, genesis):
        final = step.after
        if isinstance(step, Step):
            yield step.before, step.certificate, step.after
    for step in walk_to_tip(ledger, final):
        yield step.before, step.certificate, step.after


def not_joined(data_dir: Path) -> UsageError:
    """What to raise for a data folder without a run manifest."""
    return UsageError(f"{data_dir} has no {MANIFEST_FILE}: it has joined no run\nName its folder with --data-dir.")


def read_history(data_dir: Path) -> list[RoundRecord]:
    """All certified rounds that a data folder knows, oldest first; none if it has not joined a run yet."""
    signed = read_manifest(data_dir)
    if signed is None or not (data_dir / LEDGER_FILE).exists():
        return []
    ledger = Ledger(data_dir / LEDGER_FILE)
    try:
        genesis = genesis_head(signed.manifest, sizes_of_nothing(signed.manifest))
        return [_record(before, certificate, after) for before, certificate, after in replay(ledger, genesis)]
    finally:
        ledger.close()


def read_gaps(data_dir: Path) -> tuple[tuple[int, int], ...]:
    """(first, last) of all rounds that this data folder's node skipped when it joined or came back, oldest first.

    Of those the certificates are not here, and of the one after them there is no `RoundRecord`.
    """
    if not (data_dir / LEDGER_FILE).exists():
        return ()
    ledger = Ledger(data_dir / LEDGER_FILE)
    try:
        return tuple((gap.from_round + 1, gap.to_round) for gap in ledger.gaps())
    finally:
        ledger.close()


def _record(before: Head, certificate: Certificate, after: Head) -> RoundRecord:
    body = certificate.body
    superseded = {remark.entry for remark in body.refused if remark.reason is RefusalReason.SUPERSEDED}
    updates = [place for place, entry in enumerate(body.entries) if entry.kind is ItemKind.UPDATE]
    return RoundRecord(
        round=body.round,
        view=certificate.view,
        leader="" if body.epoch > before.epoch else peer_text(certificate_terms(before, body).leader(certificate.view)),
        epoch=body.epoch,
        final=body.final,
        updates=len([place for place in updates if place not in superseded]),
        tokens=body.tokens,
        loss=body.loss_micronats / 1e6,
        merge_alpha=after.merge_alpha,
        owners={
            row.shard: tuple(peer_text(peer) for peer in after.state.owners(row.shard)) for row in after.state.leases
        },
        psi_digest=after.psi_digest.hex(),
        members=tuple(peer_text(peer) for peer in after.state.members),
        kept_parts=len(bits(body.kept, len(body.parts))),
    )
