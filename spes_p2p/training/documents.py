"""Documents from files: what counts as one, how it is cut, and its hash.

A document is a text file or one line of a JSON-lines file (field `text`), cut into pieces of at most 4 KiB at line
boundaries. Everybody cuts alike, because a document's hash decides whether it belongs to the held-out set.
"""

from __future__ import annotations

import glob
import importlib
import io
import json
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from spes_p2p.digests import digest
from spes_p2p.errors import DataError
from spes_p2p.ids import Digest

MAX_DOCUMENT_BYTES = 4096
TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py"})
LINE_SUFFIXES = frozenset({".jsonl"})
EXTRA_SUFFIXES = frozenset({".jsonl.zst", ".parquet"})
"""Read only where the library of the extra `data` is installed."""


def document_hash(document: bytes) -> Digest:
    """What a held-out set knows a document by."""
    return digest("spes document", document)


def default_files() -> list[Path]:
    """The installed Python's own sources and documentation, in sorted order: text that every machine has."""
    root = Path(sysconfig.get_path("stdlib"))
    found = (path for suffix in ("*.py", "*.txt", "*.rst") for path in root.rglob(suffix))
    left_out = {"site-packages", "dist-packages", "__pycache__"}
    return sorted(path for path in found if not left_out & set(path.relative_to(root).parts))


def find_files(paths: Iterable[Path]) -> list[Path]:
    """Files that files, folders (all readable text below them) and glob patterns name, sorted, each once.

    Raises DataError for a path that is not there, a pattern or folder without text, or a file of an unknown kind.
    """
    found: set[Path] = set()
    for path in paths:
        if path.is_dir():
            below = [file for file in path.rglob("*") if _suffix(file) is not None and file.is_file()]
            if not below:
                raise DataError(f"{path}: no text in this folder (looked for {_known_suffixes()})")
            found.update(below)
        elif path.is_file():
            if _suffix(path) is None:
                raise DataError(f"{path}: not a kind of text this program reads ({_known_suffixes()})")
            found.add(path)
        elif glob.has_magic(str(path)):
            matches = [Path(match) for match in glob.glob(str(path), recursive=True)]  # noqa: PTH207  # absolute patterns
            matches = [file for file in matches if _suffix(file) is not None and file.is_file()]
            if not matches:
                raise DataError(f"{path}: no text file matches this pattern")
            found.update(matches)
        else:
            raise DataError(f"{path}: no such file or folder")
    return sorted(found)


def read_documents(path: Path) -> Iterator[bytes]:
    """The documents of one file, in order. A file that is not UTF-8 text has none.

    Raises DataError if the file cannot be read, or needs a library that is not installed.
    """
    try:
        for text in _texts(path):
            yield from cut_document(text)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        return


def cut_document(text: bytes) -> Iterator[bytes]:
    """Pieces of at most 4 KiB of a text, cut after line ends where possible, else between UTF-8 characters. Pieces of
    white space alone are left out."""
    start = 0
    while start < len(text):
        stop = min(start + MAX_DOCUMENT_BYTES, len(text))
        if stop < len(text):
            line_end = text.rfind(b"\n", start, stop) + 1
            if line_end > start:
                stop = line_end
            else:
                while stop > start + 1 and text[stop] & 0xC0 == 0x80:
                    stop -= 1
        piece = text[start:stop]
        if not piece.isspace():
            yield piece
        start = stop


def _texts(path: Path) -> Iterator[bytes]:
    suffix = _suffix(path)
    if suffix in TEXT_SUFFIXES:
        yield _checked(path.read_bytes())
    elif suffix == ".jsonl":
        with path.open("rb") as lines:
            yield from _json_lines(path, lines)
    elif suffix == ".jsonl.zst":
        yield from _zstd_texts(path)
    elif suffix == ".parquet":
        yield from _parquet_texts(path)


def _zstd_texts(path: Path) -> Iterator[bytes]:
    zstandard = _library("zstandard", path)
    try:
        with path.open("rb") as packed, zstandard.ZstdDecompressor().stream_reader(packed) as raw:
            yield from _json_lines(path, io.BufferedReader(raw))
    except zstandard.ZstdError as error:
        raise DataError(f"{path}: damaged: {error}") from error


def _parquet_texts(path: Path) -> Iterator[bytes]:
    parquet, arrow = _library("pyarrow.parquet", path), _library("pyarrow", path)
    try:
        file = parquet.ParquetFile(path)
        if "text" not in file.schema_arrow.names:
            raise DataError(f"{path}: has no column `text`")
        for batch in file.iter_batches(columns=["text"]):
            yield from (_checked(str(text).encode()) for text in batch.column(0).to_pylist() if text)
    except arrow.ArrowException as error:
        raise DataError(f"{path}: damaged: {error}") from error


def _json_lines(path: Path, lines: IO[bytes]) -> Iterator[bytes]:
    for number, line in enumerate(lines, start=1):
        if line.isspace():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f'{path}: line {number} is not a JSON object with a field "text"') from error
        if not isinstance(text, str):
            raise DataError(f'{path}: line {number}: the field "text" is not a string')
        yield _checked(text.encode(errors="replace"))


def _checked(text: bytes) -> bytes:
    """The text without byte 0, which separates documents. Raises UnicodeDecodeError if it is not UTF-8."""
    text.decode()
    return text.replace(b"\0", b"")


def _suffix(path: Path) -> str | None:
    name = path.name.lower()
    return next((known for known in _all_suffixes() if name.endswith(known)), None)


def _all_suffixes() -> list[str]:
    return sorted(TEXT_SUFFIXES | LINE_SUFFIXES | EXTRA_SUFFIXES)


def _known_suffixes() -> str:
    return ", ".join(_all_suffixes())


def _library(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(f"{path}: reading it needs `pip install spes-p2p[data]`") from error
