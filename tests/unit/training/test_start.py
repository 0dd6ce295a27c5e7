"""The start of a round, rebuilt from blobs."""

import msgspec
import numpy as np
import pytest

from spes_p2p.config import MergeConfig, ModelConfig, ProtocolConfig, RunConfig, TrainingConfig
from spes_p2p.errors import BlobError, SchemaError
from spes_p2p.ids import Digest
from spes_p2p.model.init import initial_shard
from spes_p2p.model.shards import expert_name, parse_expert_name
from spes_p2p.testing.blobs import MemoryBlobs
from spes_p2p.training.aggregate import owners_mean
from spes_p2p.training.codecs import decode_expert_blob, encode_expert_blob
from spes_p2p.training.genesis import genesis_start, make_genesis
from spes_p2p.training.merge import merge_shard
from spes_p2p.training.similarity import encode_lists, merge_lists
from spes_p2p.training.start import StartReader, StartSpec

MODEL = ModelConfig(width=8, num_layers=2, num_heads=2, num_kv_heads=2, num_experts=6, expert_width=6, vocab_size=32)
CONFIG = RunConfig(
    model=MODEL,
    experts_per_shard=2,
    training=TrainingConfig(merge=MergeConfig(top_k=2)),
    protocol=ProtocolConfig(parts=3),
)


@pytest.fixture
def store() -> MemoryBlobs:
    return MemoryBlobs()


@pytest.fixture
def spec(store: MemoryBlobs) -> StartSpec:
    return genesis_start(make_genesis(CONFIG, store))


def merging(spec: StartSpec, store: MemoryBlobs, receivers: tuple[bool, ...]) -> StartSpec:
    lists = merge_lists(CONFIG, StartReader(CONFIG, store, spec).row_tensor)
    return msgspec.structs.replace(spec, merge_alpha=0.1, merge_lists=encode_lists(lists), receivers=receivers)


def test_a_row_is_the_value_of_its_blob_not_the_master(store: MemoryBlobs, spec: StartSpec) -> None:
    row = StartReader(CONFIG, store, spec).row(1)
    decoded = decode_expert_blob(CONFIG, 1, store.read(spec.shards[1][0][0]))
    assert row.keys() == decoded.keys()
    for name, tensor in row.items():
        assert tensor.tobytes() == decoded[name].tobytes()
        assert tensor.tobytes() != initial_shard(MODEL, 2, 0, 1)[name].tobytes()


def test_a_row_of_several_owners_is_their_mean_by_tokens(store: MemoryBlobs, spec: StartSpec) -> None:
    values = [initial_shard(MODEL, 2, seed, 0) for seed in (3, 4)]
    blobs = [store.put(encode_expert_blob(CONFIG, 0, value)) for value in values]
    row = ((blobs[0], 300), (blobs[1], 100))
    shared = msgspec.structs.replace(spec, shards=(row, *spec.shards[1:]))
    decoded = [decode_expert_blob(CONFIG, 0, store.read(blob)) for blob in blobs]
    for name, tensor in StartReader(CONFIG, store, shared).row(0).items():
        assert tensor.tobytes() == owners_mean([value[name] for value in decoded], [300, 100]).tobytes()


def test_without_a_merge_the_start_is_the_row(store: MemoryBlobs, spec: StartSpec) -> None:
    for shard in range(3):
        row = StartReader(CONFIG, store, spec).row(shard)
        for name, tensor in StartReader(CONFIG, store, spec).start(shard).items():
            assert tensor.tobytes() == row[name].tobytes()


def test_a_merge_moves_receivers_and_nobody_else(store: MemoryBlobs, spec: StartSpec) -> None:
    plan = merging(spec, store, (True, False, True))
    reader = StartReader(CONFIG, store, plan)
    lists = merge_lists(CONFIG, reader.row_tensor)
    for shard, tensors in reader.starts():
        merged = merge_shard(CONFIG, shard, lists, 0.1, reader.row_tensor)
        wanted = merged if plan.receivers[shard] else reader.row(shard)
        for name, tensor in tensors.items():
            assert tensor.tobytes() == wanted[name].tobytes()
            assert (tensor.tobytes() == reader.row_tensor(name).tobytes()) == (not plan.receivers[shard])


def test_a_shard_that_does_not_receive_still_gives(store: MemoryBlobs, spec: StartSpec) -> None:
    plan = merging(spec, store, (True, False, False))
    lists = np.frombuffer(plan.merge_lists, np.uint16).reshape(2, 6, 2)
    donors = {int(k) for k in lists[:, :2].reshape(-1)}
    assert donors & {2, 3, 4, 5}
    start = StartReader(CONFIG, store, plan).start(0)
    row = StartReader(CONFIG, store, plan).row(0)
    name = expert_name(0, 0, "down")
    assert not np.array_equal(start[name], row[name])


def test_the_start_is_writable_and_nothing_written_to_it_comes_back(store: MemoryBlobs, spec: StartSpec) -> None:
    reader = StartReader(CONFIG, store, spec)
    before = {name: tensor.copy() for name, tensor in {**reader.psi(), **reader.start(0)}.items()}
    for tensor in (*reader.psi().values(), *reader.start(0).values()):
        tensor[...] = 9
    for name, tensor in {**reader.psi(), **reader.start(0)}.items():
        assert tensor.tobytes() == before[name].tobytes()


def test_a_missing_blob_is_named(store: MemoryBlobs, spec: StartSpec) -> None:
    store.delete(spec.shards[2][0][0])
    store.delete(spec.parts[1])
    with pytest.raises(BlobError):
        StartReader(CONFIG, store, spec).start(2)
    with pytest.raises(BlobError):
        StartReader(CONFIG, store, spec).psi()
    assert StartReader(CONFIG, store, spec).start(0)


def test_a_blob_of_another_form_is_an_error(store: MemoryBlobs, spec: StartSpec) -> None:
    odd = store.put(b"something else")
    wrong = msgspec.structs.replace(spec, parts=(odd, *spec.parts[1:]), shards=(((odd, 1),), *spec.shards[1:]))
    with pytest.raises(BlobError, match=odd.hex()[:16]):
        StartReader(CONFIG, store, wrong).psi()
    with pytest.raises(BlobError, match=odd.hex()[:16]):
        StartReader(CONFIG, store, wrong).row(0)


def test_a_spec_that_does_not_fit_the_run_is_refused(store: MemoryBlobs, spec: StartSpec) -> None:
    for wrong in (
        msgspec.structs.replace(spec, parts=spec.parts[1:]),
        msgspec.structs.replace(spec, shards=spec.shards[1:]),
        msgspec.structs.replace(spec, shards=((), *spec.shards[1:])),
        msgspec.structs.replace(spec, merge_alpha=0.1, receivers=(True,)),
    ):
        with pytest.raises(SchemaError):
            StartReader(CONFIG, store, wrong)


def test_a_psi_tensor_is_no_row_tensor(store: MemoryBlobs, spec: StartSpec) -> None:
    assert parse_expert_name("norm.weight") is None
    with pytest.raises(KeyError):
        StartReader(CONFIG, store, spec).row_tensor("norm.weight")


def test_a_spec_survives_the_wire() -> None:
    spec = StartSpec(
        round=4,
        global_step=120,
        parts=(Digest(bytes(32)),),
        shards=(((Digest(bytes([1] * 32)), 5),),),
        merge_alpha=0.05,
        merge_lists=b"\1\0",
        receivers=(True,),
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=StartSpec) == spec
