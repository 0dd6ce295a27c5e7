"""Scalars, enumerations and the base struct of everything on the wire.

Peers appear as raw 32-byte keys, float64 scalars as 8 bytes little-endian, bitmaps with bit i in byte i // 8.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from spes_p2p.crypto import KEY_BYTES, SIGNATURE_BYTES
from spes_p2p.digests import DIGEST_BYTES
from spes_p2p.ids import Digest, PeerId, RunId

NO_DIGEST = Digest(bytes(DIGEST_BYTES))
"""Stands for "none" where a digest is expected: a nil vote, no merge lists."""

Hash: TypeAlias = Annotated[Digest, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Peer: TypeAlias = Annotated[PeerId, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Run: TypeAlias = Annotated[RunId, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Signature: TypeAlias = Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
OptionalSignature: TypeAlias = Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)]
Float64: TypeAlias = Annotated[bytes, Meta(min_length=8, max_length=8)]
OptionalFloat64: TypeAlias = Annotated[bytes, Meta(max_length=8)]
Branch: TypeAlias = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
Bitmap: TypeAlias = Annotated[bytes, Meta(max_length=1024)]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=2**62)]
Small: TypeAlias = Annotated[int, Meta(ge=0, lt=2**16)]


class PieceKind(IntEnum):
    """A piece is one psi part of an update, or one expert-shard blob."""

    PSI = 0
    EXPERT = 1


class ItemKind(IntEnum):
    """What an entry of a cut is; the order is the order of entries of one peer."""

    UPDATE = 0
    ALIVE = 1
    JOIN = 2
    LEAVE = 3
    CLAIM = 4
    EVIDENCE = 5


class Step(IntEnum):
    """The two steps of voting."""

    PREVOTE = 0
    PRECOMMIT = 1


class RefusalReason(IntEnum):
    """Objective reasons to refuse a piece (1 to 6, found by an acker) or an item of a cut (16 on, a pure function)."""

    SCHEMA = 1
    NOT_FINITE = 2
    NORM_MISMATCH = 3
    NORM_BOUND = 4
    MISSING = 5
    BASE_ROW = 6
    SUPERSEDED = 16
    NOT_OWNER = 17
    TOO_OLD = 18
    NOT_ADMITTED = 19
    NOT_MEMBER = 20
    NOTHING_VACANT = 21


class RefKind(IntEnum):
    """What an `Offer` or `Want` points to."""

    STATEMENT = 0
    RECEIPT = 1
    CUT = 2
    BODY = 3
    DIGESTS = 4


class Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all structs on the wire."""
