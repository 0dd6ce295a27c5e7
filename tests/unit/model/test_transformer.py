import numpy as np
import pytest
import torch

from spes_p2p.model.init import initial_psi, initial_shard
from spes_p2p.model.transformer import Transformer, to_numpy
from spes_p2p.testing.training import TINY_MODEL


def tiny_model(frozen_format="fp32") -> Transformer:
    model = Transformer.build(TINY_MODEL, frozen_format)
    model.load(initial_psi(TINY_MODEL, 0))
    model.load(initial_shard(TINY_MODEL, 4, 0, 0))
    return model


def tokens(length: int = 12) -> torch.Tensor:
    return torch.randint(0, 256, (2, length), generator=torch.Generator().manual_seed(3))


def test_logits_and_routings_have_their_shapes():
    logits_BTV, routings = tiny_model()(tokens())
    assert logits_BTV.shape == (2, 12, 256)
    assert [tuple(routing.experts_TK.shape) for routing in routings] == [(24, 2), (24, 2)]


def test_ownership_does_not_change_what_the_model_says():
    model = tiny_model()
    before, _ = model(tokens())
    model.set_owned((0, 2))
    after, _ = model(tokens())
    torch.testing.assert_close(before, after, rtol=1e-5, atol=1e-6)


def test_a_token_sees_nothing_after_it():
    model = tiny_model()
    changed = tokens()
    changed[:, 8:] = (changed[:, 8:] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens())[0], model(changed)[0]
    torch.testing.assert_close(before[:, :8], after[:, :8], rtol=1e-5, atol=1e-6)


def test_length_may_change_between_calls():
    model = tiny_model()
    with torch.no_grad():
        long, short = model(tokens(12))[0], model(tokens(12)[:, :5])[0]
    torch.testing.assert_close(long[:, :5], short, rtol=1e-5, atol=1e-6)


def test_a_new_model_is_zero_and_wholly_frozen():
    model = Transformer.build(TINY_MODEL)
    assert all(not tensor.any() for tensor in model.tensors().values())
    assert model.owned() == {}


def test_loaded_values_come_out_again():
    psi, shard = initial_psi(TINY_MODEL, 0), initial_shard(TINY_MODEL, 4, 0, 0)
    model = tiny_model()
    model.set_owned((1,))
    held = {name: to_numpy(tensor) for name, tensor in model.tensors().items()}
    assert all(np.array_equal(held[name], values) for name, values in (psi | shard).items())


def test_loading_leaves_the_given_arrays_alone():
    psi = initial_psi(TINY_MODEL, 0)
    model = Transformer.build(TINY_MODEL)
    model.load(psi)
    with torch.no_grad():
        model.head.weight.add_(1)
    assert np.array_equal(psi["head.weight"], initial_psi(TINY_MODEL, 0)["head.weight"])


def test_read_only_arrays_can_be_loaded():
    psi = initial_psi(TINY_MODEL, 0)
    psi["head.weight"].setflags(write=False)
    Transformer.build(TINY_MODEL).load(psi)


@pytest.mark.parametrize(("name", "shape"), [("layers.0.experts.9.up", (12, 16)), ("head.weight", (16, 256))])
def test_a_tensor_that_does_not_fit_changes_nothing(name, shape):
    model = tiny_model()
    with pytest.raises(ValueError, match="no tensor"):
        model.load({"norm.weight": np.zeros(16, np.float32), name: np.zeros(shape, np.float32)})
    assert model.norm.weight.sum().item() == 16


def test_an_expert_that_the_model_lacks_cannot_be_owned():
    with pytest.raises(ValueError, match="no expert 4 in a model of 4"):
        tiny_model().set_owned((1, 4))
