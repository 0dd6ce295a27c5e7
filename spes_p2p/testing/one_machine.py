"""One peer's machine with everybody else played by hand: for tests of sides, tentative branches and healing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from spes_p2p.crypto import Identity, verify
from spes_p2p.ids import PeerId
from spes_p2p.ports import Signer
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Body, Certificate
from spes_p2p.protocol.codec import bitmap, cut_hash, decode, encode, sign
from spes_p2p.protocol.head import Head, Terms, next_head
from spes_p2p.protocol.messages import Message, Side, Signed
from spes_p2p.protocol.round import RoundMachine
from spes_p2p.protocol.statements import Item
from spes_p2p.protocol.transition import advance, make_body
from spes_p2p.protocol.wishes import Wishes
from spes_p2p.testing.protocol_cases import alive_of, certificate_on, cut_of, item_of


class OneMachine:
    """The machine of `me` after `head`, its state on disk. Keeps every effect."""

    def __init__(self, head: Head, me: Identity, *, settled: bool = True, recovery: Signer | None = None) -> None:
        self.me = me
        wishes = Wishes(capacity=2, private_seed=b"mine", recovery=recovery)
        self.machine = RoundMachine(head, me, verify, wishes, now_ms=0)
        self.now_ms = 0
        self.effects = self.machine.start(0)
        if settled:
            self.settle()

    def take(self, event: fx.Input) -> list[fx.Effect]:
        """One input, now."""
        found = self.machine.handle(event, self.now_ms)
        self.effects += found
        return found

    def settle(self) -> None:
        """The state is on disk; nothing was trained."""
        number = self.machine.terms.round
        self.take(fx.StateReady(round=number))
        self.take(fx.nothing_trained(number))

    def hear(self, sender: Identity, *messages: Message) -> list[fx.Effect]:
        """Messages of one peer."""
        return [
            effect
            for message in messages
            for effect in self.take(fx.Received(sender=sender.peer_id, data=encode(message)))
        ]

    def pass_time(self, delay_ms: int, speakers: Collection[Identity] = (), among: Sequence[Identity] = ()) -> None:
        """Let time pass; every half second each speaker says that it hears those `among` it."""
        end_ms = self.now_ms + delay_ms
        while self.now_ms < end_ms:
            self.now_ms = min(end_ms, self.now_ms + 500)
            self.take(fx.Tick())
            for speaker in speakers:
                self.hear(speaker, side_of(self.machine.head, speaker, among))

    # --- what it did -------------------------------------------------------------------------------------------------

    def sent(self, effects: Iterable[fx.Effect] | None = None) -> list[tuple[PeerId, Message]]:
        """(receiver, message) of everything that was sent."""
        chosen = self.effects if effects is None else effects
        return [(effect.to, decode(effect.data)) for effect in chosen if isinstance(effect, fx.Send)]

    def sides_sent(self, effects: Iterable[fx.Effect] | None = None) -> list[tuple[PeerId, Side]]:
        """(receiver, side) of everything that this peer said of whom it hears."""
        return [
            (receiver, message.body)
            for receiver, message in self.sent(effects)
            if isinstance(message, Signed) and isinstance(message.body, Side)
        ]

    def notes(self, effects: Iterable[fx.Effect] | None = None) -> list[str]:
        """What a person was told."""
        return [
            effect.text for effect in (self.effects if effects is None else effects) if isinstance(effect, fx.Notify)
        ]


def side_of(
    head: Head,
    speaker: Identity,
    heard: Iterable[Identity],
    *,
    side: Iterable[Identity] = (),
    tip: Head | None = None,
    asks: bool = False,
) -> Signed:
    """A voter on `head` (or another `tip`) says whom it hears, and in which attempt it is."""
    voters = head.last_final.state.voters

    def marks(peers: Iterable[Identity]) -> bytes:
        return bitmap({voters.index(peer.peer_id) for peer in peers}, len(voters))

    members = list(side)
    body = Side(
        head.run.run_id,
        head.epoch,
        head.round + 1,
        head.height,
        (tip or head).hash,
        marks(heard),
        marks(members) if members else b"",
        asks,
    )
    return sign(speaker, body)


def quiet_body(head: Head, side: Iterable[Identity] = (), items: Iterable[Item] | None = None) -> Body:
    """The body of a round in which the peers of a side were alive, or of other items; all parts stay."""
    terms = Terms(head, tuple(sorted(peer.peer_id for peer in side)))
    cut, chosen = cut_of(head, [item_of(alive_of(head, peer)) for peer in side] if items is None else items)
    return make_body(terms, advance(terms, cut_hash(cut), chosen, verify), (None,) * len(head.parts), b"")


def tentative(head: Head, side: Sequence[Identity], items: Iterable[Item] | None = None) -> tuple[Certificate, Head]:
    """The tentative certificate of a side on top of `head`, and the head after it."""
    body = quiet_body(head, side, items)
    terms = Terms(head, tuple(sorted(peer.peer_id for peer in side)))
    return certificate_on(terms, body, side), next_head(head, body)
