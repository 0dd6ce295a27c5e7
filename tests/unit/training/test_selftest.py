"""The self-test at start, and its golden vectors against the rules written plainly, one Python float at a time.

Python's floats are IEEE doubles and struct rounds once to single, so the plain forms below share nothing with numpy.
"""

import math
import struct
from collections.abc import Iterator
from fractions import Fraction

import msgspec
import pytest
import torch

from spes_p2p.errors import MachineError
from spes_p2p.training import selftest
from spes_p2p.training.selftest import GoldenCase, HexArray, flushes_denormals, golden_cases, self_test

CASES = {case.rule: case for case in golden_cases()}


def single(value: float) -> float:
    """Rounded once to fp32."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def rows(array: HexArray) -> list[list[float]]:
    """Values as Python numbers; a one-dimensional array is one row."""
    flat = array.array().tolist()
    return flat if len(array.shape) == 2 else [flat]


def row(array: HexArray) -> list[float]:
    return rows(array)[0]


def same_bits(computed: list[float], golden: list[float]) -> bool:
    return [struct.pack("<d", value) for value in computed] == [struct.pack("<d", value) for value in golden]


@pytest.fixture
def denormals_flushed() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.fail("this processor cannot flush denormals, so the test cannot show that it is noticed")
    yield
    torch.set_flush_denormal(False)


def test_this_process_computes_what_its_peers_compute() -> None:
    self_test()


def test_every_rule_has_a_golden_vector() -> None:
    assert CASES.keys() == selftest.RULES.keys()


@pytest.mark.usefixtures("denormals_flushed")
def test_a_process_that_flushes_denormals_is_refused() -> None:
    assert flushes_denormals()
    with pytest.raises(MachineError, match="denormal"):
        self_test()


@pytest.mark.parametrize("rule", sorted(CASES))
def test_a_process_that_computes_other_bits_is_refused(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[rule]
    name, result = sorted(case.results.items())[0]
    flipped = f"{int(result.data[:2], 16) ^ 1:02x}{result.data[2:]}"
    other = msgspec.structs.replace(result, data=flipped)
    wrong = GoldenCase(case.rule, case.inputs, {**case.results, name: other})
    monkeypatch.setattr(selftest, "golden_cases", lambda: (wrong,))
    with pytest.raises(MachineError, match=rule):
        self_test()


def plain_int8(values: list[float]) -> tuple[list[float], list[int], list[float]]:
    scales, qs, decoded = [], [], []
    for at in range(0, len(values), 256):
        block = values[at : at + 256]
        scale = single(max(abs(value) for value in block) / 127)
        for value in block:
            q = 0 if scale == 0 else max(-127, min(127, round(Fraction(value / scale))))
            qs.append(q)
            decoded.append(q * scale)
        scales.append(scale)
    return scales, qs, decoded


def test_golden_int8_is_the_rule() -> None:
    case = CASES["int8"]
    scales, qs, decoded = plain_int8(row(case.inputs["values"]))
    assert same_bits(scales, row(case.results["scale"]))
    assert qs == row(case.results["q"])
    assert decoded == row(case.results["decoded"])


def test_golden_error_feedback_is_the_rule() -> None:
    case = CASES["error feedback"]
    wanted = [delta + left for delta, left in zip(row(case.inputs["delta"]), row(case.inputs["residual"]), strict=True)]
    _, _, decoded = plain_int8([single(value) for value in wanted])
    left_over = [single(value - back) for value, back in zip(wanted, decoded, strict=True)]
    assert decoded == row(case.results["decoded"])
    assert left_over == row(case.results["left_over"])


def test_golden_bf16_is_the_rule() -> None:
    case = CASES["bf16"]
    for value, bits in zip(row(case.inputs["values"]), row(case.results["bits"]), strict=True):
        low = struct.unpack("<I", struct.pack("<f", value))[0] >> 16
        neighbours = [struct.unpack("<f", struct.pack("<I", bf16 << 16))[0] for bf16 in (low, low + 1)]
        distance = [abs(Fraction(value) - Fraction(near)) if math.isfinite(near) else math.inf for near in neighbours]
        nearest = low + low % 2 if distance[0] == distance[1] else low + (distance[1] < distance[0])
        assert bits == nearest


def plain_part(case: GoldenCase, num_trimmed: int) -> list[float]:
    weights, clips = row(case.inputs["weights"]), row(case.inputs["clips"])
    result = []
    for at, previous in enumerate(row(case.inputs["previous"])):
        deltas = zip(rows(case.inputs["deltas"]), clips, weights, strict=True)
        terms = [(delta[at] * clip, weight) for delta, clip, weight in deltas]
        if num_trimmed:
            terms = sorted(terms, key=lambda term: term[0])[num_trimmed:-num_trimmed]
        total, weight_total = 0.0, 0.0
        for value, weight in terms:
            total += value * weight
            weight_total += weight
        result.append(single(previous + total / weight_total))
    return result


def test_golden_means_are_the_rules() -> None:
    assert same_bits(plain_part(CASES["clipped mean"], 0), row(CASES["clipped mean"].results["result"]))
    assert same_bits(plain_part(CASES["trimmed mean"], 2), row(CASES["trimmed mean"].results["result"]))


def test_golden_value_of_several_owners_is_the_rule() -> None:
    case = CASES["owners"]
    tokens = [max(1, int(count)) for count in row(case.inputs["tokens"])]
    result = []
    for column in zip(*rows(case.inputs["values"]), strict=True):
        total = 0.0
        for value, count in zip(column, tokens, strict=True):
            total += value * count
        result.append(single(total / sum(tokens)))
    assert same_bits(result, row(case.results["value"]))


def test_golden_merge_is_the_rule() -> None:
    case = CASES["merge"]
    donors, strength = rows(case.inputs["donors"]), row(case.inputs["strength"])[0]
    result = []
    for own, column in zip(row(case.inputs["own"]), zip(*donors, strict=True), strict=True):
        pull = 0.0
        for donor in column:
            pull += donor - own
        result.append(single(own + pull * (strength / len(donors))))
    assert same_bits(result, row(case.results["merged"]))


def test_golden_nesterov_is_the_rule() -> None:
    case = CASES["nesterov"]
    learning_rate, factor = row(case.inputs["settings"])
    rest = (row(case.inputs[name]) for name in ("psi", "momentum", "mean"))
    psis, momenta = [], []
    for psi, momentum, mean in zip(*rest, strict=True):
        new_momentum = momentum * factor + mean
        psis.append(single(psi + (mean + new_momentum * factor) * learning_rate))
        momenta.append(single(new_momentum))
    assert same_bits(psis, row(case.results["psi"]))
    assert same_bits(momenta, row(case.results["new momentum"]))
