"""`spes-p2p ledger show`: the certified rounds that this machine knows; `ledger verify`: whether they are right."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spes_p2p.client import folders
from spes_p2p.client.commands.options import DataDir, Json, Run
from spes_p2p.client.output import prepare_json_file, say, say_json, short_peer, write_json
from spes_p2p.client.settings import choose, from_flags
from spes_p2p.crypto import peer_text
from spes_p2p.errors import LocalStateError

if TYPE_CHECKING:
    from spes_p2p.node.audit import Audit
    from spes_p2p.node.history import RoundRecord


def show(
    peer: Annotated[
        str | None,
        typer.Option("--peer", help="What each round says of one peer: me, its id or the end of it.", metavar="PEER"),
    ] = None,
    data_dir: DataDir = None,
    run: Run = None,
    json: Json = False,
) -> None:
    """Print the certified rounds that this machine knows, oldest first. Works with and without a running node.

    Example: spes-p2p ledger show --peer me
    """
    choices = choose(from_flags(data_dir=data_dir, run=run))
    # the certificate's parser is of no use to the other commands
    from spes_p2p.node.history import not_joined, read_gaps, read_history, read_manifest

    folder = folders.find_folder(choices.data_dir, choices.run)
    if read_manifest(folder) is None:
        raise not_joined(folder)
    if peer is not None:
        from spes_p2p.client.receipts import show_receipts

        show_receipts(folder, peer, as_json=json)
        return
    records = read_history(folder)
    if json:
        say_json([record_json(record) for record in records])
        return
    for first, last in read_gaps(folder):
        say(f"rounds {first:,} to {last:,} were skipped when this node caught up: `ledger verify` checks the skip rule")
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
        "epoch": record.epoch,
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
    if not record.leader:
        tentative = f" (recovery: epoch {record.epoch} begins)"
    return (
        f"{record.round:>5} {record.view:>4} {short_peer(record.leader):<9} {record.updates:>7} {record.tokens:>10,} "
        f"{record.loss:>6.3f} {merge:>6}  {' '.join(owners)}{tentative}"
    )


def verify(
    data_dir: DataDir = None,
    run: Run = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file as one JSON object.", metavar="FILE")
    ] = None,
) -> None:
    """Verify every certificate on disk from the run manifest on, offline, and print who contributed what.

    Example: spes-p2p ledger verify --data-dir ./a --json verified.json

    Ends with exit code 6, and a line that names the round, if a byte was changed, a certificate is missing, or it is of
    another run. Works with and without a running node.
    """
    prepare_json_file(json)
    choices = choose(from_flags(data_dir=data_dir, run=run))
    from spes_p2p.node.audit import audit

    folder = folders.find_folder(choices.data_dir, choices.run)
    found = audit(folder)
    if json is not None:
        write_json(json, audit_json(found))
    for line in audit_lines(found):
        say(line)
    if found.problem is not None:
        raise LocalStateError(
            f"round {found.problem_round}: {found.problem}\n"
            f"Move the ledger out of {folder} and join again: the certificates are fetched from the run's peers."
        )


def audit_json(found: Audit) -> dict[str, Any]:
    """What a verification found, for programs."""
    return {
        "run_id": found.run_id,
        "ok": found.problem is None,
        "problem": found.problem,
        "problem_round": found.problem_round,
        "last_round": found.head.round,
        "rounds_checked": found.num_checked,
        "rounds_tentative": found.num_tentative,
        "rounds_skipped": [list(rounds) for rounds in found.skipped],
        "certificate": found.head.hash.hex(),
        "peers": [
            {
                "peer": peer_text(peer),
                "rounds": given.rounds,
                "updates": given.updates,
                "tokens": given.tokens,
                "shards": sorted(given.shards),
                "refusals": dict(sorted(given.refusals.items())),
            }
            for peer, given in sorted(found.contributions.by_peer.items())
        ],
    }


def audit_lines(found: Audit) -> list[str]:
    """What a verification found, for people."""
    lines = [
        f"rounds {first:,} to {last:,}: skipped; verified from round {last:,} on by the skip rule"
        for first, last in found.skipped
    ]
    if not found.num_checked and found.problem is None:
        return [*lines, "no certified round yet: there is nothing to verify"]
    tentative = f", {found.num_tentative:,} of them tentative" if found.num_tentative else ""
    lines.append(f"{found.num_checked:,} certificates verified{tentative}, the newest of round {found.head.round:,}")
    if found.contributions.by_peer:
        lines.append(f"{'peer':<9} {'rounds':>7} {'updates':>7} {'tokens':>15}  {'refused':<9} shards trained")
    for peer, given in sorted(found.contributions.by_peer.items(), key=lambda item: (-item[1].tokens, item[0])):
        refused = ", ".join(f"{count} {reason}" for reason, count in sorted(given.refusals.items())) or "-"
        shards = ",".join(map(str, sorted(given.shards))) or "-"
        name = short_peer(peer_text(peer))
        lines.append(f"{name:<9} {given.rounds:>7,} {given.updates:>7,} {given.tokens:>15,}  {refused:<9} {shards}")
    return lines
