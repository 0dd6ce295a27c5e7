"""Products in bf16 under autocast, as on a GPU; sums, norms, router, losses and gradients stay fp32."""

import pytest
import torch

from spes_p2p.testing.training import genesis_round, tiny_run, tiny_trainer
from spes_p2p.training import gradients
from spes_p2p.training.gradients import autocast
from spes_p2p.training.plan import StepPlan
from spes_p2p.training.trainer import Trainer

CONFIG = tiny_run()


def started() -> Trainer:
    trainer = tiny_trainer(CONFIG)
    trainer.load_start(genesis_round(CONFIG, (0, 1)))
    return trainer


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "autocast", lambda device: torch.autocast("cpu", torch.bfloat16))


def test_a_cpu_computes_in_fp32():
    with autocast(torch.device("cpu")):
        assert not torch.is_autocast_enabled("cpu")


def test_types_under_autocast():
    model = started().model
    seen: dict[str, torch.dtype] = {}
    layer = model.layers[0]

    def note(name):
        def hook(module, inputs, output):
            seen[f"{name} in"] = inputs[0].dtype
            seen[f"{name} out"] = (output[0] if isinstance(output, tuple) else output).dtype

        return hook

    for name in ("attention_norm", "attention", "moe_norm", "moe", "experts"):
        getattr(layer, name).register_forward_hook(note(name))
    with torch.autocast("cpu", torch.bfloat16):
        hidden_BTD, routings = model.hidden(torch.zeros(1, 8, dtype=torch.int64))
    wide, narrow = torch.float32, torch.bfloat16
    assert seen == {
        "attention_norm in": wide, "attention_norm out": wide,
        "attention in": wide, "attention out": narrow,
        "moe_norm in": wide, "moe_norm out": wide,
        "moe in": wide, "moe out": wide,
        "experts in": narrow, "experts out": narrow,
    }  # fmt: skip
    assert hidden_BTD.dtype == routings[0].logits_TM.dtype == routings[0].probs_TM.dtype == wide


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_training_in_bf16_follows_training_in_fp32(checkpoint, monkeypatch):
    trainer = started()
    trainer.plan = StepPlan(micro_sequences=1, checkpoint=checkpoint)
    losses = []
    trainer.train(8, on_step=lambda report: losses.append(report.loss))
    monkeypatch.undo()
    expected = []
    started().train(8, on_step=lambda report: expected.append(report.loss))
    assert losses == pytest.approx(expected, rel=5e-3)
    assert losses != expected
    assert all(weight.dtype == torch.float32 for weight in trainer.model.parameters())


@pytest.mark.filterwarnings("ignore")  # the compiler touches everything that it traces, deprecated things among it
def test_attention_compiles_as_one_graph_and_says_the_same():
    model = started().model
    tokens_BT = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))
    expected, _ = model.hidden(tokens_BT)
    for layer in model.layers:
        layer.attention.compile(backend="eager", fullgraph=True)
    got, _ = model.hidden(tokens_BT)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    got.sum().backward()
    assert model.layers[0].attention.q_norm.weight.grad is not None
