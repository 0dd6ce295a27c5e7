"""Text of their own for the demo's peers, from what every machine with Python has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spes_p2p.digests import digest
from spes_p2p.errors import DataError
from spes_p2p.training.documents import default_files

TEXT_BYTES = 100_000
"""About how much text each peer gets."""
MAX_FILE_BYTES = 40_000
"""Larger files are passed over: one of them would be most of a peer's text."""
MIN_FILE_BYTES = 2_000


def deal_texts(folders: list[Path], text_bytes: int = TEXT_BYTES) -> None:
    """Copy about `text_bytes` of the installed Python's text into each folder, no file into two of them.

    Which files depends on nothing but what is installed. Raises DataError if there is not enough.
    """
    files = _files()
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(1_000):
            text = next(files, None)
            if text is None:
                raise DataError(f"the installed Python has too little text for {len(folders)} peers; use --peers 4")
            (folder / f"{number:03}.txt").write_bytes(text)
            if sum(path.stat().st_size for path in folder.iterdir()) >= text_bytes:
                break


def _files() -> Iterator[bytes]:
    """Texts in an order that mixes the library's packages."""
    for path in sorted(default_files(), key=_place):
        if MIN_FILE_BYTES <= path.stat().st_size <= MAX_FILE_BYTES:
            text = path.read_bytes()
            if _is_utf8(text):
                yield text


def _place(path: Path) -> bytes:
    # the last three names, so that the place where Python is installed does not matter
    return digest("spes demo text", "/".join(path.parts[-3:]).encode())


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
