"""Questions and answers of the chain are as strict as messages."""

from __future__ import annotations

import msgspec
import pytest

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol.codec import encode
from spes_p2p.protocol.questions import (
    MAX_CERTIFICATES,
    MAX_QUESTION_BYTES,
    CertificatesQuestion,
    Question,
    Tables,
    TablesQuestion,
    Tip,
    TipQuestion,
    WaypointQuestion,
    decode_answer,
    decode_question,
    decode_state,
)
from spes_p2p.protocol.state import State

ASKER = PeerId(bytes(32))
TIP = Tip(0, 7, Digest(bytes(32)), 1)


@pytest.mark.parametrize(
    "question", [TipQuestion(), CertificatesQuestion(1, MAX_CERTIFICATES), WaypointQuestion(9), TablesQuestion(2**61)]
)
def test_questions_survive_the_wire_and_are_small(question: Question) -> None:
    data = encode(question)
    assert decode_question(data, ASKER) == question
    assert len(data) <= MAX_QUESTION_BYTES


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        encode(TipQuestion()) + b"\x00",
        bytes(MAX_QUESTION_BYTES + 1),
        msgspec.msgpack.encode(["certificates?", 1, 0]),
        msgspec.msgpack.encode(["certificates?", 1, MAX_CERTIFICATES + 1]),
        msgspec.msgpack.encode(["certificates?", -1, 1]),
        msgspec.msgpack.encode(["waypoint?", 2**62]),
        b"\x92\xa9waypoint?\xcd\x00\x07",  # 7 in more bytes than it takes
        encode(TIP),
    ],
)
def test_anything_else_is_refused_with_the_asker(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as raised:
        decode_question(data, ASKER)
    assert raised.value.peer_id == ASKER


def test_answers_survive_the_wire_and_questions_are_none() -> None:
    assert decode_answer(encode(TIP)) == TIP
    with pytest.raises(RemoteProtocolError):
        decode_answer(encode(TipQuestion()))


def test_tables_on_disk_are_a_state() -> None:
    state = State((), (), ())
    assert decode_state(encode(Tables(state))) == state
    with pytest.raises(RemoteProtocolError, match="malformed tables"):
        decode_state(encode(TIP))
    with pytest.raises(RemoteProtocolError, match="malformed"):
        decode_state(encode(Tables(state))[:-1])
