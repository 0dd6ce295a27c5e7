"""The log for people."""

from __future__ import annotations

import asyncio
import logging
import threading

from spes_p2p.node.log import KEPT, LogBridge, NodeLog


def test_lines_are_numbered_and_the_last_thousand_kept() -> None:
    log = NodeLog()
    for number in range(KEPT + 5):
        log.tell("info", f"line {number}")
    assert len(log.after(0)) == KEPT
    assert [event.text for event in log.after(KEPT + 3)] == [f"line {KEPT + 3}", f"line {KEPT + 4}"]
    assert log.after(KEPT + 5) == ()


async def test_waiting_ends_with_a_line_or_any_change_and_at_once_if_there_is_news() -> None:
    log = NodeLog()
    for wake in (lambda: log.tell("info", "news"), log.changed):
        number = log.after(0)[-1].number if log.after(0) else 0
        waiting = asyncio.create_task(log.wait(number, 600))
        await asyncio.sleep(0)
        assert not waiting.done()
        wake()
        await asyncio.wait_for(waiting, 60)
    await asyncio.wait_for(log.wait(0, 600), 60)


async def test_warnings_of_loggers_show_from_whatever_thread() -> None:
    log = NodeLog()
    logger = logging.getLogger("spes_p2p.test_log")
    logger.propagate = False
    bridge = LogBridge(log)
    logger.addHandler(bridge)
    try:
        logger.info("not shown")
        logger.warning("from the loop: %d", 1)
        thread = threading.Thread(target=logger.error, args=("from a thread",))
        thread.start()
        await asyncio.to_thread(thread.join)
        await asyncio.wait_for(log.wait(1, 600), 60)
    finally:
        logger.removeHandler(bridge)
    assert [(event.level, event.text) for event in log.after(0)] == [
        ("warning", "from the loop: 1"),
        ("error", "from a thread"),
    ]
