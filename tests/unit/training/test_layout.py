"""psi as one flat vector, cut into parts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_p2p.config import ModelConfig, OuterConfig, ProtocolConfig, RunConfig, TrainingConfig
from spes_p2p.errors import SchemaError
from spes_p2p.model.shards import num_psi_values, psi_shapes
from spes_p2p.training.layout import (
    PartedTensors,
    PartState,
    first_state,
    flatten,
    part_from_bytes,
    part_to_bytes,
    psi_layout,
    unflatten,
)

MODEL = ModelConfig(width=16, num_layers=2, num_heads=2, num_kv_heads=2, num_experts=4, expert_width=8, vocab_size=37)


def config(parts: int, outer: OuterConfig | None = None) -> RunConfig:
    training = TrainingConfig(outer=outer or OuterConfig())
    return RunConfig(model=MODEL, protocol=ProtocolConfig(parts=parts), training=training)


def numbered_psi() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(1)
    return {name: generator.standard_normal(shape, dtype=np.float32) for name, shape in psi_shapes(MODEL).items()}


@settings(deadline=None)
@given(parts=st.integers(1, 500))
def test_parts_cover_psi_begin_at_blocks_and_are_as_equal_as_that_allows(parts: int) -> None:
    layout = psi_layout(config(parts))
    num_blocks = -(-num_psi_values(MODEL) // 256)
    assert layout.num_parts == min(parts, num_blocks)
    assert layout.bounds[0] == 0
    assert layout.bounds[-1] == layout.num_values == num_psi_values(MODEL)
    assert all(start % 256 == 0 for start in layout.bounds[:-1])
    blocks = [-(-layout.part_values(part) // 256) for part in range(layout.num_parts)]
    assert max(blocks) - min(blocks) <= 1
    assert min(blocks) >= 1


def test_the_flat_vector_has_the_tensors_sorted_by_name() -> None:
    psi = numbered_psi()
    flat = flatten(psi_layout(config(8)), psi)
    np.testing.assert_array_equal(flat, np.concatenate([psi[name].reshape(-1) for name in sorted(psi)]))


def test_dictionary_order_changes_no_bit() -> None:
    psi = numbered_psi()
    layout = psi_layout(config(8))
    backwards = dict(reversed(psi.items()))
    assert flatten(layout, backwards).tobytes() == flatten(layout, psi).tobytes()


def test_unflatten_undoes_flatten() -> None:
    psi = numbered_psi()
    layout = psi_layout(config(8))
    again = unflatten(layout, flatten(layout, psi))
    assert again.keys() == psi.keys()
    for name, tensor in psi.items():
        np.testing.assert_array_equal(again[name], tensor)


def test_parts_as_bytes_are_the_fp32_values() -> None:
    layout = psi_layout(config(3))
    flat = flatten(layout, numbered_psi())
    data = [part_to_bytes(PartState(psi=flat[layout.part_slice(part)])) for part in range(3)]
    assert b"".join(data) == flat.tobytes()
    assert [len(part) for part in data] == [layout.part_size_bytes(part) for part in range(3)]
    state = part_from_bytes(layout, 1, data[1])
    np.testing.assert_array_equal(state.psi, flat[layout.part_slice(1)])
    assert state.momentum is None


def test_momentum_lies_behind_psi_and_begins_as_zeros() -> None:
    layout = psi_layout(config(3, OuterConfig(rule="nesterov")))
    psi = flatten(layout, numbered_psi())[layout.part_slice(2)]
    first = part_to_bytes(first_state(layout, psi))
    assert first == psi.tobytes() + bytes(psi.nbytes)
    assert len(first) == layout.part_size_bytes(2) == 2 * psi_layout(config(3)).part_size_bytes(2)
    later = part_from_bytes(layout, 2, part_to_bytes(PartState(psi=psi, momentum=-psi)))
    assert later.momentum is not None
    np.testing.assert_array_equal(later.psi, psi)
    np.testing.assert_array_equal(later.momentum, -psi)


def test_a_part_without_momentum_is_refused_where_the_run_has_some_and_the_other_way_round() -> None:
    plain, heavy = psi_layout(config(3)), psi_layout(config(3, OuterConfig(rule="nesterov")))
    with pytest.raises(SchemaError, match="part 0"):
        part_from_bytes(heavy, 0, bytes(plain.part_size_bytes(0)))
    with pytest.raises(SchemaError, match="part 0"):
        part_from_bytes(plain, 0, bytes(heavy.part_size_bytes(0)))


def test_other_names_dtypes_shapes_and_sizes_are_refused() -> None:
    layout = psi_layout(config(3))
    psi = numbered_psi()
    with pytest.raises(SchemaError):
        flatten(layout, {**psi, "more": psi["norm.weight"]})
    with pytest.raises(SchemaError):
        flatten(layout, {**psi, "norm.weight": psi["norm.weight"].astype(np.float64)})
    with pytest.raises(SchemaError):
        flatten(layout, {**psi, "norm.weight": psi["norm.weight"][:1]})
    with pytest.raises(SchemaError):
        unflatten(layout, np.zeros(layout.num_values - 1, dtype=np.float32))
    with pytest.raises(SchemaError):
        part_from_bytes(layout, 0, bytes(layout.part_size_bytes(0) + 4))
    with pytest.raises(IndexError):
        layout.part_slice(3)


@pytest.mark.parametrize("parts", [1, 3, 64])
def test_tensors_are_read_from_the_parts_wherever_these_are_cut(parts: int) -> None:
    layout, psi = psi_layout(config(parts)), numbered_psi()
    flat = flatten(layout, psi)
    parted = PartedTensors(layout, [flat[layout.part_slice(part)] for part in range(layout.num_parts)])
    assert list(parted) == sorted(psi)
    for name, values in psi.items():
        np.testing.assert_array_equal(parted[name], values)


def test_a_tensor_within_one_part_is_not_copied() -> None:
    layout = psi_layout(config(1))
    flat = flatten(layout, numbered_psi())
    assert np.shares_memory(PartedTensors(layout, [flat])["embed.weight"], flat)
