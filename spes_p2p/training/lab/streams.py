"""Several streams of text as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from spes_p2p.training.data import TokenStream


def joined(streams: Sequence[TokenStream]) -> TokenStream:
    """One stream that takes every batch from all of these in equal parts: what they would give one by one, a trainer
    gets together."""
    if len(streams) == 1:
        return streams[0]
    # Trainers ask a stream for batches alone; its position is for checkpoints, of which the lab makes none.
    return cast(TokenStream, _Joined(streams))


class _Joined:
    def __init__(self, streams: Sequence[TokenStream]) -> None:
        self._streams = tuple(streams)

    def next_batch(self, num_sequences: int, length: int) -> npt.NDArray[np.int64]:
        """[B, T + 1], as `TokenStream.next_batch`. Raises ValueError unless all streams can give the same number."""
        share, rest = divmod(num_sequences, len(self._streams))
        if rest:
            raise ValueError(f"{num_sequences} sequences from {len(self._streams)} streams")
        return np.concatenate([stream.next_batch(share, length) for stream in self._streams])
