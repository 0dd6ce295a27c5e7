import pytest

from spes_p2p.ids import PeerId
from spes_p2p.protocol.inbox import MAX_ANSWERS_PER_PAUSE, MAX_KEPT_BYTES_PER_PEER, MAX_KEPT_PER_PEER, Inbox, Parked
from spes_p2p.protocol.params import MAX_PARKED_BYTES_PER_PEER, MAX_PARKED_PER_PEER


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "little"))


def test_messages_of_the_next_round_wait_in_order_and_older_ones_are_forgotten() -> None:
    inbox = Inbox()
    assert inbox.keep(5, peer(1), b"a", member=True)
    assert inbox.keep(5, peer(2), b"b", member=True)
    assert inbox.take(5) == [(peer(1), b"a"), (peer(2), b"b")]
    assert inbox.take(5) == []
    inbox.keep(6, peer(1), b"c", member=True)
    assert inbox.take(7) == []


def test_a_member_cannot_fill_the_inbox_for_others() -> None:
    inbox = Inbox()
    assert all(inbox.keep(5, peer(1), b"x", member=True) for _ in range(MAX_KEPT_PER_PEER))
    assert not inbox.keep(5, peer(1), b"x", member=True)
    assert inbox.keep(5, peer(2), b"x", member=True)
    assert not inbox.keep(5, peer(2), bytes(MAX_KEPT_BYTES_PER_PEER), member=True)


def test_any_number_of_strangers_share_one_bound() -> None:
    inbox = Inbox()
    kept = [inbox.keep(5, peer(number), b"x", member=False) for number in range(2 * MAX_KEPT_PER_PEER)]
    assert kept.count(True) == MAX_KEPT_PER_PEER
    assert inbox.keep(5, peer(9_999), b"x", member=True)


def test_a_peer_is_asked_once_in_a_pause() -> None:
    inbox = Inbox()
    assert inbox.may_ask(peer(1), 0, 1_000)
    assert not inbox.may_ask(peer(1), 999, 1_000)
    assert inbox.may_ask(peer(2), 999, 1_000)
    assert inbox.may_ask(peer(1), 1_000, 1_000)


def test_a_peer_that_catches_up_gets_many_rounds_in_a_pause_but_not_the_same_twice_or_all() -> None:
    inbox = Inbox()
    assert all(inbox.may_answer(peer(1), number, 0, 1_000) for number in range(MAX_ANSWERS_PER_PAUSE))
    assert not inbox.may_answer(peer(1), MAX_ANSWERS_PER_PAUSE, 0, 1_000)
    assert not inbox.may_answer(peer(1), 3, 999, 1_000)
    assert inbox.may_answer(peer(1), 3, 1_000, 1_000)
    assert inbox.may_answer(peer(2), 3, 0, 1_000)


def test_messages_of_another_ballot_are_kept_up_to_a_bound_per_sender() -> None:
    parked = Parked()
    for number in range(MAX_PARKED_PER_PEER + 1):
        parked.keep(b"branch", peer(1), bytes([number % 256]))
    parked.keep(b"branch", peer(2), b"x")
    parked.keep(b"branch", peer(2), bytes(MAX_PARKED_BYTES_PER_PEER))
    found = parked.take(b"branch")
    assert [sender for sender, _ in found].count(peer(1)) == MAX_PARKED_PER_PEER
    assert found[-1] == (peer(2), b"x")
    parked.keep(b"branch", peer(1), b"y")  # what was taken makes room
    assert parked.take(b"branch") == [(peer(1), b"y")]


@pytest.mark.parametrize(("height", "kept"), [(False, [(peer(1), b"final")]), (True, [])])
def test_messages_of_the_final_ballot_last_for_the_height(height: bool, kept: list[tuple[PeerId, bytes]]) -> None:
    parked = Parked()
    parked.keep(b"", peer(1), b"final")
    parked.keep(b"branch", peer(1), b"attempt")
    parked.new_round(height=height)
    assert parked.take(b"branch") == []
    assert parked.take(b"") == kept
