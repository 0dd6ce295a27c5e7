"""Quorums: verifying a certificate's precommits and a quorum certificate's prevotes; building both from votes.

What is to be verified comes as a list of `Check`s, so that whoever has many can spread them over processors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Digest, PeerId, RunId
from spes_p2p.ports import Verifier
from spes_p2p.protocol.body import Body, Certificate
from spes_p2p.protocol.codec import bitmap, bits, body_hash, encode
from spes_p2p.protocol.head import Head, Terms, may_go_on, next_head, side_of
from spes_p2p.protocol.messages import QuorumCertificate, Signed, Vote
from spes_p2p.protocol.params import quorum
from spes_p2p.protocol.transition import merge_root
from spes_p2p.protocol.wire import Step

Extend: TypeAlias = Callable[[Head, Body], Head]
"""`head.next_head`."""

Check: TypeAlias = tuple[PeerId, str, bytes, bytes]
"""(peer, tag, payload, signature), as a `Verifier` takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """What votes belong to: its electorate by peer id, and what they name (docs/protocol.md, section 9)."""

    run: RunId
    epoch: int
    round: int
    """The height of the final voting, or the round of a tentative attempt."""
    branch: bytes
    electorate: tuple[PeerId, ...]
    quorum: int

    def vote(self, view: int, step: Step, body: Digest, held: bool) -> Vote:
        """One vote in it."""
        return Vote(self.run, self.epoch, self.round, view, step, body, held, self.branch)


def ballot_of(terms: Terms) -> Ballot:
    """The ballot of a round's terms."""
    return Ballot(
        run=terms.head.run.run_id,
        epoch=terms.head.epoch,
        round=terms.ballot_round,
        branch=terms.branch,
        electorate=terms.voters,
        quorum=terms.quorum,
    )


def final_ballot(body: Body, height: int, electorate: tuple[PeerId, ...]) -> Ballot:
    """The ballot that made a final body. `height`: round after the final certificate before it."""
    return Ballot(
        run=body.run,
        epoch=body.epoch,
        round=height,
        branch=b"",
        electorate=electorate,
        quorum=quorum(len(electorate)),
    )


def _checks(
    ballot: Ballot,
    voters: bytes,
    signatures: tuple[bytes, ...],
    payloads: Mapping[bool, bytes],
    held: frozenset[int],
) -> tuple[Check, ...]:
    electorate, needed = ballot.electorate, ballot.quorum
    chosen = sorted(bits(voters, len(electorate)))
    if len(chosen) < needed or len(chosen) != len(signatures):
        raise RemoteProtocolError(None, f"{len(chosen)} signatures where {needed} make a quorum")
    return tuple(
        (electorate[index], Vote.tag, payloads[index in held], signature)
        for index, signature in zip(chosen, signatures, strict=True)
    )


def verify_checks(checks: Iterable[Check], verifier: Verifier) -> None:
    """Raises RemoteProtocolError at the first signature that is not its peer's."""
    for check in checks:
        if not verifier(*check):
            raise RemoteProtocolError(check[0], "a vote in a quorum has a wrong signature")


def certificate_checks(ballot: Ballot, certificate: Certificate) -> tuple[Check, ...]:
    """Signatures of a certificate. Raises RemoteProtocolError if there are fewer than the ballot's quorum of them."""
    vote = ballot.vote(certificate.view, Step.PRECOMMIT, body_hash(certificate.body), False)
    return _checks(ballot, certificate.voters, certificate.signatures, {False: encode(vote)}, frozenset())


def check_place(terms: Terms, certificate: Certificate) -> None:
    """Raises RemoteProtocolError unless the certificate is one of this run, round and side."""
    body = certificate.body
    if (body.run, body.epoch, body.round) != (terms.head.run.run_id, terms.head.epoch, terms.round):
        raise RemoteProtocolError(None, f"a certificate of another run or round than {terms.round}")
    if body.final == terms.tentative or body.side != terms.side_bitmap:
        raise RemoteProtocolError(None, "a certificate of another side")


def check_merge_lists(certificate: Certificate) -> None:
    """Raises RemoteProtocolError unless the merge lists are those of the body, and there are none without a merge."""
    body = certificate.body
    if body.merge_alpha and merge_root(certificate.merge_lists) != body.merge_root:
        raise RemoteProtocolError(None, "the certificate's merge lists do not match their root")
    if not body.merge_alpha and certificate.merge_lists:
        raise RemoteProtocolError(None, "the certificate has merge lists without a merge")


def extended(terms: Terms, certificate: Certificate, extend: Extend = next_head) -> Head:
    """The head after a certificate of this round, whose signatures are checked elsewhere. `extend`: `next_head`, or one
    that remembers. Raises RemoteProtocolError if its body does not follow from the head before."""
    head = extend(terms.head, certificate.body)
    if certificate.body.seed != terms.seed:
        raise RemoteProtocolError(None, "the certificate has another seed")
    check_merge_lists(certificate)
    return head


def certificate_terms(head: Head, body: Body) -> Terms:
    """Roles of the round that a certificate on `head` ends. Raises RemoteProtocolError for an impossible side."""
    if body.final:
        return Terms(head)
    side = side_of(head, body.side)
    if not may_go_on(head, side):
        raise RemoteProtocolError(None, "a tentative certificate of voters that may not make one")
    return Terms(head, side)


def verify_certificate(terms: Terms, certificate: Certificate, verifier: Verifier, extend: Extend = next_head) -> Head:
    """The head after it. Raises RemoteProtocolError unless a quorum of this round's voters precommitted the body."""
    check_place(terms, certificate)
    verify_checks(certificate_checks(ballot_of(terms), certificate), verifier)
    return extended(terms, certificate, extend)


def verify_qc(terms: Terms, qc: QuorumCertificate, verifier: Verifier) -> None:
    """Raises RemoteProtocolError unless q voters prevoted the body in that view and f + 1 of them hold everything."""
    held = bits(qc.held, len(terms.voters))
    if not held <= bits(qc.voters, len(terms.voters)):
        raise RemoteProtocolError(None, "a quorum certificate with holders that did not vote")
    if len(held) < terms.num_faults + 1:
        raise RemoteProtocolError(None, "a quorum certificate without enough holders")
    ballot = ballot_of(terms)
    payloads = {value: encode(ballot.vote(qc.view, Step.PREVOTE, qc.body, value)) for value in (False, True)}
    verify_checks(_checks(ballot, qc.voters, qc.signatures, payloads, held), verifier)


def votes_of_certificate(terms: Terms, certificate: Certificate) -> tuple[Signed, ...]:
    """The precommits whose signatures a verified certificate carries."""
    held: frozenset[int] = frozenset()
    identity = body_hash(certificate.body)
    return _votes(terms, certificate.view, Step.PRECOMMIT, identity, certificate.voters, certificate.signatures, held)


def votes_of_qc(terms: Terms, qc: QuorumCertificate) -> tuple[Signed, ...]:
    """The prevotes whose signatures a verified quorum certificate carries."""
    held = bits(qc.held, len(terms.voters))
    return _votes(terms, qc.view, Step.PREVOTE, qc.body, qc.voters, qc.signatures, held)


def _votes(
    terms: Terms,
    view: int,
    step: Step,
    body: Digest,
    voters: bytes,
    signatures: tuple[bytes, ...],
    held: frozenset[int],
) -> tuple[Signed, ...]:
    ballot = ballot_of(terms)
    return tuple(
        Signed(terms.voters[index], ballot.vote(view, step, body, index in held), signature)
        for index, signature in zip(sorted(bits(voters, len(terms.voters))), signatures, strict=True)
    )


def make_certificate(
    terms: Terms, body: Body, view: int, precommits: Mapping[PeerId, Signed], merge_lists: bytes
) -> Certificate:
    """A certificate from at least q precommits of the body in that view."""
    chosen = [index for index, peer in enumerate(terms.voters) if peer in precommits]
    return Certificate(
        body=body,
        view=view,
        voters=bitmap(set(chosen), len(terms.voters)),
        signatures=tuple(precommits[terms.voters[index]].signature for index in chosen),
        merge_lists=merge_lists,
    )


def make_qc(terms: Terms, body: Digest, view: int, prevotes: Mapping[PeerId, Signed]) -> QuorumCertificate:
    """A quorum certificate from at least q prevotes of the body in that view, f + 1 of which say *held*."""
    chosen = [index for index, peer in enumerate(terms.voters) if peer in prevotes]
    held = {index for index in chosen if _says_held(prevotes[terms.voters[index]])}
    return QuorumCertificate(
        view=view,
        body=body,
        voters=bitmap(set(chosen), len(terms.voters)),
        held=bitmap(held, len(terms.voters)),
        signatures=tuple(prevotes[terms.voters[index]].signature for index in chosen),
    )


def _says_held(signed: Signed) -> bool:
    return isinstance(signed.body, Vote) and signed.body.held
