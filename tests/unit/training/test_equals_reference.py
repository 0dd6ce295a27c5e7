"""SPES as a swarm executes it, through codecs, parts, blobs and merge plans, against SPES written down plainly.

Same model code, losses, optimizer, seeds and data. Partition, schedule, averaging and merge are written here again,
on plain dictionaries of tensors, and know nothing of parts, pieces, rows or lists.
"""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from spes_p2p.config import CodecConfig, MergeConfig, ModelConfig, ProtocolConfig, RunConfig, TrainingConfig
from spes_p2p.model.init import initial_psi, initial_shard
from spes_p2p.model.transformer import Transformer
from spes_p2p.testing.blobs import MemoryBlobs
from spes_p2p.testing.rounds import CutUpdate, TrainingRounds, peer_of
from spes_p2p.training.data import TokenStream, data_key
from spes_p2p.training.losses import batch_losses
from spes_p2p.training.start import StartReader
from spes_p2p.training.tokenizer import ByteTokenizer

NUM_PEERS = 3
NUM_LAYERS, NUM_EXPERTS, TOP_K_MERGE = 2, 6, 2
STEPS = ((5, 5, 5), (4, 3, 4), (4, 4, 2))
"""Steps that each peer makes in each round: H is 5, then 4; some end early."""
GLOBAL_STEPS = (0, 5, 9, 13)
ALPHA, WARMUP, INTERVAL = 0.3, 50, 4
"""So that all three rounds end in a merge: 5, 9 and 13 steps pass 4, 8 and 12."""

CONFIG = RunConfig(
    seed=5,
    model=ModelConfig(
        width=32, num_layers=NUM_LAYERS, num_heads=2, num_kv_heads=2, num_experts=NUM_EXPERTS, expert_width=24
    ),
    training=TrainingConfig(
        sequence_length=32,
        batch_sequences=2,
        inner_steps=((0, 5), (5, 4)),
        total_steps=40,
        warmup_steps=6,
        peak_lr=1e-3,
        merge=MergeConfig(alpha=ALPHA, top_k=TOP_K_MERGE, warmup_steps=WARMUP, interval_steps=INTERVAL),
    ),
    codecs=CodecConfig(expert="fp32", psi="fp32"),
    protocol=ProtocolConfig(parts=7, mean_weight="tokens"),
)
OWNERS = {shard: (shard % NUM_PEERS,) for shard in range(NUM_EXPERTS)}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def stream_of(peer: int) -> TokenStream:
    documents = [f"peer {peer}, document {number}: ".encode() * 9 for number in range(12)]
    return TokenStream(documents, ByteTokenizer(), data_key(CONFIG.seed, peer_of(peer)))


def plain_rate(step: int) -> float:
    if step < 6:
        return 1e-4 + (1e-3 - 1e-4) * step / 6
    return 1e-4 + (1e-3 - 1e-4) * (1 + math.cos(math.pi * (step - 6) / 34)) / 2


class PlainPeer:
    """One peer of the reference: a model, an AdamW over psi and its own experts that lives as long as the run."""

    def __init__(self, peer: int) -> None:
        self.stream = stream_of(peer)
        self.model = Transformer.build(CONFIG.model)
        self.model.set_owned([expert for expert in range(NUM_EXPERTS) if expert % NUM_PEERS == peer])
        self.weights = dict(self.model.named_parameters())
        self.adamw = torch.optim.AdamW(
            self.weights.values(), lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
        )

    def train(self, theta: dict[str, torch.Tensor], first_step: int, num_steps: int) -> dict[str, torch.Tensor]:
        """Weights of psi and the own experts after some steps from `theta`."""
        with torch.no_grad():
            for name, tensor in self.model.tensors().items():
                tensor.copy_(theta[name])
        for step in range(first_step, first_step + num_steps):
            tokens = torch.from_numpy(self.stream.next_batch(2, 32))
            logits, routings = self.model(tokens[:, :-1])
            losses = batch_losses(logits.flatten(0, 1), tokens[:, 1:].flatten(), routings, CONFIG.training)
            losses.total.backward()
            for weight in self.weights.values():
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
            for group in self.adamw.param_groups:
                group["lr"] = plain_rate(step)
            self.adamw.step()
            self.adamw.zero_grad()
        return {name: weight.detach().clone() for name, weight in self.weights.items()}


def plain_merge(theta: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """Every expert moves alpha of the way to the mean of the experts whose gates are most like its own."""
    alpha = ALPHA * (1 - step / WARMUP)
    merged = dict(theta)
    for layer in range(NUM_LAYERS):
        gates = [theta[f"layers.{layer}.experts.{j}.gate"].double().flatten() for j in range(NUM_EXPERTS)]
        for j in range(NUM_EXPERTS):
            others = [k for k in range(NUM_EXPERTS) if k != j]
            others.sort(key=lambda k: -torch.nn.functional.cosine_similarity(gates[j], gates[k], dim=0).item())
            for matrix in ("gate", "up", "down"):
                donors = [theta[f"layers.{layer}.experts.{k}.{matrix}"] for k in others[:TOP_K_MERGE]]
                own = theta[f"layers.{layer}.experts.{j}.{matrix}"]
                merged[f"layers.{layer}.experts.{j}.{matrix}"] = own + alpha * (sum(donors) / len(donors) - own)
    return merged


def plain_spes() -> Iterator[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """After every round: theta before and after its merge."""
    theta = {name: torch.from_numpy(values) for name, values in initial_psi(CONFIG.model, CONFIG.seed).items()}
    for expert in range(NUM_EXPERTS):
        shard = initial_shard(CONFIG.model, 1, CONFIG.seed, expert)
        theta |= {name: torch.from_numpy(values) for name, values in shard.items()}
    peers = [PlainPeer(peer) for peer in range(NUM_PEERS)]
    for first_step, next_step, steps in zip(GLOBAL_STEPS, GLOBAL_STEPS[1:], STEPS, strict=False):
        trained = [peer.train(theta, first_step, num) for peer, num in zip(peers, steps, strict=True)]
        before_merge = {}
        for name in theta:
            having = [(weights[name], num) for weights, num in zip(trained, steps, strict=True) if name in weights]
            before_merge[name] = sum(weight * num for weight, num in having) / sum(num for _, num in having)
        theta = plain_merge(before_merge, next_step)
        yield before_merge, theta


def largest_difference(swarm: dict[str, np.ndarray], plain: dict[str, torch.Tensor]) -> float:
    return max(float(np.abs(values - plain[name].numpy()).max()) for name, values in swarm.items())


def test_spes_by_a_swarm_equals_plain_spes() -> None:
    swarm = TrainingRounds(CONFIG, MemoryBlobs(), [stream_of(peer) for peer in range(NUM_PEERS)], OWNERS)
    initial = initial_psi(CONFIG.model, CONFIG.seed)
    num_compared = 0
    for steps, (before_merge, theta) in zip(STEPS, plain_spes(), strict=True):
        for peer, num_steps in enumerate(steps):
            swarm.train(peer, num_steps)
        swarm.certify([CutUpdate(peer=peer, base_round=swarm.round) for peer in range(NUM_PEERS)])
        reader = StartReader(CONFIG, swarm.store, swarm.spec)
        assert swarm.spec.merge_alpha > 0
        assert largest_difference(reader.psi(), theta) <= 1e-6
        for shard in range(NUM_EXPERTS):
            row, start = reader.row(shard), reader.start(shard)
            assert largest_difference(row, before_merge) <= 1e-6
            assert largest_difference(start, theta) <= 1e-6
            # The comparison means something only if training and merge moved the weights by much more than that.
            assert largest_difference(row, theta) > 1e-4
            num_compared += len(start)
        num_compared += len(reader.psi())
    assert num_compared == 3 * len(theta)
    assert largest_difference(initial, theta) > 1e-3
