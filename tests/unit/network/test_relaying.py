"""A reservation's messages: what is asked, byte for byte, and what the answer's limits are."""

from __future__ import annotations

import pytest

from spes_p2p.network.p2p import RELAY_LIMITS, RelayLimits
from spes_p2p.network.relaying import parse_reservation, reservation_request

OK = b"\x28\x64"
"""status: 100"""


def limit(duration: bytes, data: bytes) -> bytes:
    return b"\x22" + bytes([2 + len(duration) + len(data)]) + b"\x08" + duration + b"\x10" + data


OURS, DEFAULT = limit(b"\x88\x0e", b"\x80\x80\x80\x80\x10"), limit(b"\x78", b"\x80\x80\x08")


def test_a_request_is_framed_protobuf() -> None:
    assert reservation_request() == bytes.fromhex("02 0800")


def test_an_answer_tells_the_limits() -> None:
    assert parse_reservation(b"\x08\x02" + OURS + OK) == RELAY_LIMITS == RelayLimits(num_bytes=2**32, duration_s=1800)
    assert parse_reservation(b"\x08\x02" + DEFAULT + OK) == RelayLimits(num_bytes=128 << 10, duration_s=120)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "refused with status None"),
        (b"\x08\x02" + OURS + b"\x28\xc8\x01", "refused with status 200"),
        (b"\x08\x02" + OK, "names no limits"),
        (b"\x22\x02\x08\x78" + OK, "names no limits"),
        (b"\x20\x01" + OK, "names no limits"),
        (b"\x22\x7f" + OK, "malformed"),
    ],
)
def test_a_refusal_and_a_malformed_answer_are_no_limits(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_reservation(data)
