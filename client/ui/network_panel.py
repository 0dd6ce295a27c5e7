"""The traffic, what it may be, and the members of the run."""

from __future__ import annotations

from textual.content import Content

from spes_p2p.client.output import short_peer
from spes_p2p.client.ui.panel import Panel, fit, limit_lines, lines_of
from spes_p2p.node.snapshot import NodeSnapshot, PeerView
from spes_p2p.units import bytes_text

TABLE_WIDTH = 60
"""From this width on a line has room for how a peer is connected."""
LONG_HEIGHT = 12
LIMITS = frozenset({"upload", "download", "monthly"})


class NetworkPanel(Panel):
    """Rates and bytes, and one line per member."""

    BORDER_TITLE = "Network"

    def watch_snapshot(self, snapshot: NodeSnapshot | None) -> None:
        """The title carries the present rates."""
        if snapshot is None:
            return
        network = snapshot.network
        up, down = bytes_text(network.sent_per_s), bytes_text(network.received_per_s)
        self.border_title = f"Network · ↑{up}/s ↓{down}/s"

    def draw(self, snapshot: NodeSnapshot, width: int, height: int) -> list[Content]:
        """This node first, then as the roster has them; the last line says how many do not fit."""
        lines = _traffic_lines(snapshot, width, height)
        if height >= LONG_HEIGHT and width >= TABLE_WIDTH:
            lines.append(Content.styled(fit(HEADER, width), "bold"))
        room = height - len(lines)
        peers = sorted(snapshot.network.peers, key=lambda view: not view.me)
        shown = peers if len(peers) <= room else peers[: max(room - 1, 0)]
        lines += [_line(view, view.peer == snapshot.round.leader, width) for view in shown]
        if len(shown) < len(peers):
            lines.append(Content(fit(f"and {len(peers) - len(shown)} more peers", width)))
        return lines


def _traffic_lines(snapshot: NodeSnapshot, width: int, height: int) -> list[Content]:
    network = snapshot.network
    this_round = f"round ↑{bytes_text(network.round_sent)} ↓{bytes_text(network.round_received)}"
    total = f"all ↑{bytes_text(network.bytes_sent)} ↓{bytes_text(network.bytes_received)}"
    if height < LONG_HEIGHT:
        both = f"{this_round}  {total}"
        return [Content(both if len(both) <= width else fit(this_round, width))]
    lines = [
        f"up    {bytes_text(network.sent_per_s) + '/s':>12}   this round {bytes_text(network.round_sent):>9}"
        f"   since the start {bytes_text(network.bytes_sent):>9}",
        f"down  {bytes_text(network.received_per_s) + '/s':>12}   this round {bytes_text(network.round_received):>9}"
        f"   since the start {bytes_text(network.bytes_received):>9}",
    ]
    if network.listen:
        lines.append(f"reached at {network.listen[0]}")
    limits = snapshot.limits
    found = [Content(fit(line, width)) for line in lines] + limit_lines(limits, LIMITS, width)
    for words in (limits.no_blobs, limits.note):
        found += [Content.styled(line, "$text-warning") for line in lines_of(words, width)]
    return [*found, Content("")]


HEADER = f"  {'peer':<9} {'role':<6} {'latency':>8} {'connected by':<16} {'updates':>7}  {'last':<5} shards"


def _line(view: PeerView, leads: bool, width: int) -> Content:
    mark = "●" if view.connected or view.me else "○"
    role = "leader" if leads else "voter" if view.voter else "member"
    shards = ",".join(map(str, view.shards)) or "-"
    name = "me" if view.me else short_peer(view.peer)
    last = f"r{view.last_item_round}"
    if width < TABLE_WIDTH:
        text = f"{mark} {name:<9} {role:<6} {last:<4} shards {shards}"
    else:
        how, counted = _connection(view), f"{view.accepted_updates:>7}"
        text = f"{mark} {name:<9} {role:<6} {_latency(view):>8} {how:<16} {counted}  {last:<5} {shards}"
    return Content.styled(fit(text, width), "bold" if view.me else "" if view.connected else "dim")


def _latency(view: PeerView) -> str:
    if view.latency_ms is None:
        return "-"
    return f"{view.latency_ms:.0f} ms" if view.latency_ms >= 10 else f"{view.latency_ms:.1f} ms"


def _connection(view: PeerView) -> str:
    if view.me:
        return "-"
    if not view.connected:
        return "not connected"
    if not view.transport:
        return "connected"
    return view.transport if view.transport == "relayed" else f"{view.transport}, direct"
