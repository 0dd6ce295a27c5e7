"""`attach --web`: the terminal UI in headless Chromium, and who is kept out."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from aiohttp import ClientSession, CookieJar, WSServerHandshakeError

from spes_p2p.client.demo.processes import child_environment
from spes_p2p.client.web import listen_on_loopback
from spes_p2p.errors import MachineError, UsageError
from spes_p2p.node.control import serve_control
from spes_p2p.testing.browser import find_chromium, open_page
from spes_p2p.testing.handle import FakeHandle

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]

WAIT_S = 60.0
ADDRESS = re.compile(rb"http://127\.0\.0\.1:(\d+)/\?key=\S+")


@contextlib.asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[str, FakeHandle, asyncio.subprocess.Process]]:
    """The address that `attach --web` prints, for a node that is not there but for its local API."""
    handle = FakeHandle()
    async with serve_control(handle, folder):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "spes_p2p.client", "attach", "--web", "--data-dir", str(folder),
            env=child_environment(folder), stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            async with asyncio.timeout(WAIT_S):
                line = await process.stdout.readline()
            found = ADDRESS.search(line)
            assert found is not None, line
            yield found[0].decode(), handle, process
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


@pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed")
async def test_browser_shows_the_ui_and_its_keys_reach_the_node(tmp_path: Path) -> None:
    async with served(tmp_path) as (address, handle, process), open_page(tmp_path / "profile") as page:
        await page.go(address)
        await page.wait(lambda: "Experts · 2 of 8 mine" in page.text, WAIT_S, "overview")
        # the word is no longer in the address, and no script can read the cookie
        assert await page.evaluate("location.search + document.cookie") == ""
        assert await page.evaluate("document.activeElement.className") == "xterm-helper-textarea"
        await page.press("5")
        await page.wait(lambda: "tcp, direct" in page.text, WAIT_S, "network view")
        await page.press("p")
        await page.wait(lambda: handle.asked == ["hold pause"], WAIT_S, "pause")
        picture = tmp_path / "page.png"
        await page.picture(picture)
        assert picture.stat().st_size > 10_000
        await page.press("q")
        closed = asyncio.timeout(WAIT_S)
        async with closed:
            while "-closed" not in str(await page.evaluate("document.body.className")):
                await asyncio.sleep(0.1)
        assert page.errors == []
        assert {status for url, status in page.statuses.items() if url.startswith("http")} == {200}
        assert all(url.startswith(("http://127.0.0.1:", "data:")) for url in page.statuses)
        # the tab's own UI has ended with it
        await page.wait(
            lambda: psutil.Process(process.pid).children(recursive=True) == [], WAIT_S, "end of the tab's UI"
        )
    assert handle.asked == ["hold pause"]


async def test_only_who_has_the_printed_address_gets_in(tmp_path: Path) -> None:
    async with served(tmp_path) as (address, _, process), ClientSession(cookie_jar=CookieJar(unsafe=True)) as session:
        root = address.partition("?")[0]
        socket_address = f"{root}ws"

        async def status(url: str, **headers: str) -> int:
            async with session.get(url, headers=headers, allow_redirects=False) as response:
                return response.status

        assert await status(root) == 403
        assert await status(f"{root}static/js/textual.js") == 403
        assert await status(f"{root}?key=wrong") == 403
        with pytest.raises(WSServerHandshakeError, match="403"):
            await session.ws_connect(socket_address, origin=root.rstrip("/"))
        assert await status(address) == 303
        assert await status(root) == 200
        # a page that made its own name point here, and one of another site
        assert await status(root, Host="evil.example") == 421
        with pytest.raises(WSServerHandshakeError, match="403"):
            await session.ws_connect(socket_address, origin="http://evil.example")
        async with session.ws_connect(socket_address, origin=root.rstrip("/")) as socket_:
            assert (await socket_.receive(WAIT_S)).data
        process.terminate()
        assert await asyncio.wait_for(process.wait(), WAIT_S) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
async def test_tabs_end_with_the_server_however_that_ends(tmp_path: Path, number: signal.Signals) -> None:
    """SIGHUP: its terminal was closed."""
    async with served(tmp_path) as (address, _, process), ClientSession(cookie_jar=CookieJar(unsafe=True)) as session:
        await session.get(address)
        root = address.partition("/?")[0]
        async with session.ws_connect(f"{root}/ws", origin=root) as socket_:
            assert (await socket_.receive(WAIT_S)).data
            tabs = psutil.Process(process.pid).children(recursive=True)
            assert tabs != []
            process.send_signal(number)
            _, alive = await asyncio.to_thread(psutil.wait_procs, tabs, WAIT_S)
            assert alive == []
            await process.wait()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", ""])
def test_only_loopback_is_listened_on(host: str) -> None:
    with pytest.raises(UsageError, match="only a loopback address"):
        listen_on_loopback(host, 0)


def test_a_port_in_use_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MachineError, match=f"--port {port}: Address already in use"):
            listen_on_loopback("127.0.0.1", port)
    with pytest.raises(UsageError, match="ports go from 0 to 65535"):
        listen_on_loopback("127.0.0.1", 70_000)
