from __future__ import annotations

import asyncio
import time

import msgpack
import pytest

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.network import guards
from spes_p2p.network.guards import (
    DHTID,
    MAX_FRAME_BYTES,
    MAX_KEYS_PER_REQUEST,
    MAX_KEYS_PER_SUBKEY,
    MAX_NESTING,
    MAX_SUBKEYS,
    P2P,
    BoundedStorage,
    MSGPackSerializer,
    NestingError,
    StreamLimit,
    check_request,
    dht_pb2,
    dht_protocol,
)

TUPLE = MSGPackSerializer._TUPLE_EXT_TYPE_CODE
LATER_S = time.time() + 86_400


def nested(depth: int) -> bytes:
    """A tuple in a tuple in a tuple ..., as hivemind packs them."""
    data = msgpack.packb(1)
    for _ in range(depth):
        data = msgpack.packb(msgpack.ExtType(TUPLE, b"\x91" + data))
    return data


def test_values_are_decoded_to_the_depth_that_honest_ones_have() -> None:
    value = MSGPackSerializer.loads(nested(MAX_NESTING))
    for _ in range(MAX_NESTING):
        (value,) = value
    assert value == 1


@pytest.mark.parametrize("depth", [MAX_NESTING + 1, 2000])
def test_a_deeper_value_is_an_error_and_no_crash(depth: int) -> None:
    with pytest.raises(NestingError):
        MSGPackSerializer.loads(nested(depth))
    assert MSGPackSerializer.loads(nested(1)) == (1,)


def test_an_unknown_extension_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown"):
        MSGPackSerializer.loads(msgpack.packb(msgpack.ExtType(99, b"")))


def reader(data: bytes) -> asyncio.StreamReader:
    stream = asyncio.StreamReader()
    stream.feed_data(data)
    stream.feed_eof()
    return stream


async def test_a_frame_within_the_limit_is_received() -> None:
    assert await P2P.receive_raw_data(reader((3).to_bytes(8, "big") + b"abc")) == b"abc"


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES + 1, 2**63])
async def test_a_frame_above_the_limit_is_refused_before_it_is_read(size: int) -> None:
    with pytest.raises(RemoteProtocolError, match=str(size)):
        await P2P.receive_raw_data(reader(size.to_bytes(8, "big")))


def test_a_stream_limit_holds_per_peer_and_is_given_back() -> None:
    limit = StreamLimit(2)
    alice, bob = PeerId(b"a" * 32), PeerId(b"b" * 32)
    with limit.of(alice), limit.of(bob):
        with limit.of(alice), pytest.raises(RemoteProtocolError, match="more than 2"), limit.of(alice):
            pass
        with limit.of(alice):
            pass


def test_the_dht_uses_the_bounded_storage() -> None:
    assert dht_protocol.DHTLocalStorage is BoundedStorage


def test_a_run_has_no_more_hints_than_one_answer_can_carry() -> None:
    storage = BoundedStorage()
    stored = [
        storage.store_subkey(DHTID(1), number.to_bytes(4, "big"), b"", LATER_S) for number in range(MAX_SUBKEYS + 1)
    ]
    assert stored == [True] * MAX_SUBKEYS + [False]
    assert storage.store_subkey(DHTID(1), bytes(4), b"renewed", LATER_S + 1)


def test_a_peer_has_hints_in_a_bounded_number_of_runs() -> None:
    storage = BoundedStorage()
    stored = [storage.store_subkey(DHTID(number), b"peer", b"", LATER_S) for number in range(MAX_KEYS_PER_SUBKEY + 1)]
    assert stored == [True] * MAX_KEYS_PER_SUBKEY + [False]
    assert storage.store_subkey(DHTID(0), b"peer", b"", LATER_S + 1)
    assert storage.store_subkey(DHTID(99), b"another", b"", LATER_S)


def test_the_number_of_keys_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "MAX_DHT_KEYS", 3)
    storage = BoundedStorage()
    assert [storage.store_subkey(DHTID(n), bytes([n]), b"", LATER_S) for n in range(4)] == [True, True, True, False]
    assert storage.store_subkey(DHTID(0), b"second", b"", LATER_S)


def test_an_entry_is_only_replaced_by_one_that_lasts_longer() -> None:
    storage = BoundedStorage()
    assert storage.store_subkey(DHTID(1), b"peer", b"new", LATER_S)
    for _ in range(10):
        assert not storage.store_subkey(DHTID(1), b"peer", b"replayed", LATER_S)
    assert storage.get(DHTID(1)).value.get(b"peer").value == b"new"
    assert len(storage.get(DHTID(1)).value.expiration_heap) == 1


def test_a_request_for_too_many_keys_is_refused() -> None:
    for kind in (dht_pb2.FindRequest, dht_pb2.StoreRequest):
        check_request(kind(keys=[bytes(20)] * MAX_KEYS_PER_REQUEST))
        with pytest.raises(RemoteProtocolError, match="64 keys"):
            check_request(kind(keys=[bytes(20)] * (MAX_KEYS_PER_REQUEST + 1)))
    check_request(dht_pb2.PingRequest())
