"""Flags of a bootstrap node beyond addresses and data folder, for both commands that start one; and what they mean."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from spes_p2p.bootstrap.options import DEFAULT_CACHE_BYTES, DEFAULT_METRICS
from spes_p2p.errors import SpesError, UsageError
from spes_p2p.network.quotas import QuotaLimits
from spes_p2p.storage.logfile import DEFAULT_KEPT, DEFAULT_SIZE_BYTES, JsonLines, LogFile, RotatingLines, one_line

Metrics = Annotated[
    str,
    typer.Option("--metrics", help="Where health and metrics are served, or off.", metavar="HOST:PORT"),
]
Mirror = Annotated[
    str | None, typer.Option("--mirror", help="Mirror the runs' newest state, at most so many bytes, such as 10GB.")
]
Cache = Annotated[str | None, typer.Option("--cache", help="Most bytes of manifests and certificates, such as 1GB.")]
PeerRequests = Annotated[
    float, typer.Option("--peer-requests", help="Requests a second of one peer; ten seconds of it at once.")
]
PeerRate = Annotated[str | None, typer.Option("--peer-rate", help="Bytes a second for one peer, such as 4MB.")]
AllRequests = Annotated[float, typer.Option("--all-requests", help="Requests a second of all peers together.")]
AllRate = Annotated[str | None, typer.Option("--all-rate", help="Bytes a second for all peers together.")]
LogFilePath = Annotated[
    Path | None, typer.Option("--log-file", help="Write log lines there, and begin a new file when it is full.")
]
LogSize = Annotated[str | None, typer.Option("--log-size", help="Size of one log file, such as 10MB.")]
LogKeep = Annotated[int, typer.Option("--log-keep", help="Older log files that are kept.")]

DEFAULT_METRICS_FLAG = DEFAULT_METRICS
DEFAULT_REQUESTS = QuotaLimits().peer_requests_per_s
DEFAULT_ALL_REQUESTS = QuotaLimits().all_requests_per_s
DEFAULT_LOG_KEEP = DEFAULT_KEPT

_SIZE = TypeAdapter(ByteSize)

logger = logging.getLogger(__name__)


def size_of(flag: str, text: str | None, default: int) -> int:
    """Bytes of a text such as `10GB`. Raises UsageError."""
    if text is None:
        return default
    try:
        found = int(_SIZE.validate_python(text))
    except ValidationError as error:
        raise UsageError(f"{flag} {text}: not a size; good: 500MB, 10GB, 2GiB") from error
    if found <= 0:
        raise UsageError(f"{flag} {text}: must be above 0")
    return found


def quota_limits(peer_requests: float, peer_rate: str | None, all_requests: float, all_rate: str | None) -> QuotaLimits:
    """Raises UsageError that names the flag."""
    for flag, value in (("--peer-requests", peer_requests), ("--all-requests", all_requests)):
        if not value >= 1.0:
            raise UsageError(f"{flag} {value:g}: must be 1 or more")
    usual = QuotaLimits()
    return QuotaLimits(
        peer_requests_per_s=peer_requests,
        peer_bytes_per_s=size_of("--peer-rate", peer_rate, int(usual.peer_bytes_per_s)),
        all_requests_per_s=all_requests,
        all_bytes_per_s=size_of("--all-rate", all_rate, int(usual.all_bytes_per_s)),
    )


def cache_bytes(text: str | None) -> int:
    """Of `--cache`. Raises UsageError."""
    return size_of("--cache", text, DEFAULT_CACHE_BYTES)


def log_lines(path: Path | None, size: str | None, keep: int) -> LogFile | None:
    """Of `--log-file`, `--log-size`, `--log-keep`. Raises UsageError."""
    if not 1 <= keep <= 1000:
        raise UsageError(f"--log-keep {keep}: must be 1 to 1000")
    if path is None:
        if size is not None or keep != DEFAULT_LOG_KEEP:
            raise UsageError("--log-size and --log-keep are those of --log-file, which is not given")
        return None
    least = 10_000
    found = size_of("--log-size", size, DEFAULT_SIZE_BYTES)
    if found < least:
        raise UsageError(f"--log-size {size}: must be {least // 1000}KB or more")
    return LogFile(path=path.expanduser().absolute(), size_bytes=found, kept=keep)


@contextlib.contextmanager
def logged(file: LogFile | None, *, as_json: bool) -> Iterator[None]:
    """The log of this process: lines on standard error, or in the file. The SpesError that ends the context is in it
    too, where nobody may see what a command complains of. Raises UsageError if the file cannot be opened."""
    handler: logging.Handler = RotatingLines(file) if file is not None else logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    try:
        yield
    except SpesError as error:
        if file is not None or as_json:
            logger.error("%s", one_line(error))
        raise
