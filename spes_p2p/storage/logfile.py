"""Log files that do not fill the disk: one file of bounded size, and so many older ones beside it.

node.log, node.log.1, node.log.2 ...    the newest first
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from spes_p2p.errors import UsageError

DEFAULT_SIZE_BYTES = 10_000_000
DEFAULT_KEPT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFile:
    """Where log lines go instead of standard output."""

    path: Path
    size_bytes: int = DEFAULT_SIZE_BYTES
    """Of one file; the next line that does not fit begins a new one."""
    kept: int = DEFAULT_KEPT
    """Older files beside it."""


class RotatingLines(logging.handlers.RotatingFileHandler):
    """Writes records to a LogFile. What the disk refuses is complained about once, and the program goes on."""

    def __init__(self, file: LogFile) -> None:
        """Raises UsageError if the file cannot be opened."""
        try:
            file.path.parent.mkdir(parents=True, exist_ok=True)
            super().__init__(file.path, maxBytes=file.size_bytes, backupCount=file.kept, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--log-file {file.path}: {error.strerror}") from error
        self._complained = False

    def handleError(self, record: logging.LogRecord) -> None:
        """A record could not be written."""
        if not self._complained:
            self._complained = True
            print(f"{self.baseFilename} cannot be written: {sys.exc_info()[1]}", file=sys.stderr, flush=True)


class JsonLines(logging.Formatter):
    """A record as one JSON object with the keys `event`, `level`, `timestamp`, and `traceback` of an error."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line = {
            "event": record.getMessage(),
            "level": record.levelname.lower(),
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z"),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def one_line(error: Exception) -> str:
    """What an error says, for a log: one event is one line."""
    return " ".join(str(error).split())
