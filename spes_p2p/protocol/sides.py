"""Who hears whom, and with whom a voter goes on while others are silent (docs/protocol.md, section 9).

A voter is *silent* for this peer once it has not answered for `patience` while it was asked. A busy peer answers in
whatever phase it is, so that a long training never looks like death; and time that this process itself was stopped
counts for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spes_p2p.ids import PeerId

Hearing = Mapping[PeerId, frozenset[PeerId]]
"""Per voter, the voters that it hears."""


def mutual(hearing: Hearing, one: PeerId, other: PeerId) -> bool:
    """Whether two voters hear each other, as far as both have said."""
    return other in hearing.get(one, frozenset()) and one in hearing.get(other, frozenset())


def reach(hearing: Hearing, me: PeerId) -> frozenset[PeerId]:
    """The voters that are connected with `me` over others that hear each other: they can agree by relaying."""
    found, todo = {me}, [me]
    while todo:
        here = todo.pop()
        for peer in sorted(hearing.keys() - found):
            if mutual(hearing, here, peer):
                found.add(peer)
                todo.append(peer)
    return frozenset(found)


def side_with(hearing: Hearing, order: Sequence[PeerId], me: PeerId) -> tuple[PeerId, ...]:
    """The side that `me` is in, by peer id.

    In the order of leaders the first voter takes all that hear it and each other, then the first that is left does the
    same, and so on: equal knowledge gives equal sides.
    """
    left = list(order)
    while left:
        side: list[PeerId] = []
        for peer in left:
            if peer in hearing and all(mutual(hearing, peer, other) for other in side):
                side.append(peer)
        if me in side:
            return tuple(sorted(side))
        if not side:
            break
        left = [peer for peer in left if peer not in side]
    return (me,)


@dataclass(slots=True)
class Ears:
    """Whom this peer hears. Times are its own."""

    me: PeerId
    patience_ms: int
    resend_ms: int
    started_at_ms: int
    heard_at_ms: dict[PeerId, int] = field(default_factory=dict)
    silent: set[PeerId] = field(default_factory=set)
    declared: dict[PeerId, tuple[frozenset[PeerId], bytes]] = field(default_factory=dict)
    """What voters last said in this height: whom they hear, and on which tip."""
    asked_until_ms: int = 0
    """Somebody asks about the silent: this peer finds out as well."""
    since_ms: int | None = None
    """Since when silence counts; None: nobody is asked."""
    _last_ms: int = 0
    _looked: tuple[Sequence[PeerId], int] | None = None
    """The voters that were looked at last, and when the first of them that is heard can be silent."""

    def hear(self, peer: PeerId, now_ms: int) -> None:
        """Anything came from a peer."""
        self.heard_at_ms[peer] = now_ms
        self.silent.discard(peer)

    def asked(self, now_ms: int) -> None:
        """A voter asks about silent ones."""
        self.asked_until_ms = max(self.asked_until_ms, now_ms + 2 * self.patience_ms)

    def listen(self, voters: Sequence[PeerId], now_ms: int, *, waiting: bool) -> None:
        """Note who has been silent for too long. `waiting`: the round needs the voters now."""
        stopped = now_ms - self._last_ms > max(self.patience_ms // 2, 3 * self.resend_ms)
        self._last_ms = now_ms
        if not waiting and now_ms >= self.asked_until_ms:
            self.since_ms = None
            return
        if self.since_ms is None or stopped:
            self.since_ms, self._looked = now_ms, None
        if self._looked is not None and self._looked[0] is voters and now_ms < self._looked[1]:
            return
        since_ms, next_ms = self.since_ms, now_ms + self.patience_ms
        for peer in voters:
            silent_at_ms = max(self.heard_at_ms.get(peer, 0), since_ms) + self.patience_ms
            if peer == self.me:
                continue
            if now_ms >= silent_at_ms:
                self.silent.add(peer)
            else:
                next_ms = min(next_ms, silent_at_ms)
        self._looked = voters, next_ms

    @property
    def listening(self) -> bool:
        """Whether silence counts just now."""
        return self.since_ms is not None

    def quiet(self, voters: Sequence[PeerId], now_ms: int) -> tuple[PeerId, ...]:
        """Voters to ask for a sign of life."""
        limit_ms = max(self.patience_ms // 4, self.resend_ms)
        return tuple(
            peer
            for peer in voters
            if peer != self.me
            and (peer in self.silent or now_ms >= self.heard_at_ms.get(peer, self.started_at_ms) + limit_ms)
        )

    def heard(self, voters: Sequence[PeerId]) -> frozenset[PeerId]:
        """Voters that are not silent, this peer among them if it votes."""
        return frozenset(peer for peer in voters if peer not in self.silent)

    def direct(self, voters: Sequence[PeerId]) -> int:
        """How many voters this peer hears that hear it, as far as they have said; this peer among them."""
        me, declared, silent = self.me, self.declared, self.silent
        if not silent and not declared:
            return len(voters)
        return sum(
            peer == me or (peer not in silent and (peer not in declared or me in declared[peer][0])) for peer in voters
        )

    def hearing(self, voters: Sequence[PeerId]) -> dict[PeerId, frozenset[PeerId]]:
        """What is known of who hears whom. A voter that is heard and has said nothing hears this peer at least."""
        found = {}
        for peer in self.heard(voters):
            if peer == self.me:
                found[peer] = self.heard(voters)
            elif peer in self.declared:
                found[peer] = self.declared[peer][0] | {peer}
            else:
                found[peer] = frozenset({self.me, peer})
        for peer in voters:
            if peer in self.silent and peer in self.declared:
                found[peer] = self.declared[peer][0] - {self.me}
        return found

    def is_on(self, peer: PeerId, tip: bytes) -> bool:
        """Whether a voter has said that it builds on this tip."""
        return peer in self.declared and self.declared[peer][1] == tip
