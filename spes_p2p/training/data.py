"""A peer's own text, as an endless, shuffled and resumable stream of token sequences.

Each pass visits all documents once, in an order drawn from (run seed, peer, pass), dealt to as many lanes as a batch
has sequences: each sequence of a batch comes from a lane, and so from a document, of its own. A document enters as a
separator and its tokens; a lane is cut into sequences without gaps or padding.

Sequences of one document are too much alike for a batch: with 8 of them from one document instead of 8, a model learned
half as fast (docs/LOG.md).

B sequences, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from spes_p2p.digests import digest
from spes_p2p.errors import DataError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.training.documents import default_files, document_hash, find_files, read_documents
from spes_p2p.training.tokenizer import Tokenizer

DEFAULT_MAX_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The documents a peer trains on, and what was left out."""

    documents: tuple[bytes, ...]
    num_held_out: int
    """Documents skipped because they belong to the held-out set."""
    bounded: bool
    """The limit of bytes ended the reading before the last file."""

    @property
    def num_bytes(self) -> int:
        """Bytes of text."""
        return sum(len(document) for document in self.documents)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one lane is."""

    pass_number: int = 0
    place: int = 0
    """Place in the pass's order of documents."""
    offset: int = 0
    """Token of the document, its leading separator being token 0."""


Position: TypeAlias = tuple[Place, ...]
"""Where in its stream a peer is: one place for each lane, none before the first batch. Lane l of n visits the places
l, l + n, l + 2n, ... of every pass."""


def data_key(run_seed: int, peer: PeerId) -> Digest:
    """What one peer's order of documents in one run is drawn from."""
    return digest("spes data", run_seed, peer)


def load_corpus(
    paths: Sequence[Path],
    held_out: Collection[Digest] = frozenset(),
    max_bytes: int = DEFAULT_MAX_BYTES,
    key: Digest | None = None,
) -> Corpus:
    """Read the text of `paths`, or the default text if there are none, without the held-out documents.

    With more text than `max_bytes`, the files are visited in an order drawn from `key` until it is reached, so that a
    bound picks a fair sample. Raises DataError if a path is wrong or unreadable, or no text remains.
    """
    files = find_files(paths) if paths else default_files()
    if key is not None:
        files = sorted(files, key=lambda file: digest("spes file", key, str(file).encode()))
    documents: list[bytes] = []
    num_bytes = num_held_out = 0
    bounded = False
    for file in files:
        for document in read_documents(file):
            if document_hash(document) in held_out:
                num_held_out += 1
                continue
            if bounded := num_bytes + len(document) > max_bytes:
                break
            documents.append(document)
            num_bytes += len(document)
        if bounded:
            break
    if not documents:
        where = ", ".join(str(path) for path in paths) or "the installed Python's sources"
        why = f"all {num_held_out} documents belong to the held-out set" if num_held_out else "found no UTF-8 text"
        raise DataError(f"no text to train on in {where}: {why}")
    return Corpus(documents=tuple(documents), num_held_out=num_held_out, bounded=bounded)


class TokenStream:
    """Sequences for training, from a position that is part of the checkpoint."""

    def __init__(self, documents: Sequence[bytes], tokenizer: Tokenizer, key: Digest, position: Position = ()) -> None:
        if not documents:
            raise DataError("no documents to train on")
        self._documents = documents
        self._tokenizer = tokenizer
        self._key = key
        self._orders: dict[int, npt.NDArray[np.int64]] = {}
        self.position = position

    def next_batch(self, num_sequences: int, length: int) -> npt.NDArray[np.int64]:
        """[B, T + 1]: inputs are all tokens but the last of each row, targets all but the first. Row b comes from lane
        b, and begins with the last token of that lane's row before, so that each token is a target once. With fewer
        documents than rows, there are as many lanes as documents, and they take turns."""
        num_lanes = min(num_sequences, len(self._documents))
        if len(self.position) != num_lanes:
            self.position = _first_places(self.position, num_lanes)
        lanes = list(self.position)
        batch = np.empty((num_sequences, length + 1), dtype=np.int64)
        for row in range(num_sequences):
            lane = row % num_lanes
            batch[row], lanes[lane] = self._read(lanes[lane], lane, num_lanes, length + 1)
        self.position = tuple(lanes)
        return batch

    def _read(self, at: Place, lane: int, num_lanes: int, count: int) -> tuple[npt.NDArray[np.int64], Place]:
        """`count` tokens of a lane from a place, and the place of the last of them."""
        tokens = np.empty(count, dtype=np.int64)
        filled = 0
        while True:
            document = self._tokens(at)
            piece = document[at.offset : at.offset + count - filled]
            tokens[filled : filled + len(piece)] = piece
            filled += len(piece)
            if filled == count and len(piece):
                last = at.offset + len(piece) - 1
                return tokens, Place(pass_number=at.pass_number, place=at.place, offset=last)
            if at.place + num_lanes < len(self._documents):
                at = Place(pass_number=at.pass_number, place=at.place + num_lanes)
            else:
                at = Place(pass_number=at.pass_number + 1, place=lane)

    def _tokens(self, at: Place) -> npt.NDArray[np.int64]:
        """All tokens of the document at a place; none if the text has shrunk since the position was stored."""
        if at.place >= len(self._documents):
            return np.empty(0, dtype=np.int64)
        document = self._documents[self._order(at.pass_number)[at.place]]
        tokens = self._tokenizer.encode(document)
        document_tokens = np.empty(len(tokens) + 1, dtype=np.int64)
        document_tokens[0], document_tokens[1:] = self._tokenizer.separator, tokens
        return document_tokens

    def _order(self, pass_number: int) -> npt.NDArray[np.int64]:
        """The order of documents in a pass. Lanes may be in different passes, so all that a lane is in are kept."""
        if pass_number not in self._orders:
            in_use = {place.pass_number for place in self.position}
            self._orders = {number: order for number, order in self._orders.items() if number in in_use}
            seed = int.from_bytes(digest("spes pass", self._key, pass_number)[:16], "little")
            generator = np.random.Generator(np.random.Philox(key=seed))
            self._orders[pass_number] = generator.permutation(len(self._documents))
        return self._orders[pass_number]


def _first_places(before: Position, num_lanes: int) -> Position:
    """Where lanes begin: in the first pass, or in the one after the last that was begun if there were other lanes."""
    pass_number = max((place.pass_number + 1 for place in before), default=0)
    return tuple(Place(pass_number=pass_number, place=lane) for lane in range(num_lanes))
