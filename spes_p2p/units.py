"""Quantities in words."""

from __future__ import annotations


def bytes_text(num_bytes: float) -> str:
    """Bytes with a decimal unit, such as `12.3 MB`."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
