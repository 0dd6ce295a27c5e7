"""What one experiment is, and what came out of it: plain data, so that finished ones can be kept in a file."""

from __future__ import annotations

from typing import Literal, Self, TypeAlias

from pydantic import NonNegativeInt, PositiveInt, model_validator

from spes_p2p.config import Frozen, OuterConfig, RunConfig
from spes_p2p.digests import digest
from spes_p2p.training.documents import MAX_DOCUMENT_BYTES
from spes_p2p.training.noloco import NoLoCoConfig

Method: TypeAlias = Literal["centralised", "spes", "spes-no-merge", "spes-nesterov", "diloco", "fedavg", "noloco"]
"""centralised: one trainer that owns all, with the peers' batches together. fedavg, diloco: every peer trains
everything, and deltas are averaged, plainly or by Nesterov's momentum. spes-...: without merge; with Nesterov's
momentum on the shared modules. noloco: experts as in SPES, shared modules averaged in pairs."""
Text: TypeAlias = Literal["iid", "kinds"]
"""iid: all kinds of text, dealt at random. kinds: each peer has one kind."""


class Experiment(Frozen):
    """One run of one method. Equal but for `method` means equal tokens, in the same batches."""

    method: Method
    text: Text = "iid"
    seed: NonNegativeInt = 0
    """Of genesis, of who gets which text, and of its order. The held-out set is the same for all seeds."""
    num_peers: PositiveInt = 4
    owners_per_shard: PositiveInt = 1
    """Peers that train one shard; the mean of their values is its next start."""
    text_bytes: PositiveInt = 400_000
    """Of each kind."""
    document_bytes: PositiveInt = MAX_DOCUMENT_BYTES
    """Most bytes of a document to train on. Real sequences are about as long as documents; short ones that take turns
    in a long document make all steps of a round alike (docs/learning.md)."""
    evaluate_every: PositiveInt = 50
    """Steps between two points of the curve, rounded up to whole rounds."""
    outer: OuterConfig = OuterConfig(rule="nesterov")
    """For `diloco` and `spes-nesterov`."""
    pair: NoLoCoConfig = NoLoCoConfig()
    """For `noloco`."""
    run: RunConfig = RunConfig()
    """Its batch is that of one peer, its `total_steps` the length of the experiment; its own `seed` is not used."""

    @model_validator(mode="after")
    def _peers_have_shards(self) -> Self:
        if self.owners_per_shard > self.num_peers:
            raise ValueError(f"{self.owners_per_shard} owners of a shard among {self.num_peers} peers")
        if self.method == "noloco" and self.num_peers % 2:
            raise ValueError("noloco pairs the peers up: their number must be even")
        return self

    @property
    def key(self) -> str:
        """Names the experiment in a file of finished ones: equal for equal experiments only."""
        return digest("spes experiment", self.model_dump_json().encode()).hex()[:16]


class Point(Frozen):
    """One point of a learning curve."""

    step: int
    tokens: int
    """Of all peers, since the beginning."""
    nats_per_byte: float
    """Held-out loss of the agreed state."""


class Outcome(Frozen):
    """What an experiment showed."""

    experiment: Experiment
    curve: tuple[Point, ...]
    cpu_seconds: float
    wall_seconds: float

    @property
    def last(self) -> float:
        """Held-out loss at the end, nats per byte."""
        return self.curve[-1].nats_per_byte
