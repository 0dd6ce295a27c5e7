"""Plain lines for a terminal without a UI, a log file (`--log-file`), or a program (`--log-json`)."""

from __future__ import annotations

import logging
import sys

import structlog

from spes_p2p.storage.logfile import LogFile, RotatingLines

FILE_LOGGER = "spes-p2p lines"
LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def set_up(*, as_json: bool, file: LogFile | None = None) -> structlog.typing.FilteringBoundLogger:
    """Configure the program's log, once, and return it: lines on standard output, or in a file that is rotated, one
    event each. Raises UsageError if the file cannot be opened."""
    shared: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if as_json else "%H:%M:%S", utc=as_json),
    ]
    last: structlog.typing.Processor
    if as_json:
        last = structlog.processors.JSONRenderer()
    else:
        last = structlog.dev.ConsoleRenderer(colors=file is None and sys.stdout.isatty(), pad_event_to=0)
    structlog.configure(
        processors=[*shared, last],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stdout) if file is None else _file_loggers(file),
        cache_logger_on_first_use=False,
    )
    log: structlog.typing.FilteringBoundLogger = structlog.get_logger(*(() if file is None else (FILE_LOGGER,)))
    return log


def _file_loggers(file: LogFile) -> structlog.stdlib.LoggerFactory:
    """Finished lines go through a logger of their own, whose only handler is the file."""
    handler = RotatingLines(file)
    handler.setFormatter(logging.Formatter("%(message)s"))
    lines = logging.getLogger(FILE_LOGGER)
    for old in tuple(lines.handlers):
        lines.removeHandler(old)
        old.close()
    lines.addHandler(handler)
    lines.setLevel(logging.INFO)
    lines.propagate = False
    return structlog.stdlib.LoggerFactory()
