"""The bootstrap node: a DHT server and relay with a lasting address, that introduces the peers of any run.

It holds no key of a run, votes on nothing and can be lost: members find each other without it. Its data folder holds
its identity and the ports it listens on, so that its address stays the same over restarts, and a cache of the runs that
visit it, so that a newcomer gets their manifests and recent certificates while no member answers.

    identity.key    the key            runs/<run id>/   manifest and certificates
    ports.json      the ports          blobs/           the mirror, if there is one
    http.json       where health and metrics are, while the node runs
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spes_p2p.bootstrap.metrics import Metric, render, sum_of
from spes_p2p.bootstrap.options import BootstrapOptions, default_listen, parse_metrics
from spes_p2p.bootstrap.ports import LastingPorts
from spes_p2p.crypto import Identity, peer_text, verify
from spes_p2p.network.addresses import is_loopback
from spes_p2p.network.ports import check_ports_free, free_port
from spes_p2p.storage.atomic import write_file
from spes_p2p.storage.blobs import DiskBlobs
from spes_p2p.storage.identity import load_or_create_identity
from spes_p2p.storage.lock import FolderLock

if TYPE_CHECKING:
    from spes_p2p.bootstrap.mirror import Mirror
    from spes_p2p.bootstrap.runs import Runs
    from spes_p2p.network.transport import P2PTransport

IDENTITY_FILE = "identity.key"
PORTS_FILE = "ports.json"
HTTP_FILE = "http.json"
RUNS_FOLDER = "runs"
BLOBS_FOLDER = "blobs"
MAX_VISITORS = 4096
_LOOPBACK = "127.0.0.1"
_RELAYED = "libp2p_relaysvc_data_transferred_bytes_total"
_SCRAPE_TIMEOUT_S = 2.0

logger = logging.getLogger(__name__)


class BootstrapNode:
    """A running bootstrap node. Made by `start`."""

    def __init__(self, options: BootstrapOptions, identity: Identity, daemon_metrics: str) -> None:
        self._options = options
        self._identity = identity
        self._daemon_metrics = daemon_metrics
        self._began_s = time.monotonic()
        self._stack = contextlib.AsyncExitStack()
        self._transport: P2PTransport
        self._runs: Runs
        self._mirror: Mirror
        self._failed: BaseException | None = None
        self._following: asyncio.Task[None]
        self.http_url: str | None = None
        """Where health and metrics are; None: nowhere."""

    @classmethod
    async def start(cls, options: BootstrapOptions) -> BootstrapNode:
        """Start listening.

        Raises AddressError, UsageError, IdentityError if the folder's node runs already or its identity is damaged, and
        MachineError if a port is in use.
        """
        options.check()
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(FolderLock(options.data_dir))
            identity = load_or_create_identity(options.data_dir / IDENTITY_FILE)
            ports = LastingPorts(options.data_dir / PORTS_FILE)
            listen = ports.listen(options.listen or default_listen())
            check_ports_free(listen)
            is_seen = parse_metrics(options.metrics) is not None
            self = cls(options, identity, f"{_LOOPBACK}:{free_port('tcp', _LOOPBACK)}" if is_seen else "")
            await self._open(stack, listen)
            await self._serve_http(stack, ports)
            self._stack = stack.pop_all()
        return self

    async def _open(self, stack: contextlib.AsyncExitStack, listen: tuple[str, ...]) -> None:
        # after all that can be said at once: this loads hivemind, which takes seconds
        from spes_p2p.bootstrap.chains import Following
        from spes_p2p.bootstrap.mirror import Mirror
        from spes_p2p.bootstrap.runs import MAX_RUNS, Runs
        from spes_p2p.network.transport import NetworkOptions, P2PTransport
        from spes_p2p.node.clock import MonotonicClock
        from spes_p2p.node.verifying import Verification

        options = self._options
        logger.info("starting the network daemon, and asking its relay what it allows")
        blobs = DiskBlobs(options.data_dir / BLOBS_FOLDER)
        self._transport = await P2PTransport.create(
            self._identity,
            blobs,
            NetworkOptions(
                identity_path=options.data_dir / IDENTITY_FILE,
                listen=listen,
                announce=options.announce,
                initial_peers=options.peers,
                relay=True,
                reach_timeout_s=None,
                quotas=options.quotas,
                max_visitors=MAX_VISITORS,
                daemon_metrics=self._daemon_metrics,
            ),
        )
        stack.push_async_callback(self._transport.close)
        verification = Verification(verify, num_threads=1)
        stack.callback(verification.close)
        following = Following(
            transport=self._transport,
            verification=verification,
            clock=MonotonicClock(),
            max_bytes=options.cache_bytes // MAX_RUNS,
        )
        self._mirror = Mirror(blobs, self._transport, options.mirror_bytes)
        self._runs = Runs(options.data_dir / RUNS_FOLDER, self._transport, following, self._mirror)
        stack.push_async_callback(self._runs.close)
        await self._runs.load()
        self._transport.set_message_handler(self._runs.receive)
        self._transport.set_question_handler(self._runs.answer)
        self._following = asyncio.create_task(self._runs.keep_following(), name="following the runs")
        stack.push_async_callback(self._stop_following)

    async def _serve_http(self, stack: contextlib.AsyncExitStack, ports: LastingPorts) -> None:
        place = parse_metrics(self._options.metrics)
        path = self._options.data_dir / HTTP_FILE
        path.unlink(missing_ok=True)
        if place is None:
            return
        from spes_p2p.bootstrap.http import application, serve

        host, port = place[0], ports.metrics(*place)
        app = application(self.health, self.metrics, host, port)
        self.http_url = await stack.enter_async_context(serve(app, host, port))
        write_file(path, json.dumps({"url": self.http_url}).encode())
        stack.callback(path.unlink, missing_ok=True)

    async def _stop_following(self) -> None:
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)

    @property
    def transport(self) -> P2PTransport:
        """Its place on the network."""
        return self._transport

    async def addresses(self) -> tuple[str, ...]:
        """What to paste into an invite: announced ones in their order, else TCP and IPv4 first."""
        found = await self._transport.addresses()
        return found if self._options.announce else tuple(sorted(found, key=_rank))

    def health(self) -> Mapping[str, Any]:
        """What `/health` says."""
        limits = self._transport.relay_limits
        return {
            "ok": self._failed is None,
            "peer": peer_text(self._identity.peer_id),
            "uptime_s": round(time.monotonic() - self._began_s, 1),
            "peers": len(self._transport.visitors),
            "runs": [run.hex() for run in self._runs.chains],
            "relay": {"bytes": limits.num_bytes, "seconds": limits.duration_s} if limits is not None else None,
            "problem": str(self._failed or ""),
        }

    async def metrics(self) -> str:
        """What `/metrics` says."""
        quotas, chains = self._transport.quotas, self._runs.chains
        visitors, limits = self._transport.visitors, self._transport.relay_limits
        by_run = Counter(run.hex() for run in visitors.values() if run is not None and run in chains)

        def gauge(name: str, text: str, value: float | None) -> Metric:
            return Metric(name=name, help=text, kind="gauge", value=value)

        def counter(name: str, text: str, value: float | None) -> Metric:
            return Metric(name=name, help=text, kind="counter", value=value)

        return render(
            (
                gauge("up_seconds", "Time since the start.", time.monotonic() - self._began_s),
                gauge("peers", "Peers with an open channel.", len(visitors)),
                Metric(name="run_peers", help="The same of each run.", kind="gauge", label="run", values=by_run),
                gauge("records", "Records of the DHT that lie here.", self._transport.num_records),
                counter("relayed_bytes_total", "Bytes relayed between peers.", await self._relayed_bytes()),
                gauge(
                    "relay_limit_bytes",
                    "Most bytes that a relayed connection may pass on in each direction.",
                    limits.num_bytes if limits is not None else None,
                ),
                counter("served_bytes_total", "Bytes of answers and blobs.", quotas.bytes_served),
                counter("requests_total", "Requests that were admitted.", quotas.num_admitted),
                Metric(
                    name="refused_requests_total",
                    help="Requests beyond a limit.",
                    kind="counter",
                    label="limit",
                    values={name: float(number) for name, number in quotas.refused.items()},
                ),
                gauge("manifests", "Run manifests in the cache.", len(chains)),
                Metric(
                    name="certificates",
                    help="Certificates in the cache.",
                    kind="gauge",
                    label="run",
                    values={run.hex(): float(chain.num_certificates) for run, chain in chains.items()},
                ),
                Metric(
                    name="round",
                    help="Newest certified round that is known.",
                    kind="gauge",
                    label="run",
                    values={run.hex(): float(chain.head.round) for run, chain in chains.items()},
                ),
                gauge("mirrored_bytes", "Blobs in the mirror.", self._mirror.size_bytes),
            )
        )

    async def _relayed_bytes(self) -> float | None:
        """What the daemon says; None if it does not."""
        try:
            text = await asyncio.to_thread(_fetch_text, f"http://{self._daemon_metrics}/metrics")
            return sum_of(text, _RELAYED)
        except (OSError, ValueError) as error:
            logger.debug("the daemon's figures cannot be read: %r", error)
            return None

    async def wait_failed(self) -> BaseException:
        """Return the error that ends this node, if ever one comes."""
        failing = asyncio.create_task(self._transport.wait_failed())
        try:
            await asyncio.wait((failing, self._following), return_when=asyncio.FIRST_COMPLETED)
            error = failing.result() if failing.done() else self._following.exception()
        finally:
            failing.cancel()
        self._failed = error or RuntimeError("the runs are not followed any more")
        return self._failed

    async def close(self) -> None:
        """End; nothing is left running."""
        await self._stack.aclose()


def _rank(address: str) -> tuple[bool, bool, bool]:
    route = address.split("/p2p/")[0]
    return is_loopback(address), "/udp/" in route, route.startswith("/ip6/")


def _fetch_text(url: str) -> str:
    # no proxy of the environment: it is this machine's loopback
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=_SCRAPE_TIMEOUT_S) as answer:
        return str(answer.read().decode(errors="replace"))


def http_file(data_dir: Path) -> Path:
    """The file that says where a running node's health and metrics are."""
    return data_dir / HTTP_FILE
