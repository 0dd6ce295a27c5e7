"""The node's local API: snapshots, events, leave and stop, over HTTP on loopback, for the UI and the commands.

    GET  /snapshot                one NodeSnapshot, JSON
    GET  /events?after=NUMBER     server-sent events, without end: `snapshot` (NodeSnapshot) and `log` (LogEvent)
    GET  /log?after=NUMBER        the last 1000 LogEvents
    GET  /metrics                 for Prometheus
    GET  /openapi.json            this API, described
    POST /pause, /resume          hold training, and end that
    POST /leave                   leave properly
    POST /recover                 begin a new epoch by the run's recovery key; refused by a line in the log
    POST /stop                    end now, without a leave
    GET, POST /limits             see budgets/api.py

Every request carries the token of `control.json`, a file in the data folder that only its owner can read and that is
there while the node runs. Prometheus reads the token alone from `metrics.token` (`credentials_file`) and the address
from `metrics.targets.json` (`file_sd_configs`). All are new at each start. Requests under another host name than
loopback's are refused, so that a page in a browser cannot reach the node by rebinding its name. `control_client` is the
other side.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from spes_p2p.errors import LocalStateError, MachineError
from spes_p2p.node.budgets.api import LimitsHandle, limits_routes
from spes_p2p.node.control_client import ControlAddress
from spes_p2p.node.files import CONTROL_FILE, METRICS_TARGETS_FILE, METRICS_TOKEN_FILE
from spes_p2p.node.holds import PAUSE, Pausable
from spes_p2p.node.metrics import CONTENT_TYPE, exposition, metrics_of
from spes_p2p.node.openapi import describe
from spes_p2p.node.snapshot import LogEvent, NodeSnapshot
from spes_p2p.storage.atomic import write_file

LOOPBACK = "127.0.0.1"
IDLE_S = 1.0
"""A stream says something at least this often, so that its reader can tell a quiet node from a frozen one."""
MIN_GAP_S = 0.25
"""A stream sends snapshots no faster than this: four a second are seen as moving, and cost little."""
CLOSE_S = 2
"""Open requests get this long when the node ends."""


class NodeHandle(Pausable, LimitsHandle, Protocol):
    """What the local API and the commands may do with the running node."""

    def snapshot(self) -> NodeSnapshot:
        """The node as it is now."""
        ...

    def events(self, after: int) -> tuple[LogEvent, ...]:
        """Log lines with a number above `after`, oldest first; the last 1000 are kept."""
        ...

    async def wait_change(self, after: int, timeout_s: float) -> None:
        """Return when there is a log line above `after` or something else to see, at the latest after the time."""
        ...

    def request_leave(self) -> None:
        """Leave properly: publish, say so, serve until the certificate names it, then end."""
        ...

    def request_recovery(self) -> None:
        """Begin a new epoch with the members that are heard, if this node holds the recovery key and the run cannot go
        on; else the log says why not."""
        ...

    def request_stop(self, *, keep_wish: bool = False) -> None:
        """End now, without a leave. `keep_wish`: one that was asked for is completed at the next start; else it is
        taken back."""
        ...


class _Guard:
    """Lets through what knows the token and came by a loopback name."""

    def __init__(self, app: ASGIApp, address: ControlAddress) -> None:
        self._app = app
        self._token = f"Bearer {address.token}".encode()
        port = address.url.rsplit(":", 1)[1]
        self._hosts = {f"{name}:{port}".encode() for name in (LOOPBACK, "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if headers.get(b"host", b"") not in self._hosts:
            await PlainTextResponse("unknown host name", 421)(scope, receive, send)
        elif not hmac.compare_digest(headers.get(b"authorization", b""), self._token):
            await PlainTextResponse("wrong token", 401)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class _Server(uvicorn.Server):
    """A guest in the node's event loop: signals are the node's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _looking(handle: NodeHandle, closing: asyncio.Event) -> list[BaseRoute]:
    """What only looks."""

    async def snapshot(_: Request) -> Response:
        return _json(handle.snapshot())

    async def events(request: Request) -> Response:
        after = _number(request)
        if after is None:
            return PlainTextResponse("after: not a number", 400)
        return StreamingResponse(_event_stream(handle, after, closing), media_type="text/event-stream")

    async def log(request: Request) -> Response:
        after = _number(request)
        return PlainTextResponse("after: not a number", 400) if after is None else _json(handle.events(after))

    async def metrics(_: Request) -> Response:
        return Response(exposition(metrics_of(handle.snapshot())), headers={"content-type": CONTENT_TYPE})

    async def openapi(_: Request) -> Response:
        return _json(describe())

    return [
        Route("/snapshot", snapshot, methods=["GET"]),
        Route("/events", events, methods=["GET"]),
        Route("/log", log, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/openapi.json", openapi, methods=["GET"]),
    ]


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _number(request: Request) -> int | None:
    """`after`; None: it is no number."""
    text = request.query_params.get("after", "0")
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None


def _asking(handle: NodeHandle) -> list[BaseRoute]:
    """What asks the node to do something."""

    async def pause(_: Request) -> Response:
        handle.set_hold(PAUSE, True)
        return Response(status_code=202)

    async def resume(_: Request) -> Response:
        handle.set_hold(PAUSE, False)
        return Response(status_code=202)

    async def leave(_: Request) -> Response:
        handle.request_leave()
        return Response(status_code=202)

    async def recover(_: Request) -> Response:
        handle.request_recovery()
        return Response(status_code=202)

    async def stop(_: Request) -> Response:
        handle.request_stop()
        return Response(status_code=202)

    return [
        Route("/pause", pause, methods=["POST"]),
        Route("/resume", resume, methods=["POST"]),
        Route("/leave", leave, methods=["POST"]),
        Route("/recover", recover, methods=["POST"]),
        Route("/stop", stop, methods=["POST"]),
    ]


async def _event_stream(handle: NodeHandle, after: int, closing: asyncio.Event) -> AsyncIterator[bytes]:
    while True:
        for event in handle.events(after):
            after = max(after, event.number)
            yield _server_sent("log", event)
        yield _server_sent("snapshot", handle.snapshot())
        if closing.is_set():
            return
        await _first_of(handle.wait_change(after, IDLE_S), closing.wait())
        await _first_of(asyncio.sleep(MIN_GAP_S), closing.wait())


async def _first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Return when one of them has; the others are cancelled."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


def _server_sent(kind: str, value: msgspec.Struct) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"


@contextlib.asynccontextmanager
async def serve_control(handle: NodeHandle, data_dir: Path) -> AsyncIterator[ControlAddress]:
    """Serve the local API while the context is open; `control.json` in `data_dir` says where and with which token.

    Raises MachineError if no port of loopback can be opened, LocalStateError if `control.json` cannot be written.
    """
    listener = _listen()
    address = ControlAddress(
        url=f"http://{LOOPBACK}:{listener.getsockname()[1]}", token=secrets.token_urlsafe(32), pid=os.getpid()
    )
    closing = asyncio.Event()
    server = _Server(
        uvicorn.Config(
            Starlette(
                routes=[*_looking(handle, closing), *_asking(handle), *limits_routes(handle)],
                middleware=[Middleware(_Guard, address=address)],
            ),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=CLOSE_S,
            server_header=False,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="local api")
    files = _files(address)
    try:
        for name, content in files.items():
            _publish(data_dir / name, content)
        yield address
    finally:
        for name in files:
            (data_dir / name).unlink(missing_ok=True)
        closing.set()
        server.should_exit = True
        try:
            await serving
        finally:
            listener.close()


def _listen() -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((LOOPBACK, 0))
        listener.listen(64)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise MachineError(f"no port of {LOOPBACK} can be opened for the local API: {error.strerror}") from error
    return listener


def _files(address: ControlAddress) -> dict[str, bytes]:
    """What says where the API is; `control.json` last, since whoever finds it may ask at once."""
    place = urlsplit(address.url).netloc
    return {
        METRICS_TOKEN_FILE: address.token.encode(),
        METRICS_TARGETS_FILE: msgspec.json.encode([{"targets": [place], "labels": {"job": "spes-p2p"}}]),
        CONTROL_FILE: msgspec.json.encode(address),
    }


def _publish(path: Path, content: bytes) -> None:
    """Write the file so that nobody else can ever read it and no reader sees half of it."""
    try:
        write_file(path, content)
    except OSError as error:
        raise LocalStateError(
            f"{path} cannot be written: {error.strerror}\nCheck the folder's owner and free space."
        ) from error
