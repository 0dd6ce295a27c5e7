"""The members of the run, and the traffic with them."""

from __future__ import annotations

from textual.content import Content

from spes_p2p.client.output import bytes_text, short_peer
from spes_p2p.client.ui.panel import Panel, fit
from spes_p2p.node.snapshot import NodeSnapshot, PeerView


class PeersPanel(Panel):
    """One line per member."""

    BORDER_TITLE = "Peers"

    def watch_snapshot(self, snapshot: NodeSnapshot | None) -> None:
        """The title carries the traffic."""
        if snapshot is None:
            return
        network = snapshot.network
        self.border_title = f"Peers · ↑{bytes_text(network.bytes_sent)} ↓{bytes_text(network.bytes_received)}"

    def draw(self, snapshot: NodeSnapshot, width: int, height: int) -> list[Content]:
        """This node first, then as the roster has them; the last line says how many do not fit."""
        peers = sorted(snapshot.network.peers, key=lambda view: not view.me)
        shown = peers if len(peers) <= height else peers[: max(height - 1, 0)]
        lines = [_line(view, view.peer == snapshot.round.leader, width) for view in shown]
        if len(shown) < len(peers):
            lines.append(Content(fit(f"and {len(peers) - len(shown)} more peers", width)))
        return lines


def _line(view: PeerView, leads: bool, width: int) -> Content:
    mark = "●" if view.connected or view.me else "○"
    role = "leader" if leads else "voter" if view.voter else "member"
    shards = ",".join(map(str, view.shards)) or "-"
    name = "me" if view.me else short_peer(view.peer)
    text = f"{mark} {name:<9} {role:<6} r{view.last_item_round:<3} shards {shards}"
    return Content.styled(fit(text, width), "bold" if view.me else "" if view.connected else "dim")
