"""Who gave most, from certificates alone, and what one peer did in each round.

Only what a final certificate has made final counts: of that any two peers hold the same, whichever branch they are on
and whoever's signatures they kept. A node that skipped rounds counts from the far side on. Nothing that may differ
between two good certificates of one body, such as the view or its leader, is counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from spes_p2p.ids import PeerId
from spes_p2p.node.contributions import Contribution, Contributions
from spes_p2p.protocol.body import Body
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.wire import ItemKind, RefusalReason

Link = tuple[Head, Body, Head]
"""(head before, body of the certificate, head after)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One peer's place."""

    rank: int
    """From 1; peers that gave as much share it."""
    peer: PeerId
    given: Contribution


class Leaderboard:
    """Counts certificate by certificate, of the newest rounds alone if `last` is given."""

    def __init__(self, last: int | None = None) -> None:
        self._last = last
        self._counts: deque[tuple[int, Contributions]] = deque(maxlen=last)
        """(round, what was given in it); without `last` a single one, of all rounds from that one on."""
        self._newest = 0
        self._tentative: list[Link] = []

    def add(self, before: Head, body: Body, after: Head) -> None:
        """The next certificate of the chain. A tentative one counts once a final one is built on it."""
        self._tentative.append((before, body, after))
        if not after.is_final:
            return
        for link in self._tentative:
            self._count(link)
        self._tentative = []

    def _count(self, link: Link) -> None:
        if link[1].round != self._newest + 1:
            self._counts.clear()  # rounds were skipped: what is before them would not be all that was given
        self._newest = link[1].round
        if self._last is not None or not self._counts:
            self._counts.append((self._newest, Contributions()))
        self._counts[-1][1].add(*link)

    @property
    def rounds(self) -> tuple[int, int] | None:
        """The first and the last round that count; None: there is none."""
        return (self._counts[0][0], self._newest) if self._counts else None

    def standings(self) -> tuple[Standing, ...]:
        """By tokens of accepted updates, then by updates, then by peer id."""
        sums: dict[PeerId, Contribution] = {}
        for _, counted in self._counts:
            for peer, given in counted.by_peer.items():
                _add(sums.setdefault(peer, Contribution()), given)
        order = sorted(sums.items(), key=lambda item: (-item[1].tokens, -item[1].updates, item[0]))
        found: list[Standing] = []
        for place, (peer, given) in enumerate(order, start=1):
            tied = found and _score(found[-1].given) == _score(given)
            found.append(Standing(rank=found[-1].rank if tied else place, peer=peer, given=given))
        return tuple(found)


def _score(given: Contribution) -> tuple[int, int]:
    return given.tokens, given.updates


def _add(total: Contribution, given: Contribution) -> None:
    total.rounds += given.rounds
    total.updates += given.updates
    total.tokens += given.tokens
    total.shards |= given.shards
    total.refusals += given.refusals


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReceipt:
    """What one certificate says that a peer did."""

    round: int
    epoch: int
    final: bool
    items: tuple[str, ...]
    """What the cut has of it, such as `update`, `alive`, `claim`; empty: nothing."""
    verdict: str
    """Of its updates: `accepted`, `accepted late`, with `, experts refused: REASON` or `refused: REASON`; empty without
    one."""
    tokens: int
    """Of its accepted updates."""
    shards: tuple[int, ...]
    """Shards whose value its update changed."""
    receipts_root: bytes
    """The certificate's hash over the receipts of all updates in it: acknowledgements that others have signed."""


def receipt_of(link: Link, peer: PeerId) -> RoundReceipt | None:
    """What a certificate says of a peer; None if it names it nowhere and the peer was no member."""
    before, body, after = link
    peers = (*before.state.members, *body.newcomers)
    places = [place for place, entry in enumerate(body.entries) if peers[entry.who] == peer]
    places = [place for place in places if body.entries[place].kind is not ItemKind.EVIDENCE]
    if not places and peer not in before.state.members:
        return None
    counted = Contributions()
    counted.add(before, body, after)
    given = counted.by_peer.get(peer, Contribution())
    return RoundReceipt(
        round=body.round,
        epoch=body.epoch,
        final=body.final,
        items=tuple(body.entries[place].kind.name.lower() for place in places),
        verdict=_verdict(link, peer, places),
        tokens=given.tokens,
        shards=tuple(sorted(given.shards)),
        receipts_root=body.receipts_root,
    )


def receipts_of(chain: Iterable[Link], peer: PeerId) -> list[RoundReceipt]:
    """What every certificate of a chain says of a peer, oldest first, from its first appearance on."""
    found = [receipt_of(link, peer) for link in chain]
    return [receipt for receipt in found if receipt is not None]


def _verdict(link: Link, peer: PeerId, places: list[int]) -> str:
    _, body, after = link
    reasons = {remark.entry: remark.reason for remark in body.refused}
    row = after.state.row(peer)
    accepted = "accepted" if row is None or row.base_round == body.round else "accepted late"
    verdicts = []
    for place in places:
        if body.entries[place].kind is not ItemKind.UPDATE:
            continue
        reason = reasons.get(place)
        words = reason.name.lower().replace("_", " ") if reason is not None else ""
        if reason is RefusalReason.SUPERSEDED:
            verdicts.append(f"refused: {words}")
        else:
            verdicts.append(f"{accepted}, experts refused: {words}" if words else accepted)
    return "; ".join(verdicts)
