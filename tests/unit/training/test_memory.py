"""The memory model against the model's own tensors, and against what autograd saves."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from spes_p2p.config import ModelConfig, NodeConfig, RunConfig, TrainingConfig
from spes_p2p.digests import digest
from spes_p2p.model.head import head_losses
from spes_p2p.model.init import initial_psi, initial_shard
from spes_p2p.model.shards import parse_expert_name, psi_shapes
from spes_p2p.model.transformer import Transformer
from spes_p2p.testing.saved import saved_bytes
from spes_p2p.testing.training import genesis_round, tiny_documents
from spes_p2p.training.data import TokenStream
from spes_p2p.training.kept import layer_bytes
from spes_p2p.training.memory import held_amounts, memory_need
from spes_p2p.training.plan import StepPlan
from spes_p2p.training.tokenizer import ByteTokenizer
from spes_p2p.training.trainer import Trainer

MODEL = ModelConfig(
    vocab_size=320, width=64, num_layers=3, num_heads=4, num_kv_heads=4, num_experts=8, top_k=2, expert_width=72
)
RUN = RunConfig(
    model=MODEL,
    experts_per_shard=2,
    training=TrainingConfig(sequence_length=16, batch_sequences=4, inner_steps=((0, 2),)),
)


def node(**changes: object) -> NodeConfig:
    return NodeConfig.model_validate({"data_dir": Path(), **changes})


@pytest.mark.parametrize("moments", ["fp32", "int8"])
@pytest.mark.parametrize("frozen_format", ["fp32", "bf16", "int8", "int4"])
def test_what_is_held_is_what_the_tensors_take(frozen_format, moments):
    stream = TokenStream(tiny_documents(), ByteTokenizer(), digest("memory"))
    trainer = Trainer(RUN, stream, frozen_format=frozen_format, moments=moments)
    trainer.load_start(genesis_round(RUN, (0, 3)))
    trainer.train(1)
    weights = dict(trainer.model.named_parameters())
    counted = {
        "weights of psi": sum(w.nbytes for name, w in weights.items() if parse_expert_name(name) is None),
        "own experts": sum(w.nbytes for name, w in weights.items() if parse_expert_name(name) is not None),
        "frozen experts": sum(buffer.nbytes for buffer in trainer.model.buffers()),
        "moments": sum(tensor.nbytes for tensor in trainer.optimizer.state_tensors()),
    }
    reckoned = dict(held_amounts(RUN, node(frozen_format=frozen_format, moments=moments), 2))
    reckoned["moments"] = reckoned.pop("moments of psi") + reckoned.pop("moments of own experts")
    assert reckoned == counted


def saved_by_a_layer(config: ModelConfig, tokens_BT: torch.Tensor, checkpoint: bool) -> int:
    model = Transformer.build(config)
    model.load(initial_psi(config, 0))
    model.load(initial_shard(config, config.num_experts, 0, 0))
    model.set_owned((0, 2))

    def kept(num_layers: int) -> int:
        model.layers = model.layers[:num_layers]
        tables = model._rotary(tokens_BT.shape[1], torch.device("cpu"))
        held = (*model.tensors().values(), *tables, tokens_BT)
        return saved_bytes(lambda: model.hidden(tokens_BT, checkpoint_layers=checkpoint), held)

    return kept(3) - kept(2)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("qk_norm", ["head", "full"])
@pytest.mark.parametrize("num_kv_heads", [2, 4])
def test_what_a_layer_keeps_is_what_autograd_saves(num_kv_heads, qk_norm, norm_topk_prob):
    changes = {"num_kv_heads": num_kv_heads, "qk_norm": qk_norm, "norm_topk_prob": norm_topk_prob}
    config = MODEL.model_copy(update=changes)
    tokens_BT = torch.randint(0, config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(3))
    layer = layer_bytes(config, tokens_BT.numel(), on_gpu=False)
    assert layer.attention + layer.routing + layer.experts == saved_by_a_layer(config, tokens_BT, False)


def test_a_checkpointed_layer_keeps_its_input_and_what_the_losses_read():
    tokens_BT = torch.randint(0, 320, (2, 16), generator=torch.Generator().manual_seed(3))
    layer = layer_bytes(MODEL, tokens_BT.numel(), on_gpu=False)
    read_by_losses = tokens_BT.numel() * (4 * (2 * 8 + 2) + 16 * 2)
    assert layer.checkpointed - read_by_losses == saved_by_a_layer(MODEL, tokens_BT, True)


LONG = RUN.model_copy(update={"training": RUN.training.model_copy(update={"sequence_length": 2048})})
"""Activations outweigh the buffers."""
HEAD_PRODUCT = "product for the head's gradient"


def peak(num_owned: int, plan: StepPlan, **changes: object) -> int:
    return memory_need(LONG, node(**changes), num_owned, plan).device.peak_bytes


def test_smaller_plans_and_formats_and_fewer_shards_need_less():
    whole = StepPlan(micro_sequences=4)
    assert peak(2, StepPlan(micro_sequences=2)) < peak(2, whole)
    assert peak(2, StepPlan(micro_sequences=1, checkpoint=True)) < peak(2, StepPlan(micro_sequences=1))
    assert peak(1, whole) < peak(2, whole)
    sizes = [peak(1, whole, frozen_format=name) for name in ("int4", "int8", "bf16", "fp32")]
    assert sizes == sorted(sizes)
    assert peak(2, whole, moments="int8") < peak(2, whole)


def test_a_cpu_has_one_pool_and_a_gpu_leaves_publishing_to_the_host():
    on_cpu, on_gpu = (memory_need(RUN, node(device=name), 2, StepPlan(micro_sequences=4)) for name in ("cpu", "cuda:0"))
    assert on_cpu.host is None
    assert [name for name, _ in on_cpu.device.phases][-3:] == ["load", "publish", "checkpoint"]
    assert on_gpu.host is not None
    assert on_gpu.host.held_bytes == 0
    assert [name for name, _ in on_gpu.host.phases] == ["load", "publish", "checkpoint"]


def test_the_rows_of_a_table_add_up():
    need = memory_need(RUN, node(device="cuda:0"), 2, StepPlan(micro_sequences=4))
    for where, pool in (("device", need.device), ("host", need.host)):
        rows = [(what, size) for place, what, size in need.rows() if place == where]
        assert rows[-1] == ("all", pool.peak_bytes)
        assert sum(size for _, size in rows[:-1]) == pool.peak_bytes


def test_a_rank_holds_its_share_and_what_it_gathers_for_a_while():
    alone, ranks = (
        memory_need(RUN, node(more_devices=more), 2, StepPlan(micro_sequences=2)) for more in ((), ("cpu", "cpu"))
    )
    assert ranks.device.held_bytes == pytest.approx(alone.device.held_bytes / 3, rel=0.02)
    phases = dict(ranks.device.phases)
    ends = 4 * (2 * 320 * 64 + 64)
    layer = amount(phases["loss"], "layers and ends gathered from all ranks") - ends
    trained = 4 * (2 * 64 + 2 * 16 + 4 * 64 * 64 + 8 * 64 + 4 * 3 * 64 * 72)
    assert layer == 3 * (trained + 4 * 4 * 3 * 64 * 72)
    sums = amount(phases["sums of the ends"], "gradients of embedding and head to be summed")
    assert sums == 2 * ends + ends // 3
    gathered = "layers and ends gathered from all ranks"
    assert amount(dict(alone.device.phases)["loss"], gathered) == 0


def test_the_head_under_autocast_takes_what_is_reckoned_of_a_gpu():
    """The same code on a CPU, which widens the product by a whole copy before it adds it; a GPU does not."""
    model = MODEL.model_copy(update={"vocab_size": 4096})
    run = RUN.model_copy(update={"model": model})
    hidden_TD, weight_VD = torch.ones(4 * 16, 64, requires_grad=True), torch.ones(4096, 64, requires_grad=True)
    targets_T = torch.zeros(4 * 16, dtype=torch.int64)

    def losses():
        with torch.autocast("cpu", torch.bfloat16):
            return head_losses(hidden_TD, weight_VD, targets_T, 1e-4)

    need = memory_need(run, node(device="cuda:0"), 0, StepPlan(micro_sequences=4, checkpoint=True))
    loss = dict(need.device.phases)["loss"]
    attention = [math.prod(shape) for name, shape in psi_shapes(model).items() if ".attention." in name and shape[1:]]
    reckoned = sum(amount(loss, what) for what in ("a chunk of logits", "weights in bf16", HEAD_PRODUCT))
    reckoned -= 2 * sum(attention)
    given_out = weight_VD.nbytes + hidden_TD.nbytes
    assert allocated_at_most(losses) == pytest.approx(reckoned + given_out + weight_VD.nbytes, rel=0.02)


def test_a_cpu_adds_to_the_heads_gradient_in_place():
    loss = dict(memory_need(RUN, node(), 0, StepPlan(micro_sequences=4)).device.phases)["loss"]
    assert amount(loss, HEAD_PRODUCT) == 0


def allocated_at_most(work: Callable[[], object]) -> int:
    """Bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    now = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def amount(amounts: tuple[tuple[str, int], ...], what: str) -> int:
    return dict(amounts)[what]


def test_the_first_rank_has_the_row_that_is_left_over():
    """321 rows over two ranks are 161 and 160, as FSDP2 cuts."""
    run = RUN.model_copy(update={"model": MODEL.model_copy(update={"vocab_size": 321})})
    held = dict(held_amounts(run, node(more_devices=("cpu",)), 0))
    rows = [-(-shape[0] // 2) * math.prod(shape[1:]) for shape in psi_shapes(run.model).values()]
    assert held["weights of psi"] == 4 * sum(rows)
    assert 2 * sum(rows) == sum(map(math.prod, psi_shapes(run.model).values())) + 2 * 64  # embedding and head


def test_ranks_share_a_batch():
    plans = [memory_need(RUN, node(more_devices=("cpu",)), 2, StepPlan(micro_sequences=n)) for n in (2, 4)]
    assert plans[0].device.peak_bytes == plans[1].device.peak_bytes
