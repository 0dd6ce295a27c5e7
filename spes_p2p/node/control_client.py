"""Asks a running node through its local API. Light: `status` and `leave` need neither a web framework nor torch."""

from __future__ import annotations

import http.client
import os
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from spes_p2p.errors import LocalStateError, UnreachableError
from spes_p2p.node.files import CONTROL_FILE
from spes_p2p.node.snapshot import LogEvent, NodeSnapshot

TIMEOUT_S = 5.0
"""A healthy node answers within milliseconds, and a stream says something every second."""
MAX_LINE_BYTES = 8 << 20
_STATE_OF_PROCESS = "/proc/{pid}/stat"
_STOPPED = frozenset("Tt")
"""Linux' letters for a process that was stopped by a signal or a debugger."""


class ControlAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `control.json`: where a node's local API is, and what opens it."""

    url: str
    token: str
    pid: int


def find_control(data_dir: Path) -> ControlAddress:
    """The local API of the node that runs in `data_dir`.

    Raises UnreachableError if none runs there, LocalStateError if the file is damaged or unreadable.
    """
    path = data_dir / CONTROL_FILE
    try:
        address = msgspec.json.decode(path.read_bytes(), type=ControlAddress)
    except FileNotFoundError as error:
        raise UnreachableError(_nobody(data_dir)) from error
    except OSError as error:
        raise LocalStateError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise LocalStateError(f"{path} is damaged; stop the node, delete the file, and start it again") from error
    if not _alive(address.pid):
        raise UnreachableError(_nobody(data_dir))
    return address


def running_pid(data_dir: Path) -> int | None:
    """Process of the node that runs in `data_dir`; None: none does, or `control.json` does not say."""
    try:
        return find_control(data_dir).pid
    except (UnreachableError, LocalStateError):
        return None


def read_snapshot(data_dir: Path) -> NodeSnapshot:
    """What the node in `data_dir` says of itself. Raises UnreachableError or LocalStateError."""
    return msgspec.json.decode(_request(data_dir, "GET", "/snapshot"), type=NodeSnapshot)


def read_log(data_dir: Path, after: int = 0) -> list[LogEvent]:
    """The node's last log lines with a number above `after`. Raises UnreachableError or LocalStateError."""
    return msgspec.json.decode(_request(data_dir, "GET", f"/log?after={after}"), type=list[LogEvent])


def request_pause(data_dir: Path) -> None:
    """Ask the node in `data_dir` to hold its training. Raises UnreachableError or LocalStateError."""
    _request(data_dir, "POST", "/pause")


def request_resume(data_dir: Path) -> None:
    """Ask the node in `data_dir` to train again. Raises UnreachableError or LocalStateError."""
    _request(data_dir, "POST", "/resume")


def request_leave(data_dir: Path) -> None:
    """Ask the node in `data_dir` to leave properly. Raises UnreachableError or LocalStateError."""
    _request(data_dir, "POST", "/leave")


def request_recovery(data_dir: Path) -> None:
    """Ask the node in `data_dir` to begin a new epoch. Raises UnreachableError or LocalStateError."""
    _request(data_dir, "POST", "/recover")


def request_stop(data_dir: Path) -> None:
    """Ask the node in `data_dir` to end now. Raises UnreachableError or LocalStateError."""
    _request(data_dir, "POST", "/stop")


async def stream(data_dir: Path, after: int = 0) -> AsyncIterator[NodeSnapshot | LogEvent]:
    """Snapshots as they change, and log lines with a number above `after`, until the node ends. A healthy node is
    silent for a second at most.

    Raises UnreachableError when no node runs, or when it says nothing for `TIMEOUT_S`; LocalStateError for a damaged
    `control.json`.
    """
    import httpx  # only the UI streams; importing it costs the other commands a tenth of a second

    address = find_control(data_dir)
    headers = {"Authorization": f"Bearer {address.token}"}
    try:
        # trust_env: a proxy that the environment names has no business with loopback.
        async with (
            httpx.AsyncClient(base_url=address.url, headers=headers, timeout=TIMEOUT_S, trust_env=False) as client,
            client.stream("GET", "/events", params={"after": after}) as response,
        ):
            if response.status_code != 200:
                raise UnreachableError(_refused(data_dir, response.status_code))
            kind = ""
            async for line in response.aiter_lines():
                name, _, value = line.partition(": ")
                if name == "event":
                    kind = value
                elif name == "data" and kind == "snapshot":
                    yield msgspec.json.decode(value, type=NodeSnapshot)
                elif name == "data" and kind == "log":
                    yield msgspec.json.decode(value, type=LogEvent)
    except httpx.TimeoutException as error:
        raise UnreachableError(_silent(data_dir, address)) from error
    except httpx.HTTPError as error:
        raise UnreachableError(_nobody(data_dir)) from error


def _request(data_dir: Path, method: str, target: str) -> bytes:
    address = find_control(data_dir)
    place = urlsplit(address.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=TIMEOUT_S)
    try:
        connection.request(method, target, headers={"Authorization": f"Bearer {address.token}"})
        response = connection.getresponse()
        body = response.read(MAX_LINE_BYTES)
    except TimeoutError as error:
        raise UnreachableError(_silent(data_dir, address)) from error
    except (OSError, http.client.HTTPException) as error:
        raise UnreachableError(_nobody(data_dir)) from error
    finally:
        connection.close()
    if response.status >= 300:
        raise UnreachableError(_refused(data_dir, response.status))
    return body


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _nobody(data_dir: Path) -> str:
    return f"no node runs in {data_dir}; start one with `spes-p2p join`, or name its folder with --data-dir"


def _silent(data_dir: Path, address: ControlAddress) -> str:
    who = f"the node in {data_dir} (process {address.pid}) does not answer"
    if _is_stopped(address.pid):
        return f"{who}: it is suspended; `kill -CONT {address.pid}` lets it go on"
    return f"{who}: it is very busy, suspended or stuck"


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process; False where the system does not say."""
    try:
        text = Path(_STATE_OF_PROCESS.format(pid=pid)).read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].strip()[:1] in _STOPPED


def _refused(data_dir: Path, status: int) -> str:
    return f"the node in {data_dir} refused the request (HTTP {status}); is {CONTROL_FILE} from another start?"
