"""What the node asks of its daemon, each over a connection of its own that is closed however the asking ends.

hivemind's own calls leave their connection open when they fail or are cancelled, as they are when a node is stopped at
its start or while it announces itself. They are the calls here in another form; nothing else of its client is changed.
"""

from __future__ import annotations

import asyncio

from spes_p2p.network.channel import Stream
from spes_p2p.network.guards import (
    MAX_FRAME_BYTES,
    Client,
    ControlClient,
    DaemonConnector,
    DaemonMultiaddr,
    P2PDaemonError,
    PeerID,
    p2pd_pb2,
    read_pbmsg_safe,
    write_pbmsg,
)


class Connector(DaemonConnector):  # type: ignore[misc]  # hivemind ships no types
    """Opens connections to the daemon's socket."""

    async def ask(self, request: p2pd_pb2.Request) -> tuple[p2pd_pb2.Response, Stream]:
        """The daemon's answer, and the open connection that it came over.

        Raises P2PDaemonError if the answer is a refusal, OSError or EOFError if the daemon has gone.
        """
        reader, writer = await self.open_connection()
        try:
            await write_pbmsg(writer, request)
            response = p2pd_pb2.Response()
            await read_pbmsg_safe(reader, response)
            if response.type == p2pd_pb2.Response.ERROR:
                raise P2PDaemonError(response.error.msg)
        except BaseException:
            writer.close()
            raise
        return response, (reader, writer)

    async def answer(self, request: p2pd_pb2.Request) -> p2pd_pb2.Response:
        """The daemon's answer alone. Raises what `ask` raises."""
        response, (_, writer) = await self.ask(request)
        writer.close()
        return response


class Control(ControlClient):  # type: ignore[misc]  # hivemind ships no types
    """hivemind's client of the daemon. Made by `connect`."""

    _kept: asyncio.StreamWriter | None = None
    """The connection that the DHT's calls share."""

    async def identify(self) -> tuple[PeerID, tuple[DaemonMultiaddr, ...]]:
        """The daemon's peer id, and the addresses that it has."""
        identity = (await self.daemon_connector.answer(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY))).identify
        return PeerID(identity.id), tuple(DaemonMultiaddr(address) for address in identity.addrs)

    async def stream_handler(self, proto: str, handler_cb: object, balanced: bool = False) -> None:
        """Have incoming streams of a protocol given to `handler_cb`."""
        self.handlers[proto] = handler_cb
        wish = p2pd_pb2.StreamHandlerRequest(addr=self.listen_maddr.to_bytes(), proto=[proto], balanced=balanced)
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=wish)
        await self.daemon_connector.answer(request)

    async def remove_stream_handler(self, proto: str) -> None:
        """Take a protocol away."""
        wish = p2pd_pb2.RemoveStreamHandlerRequest(addr=self.listen_maddr.to_bytes(), proto=[proto])
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.REMOVE_STREAM_HANDLER, removeStreamHandler=wish)
        await self.daemon_connector.answer(request)
        del self.handlers[proto]

    async def _ensure_persistent_conn(self) -> None:
        upgrade = p2pd_pb2.Request(type=p2pd_pb2.Request.PERSISTENT_CONN_UPGRADE)
        _, (reader, self._kept) = await self.daemon_connector.ask(upgrade)
        self._read_task = asyncio.create_task(self._read_from_persistent_conn(reader))
        self._write_task = asyncio.create_task(self._write_to_persistent_conn(self._kept))

    def close(self) -> None:
        """End the calls and their connection, also if the task that writes to it has not begun."""
        super().close()
        if self._kept is not None:
            self._kept.close()


async def connect(control_address: DaemonMultiaddr, listen_address: DaemonMultiaddr) -> Client:
    """A client of the daemon whose control socket is at `control_address`; it gives streams to `listen_address`."""
    client = Client(_initialized_with_create=True)
    client.control = await Control.create(
        Connector(control_address), listen_address, persistent_conn_max_msg_size=MAX_FRAME_BYTES
    )
    return client
