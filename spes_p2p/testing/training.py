"""Small models, texts and trainers for tests: a training step takes a few milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

from spes_p2p.config import CodecConfig, ModelConfig, RunConfig, TrainingConfig
from spes_p2p.digests import digest
from spes_p2p.model.init import initial_psi, initial_shard
from spes_p2p.training.arrays import Tensors
from spes_p2p.training.data import TokenStream
from spes_p2p.training.tokenizer import ByteTokenizer
from spes_p2p.training.trainer import RoundStart, Trainer

TINY_MODEL = ModelConfig(width=16, num_layers=2, num_heads=2, num_kv_heads=1, num_experts=4, top_k=2, expert_width=12)
TINY_TRAINING = TrainingConfig(
    sequence_length=16, batch_sequences=2, inner_steps=((0, 3),), total_steps=40, warmup_steps=4, peak_lr=1e-2
)


def tiny_run(**changes: object) -> RunConfig:
    """A run of four experts in four shards; `changes` are fields of RunConfig."""
    fields: dict[str, object] = {"model": TINY_MODEL, "training": TINY_TRAINING, "codecs": CodecConfig()}
    return RunConfig.model_validate(fields | changes)


def tiny_documents(num_documents: int = 8) -> tuple[bytes, ...]:
    """Different short documents, the same on every call."""
    return tuple(b"Document %d.\n" % number + b"abcdefghij "[number % 7 :] * 9 for number in range(num_documents))


def tiny_trainer(config: RunConfig | None = None, seed: int = 0) -> Trainer:
    """A trainer on the tiny documents, in an order drawn from `seed`. It has no start yet."""
    stream = TokenStream(tiny_documents(), ByteTokenizer(), digest("tiny", seed))
    return Trainer(config or tiny_run(), stream)


def genesis_shards(config: RunConfig) -> Iterator[tuple[int, Tensors]]:
    """The genesis values of every shard, in fp32."""
    for shard in range(config.num_shards):
        yield shard, initial_shard(config.model, config.experts_per_shard, config.seed, shard)


def genesis_round(config: RunConfig, owned: tuple[int, ...] = (0,)) -> RoundStart:
    """The start of round 1 from genesis, without codecs."""
    return RoundStart(
        round=1,
        global_step=0,
        psi=initial_psi(config.model, config.seed),
        shards=genesis_shards(config),
        owned=owned,
    )
