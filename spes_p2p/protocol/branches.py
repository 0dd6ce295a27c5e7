"""The tentative certificates after the last final one, and which of them to build on (docs/protocol.md, section 9).

All peers that know the same certificates choose the same tip; the order of arrival never matters.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from spes_p2p.ids import Digest
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.head import Head

MAX_KNOWN = 4096
"""Tentative certificates of other branches that are kept. A liar alone can make some only where n <= 3."""


def fork_order(tip: Head) -> tuple[int, int, int, Digest]:
    """What tips are compared by, the lowest first: more distinct voters in its sides, then more tokens, then more
    certificates, then the hash. A branch therefore never loses rank by growing.

    The sides are those that the bodies name, not who happened to sign: two peers may hold different signatures.
    """
    branch = tip.branch
    voters = {peer for head in branch for peer in head.side}
    return -len(voters), -sum(head.tokens for head in branch), -len(branch), tip.hash


@dataclass(slots=True)
class Branches:
    """What is known of one height."""

    trunk: Head
    """The last final certificate."""
    heads: dict[Digest, Head] = field(default_factory=dict)
    certificates: dict[Digest, Certificate] = field(default_factory=dict)
    """Those that came while this process ran."""

    @classmethod
    def of(cls, head: Head) -> Branches:
        """The height that a head is in, with its own branch."""
        return cls(trunk=head.last_final, heads={known.hash: known for known in head.branch})

    def get(self, identity: Digest) -> Head | None:
        """A certificate of this height, the final one that it begins with included."""
        return self.trunk if identity == self.trunk.hash else self.heads.get(identity)

    def add(self, head: Head, certificate: Certificate) -> bool:
        """Keep a verified tentative certificate whose base is known. False: known already, or beyond the bound."""
        if head.hash in self.certificates:
            return False
        if head.hash not in self.heads and len(self.heads) >= MAX_KNOWN + self.trunk_distance(head):
            return False
        self.heads.setdefault(head.hash, head)
        self.certificates[head.hash] = certificate
        return True

    def lacks(self, head: Head) -> bool:
        """Whether a tentative certificate is known only as a head, from before a restart."""
        return head.hash in self.heads and head.hash not in self.certificates

    @staticmethod
    def trunk_distance(head: Head) -> int:
        """Certificates on the branch of a head, which are not counted against the bound."""
        return head.num_tentative

    def best(self) -> Head:
        """The tip by the fork choice; the trunk if there is none."""
        bases = {head.base.hash for head in self.heads.values() if head.base is not None}
        leaves = [head for head in self.heads.values() if head.hash not in bases]
        return min(leaves, key=fork_order, default=self.trunk)


def abandoned(before: Head, after: Head) -> tuple[Digest, ...]:
    """Tentative certificates of the branch of `before` that are not behind `after`, oldest first."""
    kept = {head.hash for head in after.branch}
    return tuple(head.hash for head in before.branch if head.hash not in kept)
