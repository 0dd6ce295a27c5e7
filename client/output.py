"""What commands print: text for people, JSON for programs, one unit for one kind of figure."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from spes_p2p.errors import UsageError

SHORT_PEER_CHARACTERS = 8


def say(text: str = "") -> None:
    """A line on standard output, at once."""
    print(text, flush=True)


def complain(text: str) -> None:
    """Lines on standard error, at once."""
    print(text, file=sys.stderr, flush=True)


def say_json(value: Any) -> None:
    """One JSON document on standard output; keys in their given order."""
    say(json.dumps(value, indent=2))


def prepare_json_file(json_file: Path | None) -> None:
    """Make the folder of a `--json FILE` and try to write there before the work: minutes of it must not end with a
    file that cannot be written. A file that is there keeps its content. Raises UsageError."""
    prepare_file("--json", json_file)


def prepare_file(flag: str, file: Path | None) -> None:
    """The same for the file of any flag."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise UsageError(f"{flag} {file}: is a folder; name a file")
        is_new = not file.exists()
        if is_new or file.is_file():  # a pipe may have no reader yet
            file.open("a").close()
        if is_new:
            file.unlink()
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"{flag} {file}: {file.parent} is a file, not a folder") from error
    except OSError as error:
        raise UsageError(f"{flag} {file}: {error.strerror}") from error


def write_json(json_file: Path, value: Any) -> None:
    """What `--json FILE` asks for: one JSON document. Raises MachineError if the disk is full or refuses."""
    # fsync and rename are worth their import only where something is written
    from spes_p2p.storage.atomic import disk_errors

    with disk_errors(json_file.parent):
        json_file.write_text(json.dumps(value, indent=2) + "\n")


def short_peer(peer: str) -> str:
    """The last characters of a peer id: the first ones are the same for all."""
    return f"…{peer[-SHORT_PEER_CHARACTERS:]}" if len(peer) > SHORT_PEER_CHARACTERS else peer or "-"


def count_text(number: int, thing: str) -> str:
    """Such as `1 member`, `1,200 members`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def duration_text(duration_ms: float) -> str:
    """A duration in its two largest units, such as `40 s`, `12 min 34 s`, `3 h 05 min`."""
    seconds = int(duration_ms // 1000)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02} min"
