"""Headless Chromium over its DevTools protocol: open a page, type, read what websockets carry, take a picture."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse

from spes_p2p.errors import MachineError

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip
START_S = 60.0
_POLL_S = 0.05
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|[PX^_\]].*?(\x1b\\|\x07)|[()][AB0]|.)", re.DOTALL)


def find_chromium() -> str | None:
    """Path of a Chromium on this machine."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Page:
    """One tab. Made by `open_page`."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._carried = bytearray()
        self.errors: list[str] = []
        """Exceptions of the page's scripts, and what its content policy refused."""
        self.statuses: dict[str, int] = {}
        """Address -> HTTP status of what was loaded."""

    async def listen(self) -> None:
        """Take in what the browser says, until it ends."""
        async for message in self._socket:
            said = message.json()
            waiting = self._answers.pop(said.get("id", 0), None)
            if waiting is not None and not waiting.done():
                waiting.set_result(said.get("result", {}))
            elif "method" in said:
                self._take(said["method"], said["params"])

    def _take(self, method: str, facts: dict[str, Any]) -> None:
        if method == "Network.webSocketFrameReceived":
            frame = facts["response"]
            is_binary = frame["opcode"] == 2
            self._carried += base64.b64decode(frame["payloadData"]) if is_binary else frame["payloadData"].encode()
        elif method == "Network.responseReceived":
            self.statuses[facts["response"]["url"]] = facts["response"]["status"]
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(facts["exceptionDetails"].get("exception", {}).get("description", "?")))
        elif method == "Log.entryAdded" and facts["entry"]["level"] == "error":
            self.errors.append(facts["entry"]["text"])

    @property
    def text(self) -> str:
        """All that websockets have brought so far, without the escape sequences of terminals."""
        return _ESCAPES.sub("", self._carried.decode(errors="replace"))

    async def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Ask something of the browser."""
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        await self._socket.send_json({"id": number, "method": method, "params": arguments})
        async with asyncio.timeout(START_S):
            return await answer

    async def go(self, address: str) -> None:
        """Open an address."""
        await self.call("Page.navigate", url=address)

    async def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        return answer.get("result", {}).get("value")

    async def click(self, x: int, y: int) -> None:
        """The left button, at so many pixels from the upper left corner."""
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def press(self, key: str) -> None:
        """Type one character."""
        for kind in ("keyDown", "keyUp"):
            code = {"keyDown": {"text": key}}.get(kind, {})
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=ord(key.upper()), **code
            )

    async def picture(self, path: Path) -> None:
        """Save what is seen as PNG."""
        shot = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    async def wait(self, until: Callable[[], bool], limit_s: float, what: str) -> None:
        """Until it holds. Raises MachineError that says what did not happen."""
        try:
            async with asyncio.timeout(limit_s):
                while not until():
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise MachineError(f"no {what} in the browser within {limit_s} s; errors: {self.errors}") from None


@contextlib.asynccontextmanager
async def open_page(folder: Path, size: tuple[int, int] = (1100, 700)) -> AsyncIterator[Page]:
    """A fresh browser with an empty profile in `folder` and one tab of so many pixels; it is gone afterwards."""
    program = find_chromium()
    if program is None:
        raise MachineError("no Chromium is installed")
    # what it leaves behind lies there; a socket among it, whose path must be short
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as scratch:
        window = f"--window-size={size[0]},{size[1]}"
        process = await asyncio.create_subprocess_exec(
            program, *FLAGS, window, f"--user-data-dir={folder}", "about:blank",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": scratch},
        )  # fmt: skip
        try:
            port = await _port(folder, process)
            async with ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                    address = next(
                        tab["webSocketDebuggerUrl"] for tab in await response.json() if tab["type"] == "page"
                    )
                async with session.ws_connect(address, max_msg_size=64 << 20) as socket:
                    page = Page(socket)
                    listening = asyncio.create_task(page.listen())
                    for part in ("Page", "Network", "Runtime", "Log"):
                        await page.call(f"{part}.enable")
                    # as a window that lies in front
                    await page.call("Emulation.setFocusEmulationEnabled", enabled=True)
                    yield page
                    listening.cancel()
                    await asyncio.gather(listening, return_exceptions=True)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _port(folder: Path, process: asyncio.subprocess.Process) -> int:
    """Chromium writes it into its profile."""
    path = folder / "DevToolsActivePort"
    async with asyncio.timeout(START_S):
        while True:
            if path.exists() and (lines := path.read_text().splitlines()):
                return int(lines[0])
            if process.returncode is not None:
                raise MachineError(f"Chromium ended with {process.returncode}")
            await asyncio.sleep(_POLL_S)
