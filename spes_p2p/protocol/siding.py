"""With whom this voter goes on while others are silent, and when with all again (docs/protocol.md, section 9).

`Siding` decides; the machine opens the ballot that it decides on. `Side` messages are questions and answers between
voters, never repeated: the next one says more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.protocol.codec import bitmap, bits, check_signature, sign
from spes_p2p.protocol.context import Context
from spes_p2p.protocol.head import Head, Terms, may_go_on, side_of
from spes_p2p.protocol.messages import Side, Signed
from spes_p2p.protocol.open_round import OpenRound
from spes_p2p.protocol.params import quorum
from spes_p2p.protocol.sides import Ears, reach, side_with

_STABLE_RESENDS = 2
"""A side is begun once it has been the same for so long: the answers of all are in."""


class Siding:
    """What one peer knows of who can be reached. Lasts as long as the process."""

    def __init__(self, me: PeerId, head: Head, now_ms: int) -> None:
        protocol = head.run.config.protocol
        self.ears = Ears(me, protocol.patience_ms, protocol.resend_ms, now_ms)
        self.whole = True
        """Whether a quorum of the voters can be reached, directly or over others."""
        self.halted = ""
        """Why the run cannot go on, not even tentatively."""
        self._me = me
        self._resend_ms = protocol.resend_ms
        self._candidate: tuple[tuple[PeerId, ...], int] | None = None
        """The side to go on with, and since when it has been the same."""
        self._told: set[str] = set()
        self._probes = False
        self._next_probe_at_ms = now_ms
        self._answered_at_ms: dict[PeerId, int] = {}
        self._named: dict[PeerId, tuple[bytes, tuple[PeerId, ...]]] = {}
        """Per voter, for a peer that does not vote: its tip, and the side whose ballot it is in."""

    def new_height(self) -> None:
        """A final certificate was adopted."""
        self.ears.declared.clear()
        self._named.clear()
        self._candidate, self.halted = None, ""
        self._told.clear()

    def next_side(self, terms: Terms, mine: tuple[PeerId, ...], head: Head) -> tuple[PeerId, ...]:
        """Who goes on after a certificate: nobody waits again for those that are silent still. `terms`: of its round;
        `mine`: the side of the ballot that was open here."""
        goes_on = not head.is_final and not self.whole and mine == terms.side and may_go_on(head, mine)
        return mine if goes_on else ()

    def deadline_ms(self) -> int | None:
        """When voters are asked for a sign of life next."""
        return self._next_probe_at_ms if self._probes else None

    def heard(self, terms: Terms) -> frozenset[PeerId]:
        """Voters that are not silent."""
        return self.ears.heard(terms.all_voters)

    # --- deciding ----------------------------------------------------------------------------------------------------

    def watch(self, open_round: OpenRound) -> tuple[PeerId, ...] | None:
        """The side whose ballot is to be open, empty for the final one; None: leave it as it is."""
        context = open_round.context
        terms = context.terms
        self._probes = False
        if self._me not in terms.all_voters:
            return None
        waiting = open_round.voting.view >= 0
        self.ears.listen(terms.all_voters, context.now_ms, waiting=waiting)
        self._probes = self.ears.listening or terms.tentative
        needed, hearing = quorum(len(terms.all_voters)), None
        self.whole = self.ears.direct(terms.all_voters) >= needed  # nearly always, and then nothing else matters
        if not self.whole:
            hearing = self.ears.hearing(terms.all_voters)
            self.whole = len(reach(hearing, self._me)) >= needed
        chosen: tuple[PeerId, ...] | None = None
        if self.whole:
            self._candidate, self.halted = None, ""
            chosen = () if terms.tentative else None
        elif waiting and hearing is not None:
            chosen = self._choose(context, hearing)
        return None if chosen == terms.side else chosen

    def _choose(self, context: Context, hearing: Mapping[PeerId, frozenset[PeerId]]) -> tuple[PeerId, ...] | None:
        """Which side, once it is clear."""
        terms, head = context.terms, context.terms.head
        on_tip = {peer for peer in hearing if peer == self._me or self.ears.is_on(peer, head.hash)}
        here = {peer: others for peer, others in hearing.items() if peer in on_tip}
        side = side_with(here, Terms(head).leaders, self._me)
        if self._candidate is None or self._candidate[0] != side:
            self._candidate = (side, context.now_ms)
        if context.now_ms < self._candidate[1] + _STABLE_RESENDS * self._resend_ms:
            return None
        reached, needed = f"{len(side)} of {len(terms.all_voters)} voters heard", quorum(len(terms.all_voters))
        if may_go_on(head, side):
            self.halted = ""
            self._tell(context, "tentative", f"{reached}: going on with tentative certificates until the rest is")
            return side
        self.halted = f"{reached}, {needed} needed"
        self._tell(context, "halted", f"waiting: {self.halted}")
        return ()

    def _tell(self, context: Context, what: str, text: str) -> None:
        """Tell a person once in a height."""
        if what not in self._told:
            self._told.add(what)
            context.notify(text, "warning")

    # --- asking and answering ----------------------------------------------------------------------------------------

    def announce(self, context: Context, before: Iterable[PeerId]) -> None:
        """Another ballot has begun: tell those who do not vote and acknowledge in it, or did in the one `before`."""
        others = {*context.terms.eligible, *before}.difference(context.terms.all_voters)
        context.send_once(sorted(others), self._own(context, asks=False))

    def probe(self, context: Context) -> None:
        """Ask quiet voters for a sign of life; say who is heard while a quorum is not."""
        if not self._probes or context.now_ms < self._next_probe_at_ms:
            return
        terms = context.terms
        self._next_probe_at_ms = context.now_ms + self._resend_ms
        receivers = set(self.ears.quiet(terms.all_voters, context.now_ms))
        if not self.whole:
            receivers |= set(terms.all_voters)
        if terms.tentative:
            receivers |= set(terms.eligible)
        if receivers:
            context.send_once(sorted(receivers), self._own(context, asks=True))

    def _own(self, context: Context, *, asks: bool) -> Signed:
        terms, head = context.terms, context.terms.head
        voters, heard = terms.all_voters, self.heard(terms)
        marks = bitmap({place for place, peer in enumerate(voters) if peer in heard}, len(voters))
        side = Side(head.run.run_id, head.epoch, terms.round, terms.height, head.hash, marks, terms.side_bitmap, asks)
        return sign(context.signer, side)

    def take(self, context: Context, signed: Signed, side: Side) -> tuple[PeerId, ...] | None:
        """A voter says whom it hears; answer if it asks. Raises RemoteProtocolError.

        For a peer that does not vote: the side whose ballot is to be open, as in `watch`.
        """
        terms = context.terms
        if signed.peer not in terms.all_voters:
            return None
        check_signature(signed, context.verifier)
        followed = None
        if (side.epoch, side.height) == (terms.head.epoch, terms.height):
            places = bits(side.heard, len(terms.all_voters))
            heard = frozenset(terms.all_voters[place] for place in places)
            self.ears.declared[signed.peer] = (heard, side.tip)
            if side.asks and len(heard) < len(terms.all_voters):
                self.ears.asked(context.now_ms)
            followed = self._followed(terms, signed.peer, side)
        if side.asks and self._me in terms.all_voters:
            last_ms = self._answered_at_ms.get(signed.peer)
            if last_ms is None or context.now_ms >= last_ms + self._resend_ms // 2:
                self._answered_at_ms[signed.peer] = context.now_ms
                context.send_once([signed.peer], self._own(context, asks=False))
        return followed

    def _followed(self, terms: Terms, voter: PeerId, side: Side) -> tuple[PeerId, ...] | None:
        """A member that does not vote takes part in the ballot that f + 1 voters on its tip are in: one of them is
        honest. Otherwise a liar could take it where nobody acknowledges its updates."""
        tip = terms.head.hash
        if self._me in terms.all_voters:
            return None
        here = side.tip == tip
        named = side_of(terms.head, side.side) if here and side.side else ()
        if named and not (voter in named and may_go_on(terms.head, named)):
            raise RemoteProtocolError(voter, "a side that may make no certificate")
        self._named[voter] = (side.tip, named)
        if not here or (terms.tentative and voter not in terms.side):
            return None
        followed: tuple[PeerId, ...] | None = None
        if named:
            followed = named if self._says(named, tip, named) > terms.num_faults else None
        if followed is None and terms.tentative:
            said = [self._named[peer] for peer in terms.side if peer in self._named]
            elsewhere = sum(1 for where, other in said if where == tip and other != terms.side)
            followed = () if elsewhere > terms.num_faults else None
        return None if followed == terms.side else followed

    def _says(self, voters: Iterable[PeerId], tip: bytes, side: tuple[PeerId, ...]) -> int:
        """How many of these voters say that they are in the ballot of a side."""
        return sum(1 for voter in voters if self._named.get(voter) == (tip, side))
