from spes_p2p.ids import PeerId
from spes_p2p.protocol.outbox import Outbox

A, B = PeerId(b"a" * 32), PeerId(b"b" * 32)


def test_a_message_is_repeated_until_it_is_confirmed() -> None:
    outbox = Outbox(1_000)
    send = outbox.add(A, b"hello", round_number=1, now_ms=0)
    assert send is not None
    assert outbox.due(999) == []
    assert outbox.due(1_000) == [send]
    outbox.delivered(send.ticket)
    assert outbox.deadline_ms() is None
    assert outbox.due(60_000) == []


def test_repeats_come_more_slowly_and_then_steadily() -> None:
    outbox = Outbox(1_000)
    outbox.add(A, b"hello", round_number=1, now_ms=0)
    times = []
    for _ in range(5):
        due = outbox.deadline_ms()
        assert due is not None
        times.append(due)
        outbox.due(due)
    assert times == [1_000, 3_000, 6_000, 10_000, 14_000]


def test_the_same_bytes_go_to_the_same_peer_once() -> None:
    outbox = Outbox(1_000)
    assert outbox.add(A, b"hello", round_number=1, now_ms=0) is not None
    assert outbox.add(A, b"hello", round_number=1, now_ms=5) is None
    assert outbox.add(B, b"hello", round_number=1, now_ms=5) is not None


def test_a_request_is_not_repeated_and_may_leave_again() -> None:
    outbox = Outbox(1_000)
    first, second = outbox.once(A, b"?"), outbox.once(A, b"?")
    assert first.ticket != second.ticket
    assert outbox.deadline_ms() is None


def test_messages_of_long_closed_rounds_are_forgotten() -> None:
    outbox = Outbox(1_000)
    outbox.add(A, b"old", round_number=1, now_ms=0)
    new = outbox.add(A, b"new", round_number=2, now_ms=0)
    outbox.expire(2)
    assert outbox.due(1_000) == [new]
    assert outbox.add(A, b"old", round_number=2, now_ms=1_000) is not None
