"""The whole chain: structure here, signatures as checks."""

from __future__ import annotations

import msgspec
import pytest

from spes_p2p.crypto import verify
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.protocol.certificate import verify_checks
from spes_p2p.protocol.chain import links, next_link
from spes_p2p.protocol.codec import decode_certificate, encode
from spes_p2p.testing.chains import made_chain
from spes_p2p.testing.protocol_cases import NUM_PARTS, quick_config

CHAIN = made_chain(7, quick_config(), NUM_PARTS, turnover_every=3).grow(12)


def test_a_chain_leads_from_genesis_to_its_tip_with_a_quorum_of_checks_a_link() -> None:
    found = list(links(CHAIN.genesis, CHAIN.certificates))
    assert [link.after.round for link in found] == list(range(1, 13))
    assert found[-1].after == CHAIN.head
    assert [link.before for link in found[1:]] == [link.after for link in found[:-1]]
    assert {len(link.checks) for link in found} == {5}
    for link in found:
        verify_checks(link.checks, verify)


def test_it_goes_on_from_any_head() -> None:
    half = list(links(CHAIN.genesis, CHAIN.certificates[:6]))[-1].after
    assert list(links(half, CHAIN.certificates[6:]))[-1].after == CHAIN.head


def test_a_missing_certificate_is_named_by_its_round() -> None:
    found = []
    with pytest.raises(RemoteProtocolError, match=r"^round 5: a certificate of another run or round than 5"):
        for link in links(CHAIN.genesis, [*CHAIN.certificates[:4], *CHAIN.certificates[5:]]):
            found.append(link)
    assert len(found) == 4


def test_what_is_no_certificate_is_named_by_its_round() -> None:
    with pytest.raises(RemoteProtocolError, match=r"^round 2: malformed message"):
        list(links(CHAIN.genesis, [CHAIN.certificates[0], CHAIN.certificates[1][:-1]]))


def test_a_wrong_signature_is_left_to_the_checks() -> None:
    certificate = decode_certificate(CHAIN.certificates[0])
    forged = msgspec.structs.replace(certificate, signatures=(bytes(64), *certificate.signatures[1:]))
    link = next_link(CHAIN.genesis, encode(forged))
    verify_checks(link.checks[1:], verify)
    with pytest.raises(RemoteProtocolError, match="wrong signature") as raised:
        verify_checks(link.checks, verify)
    assert raised.value.peer_id == link.checks[0][0]


def test_too_few_signatures_are_no_link() -> None:
    certificate = decode_certificate(CHAIN.certificates[0])
    fewer = msgspec.structs.replace(certificate, voters=bytes([0b1111]), signatures=certificate.signatures[:4])
    with pytest.raises(RemoteProtocolError, match="4 signatures where 5 make a quorum"):
        next_link(CHAIN.genesis, encode(fewer))


def test_another_body_under_the_same_signatures_fails_its_checks() -> None:
    certificate = decode_certificate(CHAIN.certificates[0])
    forged = msgspec.structs.replace(certificate, body=msgspec.structs.replace(certificate.body, tokens=1))
    with pytest.raises(RemoteProtocolError, match="wrong signature"):
        verify_checks(next_link(CHAIN.genesis, encode(forged)).checks, verify)
