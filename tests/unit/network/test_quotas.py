"""What peers may ask for, by a clock that is set by hand."""

from __future__ import annotations

import pytest

from spes_p2p.ids import PeerId
from spes_p2p.network.quotas import BURST_S, QuotaLimits, Quotas

ALICE, BOB, CAROL = (PeerId(bytes([number]) * 32) for number in range(3))
LIMITS = QuotaLimits(peer_requests_per_s=2.0, peer_bytes_per_s=1_000.0, all_requests_per_s=5.0, all_bytes_per_s=2_500.0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def quotas(clock: Clock) -> Quotas:
    return Quotas(LIMITS, lambda: clock.now_s)


def num_admitted(quotas: Quotas, peer: PeerId, tries: int) -> int:
    return sum(quotas.admit(peer) for _ in range(tries))


def refused(quotas: Quotas) -> dict[str, int]:
    return {reason: number for reason, number in quotas.refused.items() if number}


def test_a_peer_has_ten_seconds_of_its_rate_at_once_and_its_rate_afterwards(quotas: Quotas, clock: Clock) -> None:
    assert num_admitted(quotas, ALICE, 100) == 2 * BURST_S
    assert refused(quotas) == {"peer requests": 80}
    clock.now_s += 3.0
    assert num_admitted(quotas, ALICE, 100) == 6
    clock.now_s += 1000.0
    assert num_admitted(quotas, ALICE, 100) == 2 * BURST_S


def test_all_peers_together_are_limited_and_one_that_asks_too_much_takes_nothing_from_the_others(
    quotas: Quotas,
) -> None:
    assert num_admitted(quotas, ALICE, 1000) == 20
    assert num_admitted(quotas, BOB, 1000) == 20
    assert num_admitted(quotas, CAROL, 1000) == 5 * BURST_S - 40
    assert refused(quotas)["all requests"] > 0
    assert quotas.num_admitted == 50


def test_bytes_are_charged_afterwards_and_must_be_made_up_for(quotas: Quotas, clock: Clock) -> None:
    assert quotas.admit(ALICE)
    quotas.charge(ALICE, 12_000)
    assert not quotas.admit(ALICE)
    assert refused(quotas) == {"peer bytes": 1}
    assert quotas.admit(BOB)
    clock.now_s += 1.9
    assert not quotas.admit(ALICE)
    clock.now_s += 0.2
    assert quotas.admit(ALICE)


def test_bytes_of_all_together_are_limited(quotas: Quotas) -> None:
    for peer in (ALICE, BOB, CAROL):
        quotas.charge(peer, 9_000)
    assert not quotas.admit(CAROL)
    assert refused(quotas) == {"all bytes": 1}
    assert quotas.bytes_served == 27_000


def test_without_limits_everything_is_admitted_and_counted() -> None:
    quotas = Quotas(None, lambda: 0.0)
    assert num_admitted(quotas, ALICE, 1000) == 1000
    quotas.charge(ALICE, 1 << 40)
    assert quotas.admit(ALICE)
    assert (quotas.bytes_served, refused(quotas)) == (1 << 40, {})


def test_a_crowd_of_peers_takes_bounded_memory(quotas: Quotas, clock: Clock) -> None:
    for number in range(5_000):
        clock.now_s += 1.0
        assert quotas.admit(PeerId(number.to_bytes(32, "big")))
    assert len(quotas._peers) == 4096
