"""The two small files of a node's budgets: its limits, and the bytes of this month. Whole or not there (atomic.py)."""

from __future__ import annotations

from pathlib import Path

import msgspec
from pydantic import ValidationError

from spes_p2p.config import Limits, first_problem
from spes_p2p.errors import LocalStateError
from spes_p2p.node.budgets.month import MonthCount
from spes_p2p.node.files import LIMITS_FILE, MONTH_FILE


def read_limits(data_dir: Path) -> Limits:
    """What `limits.json` holds; no limits if there is none. Raises LocalStateError if it is damaged."""
    path = data_dir / LIMITS_FILE
    text = _read(path, "set the limits again")
    if text is None:
        return Limits()
    try:
        return Limits.model_validate_json(text)
    except ValidationError as error:
        raise LocalStateError(
            f"{path} is damaged: {first_problem(error)}\nDelete it, and set the limits again."
        ) from error


def write_limits(data_dir: Path, limits: Limits) -> None:
    """Remember them over restarts. Raises MachineError if the disk is full or refuses."""
    from spes_p2p.storage.atomic import write_file  # fsync and rename are worth their import only where it is written

    write_file(data_dir / LIMITS_FILE, limits.model_dump_json(exclude_defaults=True, indent=2).encode() + b"\n")


def read_month(data_dir: Path) -> MonthCount | None:
    """The bytes counted so far; None: none yet. Raises LocalStateError if the file is damaged."""
    path = data_dir / MONTH_FILE
    text = _read(path, "this month is counted from now on")
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=MonthCount)
    except msgspec.DecodeError as error:
        raise LocalStateError(f"{path} is damaged: {error}\nDelete it: this month is counted from now on.") from error


def write_month(data_dir: Path, count: MonthCount) -> None:
    """Raises MachineError if the disk is full or refuses."""
    from spes_p2p.storage.atomic import write_file

    write_file(data_dir / MONTH_FILE, msgspec.json.encode(count) + b"\n")


def _read(path: Path, remedy: str) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LocalStateError(f"{path} cannot be read: {error.strerror}\nDelete it: {remedy}.") from error
