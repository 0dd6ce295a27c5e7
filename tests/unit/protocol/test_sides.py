"""Who hears whom, who is silent, and which sides follow from it."""

import pytest

from spes_p2p.protocol.sides import Ears, reach, side_with
from spes_p2p.testing.protocol_cases import identities

IDS = [peer.peer_id for peer in identities(5)]
A, B, C, D, E = IDS


def pairs(*heard: tuple[bytes, bytes]) -> dict[bytes, frozenset[bytes]]:
    """Hearing of all five, in which each pair hears each other."""
    found = {peer: {peer} for peer in IDS}
    for one, other in heard:
        found[one].add(other)
        found[other].add(one)
    return {peer: frozenset(others) for peer, others in found.items()}


def test_voters_are_reached_over_others_that_hear_each_other() -> None:
    assert reach(pairs((A, B), (B, C), (D, E)), A) == {A, B, C}
    assert reach(pairs((A, B), (B, C), (D, E)), D) == {D, E}
    one_way = pairs((A, B)) | {C: frozenset({A, B, C})}
    assert reach(one_way, A) == {A, B}


def test_equal_knowledge_gives_equal_sides() -> None:
    hearing = pairs((A, B), (B, C), (A, C), (D, E))
    assert {side_with(hearing, IDS, peer) for peer in (A, B, C)} == {tuple(sorted((A, B, C)))}
    assert {side_with(hearing, IDS, peer) for peer in (D, E)} == {tuple(sorted((D, E)))}


def test_a_side_hears_each_other_and_the_first_in_order_chooses_first() -> None:
    chain = pairs((A, B), (B, C))
    assert side_with(chain, [A, B, C], B) == tuple(sorted((A, B)))
    assert side_with(chain, [C, B, A], B) == tuple(sorted((B, C)))
    assert side_with(chain, [A, B, C], C) == (C,)
    assert side_with({}, IDS, A) == (A,)
    assert side_with(chain, [A, B], C) == (C,)  # it has no place in the order


def ears() -> Ears:
    return Ears(A, patience_ms=10_000, resend_ms=1_000, started_at_ms=0)


def listen(found: Ears, first_ms: int, last_ms: int, *, waiting: bool = True) -> None:
    for now_ms in range(first_ms, last_ms + 1, 1_000):
        found.listen(IDS, now_ms, waiting=waiting)


def test_silence_counts_only_while_this_peer_waits() -> None:
    found = ears()
    listen(found, 0, 60_000, waiting=False)
    assert found.silent == set()
    listen(found, 61_000, 70_000)
    assert found.silent == set()
    found.hear(B, 70_500)
    listen(found, 71_000, 71_000)
    assert found.silent == {C, D, E}
    assert found.heard(IDS) == {A, B}


def test_whoever_is_asked_finds_out_as_well() -> None:
    found = ears()
    found.asked(1_000)
    listen(found, 1_000, 11_000, waiting=False)
    assert found.silent == {B, C, D, E}


def test_the_silent_are_silent_until_they_are_heard() -> None:
    found = ears()
    listen(found, 0, 10_000)
    listen(found, 11_000, 20_000, waiting=False)
    assert found.silent == {B, C, D, E}
    found.hear(C, 20_000)
    assert found.silent == {B, D, E}


def test_the_time_that_a_process_was_stopped_is_no_silence_of_others() -> None:
    found = ears()
    listen(found, 0, 5_000)
    listen(found, 600_000, 609_000)
    assert found.silent == set()
    listen(found, 610_000, 610_000)
    assert found.silent == {B, C, D, E}


@pytest.mark.parametrize(("quiet_ms", "asked"), [(2_499, set()), (2_500, {B, C, D, E})])
def test_a_voter_is_asked_after_a_quarter_of_the_patience(quiet_ms: int, asked: set[bytes]) -> None:
    assert set(ears().quiet(IDS, quiet_ms)) == asked


def test_what_the_silent_said_of_this_peer_no_longer_holds() -> None:
    found = ears()
    found.declared[B] = (frozenset({A, B, C}), b"tip")
    found.declared[C] = (frozenset({A, B, C}), b"tip")
    found.silent = {C, D, E}
    assert reach(found.hearing(IDS), A) == {A, B, C}  # B still hears it
    found.silent = {B, C, D, E}
    assert reach(found.hearing(IDS), A) == {A}
    assert found.is_on(B, b"tip")
    assert not found.is_on(D, b"tip")


def test_who_hears_this_peer_and_is_heard_is_reached_directly() -> None:
    found = ears()
    assert found.direct(IDS) == 5
    found.declared[B] = frozenset({B, C}), b""
    found.declared[C] = frozenset({A, C}), b""
    found.silent.add(D)
    assert found.direct(IDS) == 3  # A itself, C, and E, which has said nothing
    assert reach(found.hearing(IDS), A) >= {A, C, E}


def test_a_voter_heard_again_can_be_silent_again() -> None:
    found = ears()
    listen(found, 0, 10_000)
    assert found.silent == {B, C, D, E}
    found.hear(B, 10_500)
    listen(found, 11_000, 20_000)
    assert B not in found.silent
    listen(found, 21_000, 21_000)
    assert B in found.silent
