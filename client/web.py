"""The terminal UI of a running node in a browser: `spes-p2p attach --web`.

textual-serve runs the same UI in a process of its own for each browser tab and carries its screen over a websocket.
Its page is our own (`web_page`). Three things are added, since whoever sees it may pause the node or have it leave:

    loopback     it listens on loopback alone, and answers only requests that name a loopback host
    secret       the address that is printed carries a random word; it is put into a cookie that other sites' pages
                 cannot send, and without it there is no page and no websocket
    origin       a websocket is opened only by our own page
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import shlex
import socket
import sys
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from textual_serve.server import Server

from spes_p2p.client.output import say
from spes_p2p.client.tie import end_with_parent
from spes_p2p.errors import MachineError, UsageError
from spes_p2p.node.control_client import find_control

DEFAULT_HOST = "127.0.0.1"
COOKIE = "spes_p2p_ui"
SECRET_QUERY = "key"
FORBIDDEN_TEXT = "not for you: open the address that `spes-p2p attach --web` printed\n"
PAGE = Path(__file__).parent / "web_page"
"""Ours, since textual-serve's own loads a font from a public service and needs a click before keys work."""
NO_OUTSIDE = "default-src 'self' 'unsafe-inline' data:; connect-src 'self'; frame-ancestors 'none'"
"""The page loads nothing from other places."""


class LocalServer(Server):
    """textual-serve's server with a doorkeeper, quiet, and on a socket that is open already."""

    def __init__(self, command: str, listener: socket.socket, *, title: str) -> None:
        host, port = listener.getsockname()[:2]
        self._secret = secrets.token_urlsafe(24)
        self._listener = listener
        named = f"[{host}]" if ":" in host else host
        address = f"http://{named}:{port}"
        super().__init__(command, host=host, port=port, title=title, public_url=address, templates_path=PAGE)
        self._host_named = f"{named}:{port}"
        # a browser gives cookies to all ports of a host
        self._cookie = f"{COOKIE}_{port}"

    @property
    def address(self) -> str:
        """What to open in the browser."""
        return f"{self.public_url}/?{SECRET_QUERY}={self._secret}"

    async def _make_app(self) -> web.Application:
        app = await super()._make_app()
        app.middlewares.append(self._doorkeeper())
        return app

    def _doorkeeper(self) -> Middleware:
        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.host != self._host_named:
                return web.Response(status=421, text="unknown host name\n")
            given = request.query.get(SECRET_QUERY, "")
            if request.path == "/" and given:
                if not hmac.compare_digest(given.encode(), self._secret.encode()):
                    return web.Response(status=403, text=FORBIDDEN_TEXT)
                # the word leaves the address bar and the history at once
                moved = web.Response(status=303, headers={"Location": "/", "Referrer-Policy": "no-referrer"})
                moved.set_cookie(self._cookie, self._secret, httponly=True, samesite="Strict", path="/")
                return moved
            if not hmac.compare_digest(request.cookies.get(self._cookie, "").encode(), self._secret.encode()):
                return web.Response(status=403, text=FORBIDDEN_TEXT)
            if request.path == "/ws" and request.headers.get("Origin") != self.public_url:
                return web.Response(status=403, text="the websocket is for our own page\n")
            response = await handler(request)
            if not response.prepared:
                response.headers["Content-Security-Policy"] = NO_OUTSIDE
            return response

        return check

    async def on_startup(self, app: web.Application) -> None:
        """Say where, in one line that can be opened."""
        say(f"the UI is at {self.address}")
        say("Ctrl-C ends it; the node goes on.")

    def run(self) -> None:
        """Serve until Ctrl-C or SIGTERM."""
        web.run_app(self._make_app(), sock=self._listener, print=None, access_log=None, shutdown_timeout=2.0)


def serve_web(data_dir: Path, host: str = DEFAULT_HOST, port: int = 0) -> None:
    """Serve the UI of the node that runs in `data_dir` until Ctrl-C. Port 0: any that is free.

    Raises UsageError for a host that is not loopback, UnreachableError if no node runs there, MachineError if the port
    is taken.
    """
    listener = listen_on_loopback(host, port)
    with listener:
        find_control(data_dir)
        tab = shlex.join([sys.executable, "-m", "spes_p2p.client.web", str(os.getpid()), str(data_dir.absolute())])
        command = f"exec {tab}"  # textual-serve has a shell run it; the tab shall be a child of this process
        LocalServer(command, listener, title="spes-p2p").run()


def listen_on_loopback(host: str, port: int) -> socket.socket:
    """An open socket. Raises UsageError for a host that others could reach, MachineError if the port is taken."""
    try:
        address = ipaddress.ip_address(DEFAULT_HOST if host == "localhost" else host)
    except ValueError:
        address = None
    if address is None or not address.is_loopback:
        raise UsageError(
            f"--host {host}: only a loopback address such as {DEFAULT_HOST}: whoever sees the page controls the node\n"
            "From another machine, forward the port with `ssh -L`."
        )
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((str(address), port))
        # before the address is printed: whoever opens it at once waits, and is not refused
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise MachineError(f"--port {port}: {error.strerror}; leave it away and any free one is taken") from error
    except OverflowError as error:
        listener.close()
        raise UsageError(f"--port {port}: ports go from 0 to 65535") from error
    return listener


def main() -> None:
    """One tab: the UI, attached to the node of the folder that is named; it ends with the server that started it."""
    from spes_p2p.client.ui.app import SwarmApp
    from spes_p2p.client.ui.feed import ControlFeed

    server, folder = sys.argv[1:]
    end_with_parent(int(server))
    SwarmApp([ControlFeed(Path(folder))], role="attached").run()


if __name__ == "__main__":
    main()
