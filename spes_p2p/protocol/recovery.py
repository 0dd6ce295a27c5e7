"""Recovery: a new epoch with fewer members, signed by the run's recovery key (docs/protocol.md, section 9).

Where too few voters are left to make a final certificate, the holder of the key goes on with those that it names. The
body is a pure function of (tip, members kept); the key's signature takes the place of a quorum. Unsafe under
partition: the other side may have gone on too, and then the run has split.
"""

from __future__ import annotations

from collections.abc import Collection

from spes_p2p.config import PROTOCOL_VERSION
from spes_p2p.digests import digest_of_list
from spes_p2p.errors import LocalProtocolError, RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.ports import Signer, Verifier
from spes_p2p.protocol.body import Body, Certificate, Cut
from spes_p2p.protocol.certificate import Check, Extend, certificate_terms, verify_certificate
from spes_p2p.protocol.codec import bitmap, body_hash, cut_hash
from spes_p2p.protocol.head import Head, Terms, next_head, psi_digest
from spes_p2p.protocol.leases import next_leases
from spes_p2p.protocol.roster import with_voters
from spes_p2p.protocol.state import RosterRow, State, lease_delta, numbering, roots, roster_delta
from spes_p2p.protocol.wire import NO_DIGEST

SIGNATURE_TAG = "recover"
"""Of the recovery key's signature over the hash of the body."""


def recover(terms: Terms, keep: Collection[PeerId]) -> Body:
    """The body that makes a new epoch with these members. Raises LocalProtocolError if none of them is a member."""
    head = terms.head
    rows = tuple(
        RosterRow(row.peer, row.capacity, row.accepted, row.base_round, terms.round, row.voter_since)
        for row in head.state.roster
        if row.peer in keep
    )
    if not rows:
        raise LocalProtocolError("a recovery keeps at least one member")
    roster = with_voters(terms, rows)
    leases, _ = next_leases(terms, roster, {}, frozenset())
    state = State(roster, leases, head.state.shards)
    places = numbering(head.state, ())
    roster_root, lease_root, shard_root = roots(state)
    num_parts = len(head.parts)
    return Body(
        version=PROTOCOL_VERSION,
        run=head.run.run_id,
        epoch=head.epoch + 1,
        round=terms.round,
        prev=head.last_final.hash,
        via=NO_DIGEST if head.is_final else head.hash,
        final=True,
        side=b"",
        seed=terms.seed,
        cut=cut_hash(Cut(head.run.run_id, head.epoch + 1, terms.round, ())),
        entries=(),
        newcomers=(),
        refused=(),
        carried=(),
        roster_root=roster_root,
        lease_root=lease_root,
        shard_root=shard_root,
        roster_delta=roster_delta(head.state, state, places),
        lease_delta=lease_delta(head.state, state, places),
        shard_delta=(),
        parts=head.parts,
        psi=psi_digest(head.parts),
        kept=bitmap(set(range(num_parts)), num_parts),
        merge_alpha=b"",
        merge_root=NO_DIGEST,
        clip=(),
        receipts_root=digest_of_list("spes receipts", []),
        inner_steps=head.inner_steps,
        global_step=head.global_step,
        data_cursor=head.data_cursor,
        tokens=0,
        loss_micronats=0,
    )


def sign_recovery(body: Body, key: Signer) -> Certificate:
    """The certificate of a recovery."""
    signature = key.sign(SIGNATURE_TAG, body_hash(body))
    return Certificate(body=body, view=0, voters=b"", signatures=(signature,), merge_lists=b"")


def kept_members(head: Head, body: Body) -> frozenset[PeerId]:
    """The members that a recovery keeps. Raises RemoteProtocolError if it names places that do not exist."""
    members = head.state.members
    gone = {change.who for change in body.roster_delta if change.gone}
    if any(place >= len(members) for place in gone):
        raise RemoteProtocolError(None, "a recovery that removes nobody's row")
    return frozenset(peer for place, peer in enumerate(members) if place not in gone)


def has_split(head: Head, certificate: Certificate, verifier: Verifier) -> bool:
    """Whether a recovery, signed by the key, passes over a certificate that is final here."""
    body, key = certificate.body, head.run.manifest.recovery_key
    if len(certificate.signatures) != 1:
        return False
    if not verifier(key, SIGNATURE_TAG, body_hash(body), certificate.signatures[0]):
        return False
    passed = {identity for number, identity in head.recent if number < head.last_final.round}
    return body.round <= head.last_final.round or body.prev in passed


def recovery_check(head: Head, certificate: Certificate) -> Check:
    """The signature that makes a recovery. Raises RemoteProtocolError if there is not exactly one."""
    if len(certificate.signatures) != 1:
        raise RemoteProtocolError(None, "a recovery without the one signature of its key")
    key = head.run.manifest.recovery_key
    return key, SIGNATURE_TAG, body_hash(certificate.body), certificate.signatures[0]


def recovered(head: Head, certificate: Certificate) -> Head:
    """The head after a recovery whose signature is checked elsewhere. Raises RemoteProtocolError unless its body is
    exactly what the function gives."""
    body = certificate.body
    keep = kept_members(head, body)
    if not keep or body != recover(Terms(head), keep):
        raise RemoteProtocolError(None, "a recovery that does not follow from its certificate")
    if (certificate.view, certificate.voters, certificate.merge_lists) != (0, b"", b""):
        raise RemoteProtocolError(None, "a recovery with the votes of a round")
    return next_head(head, body)


def verify_recovery(head: Head, certificate: Certificate, verifier: Verifier) -> Head:
    """The head after a recovery. Raises RemoteProtocolError unless the key signed exactly what the function gives."""
    if not verifier(*recovery_check(head, certificate)):
        raise RemoteProtocolError(None, "a recovery that the recovery key did not sign")
    return recovered(head, certificate)


def follow(base: Head, certificate: Certificate, verifier: Verifier, extend: Extend = next_head) -> tuple[Head, Terms]:
    """The head after a certificate on top of `base`, and the terms that it was made under. Raises RemoteProtocolError
    unless a quorum, or for a new epoch the recovery key, signed what extends `base`."""
    if certificate.body.epoch > base.epoch:
        return verify_recovery(base, certificate, verifier), Terms(base)
    terms = certificate_terms(base, certificate.body)
    return verify_certificate(terms, certificate, verifier, extend), terms
