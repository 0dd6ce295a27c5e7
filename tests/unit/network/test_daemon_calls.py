"""However a call to the daemon ends, its connection is closed: at a socket pair whose other end is the daemon."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing

import pytest

from spes_p2p.ids import PeerId
from spes_p2p.network.channel import Channel
from spes_p2p.network.daemon_calls import Connector, Control
from spes_p2p.network.guards import DaemonMultiaddr, P2PDaemonError, p2pd_pb2, write_pbmsg
from spes_p2p.network.scores import Traffic
from spes_p2p.network.wire import Hello

ADDRESS = DaemonMultiaddr("/unix/nowhere.sock")
LIMIT_S = 30
Call = Callable[[Control], Awaitable[object]]

CALLS: dict[str, Call] = {
    "identify": lambda control: control.identify(),
    "serve a protocol": lambda control: control.stream_handler("name", None),
    "take a protocol away": lambda control: control.remove_stream_handler("name"),
    "share a connection": lambda control: control._ensure_persistent_conn(),
}


class Daemon:
    """The other end: it hears what is asked, and says what a test has it say."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def hears_the_end(self) -> bool:
        async with asyncio.timeout(LIMIT_S):
            while await self.reader.read(1024):
                pass
        return True


@pytest.fixture
async def daemon(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Daemon]:
    ours, theirs = socket.socketpair()

    async def open_connection(connector: Connector) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(sock=ours)

    monkeypatch.setattr(Connector, "open_connection", open_connection)
    reader, writer = await asyncio.open_unix_connection(sock=theirs)
    with closing(writer):
        yield Daemon(reader, writer)


def control() -> Control:
    return Control(Connector(ADDRESS), ADDRESS, _initialized_with_create=True)


@pytest.mark.parametrize("name", CALLS)
async def test_call_that_is_cancelled_before_the_answer_closes_its_connection(daemon: Daemon, name: str) -> None:
    calling = asyncio.ensure_future(CALLS[name](control()))
    async with asyncio.timeout(LIMIT_S):
        assert await daemon.reader.read(1)
    calling.cancel()
    assert await daemon.hears_the_end()
    with pytest.raises(asyncio.CancelledError):
        await calling


@pytest.mark.parametrize("name", CALLS)
async def test_call_that_the_daemon_breaks_off_raises_and_closes_its_connection(daemon: Daemon, name: str) -> None:
    daemon.writer.write_eof()
    with pytest.raises(EOFError):
        await asyncio.wait_for(CALLS[name](control()), LIMIT_S)
    assert await daemon.hears_the_end()


@pytest.mark.parametrize("name", CALLS)
async def test_refusal_is_raised_and_closes_the_connection(daemon: Daemon, name: str) -> None:
    refusal = p2pd_pb2.Response(type=p2pd_pb2.Response.ERROR, error=p2pd_pb2.ErrorResponse(msg="not today"))
    await write_pbmsg(daemon.writer, refusal)
    with pytest.raises(P2PDaemonError, match="not today"):
        await asyncio.wait_for(CALLS[name](control()), LIMIT_S)
    assert await daemon.hears_the_end()


async def test_shared_connection_is_closed_also_if_its_writer_has_not_begun(daemon: Daemon) -> None:
    await write_pbmsg(daemon.writer, p2pd_pb2.Response(type=p2pd_pb2.Response.OK))
    shared = control()
    await asyncio.wait_for(shared._ensure_persistent_conn(), LIMIT_S)
    shared.close()
    assert await daemon.hears_the_end()


async def test_channel_that_is_closed_before_its_listener_has_begun_closes_its_stream(daemon: Daemon) -> None:
    stream = await Connector(ADDRESS).open_connection()
    hello = Hello(protocol=1, run=b"", settings={}, session=bytes(16), wall_ms=0, addresses=())
    channel = Channel(PeerId(bytes(38)), stream, hello, 0, Traffic())
    await channel.close()
    assert not channel.is_open
    assert await daemon.hears_the_end()
