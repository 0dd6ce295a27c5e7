"""Answers from a ledger, and their end before the ledger's."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from spes_p2p.node.chain_source import ChainSource
from spes_p2p.protocol.codec import encode
from spes_p2p.protocol.questions import TipQuestion
from spes_p2p.storage.ledger import Ledger, LedgerEntry
from spes_p2p.testing.chains import made_chain
from spes_p2p.testing.protocol_cases import quick_config

CHAIN = made_chain(4, quick_config(), 4)
ASKER = CHAIN.genesis.state.members[0]
ASK = encode(TipQuestion())


class SlowLedger(Ledger):
    """Reads only when it may."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_read, self.may_read = threading.Event(), threading.Event()

    def latest(self) -> LedgerEntry | None:
        self.is_read.set()
        assert self.may_read.wait(30)
        return super().latest()


async def test_a_ledger_can_be_closed_once_its_source_has_closed(tmp_path: Path) -> None:
    ledger = SlowLedger(tmp_path / "ledger.sqlite")
    source = ChainSource(ledger, CHAIN.genesis)
    early = [asyncio.create_task(source.answer(ASKER, ASK)) for _ in range(4)]
    await asyncio.to_thread(ledger.is_read.wait, 30)
    closing = asyncio.create_task(source.close())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not closing.done()
    ledger.may_read.set()
    await closing
    ledger.close()
    # those that were read come whole, those that waited and those that come late get nothing
    assert [len(frames) for frames in await asyncio.gather(*early)] == [1, 1, 0, 0]
    assert await source.answer(ASKER, ASK) == ()
