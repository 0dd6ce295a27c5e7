"""Whether this process computes agreed values as all others do; run at start, before anything is signed.

A process that flushes denormals to zero, or whose numpy rounds otherwise, would publish other bits than its peers and
see its work refused every round. `golden.json` holds inputs and results of every agreed rule, as hex of little-endian
arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from spes_p2p.config import OuterConfig
from spes_p2p.errors import MachineError
from spes_p2p.ids import PeerId
from spes_p2p.training.aggregate import Contribution, RobustRule, owners_mean, part_result
from spes_p2p.training.codecs import (
    bf16_to_f32,
    decode_psi_piece,
    dequantise,
    encode_psi_piece,
    f32_to_bf16,
    quantise,
)
from spes_p2p.training.layout import PartState
from spes_p2p.training.merge import merge_tensor
from spes_p2p.training.outer import nesterov_step

GOLDEN_FILE = Path(__file__).with_name("golden.json")

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]


class HexArray(msgspec.Struct, frozen=True):
    """A one- or two-dimensional array."""

    dtype: str
    """As numpy writes it, little-endian."""
    shape: tuple[int, ...]
    data: str
    """Hex of the bytes in memory order."""

    def array(self) -> npt.NDArray[Any]:
        """The array, read-only."""
        return np.frombuffer(bytes.fromhex(self.data), dtype=np.dtype(self.dtype)).reshape(self.shape)


class GoldenCase(msgspec.Struct, frozen=True):
    """Inputs and results of one rule."""

    rule: str
    inputs: dict[str, HexArray]
    results: dict[str, HexArray]


def golden_cases() -> tuple[GoldenCase, ...]:
    """All golden vectors of this version."""
    return msgspec.json.decode(GOLDEN_FILE.read_bytes(), type=tuple[GoldenCase, ...])


def self_test() -> None:
    """Raise MachineError if this process, in this thread, would not compute the bits that its peers compute."""
    if sys.byteorder != "little":
        raise MachineError("this machine is big-endian, which spes-p2p does not support")
    if flushes_denormals():
        raise MachineError(
            "this process flushes denormal numbers to zero, so its results would differ from all other peers'; "
            "a library loaded before switched the processor to that mode (often one built with -ffast-math)"
        )
    for case in golden_cases():
        computed = compute(case)
        for name, expected in case.results.items():
            if computed[name].tobytes() != bytes.fromhex(expected.data):
                raise MachineError(
                    f"numpy {np.__version__} on this machine computes '{case.rule}' with other bits than the run's "
                    f"other peers ({name}); install numpy from PyPI and try again"
                )


def flushes_denormals() -> bool:
    """Whether this thread takes denormal inputs for zero or makes zero of denormal results."""
    for dtype in (np.float32, np.float64):
        smallest_normal = np.full(16, np.finfo(dtype).smallest_normal, dtype=dtype)
        smallest = np.full(16, np.finfo(dtype).smallest_subnormal, dtype=dtype)
        halves = np.multiply(smallest_normal, dtype(0.5), dtype=dtype)
        kept = np.multiply(smallest, dtype(1), dtype=dtype)
        if not (halves.view(f"u{halves.itemsize}").all() and kept.view(f"u{kept.itemsize}").all()):
            return True
    wide = np.full(16, np.finfo(np.float32).smallest_subnormal, dtype=np.float32).astype(np.float64)
    return not wide.astype(np.float32).view(np.uint32).all()


def compute(case: GoldenCase) -> Arrays:
    """Results of a case by the code of this process."""
    return RULES[case.rule]({name: value.array() for name, value in case.inputs.items()})


def _int8(inputs: Arrays) -> Arrays:
    scale, q = quantise(inputs["values"])
    return {"scale": scale, "q": q, "decoded": dequantise(scale, q)}


def _error_feedback(inputs: Arrays) -> Arrays:
    data, left_over = encode_psi_piece("int8", inputs["delta"], inputs["residual"])
    return {"left_over": left_over, "decoded": decode_psi_piece("int8", inputs["delta"].size, data)}


def _bf16(inputs: Arrays) -> Arrays:
    bits = f32_to_bf16(inputs["values"])
    return {"bits": bits, "decoded": bf16_to_f32(bits)}


def _part(inputs: Arrays, rule: RobustRule) -> Arrays:
    rows = zip(inputs["deltas"], inputs["weights"], inputs["clips"], strict=True)
    contributions = [
        Contribution(peer=PeerId(bytes([number])), delta=delta, weight=float(weight), clip=float(clip))
        for number, (delta, weight, clip) in enumerate(rows)
    ]
    return {"result": part_result(PartState(psi=inputs["previous"]), contributions, rule, OuterConfig()).psi}


def _nesterov(inputs: Arrays) -> Arrays:
    learning_rate, momentum = (float(value) for value in inputs["settings"])
    outer = OuterConfig(rule="nesterov", learning_rate=learning_rate, momentum=momentum)
    psi, new_momentum = nesterov_step(inputs["psi"], inputs["momentum"], inputs["mean"], outer)
    return {"psi": psi, "new momentum": new_momentum}


def _owners(inputs: Arrays) -> Arrays:
    return {"value": owners_mean(list(inputs["values"]), [int(count) for count in inputs["tokens"]])}


def _merge(inputs: Arrays) -> Arrays:
    return {"merged": merge_tensor(inputs["own"], list(inputs["donors"]), float(inputs["strength"][0]))}


RULES: Mapping[str, Callable[[Arrays], Arrays]] = MappingProxyType(
    {
        "int8": _int8,
        "error feedback": _error_feedback,
        "bf16": _bf16,
        "clipped mean": lambda inputs: _part(inputs, "clipped"),
        "trimmed mean": lambda inputs: _part(inputs, "trimmed"),
        "owners": _owners,
        "merge": _merge,
        "nesterov": _nesterov,
    }
)
