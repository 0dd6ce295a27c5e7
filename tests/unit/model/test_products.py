"""Matrix products agree with plain ones, whichever library computes them."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spes_p2p.model import products
from spes_p2p.model.products import Linear, add_product_, padded, product

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]  # untyped in torch
    reason="PyTorch without oneDNN",
)


@pytest.fixture(params=[False, pytest.param(True, marks=needs_onednn)], ids=["mm", "onednn"], autouse=True)
def onednn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether oneDNN computes, whatever the machine; products of any size are worth it, and tiles are small."""
    monkeypatch.setattr(products, "_onednn_is_faster", lambda: request.param)
    monkeypatch.setattr(products, "SMALLEST", 1)
    monkeypatch.setattr(products, "TILE_BYTES", 1 << 10)
    return bool(request.param)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def sides(layout: str) -> tuple[Tensor, Tensor]:
    left, right = random(40, 24), random(24, 56)
    match layout:
        case "transposed":
            return left.T.contiguous().T, right.T.contiguous().T
        case "with gaps":
            return random(40, 30)[:, :24], random(24, 60)[:, 2:58]
        case _:
            return left, right


@pytest.mark.parametrize("layout", ["plain", "transposed", "with gaps"])
def test_a_product_is_that_of_mm(layout: str) -> None:
    left, right = sides(layout)
    torch.testing.assert_close(product(left, right), left @ right)
    out = torch.full((40, 56), torch.nan)
    assert product(left, right, out=out) is out
    torch.testing.assert_close(out, left @ right)


@pytest.mark.parametrize("layout", ["plain", "transposed"])
def test_rows_of_padding_are_not_written(layout: str) -> None:
    left, right = sides(layout)
    out = torch.full((40, 56), 7.0)
    product(left, right, out=out[:33])
    torch.testing.assert_close(out[:33], (left @ right)[:33])
    assert (out[33:] == 7.0).all()


@pytest.mark.parametrize("layout", ["plain", "transposed", "with gaps"])
def test_a_product_is_added(layout: str) -> None:
    left, right = sides(layout)
    into = random(40, 56)
    wanted = into + left @ right
    torch.testing.assert_close(add_product_(into, left, right), wanted)


def test_a_product_of_a_narrow_type_is_added_to_a_wide_one() -> None:
    left, right, into = random(40, 24).bfloat16(), random(24, 56).bfloat16(), random(40, 56)
    wanted = into + left @ right
    torch.testing.assert_close(add_product_(into, left, right), wanted)


def test_linear_has_the_gradients_of_plain_linear() -> None:
    layer, x = Linear(24, 56), random(2, 20, 24)
    grads: list[tuple[Tensor, Tensor, Tensor]] = []
    for compute in (layer, lambda x: F.linear(x, layer.weight)):
        layer.weight.grad, own = None, x.clone().requires_grad_()
        y = compute(own)
        (y * random(2, 20, 56)).sum().backward()
        assert own.grad is not None and layer.weight.grad is not None
        grads.append((y.detach(), own.grad, layer.weight.grad))
    for ours, plain in zip(*grads, strict=True):
        torch.testing.assert_close(ours, plain)


def test_sizes_are_rounded_up_for_onednn_alone(onednn: bool) -> None:
    like = random(1, 1)
    assert [padded(size, like) for size in (0, 1, 32, 33, 3001)] == (
        [0, 32, 32, 64, 3072] if onednn else [0, 1, 32, 33, 3001]
    )
    assert padded(33, like.double()) == 33


def test_without_memory_for_code_a_product_is_that_of_mm(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Tensor) -> Tensor:
        raise RuntimeError("could not create a primitive")

    monkeypatch.setattr(products, "_onednn", fails)
    left, right = sides("plain")
    torch.testing.assert_close(product(left, right), left @ right)


@needs_onednn
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts what is meant on Linux alone")
@pytest.mark.parametrize("room_bytes", [products.ROOM_BYTES // 2, 2 * products.ROOM_BYTES])
def test_onednn_is_asked_only_while_it_has_room_to_work_in(
    onednn: bool, monkeypatch: pytest.MonkeyPatch, room_bytes: int
) -> None:
    """It ends the process where a few kilobytes are refused to it."""
    by_onednn: list[Tensor] = []
    monkeypatch.setattr(products, "_onednn", lambda left, right: by_onednn.append(left) or left @ right)
    left, right = random(40, 50), random(50, 60)
    with room_for(room_bytes):
        result = product(left, right)
    assert torch.equal(result, left @ right)
    assert len(by_onednn) == (onednn and room_bytes > products.ROOM_BYTES)


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """So much more this process may take."""
    status = Path("/proc/self/status").read_text()
    held = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.parametrize("added_bytes", [1, 2 * 56 * 7, 1 << 20])
def test_a_narrow_product_is_added_in_pieces(monkeypatch: pytest.MonkeyPatch, added_bytes: int) -> None:
    monkeypatch.setattr(products, "ADDED_BYTES", added_bytes)
    left, right = (side.bfloat16() for side in sides("transposed"))
    into = random(40, 56)
    wanted = into + (left @ right)
    assert add_product_(into, left, right) is into
    torch.testing.assert_close(into, wanted)
