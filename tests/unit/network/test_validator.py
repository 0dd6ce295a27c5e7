from __future__ import annotations

import time
from dataclasses import replace

import msgspec
import pytest

from spes_p2p.crypto import Identity
from spes_p2p.ids import RunId
from spes_p2p.network.discovery import HintValidator
from spes_p2p.network.guards import DHTID, MSGPackSerializer
from spes_p2p.network.hints import PeerHint, encode_hint, hint_key, hint_key_hash
from spes_p2p.network.p2p import DHTRecord

ALICE = Identity.from_seed(bytes([1]) * 32)
MALLORY = Identity.from_seed(bytes([2]) * 32)
RUN = RunId(bytes(range(32)))
packed = msgspec.msgpack.encode


@pytest.fixture
def record() -> DHTRecord:
    """A record as an honest peer stores it."""
    expires_ms = time.time_ns() // 1_000_000 + 60_000
    hint = PeerHint(
        peer=ALICE.peer_id,
        run=RUN,
        protocol=1,
        session=bytes(16),
        expires_ms=expires_ms,
        addresses=(f"/ip4/203.0.113.7/tcp/31337/p2p/{ALICE.text}",),
    )
    return DHTRecord(
        key=hint_key_hash(RUN),
        subkey=MSGPackSerializer.dumps(bytes(ALICE.peer_id)),
        value=MSGPackSerializer.dumps(encode_hint(ALICE, hint)),
        expiration_time=expires_ms / 1000,
    )


def test_an_honest_record_is_admitted(record: DHTRecord) -> None:
    assert HintValidator().validate(record)


def test_the_key_is_the_one_that_the_dht_makes_of_it() -> None:
    assert DHTID.generate(source=hint_key(RUN)).to_bytes() == hint_key_hash(RUN)


def test_a_plain_record_that_would_wipe_the_dictionary_is_refused(record: DHTRecord) -> None:
    assert not HintValidator().validate(replace(record, subkey=MSGPackSerializer.dumps(None)))


def test_a_record_under_another_peers_subkey_is_refused(record: DHTRecord) -> None:
    assert not HintValidator().validate(replace(record, subkey=packed(bytes(MALLORY.peer_id))))


@pytest.mark.parametrize("subkey", [b"", packed("text"), packed(bytes(31)), b"\xc5\x00\x20" + bytes(ALICE.peer_id)])
def test_a_subkey_that_is_no_canonical_peer_id_is_refused(record: DHTRecord, subkey: bytes) -> None:
    assert not HintValidator().validate(replace(record, subkey=subkey))


def test_a_record_under_another_runs_key_is_refused(record: DHTRecord) -> None:
    assert not HintValidator().validate(replace(record, key=hint_key_hash(RunId(bytes(32)))))


@pytest.mark.parametrize("later_s", [0.001, 3600.0, float("inf"), float("nan"), -1.0])
def test_an_expiration_that_was_not_signed_is_refused(record: DHTRecord, later_s: float) -> None:
    assert not HintValidator().validate(replace(record, expiration_time=record.expiration_time + later_s))


@pytest.mark.parametrize("value", [b"", b"\xc7", packed("text"), packed(bytes(5000)), b"\xc8\xff\xff\x40", 5, None])
def test_a_value_that_is_no_hint_is_refused(record: DHTRecord, value: object) -> None:
    assert not HintValidator().validate(replace(record, value=value))
