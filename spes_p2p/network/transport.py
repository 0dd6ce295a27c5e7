"""`P2PTransport`: authenticated messages and blob transfers between peers, over one libp2p daemon.

    open        check addresses and ports -> daemon -> streams served -> DHT -> contact with the initial peers
    send        the peer's channel, opened on first use; once more on a fresh one if the old one turns out broken
    fetch       see `transfer`
    close       everything that `open` began, in reverse

A peer is known by its Ed25519 key, which libp2p's handshake proves; what it says about itself is only compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spes_p2p.config import PROTOCOL_VERSION
from spes_p2p.crypto import Identity, peer_text
from spes_p2p.errors import BlobError, SpesError, TransportError
from spes_p2p.ids import Digest, PeerId, RunId
from spes_p2p.network.addresses import parse_announce_address, parse_listen_address, parse_peer_address
from spes_p2p.network.channel import BrokenChannelError, Channel, RefusedPeerError, Stream, open_channel
from spes_p2p.network.dialing import Dialer
from spes_p2p.network.discovery import Discovery, HintValidator
from spes_p2p.network.entry import Entrances
from spes_p2p.network.hints import MAX_ADDRESSES, SESSION_BYTES
from spes_p2p.network.p2p import Daemon, DaemonOptions, DHTNode, RelayLimits, libp2p_id
from spes_p2p.network.questions import QuestionService, ask
from spes_p2p.network.quotas import QuotaLimits, Quotas
from spes_p2p.network.reception import MAX_VISITORS, Reception
from spes_p2p.network.relaying import start_relay
from spes_p2p.network.routes import routes_of
from spes_p2p.network.scores import Offences, Traffic
from spes_p2p.network.serving import MAX_STREAMS, BlobService
from spes_p2p.network.transfer import MAX_DRAWS, Fetcher
from spes_p2p.network.wire import BLOB_STREAM, MAX_MESSAGE_BYTES, MESSAGE_STREAM, QUESTION_STREAM, Hello
from spes_p2p.ports import BlobStore, MessageHandler, QuestionHandler

SEND_TIMEOUT_S = 60.0
DHT_TIMEOUT_S = 10.0
"""For one request to another node of the DHT."""
LOOK_UP_PAUSE_S = 5.0
ROUTES_EVERY_S = 5.0
MIN_STREAMS = 2
"""Of blobs served at once, however low the upload rate."""
DRAW_BYTES_PER_S = 100_000
"""For each source drawn from at once where the download rate is limited."""
MAX_CACHED_KEYS = 256
"""Of the DHT's local cache."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """How a node is on the network. Addresses are text as a person typed it."""

    identity_path: Path
    """The identity's file in libp2p's encoding."""
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    initial_peers: tuple[str, ...] = ()
    """Bootstrap nodes or members, each with its peer id."""
    run: RunId | None = None
    """None: a node that takes no part in a run, a bootstrap node."""
    is_visitor: bool = False
    """Looks at the run and takes no part: peers are not told in the DHT where it is."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """The run's configuration, flat, compared at hello; empty: not known yet."""
    relay: bool = False
    """Relay for others: bootstrap nodes only."""
    reach_timeout_s: float | None = 60.0
    """How long to try the initial peers before giving up; None: start without waiting for them."""
    min_rate_bytes_per_s: int = 100_000
    """A slower source of a blob is left for another one."""
    max_blob_bytes: int = 16 << 30
    """Limit of `fetch` where the caller gives none."""
    quotas: QuotaLimits | None = None
    """What peers may ask of this node; None: no more than each service limits by itself."""
    max_visitors: int = MAX_VISITORS
    """Peers that may have a channel to this node."""
    daemon_metrics: str = ""
    """HOST:PORT at which the daemon shows its own figures over HTTP; empty: nowhere."""


class P2PTransport:
    """Satisfies `ports.Transport`. Made by `create`."""

    def __init__(self, identity: Identity, blobs: BlobStore, options: NetworkOptions, daemon: Daemon) -> None:
        self._identity = identity
        self._options = options
        self._daemon = daemon
        self._settings = dict(options.settings)
        self._session = secrets.token_bytes(SESSION_BYTES)
        self._addresses: tuple[str, ...] = ()
        self._traffic = Traffic()
        self._offences = Offences(time.monotonic)
        self._failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._channels: dict[PeerId, Channel] = {}
        self._opening: dict[PeerId, asyncio.Task[Channel]] = {}
        self._refusals: dict[PeerId, str] = {}
        self._routes: dict[PeerId, str] = {}
        self._looked_up_at_s = float("-inf")
        self._look_up_lock = asyncio.Lock()
        self._is_closed = False
        self.quotas = Quotas(options.quotas, time.monotonic)
        """What this node has served and refused."""
        daemon.admit = self.quotas.admit
        self._dialer = Dialer(daemon, self._look_up)
        self._reception = Reception(
            self._hello,
            self._dialer.learn,
            self._fail,
            self._offences,
            self._traffic,
            self.quotas,
            options.max_visitors,
        )
        self._blob_service = BlobService(blobs, self._traffic, self.quotas)
        self._question_service = QuestionService(time.monotonic, self._fail, self._offences, self._traffic, self.quotas)
        self._fetcher = Fetcher(
            identity.peer_id, blobs, self._open_blob_stream, self._offences, self._traffic, options.min_rate_bytes_per_s
        )
        self._entrances: Entrances | None = None
        self._dht: DHTNode | None = None
        self._watcher = asyncio.create_task(self._watch_daemon())
        self.discovery: Discovery
        """This node's part in the DHT."""
        self.relay_limits: RelayLimits | None = None
        """Within what it relays for others; None: it does not, or does not tell."""

    @classmethod
    async def create(cls, identity: Identity, blobs: BlobStore, options: NetworkOptions) -> P2PTransport:
        """Start the daemon and get in contact with at least one of the initial peers, if any are given.

        Raises AddressError for a malformed address, MachineError for a port in use or a daemon that does not start,
        UnreachableError if no initial peer answers in time, IdentityError if a process with this identity is connected
        to one of them. Nothing is left running then.
        """
        entrances = [parse_peer_address(text, own=identity.peer_id) for text in options.initial_peers]
        how = DaemonOptions(
            identity_path=options.identity_path,
            listen=tuple(parse_listen_address(text) for text in options.listen),
            announce=tuple(parse_announce_address(text) for text in options.announce),
            relay_service=options.relay,
            relays=tuple(address.text for address in entrances),
            metrics=options.daemon_metrics,
        )
        daemon, limits = await start_relay(how) if options.relay else (await Daemon.start(how), None)
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(daemon.stop)
            self = cls(identity, blobs, options, daemon)
            self.relay_limits = limits
            undo.push_async_callback(self.close)
            await self._open()
            for address in entrances:
                self._dialer.learn(address.peer, (address.text,))
            self._entrances = Entrances(entrances, self._connect_now, self._enter_dht, self._fail)
            if options.reach_timeout_s is not None:
                await self._entrances.wait_first(options.reach_timeout_s)
            undo.pop_all()
        return self

    async def _open(self) -> None:
        self._addresses = await self._daemon.addresses()
        await self._daemon.serve_stream(MESSAGE_STREAM, self._reception.serve)
        await self._daemon.serve_stream(BLOB_STREAM, self._blob_service.serve)
        await self._daemon.serve_stream(QUESTION_STREAM, self._question_service.serve)
        self._dht = await DHTNode.create(
            p2p=self._daemon,
            record_validator=HintValidator(),
            wait_timeout=DHT_TIMEOUT_S,
            cache_size=MAX_CACHED_KEYS,
            strict=False,
        )
        self.discovery = Discovery(self._dht, self._identity, self._session)
        if self._options.run is not None and not self._options.is_visitor:
            self.discovery.keep_announcing(self._options.run, self.addresses)

    @property
    def peer_id(self) -> PeerId:
        """This node."""
        return self._identity.peer_id

    @property
    def session(self) -> bytes:
        """16 random bytes of this start, by which two processes with one identity are told apart."""
        return self._session

    @property
    def daemon_pid(self) -> int:
        """Process id of the libp2p daemon."""
        return self._daemon.pid

    @property
    def entry_peers(self) -> tuple[PeerId, ...]:
        """The initial peers, met or not: bootstrap nodes or members."""
        return tuple(dict.fromkeys(parse_peer_address(text).peer for text in self._options.initial_peers))

    @property
    def visitors(self) -> Mapping[PeerId, RunId | None]:
        """Everybody who has a channel to this node, and the run that each says it takes part in."""
        return self._reception.runs

    @property
    def num_records(self) -> int:
        """Records of the DHT that lie here."""
        return self._dht.protocol.storage.num_records() if self._dht is not None else 0

    @property
    def refusals(self) -> Mapping[PeerId, str]:
        """Peers that this node cannot work with, and why."""
        return dict(self._refusals)

    @property
    def daemon(self) -> Daemon:
        """The libp2p daemon, for looking at how this node is connected."""
        return self._daemon

    @property
    def skews_ms(self) -> Mapping[PeerId, int]:
        """How far the wall clocks of the initial peers met are ahead of ours."""
        return self._entrances.skews_ms if self._entrances is not None else {}

    async def addresses(self) -> tuple[str, ...]:
        """Where this node can be dialled, peer id included."""
        self._addresses = (await self._daemon.addresses())[:MAX_ADDRESSES]
        return self._addresses

    def is_connected(self, peer: PeerId) -> bool:
        """Whether a channel to or from the peer is open."""
        channel = self._channels.get(peer)
        return self._reception.is_here(peer) or (channel is not None and channel.is_open)

    def latency_ms(self, peer: PeerId) -> float | None:
        """How soon the peer confirms a small message, its fastest of late; None: not measured."""
        channel = self._channels.get(peer)
        return channel.latency_ms if channel is not None and channel.is_open else None

    def route(self, peer: PeerId) -> str:
        """`tcp`, `quic`, `websocket` or `relayed`, as of the last look of `watch_routes`; empty: not known."""
        return self._routes.get(peer, "")

    async def watch_routes(self) -> None:
        """Look again and again how peers are connected, until cancelled."""
        while True:
            try:
                self._routes = routes_of(await self._daemon.connections())
            except TransportError as error:
                logger.debug("%s", error)  # if the daemon has ended, `wait_failed` says so
            await asyncio.sleep(ROUTES_EVERY_S)

    def set_message_handler(self, handler: MessageHandler) -> None:
        """Who gets incoming messages. Its calls for one peer begin in order, and may overlap where it waits."""
        self._reception.set_handler(handler)

    def set_question_handler(self, handler: QuestionHandler) -> None:
        """Who answers questions; before that, they are turned away."""
        self._question_service.set_handler(handler)

    def set_settings(self, settings: Mapping[str, str]) -> None:
        """The run's configuration, flat, for hellos from now on: a joiner gets to know it from the manifest."""
        self._settings = dict(settings)

    def set_min_rate(self, min_rate_bytes_per_s: int) -> None:
        """Leave sources of a blob that are slower than this, from the next one on."""
        self._fetcher.min_rate_bytes_per_s = min_rate_bytes_per_s
        self._fit_places()

    def set_rates(self, up_bytes_per_s: float | None, down_bytes_per_s: float | None) -> None:
        """Limit what leaves and what arrives, for transfers under way too; None: no limit."""
        self._traffic.up.set_rate(up_bytes_per_s)
        self._traffic.down.set_rate(down_bytes_per_s)
        self._fit_places()

    def _fit_places(self) -> None:
        """So few transfers at once that each is fast enough for its other end."""
        up, down = self._traffic.up.rate_bytes_per_s, self._traffic.down.rate_bytes_per_s
        least = 2 * self._fetcher.min_rate_bytes_per_s
        self._blob_service.places.set(
            MAX_STREAMS if up is None else max(MIN_STREAMS, min(MAX_STREAMS, int(up // least)))
        )
        self._fetcher.draws.set(MAX_DRAWS if down is None else max(1, min(MAX_DRAWS, int(down // DRAW_BYTES_PER_S))))

    def set_no_blobs(self, reason: str, spared: frozenset[Digest] = frozenset()) -> None:
        """Neither serve nor fetch blobs, those under way included, because of this; empty: do again. Messages go on,
        and the spared blobs are served all the same."""
        self._traffic.no_blobs, self._traffic.spared = reason, spared

    def bytes_up(self) -> int:
        """Bytes that left since the start: messages, answers and blobs with the heads of their frames."""
        return self._traffic.up.num_bytes

    def bytes_down(self) -> int:
        """The same of what arrived."""
        return self._traffic.down.num_bytes

    def add_peer(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Say where a peer can be reached; what is malformed or another peer's is ignored."""
        self._dialer.learn(peer, addresses)

    async def send(self, peer: PeerId, data: bytes) -> None:
        """Deliver one message; returns when the other side's handler has taken it.

        Raises TransportError if it is above 4 MiB, does not get through within 60 s, or the other side refuses it or
        this node (RefusedPeerError); IdentityError if the other side already talks with a process of our identity.
        """
        if len(data) > MAX_MESSAGE_BYTES:
            raise TransportError(f"a message of {len(data)} bytes is above the limit of {MAX_MESSAGE_BYTES}")
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                channel = self._channels.get(peer)
                if channel is not None and channel.is_open:
                    try:
                        await channel.send(data)
                        return
                    except BrokenChannelError:
                        logger.debug("the channel to %s broke, opening another", peer_text(peer))
                await (await self._channel(peer)).send(data)
        except TimeoutError as error:
            raise TransportError(f"no answer from {peer_text(peer)} within {SEND_TIMEOUT_S:.0f} s") from error

    async def ask(self, peer: PeerId, question: bytes) -> tuple[bytes, ...]:
        """The frames of a peer's answer. Raises TransportError if it gives none within 60 s, RemoteProtocolError
        if they are beyond the limits."""
        if self._is_closed:
            raise TransportError("this transport is closed")
        return await ask(peer, question, lambda to: self._dialer.open(to, QUESTION_STREAM), self._traffic)

    async def fetch(self, blob: Digest, sources: Sequence[PeerId], max_bytes: int | None = None) -> None:
        """Bring a blob of at most `max_bytes` from `sources` into the local store. Raises BlobError, MachineError."""
        if self._is_closed:
            raise BlobError("this transport is closed")
        await self._fetcher.fetch(blob, sources, self._options.max_blob_bytes if max_bytes is None else max_bytes)

    def bytes_sent(self) -> int:
        """Payload bytes of messages and blobs sent since the start."""
        return self._traffic.bytes_sent

    def bytes_received(self) -> int:
        """Payload bytes of messages and blobs received since the start."""
        return self._traffic.bytes_received

    async def wait_failed(self) -> BaseException:
        """Return the error that makes going on pointless, if ever one comes.

        The daemon ended by itself, the identity is in use elsewhere, or a message handler has a bug.
        """
        return await asyncio.shield(self._failed)

    async def close(self) -> None:
        """End all transfers and the daemon; nothing is left running. Harmless when repeated."""
        if self._is_closed:
            return
        self._is_closed = True
        self._watcher.cancel()
        if self._entrances is not None:
            await self._entrances.close()
        if self._dht is not None:
            await self.discovery.close()
            self._dht.is_alive = False
        for task in tuple(self._opening.values()):
            task.cancel()
        await asyncio.gather(*self._opening.values(), self._watcher, return_exceptions=True)
        for channel in tuple(self._channels.values()):
            await channel.close()
        await self._reception.close()
        await self._daemon.stop()

    def _hello(self) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            run=self._options.run or b"",
            settings=self._settings,
            session=self._session,
            wall_ms=time.time_ns() // 1_000_000,
            addresses=self._addresses,
        )

    async def _channel(self, peer: PeerId) -> Channel:
        """The open channel to a peer, opened by the first who needs it. Raises TransportError, IdentityError."""
        if self._is_closed:
            raise TransportError("this transport is closed")
        channel = self._channels.get(peer)
        if channel is not None and channel.is_open:
            return channel
        opening = self._opening.get(peer)
        if opening is None:
            opening = asyncio.create_task(self._open_channel(peer))
            self._opening[peer] = opening
            opening.add_done_callback(lambda task: self._opened(peer, task))
        return await asyncio.shield(opening)

    async def _open_channel(self, peer: PeerId) -> Channel:
        stream = await self._dialer.open(peer, MESSAGE_STREAM)
        channel = await open_channel(peer, stream, self._hello(), self._traffic)
        self._channels[peer] = channel
        self._dialer.learn(peer, channel.their_hello.addresses)
        return channel

    def _opened(self, peer: PeerId, task: asyncio.Task[Channel]) -> None:
        del self._opening[peer]
        error = None if task.cancelled() else task.exception()
        if isinstance(error, RefusedPeerError):
            self._refusals[peer] = str(error)
        elif error is None:
            self._refusals.pop(peer, None)

    async def _open_blob_stream(self, peer: PeerId) -> Stream:
        return await self._dialer.open(peer, BLOB_STREAM)

    async def _connect_now(self, peer: PeerId) -> Channel:
        """For the entrances, which have pauses of their own."""
        self._dialer.retry_now(peer)
        return await self._channel(peer)

    async def _enter_dht(self, peer: PeerId) -> None:
        """Make the DHT and a peer just met known to each other."""
        if self._dht is not None and await self._dht.protocol.call_ping(libp2p_id(peer)) is not None:
            await self._dht.find_nearest_nodes([self._dht.node_id])

    async def _look_up(self, peer: PeerId) -> None:
        """Ask the DHT where the run's peers are; not more often than every 5 s."""
        if self._options.run is None or self._dht is None:
            return
        async with self._look_up_lock:
            now_s = time.monotonic()
            if now_s - self._looked_up_at_s < LOOK_UP_PAUSE_S:
                return
            self._looked_up_at_s = now_s
            try:
                hints = await self.discovery.find(self._options.run)
            except TimeoutError:
                logger.info("the DHT did not say within its time where %s is", peer_text(peer))
                return
            for hint in hints:
                self._dialer.learn(hint.peer, hint.addresses)

    def _fail(self, error: BaseException) -> None:
        logger.error("%s", error, exc_info=None if isinstance(error, SpesError) else error)
        if not self._failed.done():
            self._failed.set_result(error)

    async def _watch_daemon(self) -> None:
        words = await self._daemon.wait_ended()
        if not self._is_closed:
            self._fail(TransportError(f"the network daemon ended by itself; it said: {words}"))
