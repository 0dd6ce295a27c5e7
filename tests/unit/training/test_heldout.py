import msgspec
import pytest

from spes_p2p.errors import DataError
from spes_p2p.testing.training import tiny_documents
from spes_p2p.training.documents import document_hash
from spes_p2p.training.heldout import decode_held_out, draw_held_out, encode_held_out, held_out_hashes

MANY = tiny_documents(200)


def test_a_set_survives_its_encoding():
    assert decode_held_out(encode_held_out(MANY[:5])) == MANY[:5]


def test_hashes_are_those_of_documents_as_they_enter():
    assert held_out_hashes(MANY[:2]) == {document_hash(MANY[0]), document_hash(MANY[1])}


def test_drawing_depends_on_seed_and_documents_alone():
    drawn = draw_held_out(MANY, 1000, seed=1)
    assert drawn == draw_held_out(reversed(MANY * 2), 1000, seed=1)
    assert drawn != draw_held_out(MANY, 1000, seed=2)


def test_a_drawn_set_keeps_its_limits():
    assert 800 < len(encode_held_out(draw_held_out(MANY, 1000, seed=0))) <= 1000
    text = sum(map(len, MANY))
    assert sum(map(len, draw_held_out(MANY, 1 << 20, seed=0))) <= text // 10


def test_too_little_text_is_an_error():
    with pytest.raises(DataError, match="too little text"):
        draw_held_out(MANY[:3], 1000, seed=0)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode(["text"]),
        msgspec.msgpack.encode([b""]),
        msgspec.msgpack.encode([b"a\0"]),
        msgspec.msgpack.encode([b"x" * 4097]),
        msgspec.msgpack.encode([b"x" * 4000] * 300),
        encode_held_out([b"a"]) + b"\0",
        b"\xdc\x00\x01" + msgspec.msgpack.encode(b"a"),
    ],
)
def test_other_bytes_are_refused(data):
    with pytest.raises(DataError):
        decode_held_out(data)
