"""A batch in micro-batches has the whole batch's losses and gradients."""

import math

import pytest
import torch

from spes_p2p.model.transformer import Transformer
from spes_p2p.testing.training import genesis_round, tiny_run, tiny_trainer
from spes_p2p.training.gradients import add_gradients
from spes_p2p.training.losses import batch_losses
from spes_p2p.training.plan import StepPlan
from spes_p2p.training.trainer import Trainer

BATCH = 6
TRAINING = tiny_run().training.model_copy(update={"batch_sequences": BATCH, "z_loss": 0.1, "router_z_loss": 0.2})
WITHOUT_BALANCE = TRAINING.model_copy(update={"balance_loss": 0.0})


def started(training=TRAINING, plan=None) -> Trainer:
    config = tiny_run(training=training.model_dump())
    trainer = tiny_trainer(config)
    trainer.plan = plan or trainer.plan
    trainer.load_start(genesis_round(config, (0, 2)))
    return trainer


def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (BATCH, 17), generator=torch.Generator().manual_seed(5))


def gradients(model: Transformer) -> dict[str, torch.Tensor]:
    """Also makes them anew next time."""
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("micro", [6, 4, 1])
def test_token_means_are_of_the_whole_batch(micro, checkpoint):
    model, tokens_BT1 = started().model, tokens()
    logits_BTV, routings = model(tokens_BT1[:, :-1])
    plain = batch_losses(logits_BTV.flatten(0, 1), tokens_BT1[:, 1:].flatten(), routings, WITHOUT_BALANCE)
    plain.total.backward()
    expected = gradients(model)
    plan = StepPlan(micro_sequences=micro, checkpoint=checkpoint)
    got = add_gradients(model, tokens_BT1, WITHOUT_BALANCE, plan, None)
    assert got.total == pytest.approx(plain.total.item(), rel=1e-6)
    assert got.cross_entropy == pytest.approx(plain.cross_entropy.item(), rel=1e-6)
    ours = gradients(model)
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-7)


def test_balance_is_the_mean_of_the_micro_batches_weighted_by_tokens():
    only_balance = TRAINING.model_copy(update={"balance_loss": 1.0, "z_loss": 0.0, "router_z_loss": 0.0})
    model, tokens_BT1 = started().model, tokens()
    parts = [
        add_gradients(model, rows, only_balance, StepPlan(micro_sequences=6), None) for rows in tokens_BT1.split(4)
    ]
    balances = [part.total - part.cross_entropy for part in parts]
    got = add_gradients(model, tokens_BT1, only_balance, StepPlan(micro_sequences=4), None)
    assert got.total - got.cross_entropy == pytest.approx((4 * balances[0] + 2 * balances[1]) / 6, rel=1e-5)
    assert balances[0] != pytest.approx(balances[1], rel=1e-4)


def test_a_micro_batch_whose_loss_is_not_finite_skips_the_whole_step():
    trainer = started(plan=StepPlan(micro_sequences=2))
    forward, calls = trainer.model.losses, []

    def poisoned(*args, **kwargs):
        head, routings = forward(*args, **kwargs)
        calls.append(1)
        return (head._replace(total=head.total * math.nan) if len(calls) == 2 else head), routings

    trainer.model.losses = poisoned
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    result = trainer.train(1)
    assert (result.num_steps, result.num_skipped, len(calls)) == (0, 1, 2)
    assert all(torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True))
    assert trainer.train(1).num_steps == 1


def test_no_gradient_outlives_its_step():
    trainer = started(plan=StepPlan(micro_sequences=4))
    held: list[dict[str, torch.Tensor]] = []
    trainer.train(2, on_step=lambda report: held.append(gradients(trainer.model)))
    assert held == [{}, {}]
