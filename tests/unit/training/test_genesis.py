"""The first weights of a run, as blobs."""

import numpy as np

from spes_p2p.config import CodecConfig, ModelConfig, OuterConfig, ProtocolConfig, RunConfig, TrainingConfig
from spes_p2p.model.init import initial_psi, initial_shard
from spes_p2p.testing.blobs import MemoryBlobs
from spes_p2p.training.genesis import genesis_start, make_genesis
from spes_p2p.training.start import StartReader

MODEL = ModelConfig(width=8, num_layers=2, num_heads=2, num_kv_heads=2, num_experts=4, expert_width=6, vocab_size=32)
CONFIG = RunConfig(
    model=MODEL,
    experts_per_shard=2,
    seed=11,
    codecs=CodecConfig(expert="fp32"),
    protocol=ProtocolConfig(parts=3),
)


def test_genesis_is_the_same_on_every_call() -> None:
    one, other = MemoryBlobs(), MemoryBlobs()
    assert make_genesis(CONFIG, one) == make_genesis(CONFIG, other)
    assert one.ids() == other.ids()


def test_genesis_depends_on_the_seed() -> None:
    other = CONFIG.model_copy(update={"seed": 12})
    first, second = make_genesis(CONFIG, MemoryBlobs()), make_genesis(other, MemoryBlobs())
    assert not set(first.shards) & set(second.shards)
    assert first.parts != second.parts


def test_genesis_has_one_blob_for_each_part_and_shard() -> None:
    store = MemoryBlobs()
    genesis = make_genesis(CONFIG, store)
    assert (len(genesis.parts), len(genesis.shards)) == (3, 2)
    assert set(store.ids()) == {*genesis.parts, *genesis.shards}


def test_a_run_with_momentum_begins_with_the_same_weights_and_none_of_it() -> None:
    config = CONFIG.model_copy(update={"training": TrainingConfig(outer=OuterConfig(rule="nesterov"))})
    plain, heavy = MemoryBlobs(), MemoryBlobs()
    first, second = make_genesis(CONFIG, plain), make_genesis(config, heavy)
    assert first.shards == second.shards
    for part, same in zip(first.parts, second.parts, strict=True):
        psi = bytes(plain.read(part))
        assert bytes(heavy.read(same)) == psi + bytes(len(psi))
    psi = StartReader(config, heavy, genesis_start(second)).psi()
    for name, tensor in initial_psi(MODEL, 11).items():
        np.testing.assert_array_equal(psi[name], tensor)


def test_the_start_of_genesis_is_the_initial_weights() -> None:
    store = MemoryBlobs()
    reader = StartReader(CONFIG, store, genesis_start(make_genesis(CONFIG, store)))
    for name, tensor in initial_psi(MODEL, 11).items():
        np.testing.assert_array_equal(reader.psi()[name], tensor)
    for shard, tensors in reader.starts():
        for name, tensor in initial_shard(MODEL, 2, 11, shard).items():
            np.testing.assert_array_equal(tensors[name], tensor)
