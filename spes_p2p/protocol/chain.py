"""The whole chain: certificates one after the other, each extending the head before it.

The structure is followed here; the signatures come out as checks, so that whoever has many certificates can spread them
over processors. Nothing of a `Link` is to be believed before its checks, and those of the links before it, are good.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.certificate import Check, ballot_of, certificate_checks, certificate_terms, check_place, extended
from spes_p2p.protocol.codec import decode_certificate
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.recovery import recovered, recovery_check


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One certificate of a chain."""

    before: Head
    certificate: Certificate
    encoded: bytes
    after: Head
    checks: tuple[Check, ...]
    """The signatures that make its quorum, or that of the recovery key."""


def next_link(head: Head, encoded: bytes) -> Link:
    """The certificate after `head`. Raises RemoteProtocolError if it is malformed or does not extend it."""
    certificate = decode_certificate(encoded)
    if certificate.body.epoch > head.epoch:
        checks: tuple[Check, ...] = (recovery_check(head, certificate),)
        after = recovered(head, certificate)
    else:
        terms = certificate_terms(head, certificate.body)
        check_place(terms, certificate)
        checks = certificate_checks(ballot_of(terms), certificate)
        after = extended(terms, certificate)
    return Link(before=head, certificate=certificate, encoded=encoded, after=after, checks=checks)


def links(head: Head, certificates: Iterable[bytes]) -> Iterator[Link]:
    """Follow encoded certificates from `head` on. Raises RemoteProtocolError, with the round, at the first that does
    not extend the one before."""
    for encoded in certificates:
        try:
            link = next_link(head, encoded)
        except RemoteProtocolError as error:
            raise RemoteProtocolError(error.peer_id, f"round {head.round + 1}: {error.reason}") from error
        yield link
        head = link.after
