"""AutoNAT's messages: what is asked, byte for byte, and that no answer can do harm."""

from __future__ import annotations

import pytest
from multiaddr import Multiaddr

from spes_p2p.network.dial_back import dial_request, parse_answer


def message(*fields: bytes) -> bytes:
    inner = b"".join(fields)
    return b"\x08\x01" + b"\x1a" + bytes([len(inner)]) + inner


def test_a_request_is_framed_protobuf() -> None:
    # type DIAL, dial { peer { id "ab", addrs "x", addrs "yz" } }
    assert dial_request(b"ab", [b"x", b"yz"]) == bytes.fromhex("11 0800 120d 0a0b 0a026162 120178 1202797a")


def test_a_successful_dial_names_the_address() -> None:
    address = Multiaddr("/ip4/203.0.113.7/tcp/4001").to_bytes()
    answer = parse_answer(message(b"\x08\x00", b"\x1a", bytes([len(address)]), address))
    assert (answer.verdict, answer.detail) == ("reached", "/ip4/203.0.113.7/tcp/4001")


@pytest.mark.parametrize(("status", "verdict"), [(100, "not reached"), (101, "not tried")])
def test_a_failed_dial_gives_its_reason(status: int, verdict: str) -> None:
    answer = parse_answer(message(b"\x08", bytes([status]), b"\x12\x03why"))
    assert (answer.verdict, answer.detail) == (verdict, "why")


@pytest.mark.parametrize(
    "data",
    [b"", b"\x08\x01", b"\x1a\x05ab", b"\x80", b"\xff" * 9, b"\x0f\x00", b"\x18\x01", message(b"\x12\x7fabc")],
)
def test_a_malformed_answer_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        parse_answer(data)


def test_an_answer_without_an_address_is_no_success() -> None:
    assert parse_answer(message(b"\x08\x00")).verdict == "not tried"
