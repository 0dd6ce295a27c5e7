"""`spes-p2p ledger show --peer`: what every certified round says of one peer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spes_p2p.client.output import say, say_json
from spes_p2p.crypto import peer_from_text, peer_text
from spes_p2p.errors import LocalStateError, UsageError
from spes_p2p.ids import PeerId
from spes_p2p.node.files import IDENTITY_FILE, LEDGER_FILE
from spes_p2p.node.history import read_manifest, replay, sizes_of_nothing
from spes_p2p.node.leaderboard import Link, RoundReceipt, receipts_of
from spes_p2p.protocol.head import genesis_head
from spes_p2p.storage.identity import load_identity
from spes_p2p.storage.ledger import Ledger, OwnUpdate

ME = "me"
_MIN_ENDING = 4
_ALL_UPDATES = 1 << 40


def show_receipts(folder: Path, wanted: str, *, as_json: bool) -> None:
    """Print what each certificate says of a peer, and of this machine's own peer what no certificate says: updates that
    were not included. Raises UsageError for a peer that the run does not know."""
    chain, own = _read(folder)
    peer, is_me = _find(folder, wanted, chain)
    receipts = receipts_of(chain, peer)
    left_out = _left_out(receipts, own) if is_me else {}
    if as_json:
        say_json({"peer": peer_text(peer), "rounds": [_as_json(receipt, left_out) for receipt in receipts]})
        return
    for line in receipt_lines(receipts, left_out):
        say(line)


def receipt_lines(receipts: list[RoundReceipt], left_out: dict[int, str]) -> list[str]:
    """For people. `left_out`: round -> what became of an update that no certificate has."""
    if not receipts:
        return ["no certified round names this peer"]
    lines = [f"{'round':>7} {'tokens':>10} {'shards':<9} update"]
    for receipt in receipts:
        verdict = receipt.verdict or left_out.get(receipt.round, "") or "none"
        more = [item for item in receipt.items if item != "update"]
        absent = [] if receipt.items else ["absent"]
        notes = [*more, *absent, *([] if receipt.final else ["tentative"])]
        shards = ",".join(map(str, receipt.shards)) or "-"
        tail = f" ({', '.join(notes)})" if notes else ""
        lines.append(f"{receipt.round:>7} {receipt.tokens:>10,} {shards:<9} {verdict}{tail}")
    counted = [receipt for receipt in receipts if receipt.tokens]
    tokens = sum(receipt.tokens for receipt in counted)
    lines.append(f"{len(counted):,} of {len(receipts):,} rounds with an accepted update, {tokens:,} tokens")
    return lines


def _as_json(receipt: RoundReceipt, left_out: dict[int, str]) -> dict[str, Any]:
    return {
        "round": receipt.round,
        "epoch": receipt.epoch,
        "final": receipt.final,
        "items": list(receipt.items),
        "verdict": receipt.verdict or left_out.get(receipt.round, ""),
        "tokens": receipt.tokens,
        "shards": list(receipt.shards),
        "receipts_root": receipt.receipts_root.hex(),
    }


def _left_out(receipts: list[RoundReceipt], own: tuple[OwnUpdate, ...]) -> dict[int, str]:
    without = {receipt.round for receipt in receipts if not receipt.verdict}
    return {update.round: update.verdict for update in own if update.round in without}


def _read(folder: Path) -> tuple[list[Link], tuple[OwnUpdate, ...]]:
    signed = read_manifest(folder)
    if signed is None or not (folder / LEDGER_FILE).exists():
        return [], ()
    ledger = Ledger(folder / LEDGER_FILE)
    try:
        genesis = genesis_head(signed.manifest, sizes_of_nothing(signed.manifest))
        chain = [(before, certificate.body, after) for before, certificate, after in replay(ledger, genesis)]
        return chain, ledger.updates(_ALL_UPDATES)
    finally:
        ledger.close()


def _find(folder: Path, wanted: str, chain: list[Link]) -> tuple[PeerId, bool]:
    """The peer that is meant, and whether it is this machine's. Raises UsageError."""
    path = folder / IDENTITY_FILE
    if wanted == ME:
        return load_identity(path).peer_id, True
    known = {peer for _, body, after in chain for peer in (*after.state.members, *body.newcomers)}
    matches = sorted(peer for peer in known if peer_text(peer).endswith(wanted.lstrip("…")))
    if len(wanted) < _MIN_ENDING or len(matches) != 1:
        problem = "more than one peer's id ends so" if len(matches) > 1 else "no certified round names such a peer"
        try:
            whole = peer_from_text(wanted)
        except ValueError:
            raise UsageError(f"--peer {wanted}: {problem}; give me, or the id that `ledger verify` prints") from None
        matches = [whole]
    try:
        return matches[0], load_identity(path).peer_id == matches[0]
    except LocalStateError:
        return matches[0], False  # a ledger can be looked at without its peer's key
