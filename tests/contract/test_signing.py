"""What every signer and its verifier promise: Ed25519 and the fast pair of the simulator pass the same suite."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from spes_p2p.crypto import Identity, verify
from spes_p2p.digests import digest
from spes_p2p.ids import PeerId
from spes_p2p.ports import Signer, Verifier
from spes_p2p.testing.signing import FastSigner, verify_fast


@dataclass(frozen=True)
class Pair:
    one: Signer
    again: Signer
    other: Signer
    verify: Verifier


@pytest.fixture(params=["ed25519", "fast"])
def pair(request: pytest.FixtureRequest) -> Pair:
    seeds = digest("one"), digest("one"), digest("other")
    if request.param == "ed25519":
        one, again, other = map(Identity.from_seed, seeds)
        return Pair(one, again, other, verify)
    fast = [FastSigner.from_seed(seed) for seed in seeds]
    return Pair(fast[0], fast[1], fast[2], verify_fast)


def test_a_seed_gives_one_peer_id_of_32_bytes(pair: Pair) -> None:
    assert pair.one.peer_id == pair.again.peer_id != pair.other.peer_id
    assert len(pair.one.peer_id) == 32


def test_what_a_peer_signed_is_valid_and_has_64_bytes(pair: Pair) -> None:
    signature = pair.one.sign("vote", b"payload")
    assert len(signature) == 64
    assert pair.verify(pair.one.peer_id, "vote", b"payload", signature)


def test_the_same_signer_gives_the_same_bytes(pair: Pair) -> None:
    assert pair.one.sign("vote", b"payload") == pair.again.sign("vote", b"payload")


def test_a_signature_is_for_one_peer_one_tag_and_one_payload(pair: Pair) -> None:
    signature = pair.one.sign("vote", b"payload")
    assert not pair.verify(pair.other.peer_id, "vote", b"payload", signature)
    assert not pair.verify(pair.one.peer_id, "view", b"payload", signature)
    assert not pair.verify(pair.one.peer_id, "vote", b"payloads", signature)


def test_no_byte_of_a_signature_may_change(pair: Pair) -> None:
    signature = pair.one.sign("vote", b"payload")
    for place in range(64):
        wrong = bytearray(signature)
        wrong[place] ^= 1
        assert not pair.verify(pair.one.peer_id, "vote", b"payload", bytes(wrong))


@pytest.mark.parametrize("num_bytes", [0, 31, 33, 63, 65])
def test_malformed_keys_and_signatures_are_invalid_not_errors(pair: Pair, num_bytes: int) -> None:
    signature = pair.one.sign("vote", b"payload")
    assert not pair.verify(PeerId(bytes(num_bytes)), "vote", b"payload", signature)
    assert not pair.verify(pair.one.peer_id, "vote", b"payload", bytes(num_bytes))
