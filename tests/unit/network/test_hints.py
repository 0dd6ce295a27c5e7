from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from spes_p2p.crypto import Identity
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId, RunId
from spes_p2p.network.hints import (
    MAX_EXPIRY_MS,
    MAX_HINT_BYTES,
    PeerHint,
    decode_hint,
    encode_hint,
    hint_key,
    hint_key_hash,
)

ALICE = Identity.from_seed(bytes([1]) * 32)
MALLORY = Identity.from_seed(bytes([2]) * 32)
NOW_MS = 1_900_000_000_000


def hint(**changes: object) -> PeerHint:
    plain = PeerHint(
        peer=ALICE.peer_id,
        run=RunId(bytes(range(32))),
        protocol=1,
        session=bytes(16),
        expires_ms=NOW_MS + 60_000,
        addresses=(f"/ip4/203.0.113.7/tcp/31337/p2p/{ALICE.text}",),
    )
    return replace(plain, **changes)


def test_a_signed_hint_reads_back_as_it_was() -> None:
    assert decode_hint(ALICE.peer_id, encode_hint(ALICE, hint()), NOW_MS) == hint()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"expires_ms": NOW_MS}, "expires"),
        ({"expires_ms": NOW_MS + MAX_EXPIRY_MS + 1}, "expires"),
        ({"run": RunId(b"short")}, "length"),
        ({"session": bytes(15)}, "length"),
        ({"addresses": ()}, "0 addresses"),
        ({"addresses": ("/ip4/1.2.3.4/tcp/1",)}, "bad address"),
        ({"addresses": (f"/ip4/1.2.3.4/tcp/1/p2p/{MALLORY.text}",)}, "another peer"),
        ({"addresses": (f"/ip4/1.2.3.4/tcp/1/p2p/{ALICE.text}",) * 17}, "17 addresses"),
    ],
)
def test_a_hint_that_says_what_it_may_not_is_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(RemoteProtocolError, match=problem):
        decode_hint(ALICE.peer_id, encode_hint(ALICE, hint(**changes)), NOW_MS)


def test_a_hint_signed_by_somebody_else_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="not signed"):
        decode_hint(ALICE.peer_id, encode_hint(MALLORY, hint()), NOW_MS)


def test_a_hint_with_a_flipped_bit_is_refused() -> None:
    value = bytearray(encode_hint(ALICE, hint()))
    value[40] ^= 1
    with pytest.raises(RemoteProtocolError):
        decode_hint(ALICE.peer_id, bytes(value), NOW_MS)


@pytest.mark.parametrize(
    "value",
    [b"", b"\xc1", b"\x92", msgspec.msgpack.encode([1, 2]), msgspec.msgpack.encode([b"", b"", b""]), b"\x91" * 3000],
)
def test_malformed_bytes_are_refused(value: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_hint(ALICE.peer_id, value, NOW_MS)


def test_an_oversized_hint_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(RemoteProtocolError, match="4097 bytes"):
        decode_hint(ALICE.peer_id, bytes(MAX_HINT_BYTES + 1), NOW_MS)


def test_a_peer_id_that_is_no_key_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        decode_hint(PeerId(b"short"), encode_hint(ALICE, hint()), NOW_MS)


def test_each_run_has_a_key_of_its_own() -> None:
    assert hint_key(RunId(bytes(32))) == f"spes/{'00' * 32}/peers"
    assert hint_key_hash(RunId(bytes(32))) != hint_key_hash(RunId(bytes(31) + b"\1"))
    assert len(hint_key_hash(RunId(bytes(32)))) == 20
