"""The skip rule: from a trusted certificate to a much later one without those in between. Pure.

    rule        more than a third of the trusted voters signed the later certificate, and a quorum of its own voters did
    its voters  are in the roster that the body before it names, and that body is the one its `prev` names
    otherwise   a certificate half way is tried first; in the end the next one, whose voters are the trusted ones

Fewer than a third of the trusted voters lie (docs/protocol.md, section 1), so one honest one of them had the whole
chain up to the certificate that it signed. The tables of the last certificate are checked against its roots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from spes_p2p.errors import LocalProtocolError, RemoteProtocolError
from spes_p2p.ids import Digest, PeerId, RunId
from spes_p2p.protocol import election
from spes_p2p.protocol.body import Body, base_of
from spes_p2p.protocol.certificate import Check, certificate_checks, check_merge_lists, final_ballot
from spes_p2p.protocol.codec import bits, body_hash
from spes_p2p.protocol.head import Head, Run, head_after
from spes_p2p.protocol.params import LATE_ROUNDS
from spes_p2p.protocol.questions import Waypoint
from spes_p2p.protocol.state import State, apply_roster_delta, roots, roster_root, voters_of
from spes_p2p.protocol.wire import NO_DIGEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """What is trusted of a certificate: its place, and who votes after it."""

    run: RunId
    epoch: int
    round: int
    hash: Digest
    seed: Digest
    voters: tuple[PeerId, ...]


def anchor_of(head: Head) -> Anchor:
    """A head that was followed certificate by certificate."""
    return Anchor(
        run=head.run.run_id,
        epoch=head.epoch,
        round=head.round,
        hash=head.hash,
        seed=head.seed,
        voters=head.state.voters,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A waypoint that is consistent in itself."""

    waypoint: Waypoint
    after: Anchor
    """Its certificate, trusted once `checks` are good and an anchor before it vouches."""
    checks: tuple[Check, ...]
    signers: frozenset[PeerId]


def judge(run: RunId, epoch: int, waypoint: Waypoint) -> Judged:
    """Raises RemoteProtocolError unless the waypoint's parts belong together and its signatures are a quorum by number.

    The signatures themselves are `checks`.
    """
    certificate, before = waypoint.certificate, waypoint.before
    body = certificate.body
    for one in (body, before):
        if (one.run, one.epoch, one.final) != (run, epoch, True):
            raise RemoteProtocolError(None, "a waypoint of another run or epoch, or not final")
    follows = body.round == before.round + 1 if body.via == NO_DIGEST else body.round > before.round + 1
    if not follows or body.prev != body_hash(before):
        raise RemoteProtocolError(None, "a waypoint whose bodies do not follow each other")
    # on a tentative tip the seed follows from that, which is not here; an honest one of the quorum has checked it
    if body.via == NO_DIGEST and body.seed != election.next_seed(run, body.round, before.seed, body.prev):
        raise RemoteProtocolError(None, "a waypoint with another seed")
    if roster_root(waypoint.roster) != before.roster_root:
        raise RemoteProtocolError(None, "a waypoint whose roster does not match its root")
    check_merge_lists(certificate)
    voters = voters_of(waypoint.roster)
    checks = certificate_checks(final_ballot(body, before.round + 1, voters), certificate)
    return Judged(
        waypoint=waypoint,
        after=Anchor(
            run=run,
            epoch=epoch,
            round=body.round,
            hash=body_hash(body),
            seed=body.seed,
            voters=voters_of(apply_roster_delta(waypoint.roster, body)),
        ),
        checks=checks,
        signers=frozenset(voters[place] for place in sorted(bits(certificate.voters, len(voters)))),
    )


def vouches(anchor: Anchor, judged: Judged) -> bool:
    """Whether what is trusted is enough to trust the waypoint too: more than a third of the trusted voters signed it.

    Raises RemoteProtocolError if it is the certificate right after the anchor and does not extend it.
    """
    body = judged.waypoint.certificate.body
    if body.round == anchor.round + 1 and (body.prev, voters_of(judged.waypoint.roster)) != (
        anchor.hash,
        anchor.voters,
    ):
        raise RemoteProtocolError(None, f"the certificate of round {body.round} does not extend round {anchor.round}")
    if judged.waypoint.before.round == anchor.round + 1 and judged.waypoint.before.prev != anchor.hash:
        raise RemoteProtocolError(None, f"the certificate of round {body.round} does not extend round {anchor.round}")
    return 3 * len(judged.signers.intersection(anchor.voters)) > len(anchor.voters)


class Skipping:
    """The way from an anchor to a target: says which waypoint it needs next, until it has arrived.

    The caller verifies the `checks` of what `take` returns before it asks for more.
    """

    def __init__(self, anchor: Anchor, target: int) -> None:
        if target <= anchor.round:
            raise LocalProtocolError("a skip leads forward")
        self.anchor = anchor
        self.path: list[Waypoint] = []
        """Waypoints that are trusted, each by the one before it."""
        self.num_asked = 0
        self._pending: list[Judged] = []
        """Judged, too far away to be vouched for; the nearest last."""
        self._wanted: int | None = target

    @property
    def wanted(self) -> int | None:
        """Round of the waypoint that is needed next; None: arrived."""
        return self._wanted

    def take(self, waypoint: Waypoint) -> Judged:
        """Take the waypoint that was wanted. Raises RemoteProtocolError if it is another one, or forged."""
        if waypoint.certificate.body.round != self._wanted:
            raise RemoteProtocolError(None, f"a waypoint of another round than {self._wanted}")
        judged = judge(self.anchor.run, self.anchor.epoch, waypoint)
        self.num_asked += 1
        self._pending.append(judged)
        while self._pending and vouches(self.anchor, self._pending[-1]):
            trusted = self._pending.pop()
            self.path.append(trusted.waypoint)
            self.anchor = trusted.after
        self._wanted = (self.anchor.round + self._pending[-1].after.round) // 2 if self._pending else None
        return judged


def retrace(anchor: Anchor, path: tuple[Waypoint, ...]) -> tuple[Anchor, tuple[Check, ...]]:
    """The anchor at the end of a stored path, and the signatures to be checked. Raises RemoteProtocolError if one of
    its waypoints is not vouched for by the one before it."""
    checks: list[Check] = []
    for waypoint in path:
        judged = judge(anchor.run, anchor.epoch, waypoint)
        if judged.after.round <= anchor.round or not vouches(anchor, judged):
            raise RemoteProtocolError(None, f"round {judged.after.round}: not vouched for by round {anchor.round}")
        checks += judged.checks
        anchor = judged.after
    return anchor, tuple(checks)


def head_at(run: Run, waypoint: Waypoint, state: State) -> Head:
    """The head of a trusted waypoint, from its tables. Raises RemoteProtocolError if they do not match its roots."""
    body, before = waypoint.certificate.body, waypoint.before
    recent: tuple[tuple[int, Digest], ...] = ((before.round - 1, base_of(before)), (before.round, body_hash(before)))
    forked = LATE_ROUNDS if before.via != NO_DIGEST else 0
    if body.via != NO_DIGEST:
        recent, forked = ((body.round - 1, body.via),), LATE_ROUNDS + 1
    return replace(head_from_tables(run, body, state, recent), forked=forked)


def head_from_tables(run: Run, body: Body, state: State, recent: tuple[tuple[int, Digest], ...]) -> Head:
    """The head after a trusted body. `recent`: (round, hash) of the certificates before it. Raises RemoteProtocolError
    if the tables do not match the body's roots or the run's number of shards."""
    if roots(state) != (body.roster_root, body.lease_root, body.shard_root):
        raise RemoteProtocolError(None, f"the tables of round {body.round} do not match their roots")
    return head_after(run, body, state, recent)
