"""The trainer on a GPU: `make test-gpu`."""

from __future__ import annotations

import pytest
import torch

from spes_p2p.config import ModelConfig, RunConfig, TrainingConfig
from spes_p2p.digests import digest
from spes_p2p.errors import MachineError
from spes_p2p.model.head import head_losses
from spes_p2p.testing.training import genesis_round, tiny_documents, tiny_run
from spes_p2p.training.data import TokenStream
from spes_p2p.training.out_of_memory import limit_memory
from spes_p2p.training.plan import StepPlan
from spes_p2p.training.tokenizer import ByteTokenizer
from spes_p2p.training.trainer import Trainer

pytestmark = pytest.mark.gpu

CONFIG = tiny_run(
    model=ModelConfig(width=128, num_layers=3, num_heads=4, num_kv_heads=2, num_experts=8, top_k=2, expert_width=128),
    training=TrainingConfig(sequence_length=128, batch_sequences=8, warmup_steps=4, total_steps=100, peak_lr=3e-3),
    experts_per_shard=2,
)


def started(device: str, config: RunConfig = CONFIG, plan: StepPlan | None = None) -> Trainer:
    stream = TokenStream(tiny_documents(), ByteTokenizer(), digest("gpu", 0))
    trainer = Trainer(config, stream, device=device, plan=plan)
    trainer.load_start(genesis_round(config, (0, 1)))
    return trainer


def losses_of(trainer: Trainer, num_steps: int) -> list[float]:
    losses: list[float] = []
    trainer.train(num_steps, on_step=lambda report: losses.append(report.loss))
    return losses


@pytest.mark.parametrize(
    "plan", [StepPlan(micro_sequences=8), StepPlan(micro_sequences=3), StepPlan(micro_sequences=8, checkpoint=True)]
)
def test_bf16_on_the_gpu_follows_fp32_on_the_cpu(plan: StepPlan) -> None:
    assert losses_of(started("cuda:0", plan=plan), 20) == pytest.approx(losses_of(started("cpu"), 20), rel=2e-2)


def test_evaluation_agrees_with_the_cpu() -> None:
    on_gpu = started("cuda:0").evaluate(tiny_documents()).nats_per_byte
    assert on_gpu == pytest.approx(started("cpu").evaluate(tiny_documents()).nats_per_byte, rel=1e-2)


def test_compiled_attention_gives_the_same_losses_within_bf16() -> None:
    compiled = started("cuda:0")
    compiled.model.compile_attention()
    assert losses_of(compiled, 5) == pytest.approx(losses_of(started("cuda:0"), 5), rel=2e-2)


def test_the_head_never_holds_the_logits_of_all_tokens() -> None:
    num_tokens, width, vocabulary = 16_384, 64, 65_536
    hidden_TD = torch.randn(num_tokens, width, device="cuda", requires_grad=True)
    weight_VD = torch.randn(vocabulary, width, device="cuda", requires_grad=True)
    targets_T = torch.zeros(num_tokens, dtype=torch.int64, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        head_losses(hidden_TD, weight_VD, targets_T, 1e-4).total.backward()
    assert torch.cuda.max_memory_allocated() - before < 4 * num_tokens * vocabulary / 4


def test_a_limit_on_memory_leads_to_smaller_micro_batches_and_the_same_step() -> None:
    """Runs last in its process as far as it can: the limit is lifted again."""
    device = torch.device("cuda:0")
    config = CONFIG.model_copy(
        update={"training": CONFIG.training.model_copy(update={"sequence_length": 1024, "batch_sequences": 16})}
    )
    trainer = started("cuda:0", config)
    torch.cuda.empty_cache()
    limit_memory(device, torch.cuda.memory_reserved() + (256 << 20))
    try:
        losses = losses_of(trainer, 2)
        assert trainer.plan.micro_sequences < 16
        assert trainer.take_notices()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert losses == pytest.approx(losses_of(started("cuda:0", config, trainer.plan), 2), rel=1e-3)


def test_a_limit_beyond_the_gpu_is_refused() -> None:
    with pytest.raises(MachineError, match="the GPU has"):
        limit_memory(torch.device("cuda:0"), 1 << 50)
