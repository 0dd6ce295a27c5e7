"""How well a model predicts the held-out set, in nats per byte: comparable between tokenizers and runs.

B sequences, T tokens of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from spes_p2p.config import RunConfig
from spes_p2p.model.transformer import Transformer
from spes_p2p.training.arrays import Tensors
from spes_p2p.training.tokenizer import ByteTokenizer, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Result of one evaluation."""

    nats_per_byte: float
    num_bytes: int


class Predictor(Protocol):
    """A model, or an engine around one."""

    @property
    def device(self) -> torch.device:
        """Where it wants its tokens."""
        ...

    def nats(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Cross-entropy of each target, [B, T], in nats."""
        ...


@torch.no_grad()
def evaluate(
    model: Predictor,
    documents: Sequence[bytes],
    tokenizer: Tokenizer,
    sequence_length: int,
    batch_sequences: int = 8,
    max_bytes: int | None = None,
) -> Evaluation:
    """Sum of the cross-entropy of every token of the documents, divided by their bytes.

    The documents, each behind a separator, are cut into sequences without gaps; every token is predicted once, from
    what stands before it in its sequence, and separators are not counted. With `max_bytes` the first documents that
    fit are used, at least one. Raises ValueError without documents.
    """
    chosen = _first_documents(documents, max_bytes)
    device = model.device
    separator = tokenizer.separator
    stream = np.concatenate([part for document in chosen for part in ([separator], tokenizer.encode(document))])
    num_sequences = math.ceil((len(stream) - 1) / sequence_length)
    padded = np.full(num_sequences * sequence_length + 1, separator, dtype=np.int64)
    padded[: len(stream)] = stream
    inputs = torch.from_numpy(padded[:-1].reshape(num_sequences, sequence_length))
    targets = torch.from_numpy(padded[1:].reshape(num_sequences, sequence_length))
    total_nats = 0.0
    for first in range(0, num_sequences, batch_sequences):
        targets_BT = targets[first : first + batch_sequences].to(device)
        nats_BT = model.nats(inputs[first : first + batch_sequences].to(device), targets_BT)
        total_nats += float(nats_BT.double()[targets_BT != separator].sum())
    num_bytes = sum(len(document) for document in chosen)
    return Evaluation(nats_per_byte=total_nats / num_bytes, num_bytes=num_bytes)


def evaluate_weights(
    config: RunConfig,
    psi: Tensors,
    shards: Iterable[tuple[int, Tensors]],
    documents: Sequence[bytes],
    max_bytes: int | None = None,
) -> Evaluation:
    """`evaluate` for weights that no trainer holds, such as the state of a certificate: psi and every shard's tensors
    by name, on the CPU, with the byte tokenizer."""
    model = Transformer.build(config.model)
    model.load(psi)
    for _, tensors in shards:
        model.load(tensors)
    training = config.training
    return evaluate(model, documents, ByteTokenizer(), training.sequence_length, training.batch_sequences, max_bytes)


def _first_documents(documents: Sequence[bytes], max_bytes: int | None) -> Sequence[bytes]:
    if not documents:
        raise ValueError("no documents to evaluate on")
    if max_bytes is None:
        return documents
    ends = np.cumsum([len(document) for document in documents])
    return documents[: max(1, int(np.searchsorted(ends, max_bytes, side="right")))]
