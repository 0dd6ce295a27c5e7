"""SPES as a swarm executes it, through codecs, parts, blobs and merge plans, against SPES written down plainly.

The node's part in it, from leases to masters, is compared in tests/integration/test_nodes_equal_reference.py.
"""

from collections.abc import Iterator

import pytest
import torch

from spes_p2p.config import CodecConfig, MergeConfig, ModelConfig, ProtocolConfig, RunConfig, TrainingConfig
from spes_p2p.model.init import initial_psi
from spes_p2p.testing.blobs import MemoryBlobs
from spes_p2p.testing.plain import PlainSpes, largest_difference
from spes_p2p.training.data import TokenStream, data_key
from spes_p2p.training.lab.rounds import CutUpdate, TrainingRounds, peer_of
from spes_p2p.training.start import StartReader
from spes_p2p.training.tokenizer import ByteTokenizer

NUM_PEERS = 3
NUM_LAYERS, NUM_EXPERTS, TOP_K_MERGE = 2, 6, 2
STEPS = ((5, 5, 5), (4, 3, 4), (4, 4, 2))
"""Steps that each peer makes in each round: H is 5, then 4; some end early."""
INNER_STEPS = (5, 4, 4)
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
        psi_lr_ratio=1.5,
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


def test_spes_by_a_swarm_equals_plain_spes() -> None:
    swarm = TrainingRounds(CONFIG, MemoryBlobs(), [stream_of(peer) for peer in range(NUM_PEERS)], OWNERS)
    own = [[expert for expert in range(NUM_EXPERTS) if expert % NUM_PEERS == peer] for peer in range(NUM_PEERS)]
    plain = PlainSpes(CONFIG, [stream_of(peer) for peer in range(NUM_PEERS)], own)
    initial = initial_psi(CONFIG.model, CONFIG.seed)
    num_compared = 0
    for steps, inner_steps in zip(STEPS, INNER_STEPS, strict=True):
        before_merge = plain.round(steps, inner_steps)
        theta = plain.theta
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
