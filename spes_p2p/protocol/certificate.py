"""Quorums: verifying a certificate's precommits and a quorum certificate's prevotes; building both from votes."""

from __future__ import annotations

from collections.abc import Mapping

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.ports import Verifier
from spes_p2p.protocol.body import Body, Certificate
from spes_p2p.protocol.codec import bitmap, bits, body_hash, encode
from spes_p2p.protocol.head import Head, Terms, next_head
from spes_p2p.protocol.messages import QuorumCertificate, Signed, Vote
from spes_p2p.protocol.transition import merge_root
from spes_p2p.protocol.wire import Step


def _vote_bytes(terms: Terms, view: int, step: Step, body: Digest, held: bool) -> bytes:
    vote = Vote(terms.head.run.run_id, terms.head.epoch, terms.round, view, step, body, held)
    return encode(vote)


def _check_signatures(
    terms: Terms,
    voters: bytes,
    signatures: tuple[bytes, ...],
    payloads: Mapping[bool, bytes],
    held: frozenset[int],
    verifier: Verifier,
) -> None:
    chosen = sorted(bits(voters, len(terms.voters)))
    if len(chosen) < terms.quorum or len(chosen) != len(signatures):
        raise RemoteProtocolError(None, f"{len(chosen)} signatures where {terms.quorum} make a quorum")
    for index, signature in zip(chosen, signatures, strict=True):
        if not verifier(terms.voters[index], Vote.tag, payloads[index in held], signature):
            raise RemoteProtocolError(terms.voters[index], "a vote in a quorum has a wrong signature")


def verify_certificate(terms: Terms, certificate: Certificate, verifier: Verifier) -> Head:
    """The head after it. Raises RemoteProtocolError unless a quorum of this round's voters precommitted the body."""
    body = certificate.body
    if (body.run, body.epoch, body.round) != (terms.head.run.run_id, terms.head.epoch, terms.round):
        raise RemoteProtocolError(None, f"a certificate of another run or round than {terms.round}")
    payload = _vote_bytes(terms, certificate.view, Step.PRECOMMIT, body_hash(body), False)
    _check_signatures(terms, certificate.voters, certificate.signatures, {False: payload}, frozenset(), verifier)
    head = next_head(terms.head, body)
    if certificate.body.seed != terms.seed:
        raise RemoteProtocolError(None, "the certificate has another seed")
    if certificate.body.merge_alpha and merge_root(certificate.merge_lists) != certificate.body.merge_root:
        raise RemoteProtocolError(None, "the certificate's merge lists do not match their root")
    if not certificate.body.merge_alpha and certificate.merge_lists:
        raise RemoteProtocolError(None, "the certificate has merge lists without a merge")
    return head


def verify_qc(terms: Terms, qc: QuorumCertificate, verifier: Verifier) -> None:
    """Raises RemoteProtocolError unless q voters prevoted the body in that view and f + 1 of them hold everything."""
    held = bits(qc.held, len(terms.voters))
    if not held <= bits(qc.voters, len(terms.voters)):
        raise RemoteProtocolError(None, "a quorum certificate with holders that did not vote")
    if len(held) < terms.num_faults + 1:
        raise RemoteProtocolError(None, "a quorum certificate without enough holders")
    payloads = {value: _vote_bytes(terms, qc.view, Step.PREVOTE, qc.body, value) for value in (False, True)}
    _check_signatures(terms, qc.voters, qc.signatures, payloads, held, verifier)


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
    head = terms.head
    return tuple(
        Signed(
            terms.voters[index],
            Vote(head.run.run_id, head.epoch, terms.round, view, step, body, index in held),
            signature,
        )
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
