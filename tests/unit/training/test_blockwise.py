import pytest
import torch

from spes_p2p.training import blockwise
from spes_p2p.training.blockwise import BLOCK_VALUES, DITHER_STEPS, NEAREST, dither, dither_sequence

CPU = torch.device("cpu")


def packed_mean(values, offset=NEAREST):
    codes, scales = torch.empty(values.numel(), dtype=torch.int8), torch.empty(values.numel() // BLOCK_VALUES)
    blockwise.encode_mean(values, codes, scales, offset, torch.empty_like(values))
    return codes, scales


def packed_square(values, offset=NEAREST):
    codes, scales = torch.empty(values.numel(), dtype=torch.int8), torch.empty(values.numel() // BLOCK_VALUES)
    blockwise.encode_square(values, codes, scales, offset, torch.empty_like(values))
    return codes, scales


def mean_values(codes, scales):
    out = torch.empty(codes.numel())
    blockwise.decode_mean(codes, scales, out, torch.empty_like(out))
    return out


def square_values(codes, scales):
    out = torch.empty(codes.numel())
    blockwise.decode_square(codes, scales, out)
    return out


def seeded_values(num_values=16 * BLOCK_VALUES):
    """Over about ten decades, as gradients are."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(num_values, generator=generator) * torch.exp(3 * torch.randn(num_values, generator=generator))


@pytest.mark.parametrize("scale", [1.0, 0.1, 3.7e-5, 1e-12, 1e-27])
@pytest.mark.parametrize("offset", [NEAREST, 0.0, 0.9997])
def test_every_code_comes_back_from_its_value(scale, offset):
    codes = torch.arange(-127, 129).clamp(max=127).to(torch.int8)
    assert torch.equal(packed_mean(mean_values(codes, torch.tensor([scale])))[0], codes)
    codes = torch.arange(-128, 128).to(torch.int8)
    assert torch.equal(packed_square(square_values(codes, torch.tensor([scale])))[0], codes)
    # the largest value of a block keeps its code, and with it the scale, however the others are rounded
    assert packed_mean(mean_values(codes[1:].repeat(2)[:256], torch.tensor([scale])), offset)[1] == torch.tensor(scale)
    assert packed_square(square_values(codes, torch.tensor([scale])), offset)[1] == torch.tensor(scale)


def test_the_largest_value_of_a_block_is_exact():
    values = seeded_values()
    largest = values.abs().view(-1, BLOCK_VALUES).amax(1)
    decoded = mean_values(*packed_mean(values))
    assert torch.equal(decoded.abs().view(-1, BLOCK_VALUES).amax(1), largest)
    assert torch.equal(square_values(*packed_square(values.abs())).view(-1, BLOCK_VALUES).amax(1), largest)


def test_values_of_a_hundredth_of_the_largest_are_within_seven_percent():
    values = seeded_values()
    ratio = (values.abs().view(-1, BLOCK_VALUES) / values.abs().view(-1, BLOCK_VALUES).amax(1, keepdim=True)).flatten()
    large = ratio >= 0.01
    mean_error = (mean_values(*packed_mean(values)) / values - 1).abs()
    square_error = (square_values(*packed_square(values.abs())) / values.abs() - 1).abs()
    assert mean_error[large].max() < 0.07
    assert square_error[large].max() < 0.03


def test_a_second_moment_never_becomes_zero_beside_a_larger_one():
    values = torch.full((BLOCK_VALUES,), 1e-30)
    values[7] = 1.0
    for offset in (NEAREST, 0.0):
        decoded = square_values(*packed_square(values, offset))
        assert decoded.min() == pytest.approx(256.0**-4)
        assert decoded[7] == 1.0


def test_a_block_of_zeros_is_exact():
    zeros = torch.zeros(2 * BLOCK_VALUES)
    assert torch.equal(mean_values(*packed_mean(zeros)), zeros)
    assert torch.equal(square_values(*packed_square(zeros)), zeros)


def test_dither_keeps_a_slow_average_moving():
    # Every step moves 3 % towards one half: less than half a code, so that the nearest code would hold it for ever.
    def after(rounding):
        values = torch.full((BLOCK_VALUES,), 1e-4)
        values[0] = 1.0
        packed = packed_square(values)
        for step in range(600):
            values = square_values(*packed)
            values[1:] += 0.03 * (5e-5 - values[1:])
            packed = packed_square(values, rounding(step))
        return square_values(*packed)[1:]

    sequence = dither_sequence(CPU)
    assert after(lambda step: NEAREST).mean() == pytest.approx(1e-4, rel=0.15)
    assert after(lambda step: dither(sequence, step)).mean() == pytest.approx(5e-5, rel=0.15)


def test_dither_is_even_over_the_steps_and_stays_below_one():
    sequence = dither_sequence(CPU)
    assert sequence.min() >= 0
    assert sequence.max() < 1
    seen = torch.stack([dither(sequence, step) for step in range(100)])
    assert (seen.mean(0) - 0.5).abs().max() < 0.02
    assert torch.equal(dither(sequence, DITHER_STEPS + 5), dither(sequence, 5))
