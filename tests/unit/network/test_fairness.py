"""Places that all peers share: all of them for one that is alone, a share each where others want some."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from spes_p2p.ids import PeerId
from spes_p2p.network.fairness import WANT_S, FairPlaces, fair_share

ALICE, BOB, CLEO = (PeerId(letter * 32) for letter in (b"a", b"b", b"c"))


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("num_places", "num_peers", "share"), [(8, 1, 8), (8, 2, 4), (8, 3, 2), (2, 3, 1), (2, 100, 1), (64, 0, 64)]
)
def test_share_is_an_equal_part_and_at_least_one(num_places: int, num_peers: int, share: int) -> None:
    assert fair_share(num_places, num_peers) == share


def test_one_that_is_alone_may_have_all_up_to_what_a_peer_may_ever_have() -> None:
    places = FairPlaces(3, 4, Clock())
    assert [places.take(ALICE) for _ in range(4)] == [True, True, True, False]
    assert not places.must_yield(ALICE)  # its own wish for more is no other's
    bounded = FairPlaces(8, 2, Clock())
    assert [bounded.take(ALICE) for _ in range(3)] == [True, True, False]


def test_who_has_more_than_its_share_yields_to_one_that_came_later() -> None:
    places = FairPlaces(2, 4, Clock())
    assert places.take(ALICE) and places.take(ALICE)
    assert not places.take(BOB)
    assert places.must_yield(ALICE)
    places.give_back(ALICE)
    assert not places.must_yield(ALICE)
    assert not places.take(ALICE)  # what was given back is the other's
    assert places.take(BOB)
    assert not places.take(ALICE) and not places.must_yield(BOB)
    places.give_back(BOB)
    assert places.take(ALICE)


def test_a_wish_lapses_if_nobody_asks_again() -> None:
    clock = Clock()
    places = FairPlaces(2, 4, clock)
    assert places.take(ALICE) and places.take(ALICE) and not places.take(BOB)
    clock.now_s += WANT_S - 1
    assert not places.take(BOB) and places.must_yield(ALICE)
    clock.now_s += WANT_S - 1
    assert places.must_yield(ALICE)
    clock.now_s += 1
    assert not places.must_yield(ALICE)


def test_who_has_its_share_wants_nothing_of_the_others() -> None:
    places = FairPlaces(2, 4, Clock())
    assert places.take(ALICE) and places.take(BOB)
    assert not places.take(ALICE) and not places.take(BOB)
    assert not places.must_yield(ALICE) and not places.must_yield(BOB)


def test_an_odd_place_stays_where_it_is() -> None:
    places = FairPlaces(3, 4, Clock())
    assert [places.take(peer) for peer in (ALICE, ALICE, BOB, BOB)] == [True, True, True, False]
    assert not places.must_yield(ALICE), "else it would go to and fro"


def test_who_has_less_than_its_share_may_want_more() -> None:
    places = FairPlaces(4, 4, Clock())
    assert [places.take(peer) for peer in (ALICE, ALICE, ALICE, BOB, BOB)] == [True, True, True, True, False]
    assert places.must_yield(ALICE) and not places.must_yield(BOB)
    places.give_back(ALICE)
    assert places.take(BOB)


def test_fewer_places_leave_what_is_held_until_it_is_given_back() -> None:
    places = FairPlaces(4, 4, Clock())
    assert all(places.take(ALICE) for _ in range(3))
    places.set(2)
    assert not places.take(BOB) and places.must_yield(ALICE)
    places.give_back(ALICE)
    assert not places.take(BOB) and places.must_yield(ALICE)
    places.give_back(ALICE)
    assert places.take(BOB) and not places.must_yield(ALICE)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_nobody_starves_whom_a_place_can_be_given(seed: int) -> None:
    """Three greedy peers that yield at their seams: at each moment no more than there are, and in the end all equal."""
    draw = random.Random(seed)
    clock, held = Clock(), Counter[PeerId]()
    places = FairPlaces(6, 6, clock)
    for turn in range(400):
        clock.now_s += draw.random()
        peer = draw.choice((ALICE, BOB, CLEO) if turn > 100 else (ALICE, BOB))
        if held[peer] and places.must_yield(peer):
            places.give_back(peer)
            held[peer] -= 1
        elif places.take(peer):
            held[peer] += 1
        assert held.total() <= 6
    assert held == {ALICE: 2, BOB: 2, CLEO: 2}
