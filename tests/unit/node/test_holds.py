"""Several reasons may hold training at once."""

from __future__ import annotations

import asyncio

from spes_p2p.node.holds import PAUSE, Holds


def test_training_is_held_until_the_last_reason_is_gone() -> None:
    holds = Holds()
    holds.set(PAUSE, True)
    holds.set("on battery", True)
    assert (holds.held, holds.reasons) == (True, (PAUSE, "on battery"))
    holds.set(PAUSE, False)
    assert (holds.held, holds.reasons) == (True, ("on battery",))
    holds.set("on battery", False)
    assert (holds.held, holds.reasons, holds.since_ms) == (False, (), None)


def test_the_same_again_changes_neither_the_beginning_nor_anything_else() -> None:
    now = [1_000]
    holds = Holds(lambda: now[0])
    holds.set(PAUSE, False)
    assert holds.since_ms is None
    holds.set(PAUSE, True)
    now[0] = 5_000
    holds.set(PAUSE, True)
    holds.set("hours", True)
    assert holds.since_ms == 1_000
    holds.set(PAUSE, False)
    assert holds.since_ms == 5_000


async def test_whoever_waits_for_a_change_or_the_end_is_woken() -> None:
    holds = Holds()
    changes = [asyncio.ensure_future(holds.changed.wait()) for _ in range(2)]
    await asyncio.sleep(0)
    holds.set(PAUSE, True)
    await asyncio.gather(*changes)

    released = asyncio.ensure_future(holds.wait_released())
    await asyncio.sleep(0)
    holds.set("hours", True)
    holds.set(PAUSE, False)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not released.done()
    holds.set("hours", False)
    await asyncio.wait_for(released, 5)


async def test_nothing_held_is_released_at_once() -> None:
    await asyncio.wait_for(Holds().wait_released(), 5)
