"""`spes-p2p ledger leaderboard`: who gave most to a run, from its certificates alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from spes_p2p.client import folders
from spes_p2p.client.commands.options import DataDir, Json, Run
from spes_p2p.client.output import say, say_json, short_peer
from spes_p2p.client.settings import choose, from_flags
from spes_p2p.crypto import peer_text
from spes_p2p.errors import LocalStateError

if TYPE_CHECKING:
    from spes_p2p.node.leaderboard import Leaderboard, Standing


def leaderboard(
    last: Annotated[
        int | None, typer.Option("--last", min=1, help="Count the newest so many rounds alone. Default: all.")
    ] = None,
    data_dir: DataDir = None,
    run: Run = None,
    json: Json = False,
) -> None:
    """Verify the certificates on disk and print who gave most. Any two peers with the same rounds print the same.

    Example: spes-p2p ledger leaderboard --last 100

    Only what a quorum has made final counts. Offline; works with and without a running node.
    """
    choices = choose(from_flags(data_dir=data_dir, run=run))
    # the certificate's parser is of no use to the other commands
    from spes_p2p.node.audit import audit
    from spes_p2p.node.leaderboard import Leaderboard

    folder = folders.find_folder(choices.data_dir, choices.run)
    board = Leaderboard(last)
    found = audit(folder, board.add)
    if found.problem is not None:
        raise LocalStateError(
            f"round {found.problem_round}: {found.problem}\n"
            "Only a sound ledger is counted; see `spes-p2p ledger verify`."
        )
    if json:
        say_json(leaderboard_json(board, found.run_id))
        return
    for line in leaderboard_lines(board):
        say(line)


def leaderboard_json(board: Leaderboard, run_id: str) -> dict[str, Any]:
    """For programs. Nothing in it depends on whose folder it was made from."""
    first, last = board.rounds or (0, 0)
    return {
        "run_id": run_id,
        "first_round": first,
        "last_round": last,
        "peers": [_peer_json(standing) for standing in board.standings()],
    }


def _peer_json(standing: Standing) -> dict[str, Any]:
    given = standing.given
    return {
        "rank": standing.rank,
        "peer": peer_text(standing.peer),
        "tokens": given.tokens,
        "updates": given.updates,
        "rounds": given.rounds,
        "shards": sorted(given.shards),
        "refusals": dict(sorted(given.refusals.items())),
    }


def leaderboard_lines(board: Leaderboard) -> list[str]:
    """For people."""
    if board.rounds is None:
        return ["no certified round yet: nobody has given anything"]
    first, last = board.rounds
    lines = [
        f"final rounds {first:,} to {last:,}",
        f"{'rank':>4} {'peer':<9} {'tokens':>15} {'updates':>7} {'rounds':>7}",
    ]
    for standing in board.standings():
        given, name = standing.given, short_peer(peer_text(standing.peer))
        lines.append(f"{standing.rank:>4} {name:<9} {given.tokens:>15,} {given.updates:>7,} {given.rounds:>7,}")
    return lines
