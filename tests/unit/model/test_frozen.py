import pytest
import torch

from spes_p2p.model.frozen import frozen_matrix

FORMATS = ["fp32", "bf16", "int8", "int4"]
SHAPES = [(12, 16), (16, 12), (3, 128), (3, 5), (1, 1)]


def values_of(shape) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def stored(frozen_format, values):
    matrix = frozen_matrix(frozen_format, tuple(values.shape))
    matrix.store_(values)
    return matrix


@pytest.mark.parametrize("frozen_format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_format_holds_it_holds_again(frozen_format, shape):
    once = stored(frozen_format, values_of(shape)).decoded()
    assert torch.equal(stored(frozen_format, once).decoded(), once)


WORST = {"fp32": 0, "bf16": 2**-8, "int8": 0.5 / 127, "int4": 0.5 / 7}
BYTES = {"fp32": 4, "bf16": 2, "int8": 1 + 4 / 512, "int4": 0.5 + 2 / 64}


@pytest.mark.parametrize(("frozen_format", "worst"), WORST.items())
@pytest.mark.parametrize("shape", SHAPES)
def test_the_error_is_half_a_step_of_the_rows_largest_value(frozen_format, worst, shape):
    values = values_of(shape)
    error = (stored(frozen_format, values).decoded() - values).abs()
    # fp16 scales are off by up to 2**-11
    assert (error <= (worst * 1.01 + 2**-11 * bool(worst)) * values.abs().amax(dim=1, keepdim=True)).all()


@pytest.mark.parametrize(("frozen_format", "num_bytes"), BYTES.items())
def test_bytes_per_value(frozen_format, num_bytes):
    matrix = frozen_matrix(frozen_format, (512, 512))
    assert sum(buffer.nbytes for buffer in matrix.buffers()) == 512 * 512 * num_bytes


def test_int8_values_by_hand():
    # scale 1: halves go to the even neighbour
    decoded = stored("int8", torch.tensor([[127.0, 0.5, 1.5, -2.5, 0.49]])).decoded()
    assert decoded.tolist() == [[127.0, 0.0, 2.0, -2.0, 0.0]]


def test_int4_values_by_hand():
    matrix = stored("int4", torch.tensor([[7.0, -0.5, 1.5], [-14.0, 1.0, 3.0]]))
    assert matrix.decoded().tolist() == [[7.0, 0.0, 2.0], [-14.0, 0.0, 4.0]]
    # q of the first half (7, 0, 2) in the low nibbles, of the second (-7, 0, 2) in the high ones
    assert matrix.values.tolist() == [7 - 7 * 16, 0, 2 + 2 * 16]


@pytest.mark.parametrize("frozen_format", ["int8", "int4"])
def test_integers_are_the_nearest_by_the_scale_that_is_stored(frozen_format):
    values = values_of((256, 256))
    matrix = stored(frozen_format, values)
    blocks = values.view(len(matrix.scales), -1)
    error = (matrix.decoded().view_as(blocks) - blocks).abs() / matrix.scales.float()
    # but for the largest ones, for which a scale that was rounded down has no integer
    assert error[blocks.abs() < 0.9 * blocks.abs().amax(dim=1, keepdim=True)].max() <= 0.5 * (1 + 1e-5)


def test_int4_values_beyond_a_scale_that_was_rounded_down_keep_their_sign():
    # fp16 has nothing between 6e-8, which becomes the scale, and twice that
    step = 2.0**-24
    values = torch.tensor([[-7.0, -5.0, 5.0, 7.0]]) * 1.4 * step
    assert stored("int4", values).decoded().tolist() == [[-7 * step, -7 * step, 7 * step, 7 * step]]


def test_int4_has_a_scale_for_every_64_values_of_a_row():
    values = torch.cat((torch.full((2, 64), 0.001), torch.full((2, 64), 100.0)), dim=1)
    torch.testing.assert_close(stored("int4", values).decoded(), values, rtol=1e-3, atol=0)


@pytest.mark.parametrize("frozen_format", FORMATS)
def test_zeros_stay_zeros(frozen_format):
    assert not stored(frozen_format, torch.zeros(3, 8)).decoded().any()


@pytest.mark.parametrize("frozen_format", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_noticed(frozen_format, bad):
    values = values_of((2, 8))
    values[1, 3] = bad
    decoded = stored(frozen_format, values).decoded()
    assert decoded[0].isfinite().all()
    assert not decoded[1, 3].isfinite()


@pytest.mark.parametrize("frozen_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_into_a_type_rounds_the_values_once(frozen_format, dtype):
    matrix = stored(frozen_format, values_of((4, 64)))
    scratch = torch.empty(300, dtype=dtype)
    assert torch.equal(matrix.dense(scratch), matrix.decoded().to(dtype))
    assert torch.equal(matrix.decode_(torch.empty(4, 64, dtype=dtype)), matrix.decoded().to(dtype))


@pytest.mark.parametrize("frozen_format", ["fp32", "bf16"])
def test_a_matrix_of_the_right_type_is_read_where_it_lies(frozen_format):
    matrix = stored(frozen_format, values_of((4, 64)))
    assert matrix.dense(torch.empty(256, dtype=matrix.values.dtype)).data_ptr() == matrix.values.data_ptr()


@pytest.mark.parametrize("frozen_format", ["int8", "int4"])
def test_bits_do_not_depend_on_the_number_of_threads(frozen_format):
    values, found = values_of((512, 512)), []
    threads = torch.get_num_threads()
    for number in (1, 2):
        torch.set_num_threads(number)
        found.append(stored(frozen_format, values).decoded())
    torch.set_num_threads(threads)
    assert torch.equal(*found)
