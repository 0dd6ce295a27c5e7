"""Text of several kinds that every machine has on which this package is installed.

| kind | from |
|---|---|
| python | the sources of Python's standard library |
| header | the C++ headers that come with PyTorch |
| manual | the language reference behind Python's `help()` |
| readme | the descriptions of the installed packages |
"""

from __future__ import annotations

import functools
import importlib.metadata
import pydoc_data.topics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import torch

from spes_p2p.digests import digest
from spes_p2p.errors import DataError
from spes_p2p.training.documents import cut_document, default_files
from spes_p2p.training.heldout import draw_held_out
from spes_p2p.training.lab.experiment import Text

Kind: TypeAlias = Literal["python", "header", "manual", "readme"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_FILE_BYTES = 40_000
"""Larger files are passed over, so that none of them is most of a kind. The manual's topics are all taken."""
MIN_FILE_BYTES = 500
HELD_OUT_SEED = 0
MAX_HELD_OUT_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtTexts:
    """Documents for training, by peer, and the held-out set, in which every kind has the same share."""

    peers: tuple[tuple[bytes, ...], ...]
    held_out: tuple[bytes, ...]


def deal(text: Text, num_peers: int, seed: int, text_bytes: int, held_out_bytes: int) -> DealtTexts:
    """About `text_bytes` of each kind, dealt to the peers: at random, or peer i gets of kind i mod 4 alone.

    All peers together have the same documents either way if every kind has a peer. Raises DataError if this machine
    has too little text.
    """
    held_out: list[bytes] = []
    piles: list[list[bytes]] = [[] for _ in KINDS]
    for pile, kind in zip(piles, KINDS, strict=True):
        documents = _documents(kind, text_bytes)
        drawn = draw_held_out(documents, held_out_bytes // len(KINDS), HELD_OUT_SEED, MAX_HELD_OUT_SHARE)
        held_out += drawn
        pile += sorted(set(documents) - set(drawn), key=functools.partial(_place, seed))
    if text == "iid":
        piles = [sorted((document for pile in piles for document in pile), key=functools.partial(_place, seed))]
    peers: list[tuple[bytes, ...]] = []
    for peer in range(num_peers):
        pile = piles[peer % len(piles)]
        sharing = range(peer % len(piles), num_peers, len(piles))
        peers.append(tuple(pile[sharing.index(peer) :: len(sharing)]))
    if not all(peers):
        raise DataError(f"too little text for {num_peers} peers: raise text_bytes, {text_bytes} now")
    return DealtTexts(peers=tuple(peers), held_out=tuple(held_out))


def in_pieces(texts: DealtTexts, document_bytes: int) -> DealtTexts:
    """The same texts, every document for training cut into pieces of at most so many bytes."""
    return replace(
        texts,
        peers=tuple(
            tuple(
                document[begin : begin + document_bytes]
                for document in documents
                for begin in range(0, len(document), document_bytes)
            )
            for documents in texts.peers
        ),
    )


def _place(seed: int, document: bytes) -> bytes:
    return digest("spes lab order", seed, document)


@functools.lru_cache(maxsize=len(KINDS))
def _documents(kind: Kind, text_bytes: int) -> tuple[bytes, ...]:
    """Documents of a kind, whole texts at a time, until there are `text_bytes` or no more."""
    documents: list[bytes] = []
    num_bytes = 0
    for text in _texts(kind):
        if num_bytes >= text_bytes:
            break
        pieces = [piece for piece in cut_document(text) if len(piece) >= MIN_FILE_BYTES]
        documents += pieces
        num_bytes += sum(map(len, pieces))
    if not documents:
        raise DataError(f"this machine has no text of the kind {kind}")
    return tuple(documents)


def _texts(kind: Kind) -> Iterator[bytes]:
    if kind == "python":
        yield from _files(path for path in default_files() if path.suffix == ".py")
    elif kind == "header":
        yield from _files((Path(torch.__file__).parent / "include").rglob("*.h"))
    elif kind == "manual":
        yield from (text.encode() for _, text in sorted(pydoc_data.topics.topics.items()))
    else:
        described = {package.metadata["Name"]: package.read_text("METADATA") for package in _packages()}
        yield from (text.encode() for _, text in sorted(described.items()) if text)


def _packages() -> Iterable[importlib.metadata.Distribution]:
    return importlib.metadata.distributions()


def _files(paths: Iterable[Path]) -> Iterator[bytes]:
    """Texts of files, in an order that depends on their last three names alone and mixes the packages."""
    for path in sorted(paths, key=lambda path: digest("spes lab file", "/".join(path.parts[-3:]).encode())):
        if MIN_FILE_BYTES <= path.stat().st_size <= MAX_FILE_BYTES:
            text = path.read_bytes().replace(b"\0", b"")
            if _is_utf8(text):
                yield text


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
