"""`spes-p2p status`: what the node on this machine is doing."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from spes_p2p.client import folders
from spes_p2p.client.commands.limits import limit_lines
from spes_p2p.client.commands.options import DataDir, Json, Run
from spes_p2p.client.output import duration_text, say, short_peer
from spes_p2p.client.settings import choose, from_flags
from spes_p2p.client.standing import ON_PURPOSE, certified_text, leave_text, trouble_texts
from spes_p2p.node.control_client import read_snapshot
from spes_p2p.node.snapshot import NodeSnapshot
from spes_p2p.units import bytes_text


def status(data_dir: DataDir = None, run: Run = None, json: Json = False) -> None:
    """Show what the node on this machine is doing.

    Example: spes-p2p status --data-dir ./a
    """
    choices = choose(from_flags(data_dir=data_dir, run=run))
    snapshot = read_snapshot(folders.find_folder(choices.data_dir, choices.run))
    if json:
        say(msgspec.json.format(msgspec.json.encode(snapshot)).decode())
        return
    for line in status_lines(snapshot):
        say(line)


def status_lines(snapshot: NodeSnapshot) -> Iterator[str]:
    """A snapshot for people, one fact a line."""
    role = "voter" if snapshot.voter else "member" if snapshot.member else "not a member now"
    yield f"run        {snapshot.run_name} ({snapshot.run_id[:12]})"
    yield f"peer       {snapshot.peer} ({role}{', leaving' if snapshot.leaving else ''})"
    yield f"up         {duration_text(snapshot.started_ms_ago)}"
    yield f"certified  {certified_text(snapshot)}"
    for label, text in trouble_texts(snapshot):
        yield f"{label:<10} {text}"
    if snapshot.pause is not None:
        since = duration_text(snapshot.pause.since_ms)
        yield f"paused     for {since}: {', '.join(snapshot.pause.reasons)}"
        if snapshot.pause.reason:
            yield f"leases     {snapshot.pause.reason}"
    if snapshot.leave is not None:
        yield f"leave      {leave_text(snapshot.leave)}"
    yield f"round      {snapshot.round.number}: {round_text(snapshot)}"
    mine = [str(view.shard) for view in snapshot.shards if view.mine]
    orphans = [str(view.shard) for view in snapshot.shards if not view.owners]
    yield f"shards     {', '.join(mine) or 'none'} mine, {len(snapshot.shards)} in all{_orphans(orphans)}"
    learning = snapshot.learning
    if learning.val_curve:
        number, loss = learning.val_curve[-1]
        yield f"held-out   {loss:.3f} nats per byte after round {number}"
    yield f"training   {learning.tokens_per_s:,.0f} tokens/s, {learning.tokens_total:,} tokens certified"
    network = snapshot.network
    connected = sum(1 for peer in network.peers if peer.connected and not peer.me)
    yield f"peers      {len(network.peers)} members, {connected} connected"
    yield f"traffic    {bytes_text(network.bytes_sent)} sent, {bytes_text(network.bytes_received)} received"
    yield from limit_lines(snapshot.limits)
    yield f"machine    {snapshot.machine.device}, {bytes_text(snapshot.machine.memory_bytes)} in use"


def round_text(snapshot: NodeSnapshot) -> str:
    """The open phase in words, with its detail, the leader and what is waited for."""
    view = snapshot.round
    parts = [str(view.phase)]
    parts += [phase.detail for phase in view.phases if phase.name == view.phase and phase.detail]
    if view.leader:
        parts.append(f"leader {short_peer(view.leader)}")
    if snapshot.waiting:
        parts.append(f"{ON_PURPOSE}: {snapshot.waiting}")
    elif view.waiting_for:
        parts.append(f"waiting for {view.waiting_for}")
    return ", ".join(parts)


def _orphans(orphans: list[str]) -> str:
    return f" (orphans: {', '.join(orphans)})" if orphans else ""
