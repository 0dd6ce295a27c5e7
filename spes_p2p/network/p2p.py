"""libp2p's daemon under our guards: start, dial, streams, and an end on every way out.

`Daemon` is hivemind's `P2P` with what it has no argument for: the relay service on or off, private sockets, its own
words when it fails, no share in the terminal's Ctrl-C, death with its parent. The DHT runs on it unchanged.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import math
import os
import sys
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import TypeVar

from multiaddr import Multiaddr  # type: ignore[import-untyped]  # ships no types

from spes_p2p.crypto import KEY_BYTES, peer_from_text, peer_text
from spes_p2p.errors import AddressError, MachineError, RemoteProtocolError, TransportError
from spes_p2p.ids import PeerId
from spes_p2p.network import guards, launch
from spes_p2p.network.addresses import is_loopback, parse_peer_address
from spes_p2p.network.daemon_calls import connect
from spes_p2p.network.guards import (
    P2P,
    DaemonMultiaddr,
    DHTNode,
    DHTRecord,
    P2PContext,
    P2PDaemonError,
    PeerID,
    RecordValidatorBase,
    StreamInfo,
    daemon_package,
    p2pd_pb2,
)
from spes_p2p.network.ports import check_ports_free
from spes_p2p.network.sockets import SocketFolder

__all__ = ["DHTNode", "DHTRecord", "Daemon", "DaemonOptions", "RecordValidatorBase", "StreamHandler", "libp2p_id"]

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
RELAY_STREAM = "/libp2p/circuit/relay/0.2.0/hop"
"""libp2p's protocol for asking a peer to relay."""
_NUM_WORDS = 20
NUM_RELAY_THREADS = 1
"""Threads that run Go code at once where the daemon relays: see `relaying`."""

Answer = TypeVar("Answer")

StreamHandler = Callable[[PeerId, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Serves one incoming stream of an authenticated peer; the stream is closed when it returns."""

logger = logging.getLogger(__name__)

_running: weakref.WeakSet[Daemon] = weakref.WeakSet()


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """After how much a relay ends a connection that it passes on."""

    num_bytes: int
    """In each direction."""
    duration_s: int


RELAY_LIMITS = RelayLimits(num_bytes=4 << 30, duration_s=1800)
"""What this project's relays are meant to allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions:
    """How libp2p's daemon shall run. Addresses are checked ones (see `addresses`)."""

    identity_path: Path | None
    """None: a key of the daemon's own, made for this once."""
    listen: tuple[str, ...]
    announce: tuple[str, ...] = ()
    relay_service: bool = False
    """Carry other peers' traffic: bootstrap nodes only."""
    metrics: str = ""
    """HOST:PORT at which the daemon shall show its own figures over HTTP; empty: nowhere."""
    relays: tuple[str, ...] = ()
    """Peers that may be asked to relay to this node when it cannot be reached directly."""


def libp2p_id(peer: PeerId) -> PeerID:
    """hivemind's form of a peer id."""
    return PeerID.from_base58(peer_text(peer))


class Daemon(P2P):  # type: ignore[misc]  # hivemind ships no types
    """One `p2pd` process and the connection to it. Made by `start`, ended by `stop`."""

    def __init__(self) -> None:
        super().__init__()
        self._words: deque[str] = deque(maxlen=_NUM_WORDS)
        self._sockets = SocketFolder()
        self._daemon_listen_maddr = DaemonMultiaddr(f"/unix{self._sockets.path}/daemon.sock")
        self._client_listen_maddr = DaemonMultiaddr(f"/unix{self._sockets.path}/node.sock")
        self._limit = guards.StreamLimit()
        self._call_limit = guards.StreamLimit()
        self._streams: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self.admit: Callable[[PeerId], bool] = lambda peer: True
        """Whether a unary call (the DHT's) of a peer may be served."""

    @classmethod
    async def start(cls, options: DaemonOptions) -> Daemon:
        """Start the daemon and wait until it listens, at most 60 s.

        Raises MachineError if a port is taken or the daemon does not start, with the daemon's own words.
        """
        check_ports_free(options.listen)
        self = cls()
        _running.add(self)
        try:
            with as_file(files(daemon_package) / "p2pd") as program:
                await self._launch(program, options)
            self._client = await connect(self._daemon_listen_maddr, self._client_listen_maddr)
            await self._ping_daemon()
            if not options.relay_service:
                await self._stop_relaying()
        except (OSError, EOFError, P2PDaemonError) as error:
            await self.stop()
            raise MachineError(f"the network daemon does not start: {error}; it said: {self.words}") from error
        except BaseException:
            await self.stop()
            raise
        return self

    async def _launch(self, program: Path, options: DaemonOptions) -> None:
        arguments = daemon_arguments(options, str(self._daemon_listen_maddr))
        environment = {**os.environ, "GOLOG_LOG_LEVEL": "error", "GOLOG_LOG_FMT": "json"}
        if options.relay_service:
            environment["GOMAXPROCS"] = str(NUM_RELAY_THREADS)
        self._child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), str(program), *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            process_group=0,  # a Ctrl-C in the terminal is for the node, which then leaves properly
        )
        self._alive = True
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reader_task = asyncio.create_task(self._read_outputs(ready))
        try:
            await asyncio.wait_for(asyncio.shield(ready), START_TIMEOUT_S)
        except TimeoutError as error:
            raise MachineError(
                f"the network daemon did not start within {START_TIMEOUT_S:.0f} s; it said: {self.words}"
            ) from error

    async def _stop_relaying(self) -> None:
        """Take away the daemon's answer to those who ask it to relay.

        With -relayService=0 it still serves as a relay within libp2p's default limits, as long as it may use relays
        itself, which a volunteer behind a router must. Our handler replaces its own, and is then removed.
        """
        await self.serve_stream(RELAY_STREAM, _refuse)
        await self.remove_binary_stream_handler(RELAY_STREAM)

    async def _read_outputs(self, ready: asyncio.Future[None]) -> None:
        """Keep the daemon's latest words; tell `ready` when it listens, or why it ended before."""
        output: asyncio.StreamReader = self._child.stdout  # type: ignore[assignment]  # piped: never None
        while line := await output.readline():
            text = line.decode(errors="replace").rstrip()
            self._words.append(text)
            if text.startswith("Peer ID:") and not ready.done():
                ready.set_result(None)
        self._ended.set()
        if not ready.done():
            ready.set_exception(MachineError(f"the network daemon did not start: {self.words}"))

    @property
    def words(self) -> str:
        """The last thing the daemon said that a person can read."""
        readable = [line for line in self._words if line and not line.startswith(("\t", "goroutine", "main."))]
        return readable[-1] if readable else "nothing"

    @property
    def pid(self) -> int:
        """Process id of the daemon."""
        return int(self._child.pid)

    async def wait_ended(self) -> str:
        """Return the daemon's last words once it has ended, by itself or by `stop`."""
        await self._ended.wait()
        return self.words

    async def stop(self) -> None:
        """End all streams and the daemon, by force if it does not listen to reason; nothing is left running."""
        streams = tuple(self._streams)
        helpers = [task for task in (self._reader_task, self._listen_task) if task is not None]
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        self._terminate()
        if self._child is not None:
            try:
                await asyncio.wait_for(self._child.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                self._child.kill()
                await self._child.wait()
        if helpers:
            await asyncio.wait(helpers, timeout=STOP_TIMEOUT_S)
        self._ended.set()
        self._sockets.close()
        _running.discard(self)

    def kill(self) -> None:
        """End the daemon at once, without an event loop: for the interpreter's exit."""
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, 9)
        self._sockets.close()

    async def addresses(self) -> tuple[str, ...]:
        """Where this node listens or is seen, each with its peer id; loopback only if there is nothing else."""
        _, maddrs = await self._client.identify()
        found = []
        for maddr in maddrs:
            text = f"{Multiaddr(maddr.to_bytes())}/p2p/{self.peer_id}"
            try:
                found.append(parse_peer_address(text).text)
            except AddressError as error:
                logger.debug("not announced: %s", error)  # a transport that others of our kind do not dial
        return tuple([text for text in found if not is_loopback(text)] or found)

    async def connections(self) -> tuple[tuple[PeerId, str], ...]:
        """(peer, remote multiaddress) of the daemon's open connections. Raises TransportError if it gives no answer."""
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                response = await self._client.control.daemon_connector.answer(request)
        except (OSError, EOFError, TimeoutError, P2PDaemonError) as error:
            raise TransportError("the network daemon does not tell its connections") from error
        found = []
        for info in response.peers:
            with contextlib.suppress(ValueError):  # another kind of key, or an address of a kind that is not known here
                peer = peer_from_text(PeerID(info.id).to_base58())
                found += [(peer, str(Multiaddr(address))) for address in info.addrs]
        return tuple(found)

    async def dial(self, peer: PeerId, routes: Iterable[str], timeout_s: float) -> None:
        """Connect to a peer, through `routes` (without peer id) or what the daemon knows. Raises TransportError."""
        connect = p2pd_pb2.ConnectRequest(
            peer=libp2p_id(peer).to_bytes(),
            addrs=[Multiaddr(route).to_bytes() for route in routes],
            timeout=math.ceil(timeout_s),
        )
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=connect)
        _, writer = await self._ask(peer, request, timeout_s)
        writer.close()

    async def open_stream(
        self, peer: PeerId, name: str, timeout_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a stream of protocol `name` to a peer that is connected or can be found. Raises TransportError."""
        stream = p2pd_pb2.StreamOpenRequest(peer=libp2p_id(peer).to_bytes(), proto=[name], timeout=math.ceil(timeout_s))
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=stream)
        return await self._ask(peer, request, timeout_s)

    async def exchange(
        self,
        peer: PeerId,
        name: str,
        data: bytes,
        read: Callable[[asyncio.StreamReader], Awaitable[Answer]],
        timeout_s: float,
        failure: str,
    ) -> Answer:
        """Send bytes on a stream of protocol `name` of their own, and return what `read` makes of the answer.

        Raises TransportError, which begins with `failure` if the answer is none: ValueError of `read`, an end, or
        silence for `timeout_s`.
        """
        reader, writer = await self.open_stream(peer, name, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                writer.write(data)
                await writer.drain()
                return await read(reader)
        except (TimeoutError, OSError, EOFError, ValueError) as error:
            raise TransportError(f"{failure}: {error!r}") from error
        finally:
            writer.close()

    async def _ask(
        self, peer: PeerId, request: p2pd_pb2.Request, timeout_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send the daemon a request about a peer over a connection of its own, which is closed unless it succeeds."""
        stream: tuple[asyncio.StreamReader, asyncio.StreamWriter]
        try:
            async with asyncio.timeout(timeout_s):
                _, stream = await self._client.control.daemon_connector.ask(request)
        except TimeoutError as error:
            raise TransportError(f"cannot reach {peer_text(peer)}: no answer within {timeout_s:.0f} s") from error
        except (OSError, EOFError) as error:
            raise TransportError("the network daemon has gone") from error
        except P2PDaemonError as error:
            raise TransportError(f"cannot reach {peer_text(peer)}: {_one_line(str(error))}") from error
        return stream

    async def serve_stream(self, name: str, handler: StreamHandler) -> None:
        """Let `handler` serve incoming streams of protocol `name`, at most 64 of a peer at once over all protocols."""

        async def serve(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            if task is not None:
                self._streams.add(task)
                task.add_done_callback(self._streams.discard)
            with contextlib.closing(writer), contextlib.suppress(asyncio.CancelledError):  # cancelled: by `stop`
                try:
                    peer = peer_from_text(info.peer_id.to_base58())
                    with self._limit.of(peer):
                        await handler(peer, reader, writer)
                except (ValueError, RemoteProtocolError) as error:
                    logger.info("stream %s of %s closed: %s", name, info.peer_id, error)
                except (OSError, EOFError) as error:
                    logger.debug("stream %s of %s broke: %r", name, info.peer_id, error)

        await self.add_binary_stream_handler(name, serve)

    async def _add_protobuf_unary_handler(
        self,
        handle_name: str,
        handler: Callable[[object, P2PContext], Awaitable[object]],
        input_protobuf_type: type,
        balanced: bool = False,
    ) -> None:
        """Bound what a peer may ask of a unary handler (the DHT's): open calls and keys per request."""

        async def guarded(request: object, context: P2PContext) -> object:
            guards.check_request(request)
            peer = PeerId(context.remote_id.to_bytes()[-KEY_BYTES:])  # the key is the end of an Ed25519 peer's id
            if not self.admit(peer):
                raise RemoteProtocolError(peer, "busy")
            with self._call_limit.of(peer):
                return await handler(request, context)

        await super()._add_protobuf_unary_handler(handle_name, guarded, input_protobuf_type, balanced)


async def _refuse(peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """For the moment between the two calls that take a protocol away: the stream is closed at once."""


def daemon_arguments(options: DaemonOptions, control_address: str) -> list[str]:
    """The daemon's command line."""
    local = all(is_loopback(address) for address in options.listen)
    relays = () if local or options.relay_service else options.relays  # the daemon wants these and -autoRelay together
    flags: dict[str, object] = {
        "listen": control_address,
        "hostAddrs": ",".join(options.listen),
        "dhtServer": 1,
        "tls": 1,
        "connManager": 1,
        "idleTimeout": "30s",
        "autonat": 1,
        "natPortMap": int(not local),
        "relay": 1,
        "relayService": int(options.relay_service),
        "autoRelay": int(bool(relays)),
        "persistentConnMaxMsgSize": guards.MAX_FRAME_BYTES,
    }
    if options.identity_path is not None:
        flags["id"] = options.identity_path
    lists = {"announceAddrs": options.announce, "trustedRelays": relays}
    if options.relay_service:
        # the daemon's own limits of 256 and 512 connections are for one peer of a run, not for who introduces all of
        # them. The relay with our limits begins when the daemon is sure that it is public, which takes others' word
        flags |= {"connLo": 3072, "connHi": 4608, "forceReachabilityPublic": 1}
        flags |= {"relayDataLimit": RELAY_LIMITS.num_bytes, "relayTimeLimit": f"{RELAY_LIMITS.duration_s}s"}
    if options.metrics:
        flags["metricsAddr"] = options.metrics
    return [f"-{key}={value}" for key, value in flags.items()] + [
        f"-{key}={','.join(values)}" for key, values in lists.items() if values
    ]


def _one_line(message: str) -> str:
    """The daemon's reasons, one per address tried, in one line."""
    return "; ".join(line.strip(" *") for line in message.splitlines())


@atexit.register
def _kill_all() -> None:
    for daemon in tuple(_running):
        daemon.kill()
