"""A readable trace of a simulated swarm: when, who, what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spes_p2p.ids import Digest
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Certificate, Cut
from spes_p2p.protocol.codec import body_hash, cut_hash, decode
from spes_p2p.protocol.messages import (
    BodyMessage,
    CutAnnouncement,
    CutMessage,
    Message,
    Offer,
    PartDigest,
    Proposal,
    ProposalMessage,
    Receipt,
    Signed,
    SignedBody,
    TipAsk,
    ViewChange,
    Vote,
    Want,
)
from spes_p2p.protocol.wire import NO_DIGEST, Step
from spes_p2p.testing.sim.peer import SimPeer

if TYPE_CHECKING:
    from spes_p2p.testing.swarm import Swarm


class Trace:
    """Collects lines while `on`. The same message to many at one moment is one line."""

    def __init__(self, swarm: Swarm) -> None:
        self.on = False
        self._swarm = swarm
        self._lines: list[str] = []
        self._last: tuple[int, str, bytes] | None = None
        self._receivers: list[str] = []

    def add(self, peer: SimPeer | None, text: str) -> None:
        """An event of a peer, or of all (None)."""
        if self.on:
            self._flush()
            self._lines.append(f"{self._time()}  {peer.name if peer is not None else '*':<8} {text}")

    def sent(self, peer: SimPeer, send: fx.Send, *, lost: bool) -> None:
        """A message leaves."""
        if not self.on:
            return
        key = self._swarm.now_ms, peer.name, send.data
        if key != self._last:
            self._flush()
            self._last = key
        target = self._swarm.peers.get(send.to)
        name = target.name if target is not None else send.to.hex()[:8]
        self._receivers.append(f"({name})" if lost else name)

    def lines(self) -> list[str]:
        """Everything so far. Names in brackets: the message was lost on the way to them."""
        self._flush()
        return list(self._lines)

    def _time(self) -> str:
        return f"{self._swarm.now_ms / 1000:10.3f}"

    def _flush(self) -> None:
        if self._last is None:
            return
        now_ms, name, data = self._last
        text = words(decode(data))
        self._lines.append(f"{now_ms / 1000:10.3f}  {name:<8} -> {' '.join(self._receivers)}: {text}")
        self._last = None
        self._receivers = []


def words(message: Message) -> str:
    """A message in a few words, with its round and view."""
    match message:
        case Signed():
            return _signed(message.body)
        case CutMessage():
            return f"{_signed(message.announcement.body)}, {len(message.cut.items)} items"
        case ProposalMessage():
            return _signed(message.proposal.body)
        case Certificate():
            return f"certificate r{message.body.round} v{message.view} {_short(body_hash(message.body))}"
        case BodyMessage():
            return f"body r{message.body.round} {_short(body_hash(message.body))}"
        case Cut():
            return f"cut r{message.round} {_short(cut_hash(message))}"
        case Receipt():
            return f"receipt of {_short(message.manifest)}, {len(message.acks)} acks"
        case Offer() | Want():
            kinds = sorted({ref.kind.name.lower() for ref in message.refs})
            return f"{type(message).__name__.lower()} r{message.round}: {len(message.refs)} {' '.join(kinds)}"
        case TipAsk():
            return f"is in r{message.round}, asks for the tip"
        case _:
            return type(message).__name__


def _signed(body: SignedBody) -> str:
    match body:
        case Vote():
            step = "prevote" if body.step is Step.PREVOTE else "precommit"
            named = "nil" if body.body == NO_DIGEST else _short(body.body)
            return f"{step} r{body.round} v{body.view} {named}{' held' if body.held else ''}"
        case Proposal():
            qc = "" if body.qc is None else f" with QC of v{body.qc.view}"
            return f"proposal r{body.round} v{body.view} {_short(body.body)}{qc}"
        case ViewChange():
            qc = "" if body.qc is None else f", QC of v{body.qc.view}"
            return f"asks for view {body.view} r{body.round}{qc}"
        case CutAnnouncement():
            return f"cut r{body.round} v{body.view} {_short(body.cut)}"
        case PartDigest():
            return f"part {body.part} r{body.round} {_short(body.digest)}"
        case _:
            return f"{body.tag} r{body.round}"


def _short(value: Digest) -> str:
    return value.hex()[:6]
