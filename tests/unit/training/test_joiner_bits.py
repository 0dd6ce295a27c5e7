"""Whoever joins at any round of a warm-up has the bits that everybody else has, from that round's blobs alone.

Four shards: one with two owners, one with one, one whose owner is late every other round, and an orphan. The codecs
round (bf16, int8), so that masters and residuals differ from what is published.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from spes_p2p.config import MergeConfig, ModelConfig, ProtocolConfig, RunConfig, TrainingConfig
from spes_p2p.model.shards import shard_tensor_names
from spes_p2p.model.transformer import to_numpy
from spes_p2p.testing.blobs import MemoryBlobs
from spes_p2p.training.arrays import Tensors
from spes_p2p.training.data import TokenStream, data_key
from spes_p2p.training.lab.rounds import CutUpdate, TrainingRounds, peer_of
from spes_p2p.training.start import StartReader, StartSpec
from spes_p2p.training.tokenizer import ByteTokenizer

CONFIG = RunConfig(
    model=ModelConfig(width=16, num_layers=2, num_heads=2, num_kv_heads=2, num_experts=8, expert_width=12),
    experts_per_shard=2,
    training=TrainingConfig(
        sequence_length=16,
        batch_sequences=2,
        inner_steps=((0, 3),),
        total_steps=50,
        warmup_steps=0,
        peak_lr=3e-3,
        merge=MergeConfig(alpha=0.3, top_k=3, warmup_steps=40, interval_steps=3),
    ),
    protocol=ProtocolConfig(parts=3),
)
OWNERS = {0: (0, 1), 1: (1,), 2: (2,)}
ORPHAN, LATE_SHARD, LATE_PEER = 3, 2, 2
CUTS = {2: {0: 2, 1: 2, 2: 2}, 3: {0: 3, 1: 3}, 4: {0: 4, 1: 4, 2: 3}, 5: {0: 5, 1: 5}, 6: {0: 6, 2: 5}}
"""Round -> peer -> round in which its update in the cut was trained."""


@dataclass(frozen=True)
class RoundSeen:
    """What was there after one round."""

    spec: StartSpec
    before: StartSpec
    blobs: dict[bytes, bytes]
    """Those that the spec names, and no others."""
    held: list[Tensors]
    """All weights of each trainer, right after it loaded the start."""


def stream_of(peer: int) -> TokenStream:
    documents = [f"text {number} of {peer}. ".encode() * 7 for number in range(8)]
    return TokenStream(documents, ByteTokenizer(), data_key(CONFIG.seed, peer_of(peer)))


@pytest.fixture(scope="module")
def seen() -> dict[int, RoundSeen]:
    store = MemoryBlobs()
    rounds = TrainingRounds(CONFIG, store, [stream_of(peer) for peer in range(3)], OWNERS)
    found = {}
    for number, cut in CUTS.items():
        before = rounds.spec
        for peer in range(3):
            rounds.train(peer, 3)
        spec = rounds.certify([CutUpdate(peer=peer, base_round=base) for peer, base in cut.items()])
        named = {*spec.parts, *(blob for row in spec.shards for blob, _ in row)}
        found[number] = RoundSeen(
            spec=spec,
            before=before,
            blobs={blob: bytes(store.read(blob)) for blob in named},
            held=[
                {name: to_numpy(tensor) for name, tensor in trainer.model.tensors().items()}
                for trainer in rounds.trainers
            ],
        )
    return found


def joiner(at: RoundSeen) -> StartReader:
    store = MemoryBlobs()
    for data in at.blobs.values():
        store.put(data)
    return StartReader(CONFIG, store, at.spec)


def bits(tensors: Tensors, names: list[str]) -> list[bytes]:
    return [tensors[name].tobytes() for name in names]


def names_of(shard: int) -> list[str]:
    return list(shard_tensor_names(CONFIG.model, CONFIG.experts_per_shard, shard))


@pytest.mark.parametrize("number", CUTS)
def test_a_joiner_has_the_psi_of_all_others(seen: dict[int, RoundSeen], number: int) -> None:
    psi = joiner(seen[number]).psi()
    for held in seen[number].held:
        assert bits(held, sorted(psi)) == bits(psi, sorted(psi))


@pytest.mark.parametrize("number", CUTS)
def test_a_joiner_has_the_experts_of_all_who_do_not_own_them(seen: dict[int, RoundSeen], number: int) -> None:
    reader = joiner(seen[number])
    assert seen[number].spec.merge_alpha > 0
    for shard in range(CONFIG.num_shards):
        start, names = reader.start(shard), names_of(shard)
        others = [peer for peer in range(3) if peer not in OWNERS.get(shard, ())]
        assert others
        for peer in others:
            assert bits(seen[number].held[peer], names) == bits(start, names)


@pytest.mark.parametrize("number", CUTS)
def test_owners_of_one_shard_start_from_the_same_bits(seen: dict[int, RoundSeen], number: int) -> None:
    held = seen[number].held
    start, names = joiner(seen[number]).start(0), names_of(0)
    for peer in OWNERS[0]:
        if peer in CUTS[number]:
            assert bits(held[peer], names) == bits(start, names)


def test_an_owner_keeps_what_rounding_took_from_its_accepted_update(seen: dict[int, RoundSeen]) -> None:
    for number in (2, 3, 4, 5):
        start = joiner(seen[number]).start(1)
        master = seen[number].held[1]
        assert bits(master, names_of(1)) != bits(start, names_of(1))
        for name in names_of(1):
            np.testing.assert_allclose(master[name], start[name], atol=1e-3)


def test_an_orphan_gives_and_never_moves(seen: dict[int, RoundSeen]) -> None:
    first = seen[2].before.shards[ORPHAN]
    donors: set[int] = set()
    for number in CUTS:
        spec = seen[number].spec
        assert spec.shards[ORPHAN] == first
        assert not spec.receivers[ORPHAN]
        reader = joiner(seen[number])
        assert bits(reader.start(ORPHAN), names_of(ORPHAN)) == bits(reader.row(ORPHAN), names_of(ORPHAN))
        lists = np.frombuffer(spec.merge_lists, np.uint16).reshape(2, 8, 3)
        donors |= {int(k) for k in lists[:, :6].reshape(-1)}
    assert donors & {6, 7}


def test_a_late_owner_receives_in_the_round_that_takes_its_update_and_not_before(seen: dict[int, RoundSeen]) -> None:
    assert [seen[number].spec.receivers[LATE_SHARD] for number in CUTS] == [True, False, True, False, True]
    assert seen[3].spec.shards[LATE_SHARD] == seen[3].before.shards[LATE_SHARD]
    assert seen[4].spec.shards[LATE_SHARD] != seen[4].before.shards[LATE_SHARD]


def test_a_late_owner_keeps_its_master_while_its_row_stands(seen: dict[int, RoundSeen]) -> None:
    start = joiner(seen[3]).start(LATE_SHARD)
    master = seen[3].held[LATE_PEER]
    assert max(float(np.abs(master[name] - start[name]).max()) for name in names_of(LATE_SHARD)) > 3e-3


def test_a_co_owner_that_was_not_in_the_cut_starts_from_the_row_of_the_other(seen: dict[int, RoundSeen]) -> None:
    spec = seen[6].spec
    assert len(seen[5].spec.shards[0]) == 2
    assert len(spec.shards[0]) == 1
    start = joiner(seen[6]).start(0)
    assert bits(seen[6].held[1], names_of(0)) == bits(start, names_of(0))
