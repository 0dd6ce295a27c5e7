from collections.abc import Iterator
from typing import get_args

import msgspec
import numpy as np
import pytest
import torch

from spes_p2p.config import CodecConfig, MergeConfig, OuterConfig
from spes_p2p.digests import digest
from spes_p2p.ids import RoundNumber
from spes_p2p.testing.blobs import MemoryBlobs
from spes_p2p.testing.training import TINY_TRAINING, tiny_documents, tiny_run
from spes_p2p.training.data import TokenStream
from spes_p2p.training.genesis import genesis_start, make_genesis
from spes_p2p.training.lab.experiment import Experiment, Method
from spes_p2p.training.lab.rounds import peer_of
from spes_p2p.training.lab.running import make_swarm, with_outer_step
from spes_p2p.training.lab.streams import joined
from spes_p2p.training.lab.swarms import Alone, Pairs, Replicas, Spes, Swarm, owners_of_shards
from spes_p2p.training.lab.texts import DealtTexts
from spes_p2p.training.layout import psi_layout, unflatten
from spes_p2p.training.noloco import NoLoCoConfig
from spes_p2p.training.pieces import PieceOfCut, aggregate_part
from spes_p2p.training.publish import publish
from spes_p2p.training.similarity import encode_lists, merge_lists
from spes_p2p.training.start import StartReader
from spes_p2p.training.tokenizer import ByteTokenizer
from spes_p2p.training.trainer import RoundStart, Trainer

H = 3
FP32 = CodecConfig(expert="fp32", psi="fp32")
NO_MERGE = TINY_TRAINING.model_copy(update={"merge": MergeConfig(alpha=0)})
MERGING = TINY_TRAINING.model_copy(update={"merge": MergeConfig(alpha=0.3, top_k=2, warmup_steps=30, interval_steps=H)})
PLAIN = tiny_run(codecs=FP32, training=NO_MERGE)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def streams(num_peers: int) -> list[TokenStream]:
    return [TokenStream(tiny_documents(), ByteTokenizer(), digest("lab test", peer)) for peer in range(num_peers)]


def weights_of(swarm: Swarm) -> dict[str, np.ndarray]:
    psi, shards = swarm.weights()
    return psi | {name: values for _, tensors in shards for name, values in tensors.items()}


def after_rounds(swarm: Swarm, num_rounds: int = 2) -> dict[str, np.ndarray]:
    for _ in range(num_rounds):
        swarm.round(H)
    return weights_of(swarm)


def largest_difference(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> float:
    assert first.keys() == second.keys()
    return max(float(np.abs(first[name] - second[name]).max()) for name in first)


def test_spes_in_the_lab_has_the_bits_of_the_swarms_own_path():
    config = tiny_run(training=MERGING)
    store = MemoryBlobs()
    owned = [(0, 2), (1, 3)]
    trainers = [Trainer(config, stream) for stream in streams(2)]
    spec = genesis_start(make_genesis(config, store))
    for number in range(2):
        reader = StartReader(config, store, spec)
        updates = []
        for trainer, own in zip(trainers, owned, strict=True):
            carry = dict.fromkeys(own, "carry") if number else {}
            start = RoundStart(
                round=number + 2,
                global_step=number * H,
                psi=reader.psi(),
                shards=reader.starts(),
                owned=own,
                masters=carry,
                residual="advance" if number else "keep",
                accepted_update=number + 1 if number else None,
            )
            trainer.load_start(start)
            trainer.train(H)
            updates.append(publish(trainer, store, reader.row_tensor))
        tokens = H * config.training.batch_tokens
        parts = []
        for part in range(psi_layout(config).num_parts):
            pieces = [
                PieceOfCut(peer=peer_of(place), data=store.read(update.psi[part].blob), weight=tokens)
                for place, update in enumerate(updates)
            ]
            parts.append(store.put(aggregate_part(config, part, store.read(spec.parts[part]), pieces)))
        rows = {piece.index: ((piece.blob, tokens),) for update in updates for piece in update.experts}
        step = (number + 1) * H
        spec = msgspec.structs.replace(
            spec,
            round=RoundNumber(number + 2),
            global_step=step,
            parts=tuple(parts),
            shards=tuple(rows[shard] for shard in range(config.num_shards)),
            merge_alpha=0.0,
        )
        lists = merge_lists(config, StartReader(config, store, spec).row_tensor)
        spec = msgspec.structs.replace(
            spec, merge_alpha=0.3 * (1 - step / 30), merge_lists=encode_lists(lists), receivers=(True,) * 4
        )
    reader = StartReader(config, store, spec)
    by_hand = reader.psi() | {name: values for _, tensors in reader.starts() for name, values in tensors.items()}

    in_the_lab = after_rounds(Spes(config, MemoryBlobs(), streams(2)))

    assert in_the_lab.keys() == by_hand.keys()
    assert all(in_the_lab[name].tobytes() == by_hand[name].tobytes() for name in by_hand)


def test_blobs_that_the_state_no_longer_names_are_deleted():
    config, store = tiny_run(training=MERGING), MemoryBlobs()
    swarm = Spes(config, store, streams(2))
    swarm.round(H)
    num_blobs = len(store.ids())
    swarm.round(H)
    assert len(store.ids()) == num_blobs == psi_layout(config).num_parts + config.num_shards


def test_a_joined_stream_gives_what_its_streams_would_give():
    rows = np.concatenate([stream.next_batch(2, 16) for stream in streams(3)])
    assert np.array_equal(joined(streams(3)).next_batch(6, 16), rows)
    with pytest.raises(ValueError, match="5 sequences from 3 streams"):
        joined(streams(3)).next_batch(5, 16)


def test_one_peer_alone_is_centralised_training_whatever_the_method():
    centralised = after_rounds(Alone(PLAIN, streams(1)))
    assert largest_difference(centralised, after_rounds(Replicas(PLAIN, streams(1)))) < 1e-6
    assert largest_difference(centralised, after_rounds(Spes(PLAIN, MemoryBlobs(), streams(1)))) < 1e-6


def test_a_centralised_step_sees_the_batches_of_all_peers():
    together = PLAIN.model_copy(update={"training": NO_MERGE.model_copy(update={"batch_sequences": 4})})
    of_one_stream = after_rounds(Alone(together, [joined(streams(2))]))
    assert largest_difference(after_rounds(Alone(PLAIN, streams(2))), of_one_stream) == 0
    assert largest_difference(after_rounds(Alone(PLAIN, streams(1))), of_one_stream) > 1e-4


def test_averaging_everything_is_spes_in_which_all_peers_own_all_shards():
    by_replicas = after_rounds(Replicas(PLAIN, streams(2)))
    by_spes = after_rounds(Spes(PLAIN, MemoryBlobs(), streams(2), owners_per_shard=2))
    assert largest_difference(by_replicas, by_spes) < 1e-6
    assert largest_difference(by_replicas, after_rounds(Spes(PLAIN, MemoryBlobs(), streams(2)))) > 1e-4


def test_nesterov_without_momentum_at_rate_one_is_the_mean():
    still = with_outer_step(PLAIN, OuterConfig(rule="nesterov", learning_rate=1, momentum=0))
    mean = after_rounds(Spes(PLAIN, MemoryBlobs(), streams(2)))
    assert largest_difference(mean, after_rounds(Spes(still, MemoryBlobs(), streams(2)))) == 0
    everything = after_rounds(Replicas(PLAIN, streams(2)))
    assert largest_difference(everything, after_rounds(Replicas(still, streams(2)))) == 0


def test_pairs_that_only_average_are_spes_among_two():
    plain_mean = NoLoCoConfig(momentum=0, learning_rate=1, attraction=1)
    pairs = after_rounds(Pairs(PLAIN, streams(2), 1, plain_mean))
    assert largest_difference(pairs, after_rounds(Spes(PLAIN, MemoryBlobs(), streams(2)))) < 1e-6


def test_what_pairs_give_is_the_mean_of_all_replicas():
    swarm = Pairs(PLAIN, streams(4), 1, NoLoCoConfig())
    psi = after_rounds(swarm)
    layout = psi_layout(PLAIN)
    replicas = [unflatten(layout, replica.slow) for replica in swarm._replicas]
    for name in replicas[0]:
        values = np.stack([replica[name] for replica in replicas])
        np.testing.assert_allclose(psi[name], values.mean(axis=0), rtol=1e-6, atol=1e-8)
    assert any(not np.array_equal(replicas[0][name], replicas[2][name]) for name in replicas[0])


def test_each_method_is_what_its_name_says():
    outer = OuterConfig(rule="nesterov", learning_rate=0.5, momentum=0.6)
    run = tiny_run(training=MERGING)
    documents = tuple(tiny_documents())
    texts = DealtTexts(peers=(documents,) * 2, held_out=documents)
    found = {}
    for method in get_args(Method):
        experiment = Experiment(method=method, num_peers=2, outer=outer, run=run)
        swarm = make_swarm(experiment, run, MemoryBlobs(), texts)
        config = swarm.rounds.config if isinstance(swarm, Spes) else swarm._config
        found[method] = type(swarm), config.training.outer == outer, config.merge_alpha(0, H) > 0
    assert found == {
        "centralised": (Alone, False, True),  # which has nothing to merge
        "spes": (Spes, False, True),
        "spes-no-merge": (Spes, False, False),
        "spes-nesterov": (Spes, True, True),
        "fedavg": (Replicas, False, True),
        "diloco": (Replicas, True, True),
        "noloco": (Pairs, False, True),
    }


@pytest.mark.parametrize(
    ("owners_per_shard", "expected"), [(1, [(0,), (1,), (2,), (0,)]), (2, [(0, 1), (1, 2), (0, 2), (0, 1)])]
)
def test_shards_go_round_the_peers(owners_per_shard, expected):
    assert list(owners_of_shards(4, 3, owners_per_shard).values()) == expected
