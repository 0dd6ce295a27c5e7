"""What lasts for a height, that is, over all tentative rounds after one final certificate."""

from __future__ import annotations

from dataclasses import dataclass, field

from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.branches import Branches
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.history import Held
from spes_p2p.protocol.params import CERTIFICATES_PER_ANSWER, LATE_ROUNDS, MAX_PEERS_REMEMBERED
from spes_p2p.protocol.stash import Stash


@dataclass(slots=True, kw_only=True)
class Height:
    """The height that is open."""

    branches: Branches
    log: list[tuple[PeerId, bytes]] = field(default_factory=list)
    """(author, message) of the final voting, for its next round."""
    pinned: Digest | None = None
    """The tip that the highest quorum certificate, or this voter's lock, binds the final voting to."""
    stash: Stash | None = None
    """What was known of the round on that tip."""
    spent: list[Held] = field(default_factory=list)
    """Updates in tentative certificates of the branch: they count again if it is left."""
    shown: dict[PeerId, Head] = field(default_factory=dict)
    """What a peer has shown of another branch: the last tentative certificate of it, or where both begin."""

    @classmethod
    def of(cls, head: Head) -> Height:
        """The height that a head is in."""
        return cls(branches=Branches.of(head))

    def stash_of(self, tip: Head) -> Stash | None:
        """What was known of the round on a tip."""
        return self.stash if self.stash is not None and self.stash.tip == tip.hash else None

    def goal(self, pinned: Digest | None) -> Head:
        """What to build on: the tip that a body which may become final is bound to, or that of the fork choice."""
        known = self.branches.get(pinned) if pinned is not None else None
        return known or self.branches.best()

    def anchors(self) -> tuple[Head, ...]:
        """Certificates whose state may be needed again, however long the branch grows: the final one that the height
        begins with, and the one that the final voting is bound to."""
        bound = self.branches.get(self.pinned) if self.pinned is not None else None
        return (self.branches.trunk, bound) if bound not in (None, self.branches.trunk) else (self.branches.trunk,)

    def path(self, head: Head, tip: Head) -> list[tuple[Head, Certificate]]:
        """What to adopt, one after the other, to get from a head to a tip that is not behind it; without `lacking`."""
        own = {known.hash for known in head.branch}
        heads = [known for known in tip.branch if known.hash not in own]
        found = [(known, self.branches.certificates.get(known.hash)) for known in heads]
        return [(known, certificate) for known, certificate in found if certificate is not None]

    def lacking(self, head: Head, tip: Head) -> Head | None:
        """The first on that way that was adopted before a restart, and left: its certificate is not here any more."""
        own = {known.hash for known in head.branch}
        return next((known for known in tip.branch if known.hash not in own and self.branches.lacks(known)), None)

    def base_of(self, head: Head) -> Head:
        """What a tentative certificate builds on."""
        return head.base if head.base is not None else self.branches.trunk

    def show(self, peer: PeerId, known: Head) -> None:
        """A peer shows a certificate that is known already. It is asked for what follows on that if its branch is being
        followed, or if a whole answer is known: after it its branch may part from this one."""
        shown = self.shown.get(peer)
        if known.num_tentative >= CERTIFICATES_PER_ANSWER if shown is None else known.round > shown.round:
            self.ask_from(peer, known)

    def ask_from(self, peer: PeerId, head: Head) -> None:
        """The next question to a peer is what follows on this. Bounded, for strangers too."""
        if peer in self.shown or len(self.shown) < MAX_PEERS_REMEMBERED:
            self.shown[peer] = head

    def enter(self, head: Head, certificate: Certificate, spent: list[Held]) -> None:
        """A tentative certificate is the tip now; `spent`: the updates in its cut."""
        self.branches.add(head, certificate)
        recent = [held for held in self.spent if held.signed.body.round >= head.round - LATE_ROUNDS]
        self.spent = [*recent, *spent]
        own = {known.hash for known in head.branch}
        self.shown = {peer: shown for peer, shown in self.shown.items() if shown.hash not in own}
