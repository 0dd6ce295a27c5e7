"""SPES as whole nodes execute it against SPES written down plainly.

Machine, driver, leases, certificates, arithmetic and trainers are the real ones; only the network is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from spes_p2p.config import CodecConfig, MergeConfig, ModelConfig, RunConfig, TrainingConfig
from spes_p2p.ids import PeerId
from spes_p2p.model.init import initial_psi
from spes_p2p.node.files import BLOBS_FOLDER, LEDGER_FILE
from spes_p2p.node.history import read_manifest, replay
from spes_p2p.node.settle import start_spec
from spes_p2p.node.sizes import piece_sizes
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.head import Head, genesis_head
from spes_p2p.protocol.messages import RunManifest
from spes_p2p.storage.blobs import DiskBlobs
from spes_p2p.storage.ledger import Ledger
from spes_p2p.testing import nodes
from spes_p2p.testing.nodes import NodeSwarm, node_swarm
from spes_p2p.testing.plain import PlainSpes, largest_difference
from spes_p2p.training.data import TokenStream, data_key, load_corpus
from spes_p2p.training.heldout import decode_held_out, held_out_hashes
from spes_p2p.training.start import StartReader
from spes_p2p.training.tokenizer import ByteTokenizer

FOUNDERS = ["ada", "ben", "cleo"]
H = 5
TRAINING_ROUNDS = (2, 3, 4)
"""Round 1 is for claims. They end at the global steps 5, 10 and 15, each in a merge."""
MODEL = ModelConfig(width=16, num_layers=2, num_heads=2, num_kv_heads=2, num_experts=6, expert_width=12)
TRAINING = TrainingConfig(
    sequence_length=16,
    batch_sequences=2,
    inner_steps=((0, H),),
    total_steps=40,
    warmup_steps=6,
    peak_lr=1e-3,
    merge=MergeConfig(alpha=0.3, top_k=2, warmup_steps=50, interval_steps=4),
)


def patient_run() -> RunConfig:
    """fp32 codecs, and no update that comes too late."""
    return RunConfig(
        seed=5,
        model=MODEL,
        training=TRAINING,
        codecs=CodecConfig(expert="fp32", psi="fp32"),
        protocol=nodes.patient_run().protocol,
        held_out_bytes=2_048,
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rounds_of(folder: Path, config: RunConfig, manifest: RunManifest) -> dict[int, tuple[Head, Certificate, Head]]:
    """Per certified round: the head before, the certificate, the head after."""
    ledger = Ledger(folder / LEDGER_FILE)
    try:
        genesis = genesis_head(manifest, piece_sizes(config))
        return {step[2].round: step for step in replay(ledger, genesis)}
    finally:
        ledger.close()


def plain_swarm(swarm: NodeSwarm, manifest: RunManifest, owners: dict[PeerId, tuple[int, ...]]) -> PlainSpes:
    """The reference on the very texts of the nodes."""
    held_out = DiskBlobs(swarm.data_dir("ada") / BLOBS_FOLDER).read(manifest.held_out)
    skipped = held_out_hashes(decode_held_out(held_out))
    streams = []
    for name in FOUNDERS:
        key = data_key(swarm.config.seed, swarm.identity(name).peer_id)
        corpus = load_corpus([swarm.folder / f"{name}.txt"], skipped, key=key)
        streams.append(TokenStream(corpus.documents, ByteTokenizer(), key))
    return PlainSpes(swarm.config, streams, [owners[swarm.identity(name).peer_id] for name in FOUNDERS])


async def test_spes_by_whole_nodes_equals_plain_spes(tmp_path: Path) -> None:
    config = patient_run()
    async with node_swarm(tmp_path / "swarm", config) as swarm:
        swarm.create(FOUNDERS)
        for name in FOUNDERS:
            await swarm.start(name, capacity=2)
        swarm.introduce()
        await swarm.wait_round(TRAINING_ROUNDS[-1])
        await swarm.close()
        folder = swarm.data_dir("ada")
        signed = read_manifest(folder)
        assert signed is not None
        rounds = rounds_of(folder, config, signed.manifest)
        first, (_, certificate, last) = rounds[1][2], rounds[TRAINING_ROUNDS[-1]]
        owners = {peer: first.state.shards_of(peer) for peer in first.state.members}
        assert sorted(len(shards) for shards in owners.values()) == [2, 2, 2]
        plain = plain_swarm(swarm, signed.manifest, owners)
        for number in TRAINING_ROUNDS:
            before, seen, after = rounds[number]
            assert seen.body.tokens == 3 * H * TRAINING.batch_tokens
            assert {peer: before.state.shards_of(peer) for peer in before.state.members} == owners
            assert after.merge_alpha > 0
            before_merge = plain.round([H] * 3, H)
        assert last.global_step == plain.step == 15
        reader = StartReader(
            config, DiskBlobs(folder / BLOBS_FOLDER), start_spec(last, certificate.merge_lists)
        )  # what a joiner, and every owner, starts from
        assert largest_difference(reader.psi(), plain.theta) <= 1e-6
        for shard in range(config.num_shards):
            assert largest_difference(reader.row(shard), before_merge) <= 1e-6
            assert largest_difference(reader.start(shard), plain.theta) <= 1e-6
            # the comparison means something only if the merge moved the weights by much more than that
            assert largest_difference(reader.row(shard), plain.theta) > 1e-4
        assert largest_difference(initial_psi(config.model, config.seed), plain.theta) > 1e-3
