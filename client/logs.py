"""Plain lines for a terminal without a UI, a log file, or a program (`--log-json`)."""

from __future__ import annotations

import logging
import sys

import structlog

LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def set_up(*, as_json: bool) -> structlog.typing.FilteringBoundLogger:
    """Configure the program's log, once, and return it: lines on standard output, one event each."""
    shared: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if as_json else "%H:%M:%S", utc=as_json),
    ]
    last: structlog.typing.Processor
    if as_json:
        last = structlog.processors.JSONRenderer()
    else:
        last = structlog.dev.ConsoleRenderer(colors=sys.stdout.isatty(), pad_event_to=0)
    structlog.configure(
        processors=[*shared, last],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
        cache_logger_on_first_use=False,
    )
    log: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return log
