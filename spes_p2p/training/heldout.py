"""The held-out set: documents that everybody evaluates on and nobody trains on.

It is one genesis blob of at most 1 MiB: a msgpack list of byte strings, in canonical form.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from spes_p2p.digests import digest
from spes_p2p.errors import DataError
from spes_p2p.ids import Digest
from spes_p2p.training.documents import MAX_DOCUMENT_BYTES, document_hash

MAX_HELD_OUT_BYTES = 1 << 20


def encode_held_out(documents: Sequence[bytes]) -> bytes:
    """The blob of a held-out set. Raises DataError if it is empty or would be over 1 MiB."""
    data = msgspec.msgpack.encode(list(documents))
    _check(documents, len(data))
    return data


def decode_held_out(data: bytes | memoryview) -> tuple[bytes, ...]:
    """Inverse of `encode_held_out`. Raises DataError for anything that it does not return."""
    if len(data) > MAX_HELD_OUT_BYTES:
        raise DataError(f"the held-out set has {len(data)} bytes, at most {MAX_HELD_OUT_BYTES} are allowed")
    try:
        documents = msgspec.msgpack.decode(data, type=tuple[bytes, ...])
    except msgspec.MsgspecError as error:
        raise DataError(f"the held-out set is malformed: {error}") from error
    _check(documents, len(data))
    if msgspec.msgpack.encode(list(documents)) != data:
        raise DataError("the held-out set is not in canonical form")
    return documents


def held_out_hashes(documents: Iterable[bytes]) -> frozenset[Digest]:
    """Hashes of the documents that must not be trained on."""
    return frozenset(document_hash(document) for document in documents)


def draw_held_out(documents: Iterable[bytes], max_bytes: int, seed: int, max_share: float = 0.1) -> tuple[bytes, ...]:
    """Draw a held-out set whose blob is at most `max_bytes`, and at most `max_share` of the text.

    The order of the documents given does not matter, only which there are: they are ranked by a hash of (seed,
    document), and taken from the lowest up if they fit. Raises DataError if there are too few.
    """
    ranked = sorted((digest("spes held-out", seed, document), document) for document in set(documents))
    limit = min(max_bytes, MAX_HELD_OUT_BYTES, int(max_share * sum(len(document) for _, document in ranked)))
    drawn: list[bytes] = []
    size = 5  # the msgpack list's own header, at its largest
    for _, document in ranked:
        cost = len(document) + 3  # a byte string's header, for at most 64 KiB
        if size + cost > limit:
            continue  # a shorter one may still fit, so that one long document does not decide
        drawn.append(document)
        size += cost
    if not drawn:
        raise DataError(
            f"too little text to draw a held-out set from: {len(ranked)} documents of UTF-8 text, "
            f"of which it may take {limit:,} bytes in all\nName more text, of the kind that the run shall learn."
        )
    return tuple(drawn)


def _check(documents: Sequence[bytes], size_bytes: int) -> None:
    if not documents:
        raise DataError("the held-out set is empty")
    if size_bytes > MAX_HELD_OUT_BYTES:
        raise DataError(f"the held-out set has {size_bytes} bytes, at most {MAX_HELD_OUT_BYTES} are allowed")
    if any(not document or b"\0" in document or len(document) > MAX_DOCUMENT_BYTES for document in documents):
        raise DataError(f"a held-out document is empty, contains byte 0, or is over {MAX_DOCUMENT_BYTES} bytes")
