"""One peer's training: load the agreed start, make H inner steps on the shared modules and the own experts, hand out
what changed. No files, processes or network: the node's trainer process is a shell around this class, and tests and
the baseline use it as it is.

A round of a peer that owns shards 0 and 3, in outline:

    trainer.load_start(RoundStart(round=7, global_step=240, psi=psi, shards=starts, owned=(0, 3)))
    result = trainer.train(40)
    delta = trainer.delta_psi()             # trained - start, fp32, by name
    values = trainer.trained(0)             # a shard's trained values
    trainer.published(PendingUpdate(...))   # what the codecs left over, for the rounds to come
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from spes_p2p.config import FrozenFormat, MomentsFormat, RunConfig
from spes_p2p.model.heap import give_all_holes_back
from spes_p2p.model.shards import shard_experts, shard_tensor_names
from spes_p2p.model.transformer import Transformer
from spes_p2p.training.arrays import F32, Tensors
from spes_p2p.training.data import TokenStream
from spes_p2p.training.engine import Engine
from spes_p2p.training.evaluate import Evaluation, evaluate
from spes_p2p.training.layout import psi_layout, unflatten
from spes_p2p.training.losses import owned_count_scale
from spes_p2p.training.optim import NamedAdamW
from spes_p2p.training.out_of_memory import give_back, is_out_of_memory, memory_error
from spes_p2p.training.own_work import MasterRule, OwnWork, PendingUpdate, ResidualRule, carried_master
from spes_p2p.training.plan import StepPlan, smaller, whole_batch
from spes_p2p.training.schedule import learning_rate
from spes_p2p.training.tokenizer import ByteTokenizer, Tokenizer

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStart:
    """Everything a round of training starts from."""

    round: int
    """The round to train in."""
    base: bytes = b""
    """Hash of the certificate that made this start."""
    global_step: int
    psi: Mapping[str, F32]
    """Read tensor by tensor, now and again for the delta: it must stay as it is until the next start."""
    shards: Iterable[tuple[int, Tensors]]
    """(shard, its agreed start) of every shard of the run, in any order; read once, one at a time."""
    owned: Sequence[int]
    """Shards that this peer owns in this round."""
    masters: Mapping[int, MasterRule] = field(default_factory=dict)
    """Rule of an owned shard; `start` where it is missing."""
    residual: ResidualRule = "keep"
    accepted_update: int | None = None
    """Round of this peer's update that the certificate accepted: the one that `carry` and `advance` speak of."""
    kept_parts: Sequence[int] = ()
    """Parts of psi that the certificate kept at their previous value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One inner step, for whoever watches."""

    local_step: int
    """Steps of this round made so far."""
    global_step: int
    loss: float
    """Cross-entropy in nats per token; not finite if the step was skipped for that."""
    gradient_norm: float | None
    """Before clipping; None: the step was skipped."""
    learning_rate: float
    """Of the experts; psi's is `psi_lr_ratio` times this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What one call of `train` did."""

    num_steps: int
    num_skipped: int
    """Steps left out because loss or gradient was not finite."""
    tokens: int
    mean_loss: float
    """Mean cross-entropy of the steps made, nats per token; NaN without steps."""
    seconds: float
    finite: bool
    """False: weights are not finite, so the update must be withheld; the next start does not use them."""


class Trainer:
    """Holds the engine (model, optimizer with its moments, own shards' masters), own work and the data position."""

    def __init__(
        self,
        config: RunConfig,
        stream: TokenStream,
        *,
        device: str = "cpu",
        frozen_format: FrozenFormat = "fp32",
        moments: MomentsFormat = "fp32",
        tokenizer: Tokenizer | None = None,
        plan: StepPlan | None = None,
        engine: Engine | None = None,
    ) -> None:
        """`plan`: how steps are cut, to begin with; None: not at all. Where memory runs out the trainer goes over to
        smaller plans by itself, and keeps to them. `engine`: a fresh one, instead of one of that device and formats.
        """
        self.config = config
        self.stream = stream
        self.tokenizer = tokenizer or ByteTokenizer()
        self.engine = engine or Engine(config, device=device, frozen_format=frozen_format, moments=moments)
        self.work = OwnWork(config)
        self.owned: tuple[int, ...] = ()
        self.round = -1
        self.global_step = 0
        self.local_step = 0
        self.base = b""
        """Hash of the certificate that the loaded start comes from."""
        self.finite = True
        self.plan = plan or whole_batch(config.training, self.engine.num_ranks)
        self._notices: list[str] = []
        self._device = self.engine.device
        self._psi_start: Mapping[str, F32] = {}

    @property
    def model(self) -> Transformer:
        """The engine's."""
        return self.engine.model

    @property
    def optimizer(self) -> NamedAdamW:
        """The engine's."""
        return self.engine.optimizer

    # ------------------------------------------------------------------------------------------------ start of a round

    def load_start(self, start: RoundStart) -> None:
        """Set psi, all experts, the own masters and the residual for a round.

        For the start that the trainer already has (after a restart from its checkpoint) masters and residual stay as
        they are: the rules were applied before the checkpoint. Raises ValueError if a shard of the run is missing
        or a tensor does not fit; the trainer must then not train.
        """
        again = (start.round, start.base) == (self.round, self.base) and self.finite
        self._psi_start = {}
        kept_owned = set(self.owned) & set(start.owned)
        remainders = {shard: self.work.remainder(start.accepted_update, shard) for shard in start.owned}
        self._set_owned(start.owned)
        if not self.finite:
            self.engine.forget_moments()
        seen: set[int] = set()
        for shard, agreed in start.shards:
            seen.add(shard)
            rule: MasterRule = start.masters.get(shard, "start") if self.finite else "start"
            if shard in kept_owned and (again or rule == "keep"):
                continue
            remainder = remainders.get(shard) if shard in kept_owned and rule == "carry" else None
            self.engine.load(agreed if remainder is None else carried_master(agreed, remainder))
        if missing := set(range(self.config.num_shards)) - seen:
            raise ValueError(f"the start lacks shard {min(missing)}")
        if not again:
            self.work.settle(start.residual, start.accepted_update, start.kept_parts)
        self.engine.load(start.psi)
        self._psi_start = start.psi
        self.round, self.global_step, self.local_step = start.round, start.global_step, 0
        self.base = start.base
        self.finite = True
        give_all_holes_back()

    def adopt(self, owned: Sequence[int], round_number: int, base: bytes, global_step: int, finite: bool) -> None:
        """Take over the bookkeeping of a checkpoint, before its tensors are loaded; `load_start` must follow."""
        self._set_owned(owned)
        self.round, self.base, self.global_step, self.finite = round_number, base, global_step, finite

    def _set_owned(self, shards: Sequence[int]) -> None:
        self.owned = tuple(sorted(shards))
        n = self.config.experts_per_shard
        self.engine.set_owned([expert for shard in self.owned for expert in shard_experts(shard, n)])

    # -------------------------------------------------------------------------------------------------------- training

    def train(
        self,
        num_inner_steps: int,
        should_stop: Callable[[], bool] = lambda: False,
        on_step: Callable[[StepReport], None] = lambda report: None,
    ) -> TrainResult:
        """Make inner steps until the number is reached or `should_stop` says so, asked before each step.

        A step that runs out of memory is made again, of the same tokens, in smaller pieces. Raises MachineError if
        that does not help, ValueError before the first `load_start`.
        """
        if not self._psi_start:
            raise ValueError("no start is loaded")
        began = time.monotonic()
        losses: list[float] = []
        num_skipped = 0
        for _ in range(num_inner_steps):
            if should_stop():
                break
            report = self._inner_step()
            if report.gradient_norm is None:
                num_skipped += 1
            else:
                losses.append(report.loss)
            on_step(report)
        self.finite = self.engine.weights_are_finite()
        give_all_holes_back()  # what comes next, publishing, has blocks of other sizes
        return TrainResult(
            num_steps=len(losses),
            num_skipped=num_skipped,
            tokens=len(losses) * self.config.training.batch_tokens,
            mean_loss=float(np.mean(losses)) if losses else float("nan"),
            seconds=time.monotonic() - began,
            finite=self.finite,
        )

    def _inner_step(self) -> StepReport:
        training = self.config.training
        step = self.global_step + self.local_step
        rate = learning_rate(training, step)
        batch_BT1 = self.stream.next_batch(training.batch_sequences, training.sequence_length)
        tokens_BT1 = torch.from_numpy(batch_BT1).to(self._device)

        scale_M = self._count_scale(step)
        losses = self._fitted(lambda plan: self.engine.add_gradients(tokens_BT1, plan, scale_M))
        gradient_norm = self._update(rate) if losses.finite else None
        self.engine.drop_gradients()

        self.local_step += 1
        return StepReport(
            local_step=self.local_step,
            global_step=step,
            loss=losses.cross_entropy,
            gradient_norm=gradient_norm,
            learning_rate=rate,
        )

    def _update(self, rate: float) -> float | None:
        """Let the optimizer use the gradients. Raises MachineError if there is no memory for its state: activations
        are gone by then, so that smaller micro-batches would not help."""
        try:
            return self.engine.step(rate)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise memory_error("the optimizer's state", error) from error

    def _fitted(self, attempt: Callable[[StepPlan], Result]) -> Result:
        """What `attempt` returns under the present plan, or under the first smaller one that fits into memory."""
        while True:
            try:
                return attempt(self.plan)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                plan = smaller(self.plan)
                if plan is None:
                    length = self.config.training.sequence_length
                    raise memory_error(f"one sequence of {length} tokens", error) from error
                reason = str(error).partition("\n")[0]
            # only here, where the exception and with it the frames of the attempt are gone, can its memory be freed
            self.engine.drop_gradients()
            give_back(self._device)
            self._notices.append(f"out of memory with {self.plan}; going on with {plan} ({reason})")
            self.plan = plan

    def take_notices(self) -> tuple[str, ...]:
        """What the user should hear of that happened since the last call: changes of the plan."""
        notices, self._notices = tuple(self._notices), []
        return notices

    def _count_scale(self, step: int) -> torch.Tensor | None:
        training = self.config.training
        if not training.decayed_balance:
            return None
        owned_M = torch.zeros(self.config.model.num_experts, dtype=torch.bool, device=self._device)
        for shard in self.owned:
            owned_M[list(shard_experts(shard, self.config.experts_per_shard))] = True
        return owned_count_scale(owned_M, step, training.total_steps)

    # ------------------------------------------------------------------------------------------- what comes out of it

    def delta_psi(self) -> Tensors:
        """Trained minus start of the shared modules, fp32, by name."""
        return {name: self._delta(name) for name in self._psi_start}

    def flat_delta_psi(self) -> F32:
        """The same in psi's flat order (training/layout.py), made tensor by tensor: [values of psi]."""
        layout = psi_layout(self.config)
        flat = np.empty(layout.num_values, dtype=np.float32)
        for name, values in unflatten(layout, flat).items():
            self._delta(name, values)
        return flat

    def _delta(self, name: str, out: F32 | None = None) -> F32:
        trained = self.engine.host_weight(name)
        return np.subtract(trained, self._psi_start[name], out=out, dtype=np.float32)

    def trained(self, shard: int) -> Tensors:
        """Values of an owned shard as they are now: fp32 copies, by name. Raises ValueError for a shard of others."""
        if shard not in self.owned:
            raise ValueError(f"shard {shard} is not owned here")
        return self.engine.weights(shard_tensor_names(self.config.model, self.config.experts_per_shard, shard))

    def published(self, update: PendingUpdate) -> None:
        """Note what the codecs left over of this round's update."""
        self.work.published(self.round, update)

    def evaluate(self, documents: Sequence[bytes], max_bytes: int | None = None) -> Evaluation:
        """Held-out loss of the weights as they are now; right after `load_start`, of the agreed state (with the own
        masters, which differ from it by less than a rounding)."""
        training = self.config.training

        def attempt(plan: StepPlan) -> Evaluation:
            num_sequences = plan.micro_sequences * self.engine.num_ranks
            return evaluate(self.engine, documents, self.tokenizer, training.sequence_length, num_sequences, max_bytes)

        return self._fitted(attempt)
