"""Text to tokens. Built in: a token is a byte, and byte 0, which text does not contain, stands between documents."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt


class Tokenizer(Protocol):
    """What training needs to know of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of different tokens."""
        ...

    @property
    def separator(self) -> int:
        """The token between documents."""
        ...

    def encode(self, document: bytes) -> npt.NDArray[np.int32]:
        """Tokens of one UTF-8 document, without separators."""
        ...


class ByteTokenizer:
    """Token id = byte value."""

    vocab_size = 256
    separator = 0

    def encode(self, document: bytes) -> npt.NDArray[np.int32]:
        """One token per byte. Raises ValueError if the document contains the separator."""
        if b"\0" in document:
            raise ValueError("a document must not contain byte 0, which separates documents")
        return np.frombuffer(document, dtype=np.uint8).astype(np.int32)

    def decode(self, tokens: npt.NDArray[np.int32]) -> bytes:
        """Inverse of `encode`; separators come out as byte 0."""
        return tokens.astype(np.uint8).tobytes()
