"""`spes-p2p ledger show`: the certified rounds that this machine knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spes_p2p.client import folders
from spes_p2p.client.commands.options import DataDir, Json, Run
from spes_p2p.client.output import say, say_json, short_peer
from spes_p2p.client.settings import choose, from_flags

if TYPE_CHECKING:
    from spes_p2p.node.history import RoundRecord


def show(data_dir: DataDir = None, run: Run = None, json: Json = False) -> None:
    """Print the certified rounds that this machine knows, oldest first. Works with and without a running node."""
    choices = choose(from_flags(data_dir=data_dir, run=run))
    # the certificate's parser is of no use to the other commands
    from spes_p2p.node.history import read_history

    records = read_history(folders.find_folder(choices.data_dir, choices.run))
    if json:
        say_json([record_json(record) for record in records])
        return
    if not records:
        say("no certified round yet")
        return
    head = f"{'round':>5} {'view':>4} {'leader':<9} {'updates':>7} {'tokens':>10} {'loss':>6} {'merge':>6}"
    say(f"{head}  owners of the shards")
    for record in records:
        say(record_line(record))


def record_json(record: RoundRecord) -> dict[str, Any]:
    """One certified round for programs; shards are keys, as text."""
    return {
        "round": record.round,
        "view": record.view,
        "leader": record.leader,
        "final": record.final,
        "updates": record.updates,
        "tokens": record.tokens,
        "loss": record.loss,
        "merge_alpha": record.merge_alpha,
        "owners": {str(shard): list(record.owners[shard]) for shard in sorted(record.owners)},
        "psi_digest": record.psi_digest,
        "members": list(record.members),
        "kept_parts": record.kept_parts,
    }


def record_line(record: RoundRecord) -> str:
    """One certified round for people."""
    owners = (",".join(map(short_peer, record.owners[shard])) or "orphan" for shard in sorted(record.owners))
    merge = f"{record.merge_alpha:.3f}" if record.merge_alpha else "-"
    tentative = "" if record.final else " (tentative)"
    return (
        f"{record.round:>5} {record.view:>4} {short_peer(record.leader):<9} {record.updates:>7} {record.tokens:>10,} "
        f"{record.loss:>6.3f} {merge:>6}  {' '.join(owners)}{tentative}"
    )
