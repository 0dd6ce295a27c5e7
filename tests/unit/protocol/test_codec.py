import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_p2p.crypto import verify
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.protocol.codec import (
    MAX_MESSAGE_BYTES,
    bitmap,
    bits,
    check_signature,
    decode,
    decode_certificate,
    decode_signed,
    encode,
    pack_float,
    sign,
    statement_hash,
    unpack_float,
)
from spes_p2p.protocol.messages import Alive, Leave, TipAsk
from spes_p2p.protocol.wire import NO_DIGEST
from spes_p2p.testing.protocol_cases import (
    alive_of,
    body_of,
    certificate_of,
    genesis_of,
    identities,
    owned_head,
    trained_items,
    transition_of,
    update_of,
)

PEERS = identities(4)
HEAD = owned_head(PEERS)
UPDATE = encode(update_of(HEAD, PEERS[0]))
BODY = body_of(HEAD, transition_of(HEAD, trained_items(HEAD, PEERS)))
CERTIFICATE = encode(certificate_of(HEAD, BODY, PEERS))
SENDER = PeerId(bytes(32))


def test_a_message_comes_back_as_it_was() -> None:
    signed = alive_of(HEAD, PEERS[0], more=True)
    assert decode(encode(signed)) == signed
    assert decode_signed(encode(signed)).body == Alive(HEAD.run.run_id, 0, 2, True)
    assert decode_certificate(CERTIFICATE).body == BODY


def test_refused_bytes_name_their_sender() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(b"\xc1", SENDER)
    assert caught.value.peer_id == SENDER
    assert caught.value.reason.startswith("malformed message")


def test_size_is_judged_before_anything_is_parsed() -> None:
    with pytest.raises(RemoteProtocolError, match="larger than 4194304"):
        decode(bytes(MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "malformed"),
        (encode(TipAsk(0, 1)) + b"\x00", "malformed"),
        (b"\xdc\x00\x05" + encode(TipAsk(0, 1))[1:], "not in canonical encoding"),
        (encode(TipAsk(0, 1)).replace(b"tip\0\1", b"tip\0\xcc\1"), "not in canonical encoding"),
        (msgspec.msgpack.encode(["tip", 0, 1, 2]), "malformed"),
        (msgspec.msgpack.encode(["tip", 0]), "malformed"),
        (msgspec.msgpack.encode(["tip", -1, 1]), "malformed"),
        (msgspec.msgpack.encode(["tip", 0, 2**62]), "malformed"),
        (msgspec.msgpack.encode(["tip", 0, 1.0]), "malformed"),
        (msgspec.msgpack.encode(["no such tag", 0, 1]), "malformed"),
        (msgspec.msgpack.encode({"tip": 1}), "malformed"),
        (b"\x91" * 100_000 + b"\xc0", "malformed"),
    ],
)
def test_other_forms_of_a_message_are_malformed(data: bytes, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        decode(data)


def test_wrong_lengths_of_keys_and_hashes_are_malformed() -> None:
    fields = msgspec.msgpack.decode(encode(alive_of(HEAD, PEERS[0])))
    fields[1] = fields[1][:-1]
    with pytest.raises(RemoteProtocolError, match="malformed"):
        decode(msgspec.msgpack.encode(fields))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_garbage_is_refused_and_nothing_else_happens(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(data)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([UPDATE, CERTIFICATE]), st.data())
def test_flipped_or_cut_bytes_are_refused_or_still_canonical(message: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(message) - 1))
    flipped = message[:at] + bytes([message[at] ^ data.draw(st.integers(1, 255))]) + message[at + 1 :]
    for candidate in (flipped, message[:at]):
        try:
            found = decode(candidate)
        except RemoteProtocolError:
            continue
        assert encode(found) == candidate


def test_a_signature_is_for_one_kind_of_statement_only() -> None:
    head = genesis_of(PEERS)
    signed = alive_of(head, PEERS[0])
    check_signature(signed, verify)
    other = msgspec.structs.replace(signed, body=Leave(head.run.run_id, 0, 1, NO_DIGEST, 0))
    with pytest.raises(RemoteProtocolError, match="wrong signature on a leave"):
        check_signature(other, verify)


def test_the_identity_of_a_statement_is_author_and_body_without_the_signature() -> None:
    signed = alive_of(HEAD, PEERS[0])
    assert statement_hash(signed) == statement_hash(msgspec.structs.replace(signed, signature=bytes(64)))
    assert statement_hash(signed) != statement_hash(sign(PEERS[1], signed.body))


@given(st.sets(st.integers(0, 99)), st.integers(100, 140))
def test_bitmaps_come_back(indices: set[int], size: int) -> None:
    assert bits(bitmap(indices, size), size) == indices


def test_bitmaps_of_another_length_or_with_bits_beyond_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="bitmap of 2 bytes for 8 bits"):
        bits(bytes(2), 8)
    with pytest.raises(RemoteProtocolError, match="beyond 9"):
        bits(bytes([0, 2]), 9)


def test_floats_travel_as_eight_bytes() -> None:
    assert pack_float(1.0) == bytes.fromhex("000000000000f03f")
    assert unpack_float(pack_float(-0.1)) == -0.1
    assert math.isnan(unpack_float(pack_float(math.nan)))
