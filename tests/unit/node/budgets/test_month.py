"""Bytes of the calendar month, over kills and over its end."""

from __future__ import annotations

from datetime import date
from random import Random

from spes_p2p.node.budgets.month import ALLOWANCE_BYTES, MonthBook, MonthCount, first_of_next

NOVEMBER, DECEMBER = date(2026, 11, 29), date(2026, 12, 1)


def test_both_directions_are_counted_from_where_the_last_start_ended() -> None:
    book = MonthBook(MonthCount(month="2026-11", up_bytes=100, down_bytes=10), NOVEMBER)
    book.look(5, 7, NOVEMBER)
    book.look(6, 9, NOVEMBER)
    assert (book.up_bytes, book.down_bytes, book.total_bytes) == (106, 19, 125)
    assert book.exact() == MonthCount(month="2026-11", up_bytes=106, down_bytes=19)


def test_a_kill_at_any_moment_forgets_nothing_and_adds_little() -> None:
    random = Random(1)
    book, stored, up, down = MonthBook(None, NOVEMBER), None, 0, 0
    num_stores = 0
    for _ in range(2_000):
        rate = random.choice((0, 2_000, 300_000, 1_000_000))
        up, down = up + random.randrange(rate + 1), down + random.randrange(rate + 1)
        to_store = book.look(up, down, NOVEMBER)
        if to_store is not None:
            stored, num_stores = to_store, num_stores + 1
        assert stored is not None
        after_kill = MonthBook(stored, NOVEMBER).total_bytes
        assert up + down <= after_kill <= up + down + 20_000_000 + ALLOWANCE_BYTES
    assert num_stores < 600


def test_a_new_month_begins_at_zero_and_an_old_file_counts_for_nothing() -> None:
    book = MonthBook(MonthCount(month="2026-11", up_bytes=100, down_bytes=10), NOVEMBER)
    book.look(5, 5, NOVEMBER)
    to_store = book.look(8, 5, DECEMBER)
    assert book.total_bytes == 3
    assert to_store is not None and to_store.month == "2026-12"
    assert MonthBook(MonthCount(month="2026-10", up_bytes=9, down_bytes=9), NOVEMBER).total_bytes == 0


def test_a_clock_set_back_forgets_nothing() -> None:
    book = MonthBook(MonthCount(month="2026-12", up_bytes=100, down_bytes=0), NOVEMBER)
    book.look(1, 0, NOVEMBER)
    assert (book.total_bytes, book.exact().month) == (101, "2026-12")


def test_counting_begins_anew_on_the_first() -> None:
    assert first_of_next(NOVEMBER) == DECEMBER
    assert first_of_next(date(2026, 12, 31)) == date(2027, 1, 1)
