"""What commands print: text for people, JSON for programs, one unit for one kind of figure."""

from __future__ import annotations

import json
import sys
from typing import Any

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


def short_peer(peer: str) -> str:
    """The last characters of a peer id: the first ones are the same for all."""
    return f"…{peer[-SHORT_PEER_CHARACTERS:]}" if len(peer) > SHORT_PEER_CHARACTERS else peer or "-"


def bytes_text(num_bytes: float) -> str:
    """Bytes with a decimal unit, such as `12.3 MB`."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def duration_text(duration_ms: float) -> str:
    """A duration in its two largest units, such as `40 s`, `12 min 34 s`, `3 h 05 min`."""
    seconds = int(duration_ms // 1000)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02} min"
