"""The one canonical safetensors form."""

import json

import numpy as np
import pytest
import safetensors.numpy

from spes_p2p.errors import SchemaError
from spes_p2p.training.tensorfile import (
    TensorSpec,
    decode_tensors,
    encode_tensors,
    file_size_bytes,
    header_of,
    open_tensors,
)

SPECS = (TensorSpec("b", "F32", (2, 3)), TensorSpec("a", "I8", (5,)))
ARRAYS = (np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(-2, 3, dtype=np.int8))


def test_what_is_encoded_is_decoded() -> None:
    tensors = decode_tensors(SPECS, encode_tensors(SPECS, ARRAYS))
    assert [*tensors] == ["b", "a"]
    assert tensors["b"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors["a"].tolist() == [-2, -1, 0, 1, 2]


def test_safetensors_reads_the_form() -> None:
    loaded = safetensors.numpy.load(encode_tensors(SPECS, ARRAYS))
    np.testing.assert_array_equal(loaded["b"], ARRAYS[0])
    np.testing.assert_array_equal(loaded["a"], ARRAYS[1])


def test_file_size_is_known_before_the_file() -> None:
    assert file_size_bytes(SPECS) == len(encode_tensors(SPECS, ARRAYS))
    assert len(header_of(SPECS)) % 8 == 0


def test_memory_order_of_an_array_changes_no_byte() -> None:
    turned = np.asfortranarray(ARRAYS[0])
    assert encode_tensors(SPECS, (turned, ARRAYS[1])) == encode_tensors(SPECS, ARRAYS)


def test_decoded_tensors_are_read_only() -> None:
    tensors = decode_tensors(SPECS, bytearray(encode_tensors(SPECS, ARRAYS)))
    with pytest.raises(ValueError, match="read-only"):
        tensors["a"][0] = 1


def test_another_order_of_the_same_tensors_is_refused() -> None:
    other = safetensors.numpy.save({"b": ARRAYS[0], "a": ARRAYS[1]}, metadata={"x": "y"})
    with pytest.raises(SchemaError):
        decode_tensors(SPECS, other)
    with pytest.raises(SchemaError):
        decode_tensors(SPECS, encode_tensors(SPECS[::-1], ARRAYS[::-1]))


@pytest.mark.parametrize("change", ["truncated", "longer", "empty", "name", "dtype", "shape"])
def test_any_other_form_is_refused(change: str) -> None:
    good = encode_tensors(SPECS, ARRAYS)
    other = {
        "truncated": good[:-1],
        "longer": good + b"\0",
        "empty": b"",
        "name": good.replace(b'"b"', b'"c"'),
        "dtype": good.replace(b'"F32"', b'"I32"'),
        "shape": good.replace(b"[2,3]", b"[3,2]"),
    }[change]
    with pytest.raises(SchemaError):
        decode_tensors(SPECS, other)


def test_a_header_with_spaces_is_another_form() -> None:
    text = json.dumps({"a": {"dtype": "I8", "shape": [5], "data_offsets": [0, 5]}}).encode()
    padded = text + b" " * (-len(text) % 8)
    data = len(padded).to_bytes(8, "little") + padded + bytes(5)
    assert safetensors.numpy.load(data)["a"].shape == (5,)
    with pytest.raises(SchemaError):
        decode_tensors(SPECS[1:], data)


@pytest.mark.parametrize("wrong", [np.zeros((2, 3)), np.zeros((3, 2), dtype=np.float32), np.zeros((2, 3), dtype=">f4")])
def test_an_array_that_does_not_fit_is_not_encoded(wrong: np.ndarray) -> None:
    with pytest.raises(SchemaError, match="b: "):
        encode_tensors(SPECS, (wrong, ARRAYS[1]))


def test_a_file_of_any_form_is_opened_with_its_metadata_and_without_a_copy() -> None:
    data = safetensors.numpy.save({"b": ARRAYS[0], "a": ARRAYS[1]}, metadata={"note": "x"})
    tensors, metadata = open_tensors(data)
    assert metadata == {"note": "x"}
    np.testing.assert_array_equal(tensors["b"], ARRAYS[0])
    np.testing.assert_array_equal(tensors["a"], ARRAYS[1])
    assert np.shares_memory(tensors["b"], np.frombuffer(data, np.uint8))


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: data[:20]])
def test_a_file_of_another_length_than_its_header_says_is_not_opened(change) -> None:
    with pytest.raises(SchemaError):
        open_tensors(change(encode_tensors(SPECS, ARRAYS)))


def test_tensors_that_overlap_are_not_opened() -> None:
    data = encode_tensors(SPECS, ARRAYS).replace(b"[24,29]", b"[23,28]")
    with pytest.raises(SchemaError, match="a does not lie"):
        open_tensors(data)
