"""Health and metrics of a bootstrap node: `GET /health` and `GET /metrics`, on loopback unless told otherwise.

Both only tell; nothing can be done through them. On loopback, requests under another name than that are refused, so
that a page in a browser cannot read them by rebinding its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from spes_p2p.bootstrap.metrics import CONTENT_TYPE
from spes_p2p.errors import MachineError

CLOSE_S = 2

Health = Callable[[], Mapping[str, Any]]
"""What `/health` says; its entry `ok` decides between 200 and 503."""


class _Server(uvicorn.Server):
    """A guest in the event loop: signals are the command's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Guard:
    """Lets through what came by one of these names."""

    def __init__(self, app: ASGIApp, hosts: frozenset[bytes]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and dict(scope["headers"]).get(b"host", b"") not in self._hosts:
            await PlainTextResponse("unknown host name", 421)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def application(health: Health, metrics: Callable[[], Awaitable[str]], host: str, port: int) -> Starlette:
    """The two pages."""

    async def show_health(_: Request) -> Response:
        found = health()
        return JSONResponse(dict(found), status_code=200 if found["ok"] else 503)

    async def show_metrics(_: Request) -> Response:
        return Response(await metrics(), media_type=CONTENT_TYPE)

    hosts = frozenset(url.removeprefix("http://").encode() for url in (url_of(host, port), url_of("localhost", port)))
    return Starlette(
        routes=[Route("/health", show_health), Route("/metrics", show_metrics)],
        middleware=[Middleware(_Guard, hosts=hosts)] if ipaddress.ip_address(host).is_loopback else [],
    )


@contextlib.asynccontextmanager
async def serve(app: Starlette, host: str, port: int) -> AsyncIterator[str]:
    """Serve while the context is open; gives the URL. Raises MachineError if the port cannot be opened."""
    listener = _listen(host, port)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its start and end are no news
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=CLOSE_S,
            server_header=False,
            limit_concurrency=64,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="health and metrics")
    try:
        yield url_of(host, port)
    finally:
        server.should_exit = True
        try:
            await serving
        finally:
            listener.close()


def url_of(host: str, port: int) -> str:
    """Where it is served."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(64)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise MachineError(
            f"health and metrics cannot be served at {host} port {port}: {error.strerror}\n"
            "Name another place with --metrics HOST:PORT, or none with --metrics off."
        ) from error
    return listener
