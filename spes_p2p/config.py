"""Configuration of a run, shared by all its peers and hashed into the run id, and of one machine's node.

`RunConfig` is what an operator writes (TOML) and the run manifest carries (canonical JSON). `NodeConfig` is how one
volunteer takes part. Both are frozen and complete: nothing reads flags or the environment after they are made.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from spes_p2p.errors import ConfigError

PROTOCOL_VERSION = 1
MAX_PARTS = MAX_SHARDS = 4096
"""What a message can list (protocol/messages.py)."""

FrozenFormat: TypeAlias = Literal["fp32", "bf16", "int8", "int4"]
"""How a node keeps the experts of others in memory: 4, 2, 1 or 0.53 bytes per value (model/frozen.py)."""
MomentsFormat: TypeAlias = Literal["fp32", "int8"]
"""How the optimizer holds its two moments of each value that is trained."""


class Frozen(BaseModel):
    """Base of all configuration: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @classmethod
    def from_toml(cls, path: Path) -> Self:
        """Read a TOML file. Raises ConfigError with the file, the key and what is wrong."""
        try:
            return cls.model_validate(tomllib.loads(path.read_text()))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not TOML: {error}") from error
        except ValidationError as error:
            raise ConfigError(f"{path}: {first_problem(error)}") from error


class ModelConfig(Frozen):
    """Shape of the mixture-of-experts transformer (OLMoE/Qwen3-MoE family)."""

    vocab_size: PositiveInt = 256
    width: PositiveInt = 96
    num_layers: PositiveInt = 3
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt = 4
    head_dim: PositiveInt | None = None
    """Default: width / num_heads."""
    num_experts: PositiveInt = 8
    top_k: PositiveInt = 2
    expert_width: PositiveInt = 96
    rope_theta: float = Field(default=10_000.0, gt=0)
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    qk_norm: Literal["head", "full"] = "head"
    norm_topk_prob: bool = True

    @model_validator(mode="after")
    def _shapes_fit(self) -> Self:
        if self.head_dim is None and self.width % self.num_heads:
            raise ValueError(f"width {self.width} is not a multiple of num_heads {self.num_heads}")
        if self.resolved_head_dim % 2:
            raise ValueError(f"head_dim {self.resolved_head_dim} must be even for rotary positions")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} is more than num_experts {self.num_experts}")
        return self

    @property
    def resolved_head_dim(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.width // self.num_heads


class MergeConfig(Frozen):
    """Expert-merge warm-up (SPES): alpha_t = alpha * max(0, 1 - t / warmup_steps), every `interval_steps`."""

    alpha: float = Field(default=0.1, ge=0, lt=1)
    top_k: PositiveInt = 4
    warmup_steps: int = Field(default=12_500, ge=0)
    interval_steps: PositiveInt = 300


def nesterov_bound(momentum: float) -> float:
    """Learning rate below which `nesterov` is stable: 2 (1 + mu) / (1 + 2 mu), which is 2 at mu = 0, 4/3 near mu = 1.

    Of the linear model in which a round of training takes psi, at distance x from the optimum along one direction, the
    share h of the way: mean delta = -h x, h at most 1. The rule is then the recursion

        x_{r+1} = (1 + mu) s x_r - mu s x_{r-1},    s = 1 - eta h

    (Nesterov's method on a quadratic; Lessard, Recht, Packard, arXiv 1408.3595, section 4.5). Its roots lie inside the
    unit circle if |mu s| < 1 and |(1 + mu) s| < 1 + mu s, that is, if s < 1 and s > -1 / (1 + 2 mu). So 0 < eta h <
    2 (1 + mu) / (1 + 2 mu), and h = 1, training that arrives within the round, is the case that needs the smallest eta.
    """
    return 2 * (1 + momentum) / (1 + 2 * momentum)


class OuterConfig(Frozen):
    """The outer step: how the mean of the peers' deltas becomes the next psi (training/outer.py).

    `mean`: it is added. `nesterov` (DiLoCo, arXiv 2311.08105): momentum over rounds, its state certified with psi.
    """

    rule: Literal["mean", "nesterov"] = "mean"
    learning_rate: float = 0.7
    """eta; of `nesterov` alone."""
    momentum: float = 0.9
    """mu; of `nesterov` alone."""

    @model_validator(mode="after")
    def _stable(self) -> Self:
        if self.rule == "mean":
            if (self.learning_rate, self.momentum) != (0.7, 0.9):
                raise ValueError('learning_rate and momentum mean nothing to the rule "mean": leave them out')
            return self
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum {self.momentum} must be at least 0 and below 1")
        bound = nesterov_bound(self.momentum)
        if not 0 < self.learning_rate < bound:
            raise ValueError(
                f"learning_rate {self.learning_rate} is not stable with momentum {self.momentum}: it must be above 0 "
                f"and below 2 (1 + momentum) / (1 + 2 momentum) = {bound:.3f}"
            )
        return self

    @property
    def has_momentum(self) -> bool:
        """Whether the rule has a state: one more value for each of psi."""
        return self.rule == "nesterov"


class TrainingConfig(Frozen):
    """Data shape, optimizer, schedule and losses; the same for all peers."""

    sequence_length: PositiveInt = 128
    batch_sequences: PositiveInt = 8
    """Sequences per peer and inner step."""
    inner_steps: tuple[tuple[int, int], ...] = ((0, 100), (45_000, 50))
    """H as a list of (from global step, H), ascending, the first from 0."""
    total_steps: PositiveInt = 50_000
    warmup_steps: int = Field(default=2_000, ge=0)
    peak_lr: float = Field(default=5e-4, gt=0)
    psi_lr_ratio: float = Field(default=1.0, gt=0)
    """Rate of the shared modules in units of the experts'. A mean of n noisy updates of Adam is shorter than one: rates
    that grow with the root of the batch (Malladi and others, arXiv 2205.10287) would make it sqrt(n)."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    z_loss: float = Field(default=1e-4, ge=0)
    balance_loss: float = Field(default=0.01, ge=0)
    router_z_loss: float = Field(default=0.001, ge=0)
    decayed_balance: bool = False
    merge: MergeConfig = MergeConfig()
    outer: OuterConfig = OuterConfig()

    @model_validator(mode="after")
    def _steps_ascend(self) -> Self:
        starts = [start for start, _ in self.inner_steps]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError("inner_steps must be [from step, H] pairs, ascending, the first from step 0")
        if any(steps < 1 for _, steps in self.inner_steps):
            raise ValueError("inner_steps: every H must be at least 1")
        return self

    @property
    def batch_tokens(self) -> int:
        """Tokens per peer and inner step."""
        return self.batch_sequences * self.sequence_length

    def inner_steps_at(self, global_step: int) -> int:
        """H of the round that begins at this global step."""
        return next(steps for start, steps in reversed(self.inner_steps) if start <= global_step)


class CodecConfig(Frozen):
    """How updates travel. `fp32` is for tests and for the comparison with the plain reference."""

    expert: Literal["bf16", "fp32"] = "bf16"
    psi: Literal["int8", "fp32"] = "int8"


class ProtocolConfig(Frozen):
    """The round protocol's parameters (docs/protocol.md, section 3). Times are milliseconds."""

    round_max_ms: PositiveInt = 1_800_000
    round_min_ms: int | None = Field(default=None, ge=0)
    """Default: half of round_max_ms."""
    train_grace_ms: PositiveInt = 60_000
    min_rate_bytes_per_s: PositiveInt = 1_000_000
    view_timeout_base_ms: PositiveInt = 5_000
    view_timeout_step_ms: int = Field(default=2_500, ge=0)
    view_timeout_max_ms: PositiveInt = 60_000
    resend_ms: PositiveInt = 3_000
    parts: int = Field(default=64, ge=1, le=MAX_PARTS)
    replicas: PositiveInt | None = None
    """Equal digests needed per part. Default: f + 1 in open runs, min(f + 1, 2) in invited ones."""
    lease_rounds: PositiveInt = 2
    norm_bound: float = Field(default=3.0, gt=1)
    mean_weight: Literal["tokens", "equal"] | None = None
    """Default: equal in open runs, tokens otherwise."""
    robust: Literal["mean", "clipped", "trimmed"] = "mean"
    clip_ratio: float = Field(default=2.0, gt=0)
    """`clipped`: longest psi delta, in median norms of the cut."""
    patience_ms: PositiveInt = 60_000
    max_tentative: PositiveInt = 3
    admission: Literal["open", "invited", "allowlist"] = "invited"
    admission_rounds: PositiveInt | None = None
    """Accepted updates before a member may vote. Default: 10 in open runs, 1 otherwise."""
    auto_recover: bool | None = None
    """Default: on unless the run is open."""

    @property
    def round_min(self) -> int:
        """No cut earlier than this after the round opened, unless all live members are in (ms)."""
        return self.round_max_ms // 2 if self.round_min_ms is None else self.round_min_ms

    @property
    def rounds_to_qualify(self) -> int:
        """Accepted updates before a member qualifies as a voter."""
        if self.admission_rounds is not None:
            return self.admission_rounds
        return 10 if self.admission == "open" else 1

    @property
    def recovers_by_itself(self) -> bool:
        """Whether a holder of the recovery key makes a new epoch without being asked."""
        return self.auto_recover if self.auto_recover is not None else self.admission != "open"

    @property
    def weighted_by_tokens(self) -> bool:
        """Whether means are weighted by tokens."""
        if self.mean_weight is not None:
            return self.mean_weight == "tokens"
        return self.admission != "open"

    def view_timeout(self, view: int) -> int:
        """Time-out of a view (ms)."""
        return min(self.view_timeout_base_ms + self.view_timeout_step_ms * view, self.view_timeout_max_ms)


class RunConfig(Frozen):
    """Everything the peers of a run must agree on before it begins."""

    name: str = Field(default="run", min_length=1, max_length=64)
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seeds the genesis weights."""
    experts_per_shard: PositiveInt = 1
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    codecs: CodecConfig = CodecConfig()
    protocol: ProtocolConfig = ProtocolConfig()
    held_out_bytes: int = Field(default=128 * 1024, ge=1024, le=1024 * 1024)

    @model_validator(mode="after")
    def _shards_fit(self) -> Self:
        if self.model.num_experts % self.experts_per_shard:
            raise ValueError(
                f"num_experts {self.model.num_experts} is not a multiple of experts_per_shard {self.experts_per_shard}"
            )
        if self.num_shards > MAX_SHARDS:
            raise ValueError(f"{self.num_shards} shards; {MAX_SHARDS} are the most: raise experts_per_shard")
        return self

    def merge_alpha(self, step_before: int, step: int) -> float:
        """alpha_t of the merge after a round between these global steps: alpha * (1 - t / T_w) if it crossed a multiple
        of T_i while t < T_w, else 0. A single expert has nobody to merge with."""
        merge = self.training.merge
        crossed = step // merge.interval_steps > step_before // merge.interval_steps
        if not crossed or step >= merge.warmup_steps or self.model.num_experts < 2:
            return 0.0
        return merge.alpha * (1.0 - step / merge.warmup_steps)

    @property
    def num_shards(self) -> int:
        """S = M / n."""
        return self.model.num_experts // self.experts_per_shard

    def to_json(self) -> bytes:
        """Canonical bytes: every field, sorted keys, no spaces. Hashed into the run id.

        `training.outer` and `training.psi_lr_ratio` are left out when they are the default, so that the ids of runs
        made before there was a choice stay what they are.
        """
        defaults = {"outer": OuterConfig(), "psi_lr_ratio": 1.0}
        left_out = {name for name, default in defaults.items() if getattr(self.training, name) == default}
        fields = self.model_dump(mode="json", exclude={"training": left_out})
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> RunConfig:
        """Inverse of `to_json`. Raises ConfigError if malformed or not canonical."""
        try:
            config = cls.model_validate_json(data)
        except ValidationError as error:
            raise ConfigError(f"run configuration: {first_problem(error)}") from error
        if config.to_json() != data:
            raise ConfigError("run configuration: not in canonical form")
        return config


class Limits(Frozen):
    """What this machine's owner lets a node take; None or False: no such limit (node/budgets, docs/volunteer.md)."""

    upload: PositiveInt | None = None
    """Bytes per second."""
    download: PositiveInt | None = None
    monthly: PositiveInt | None = None
    """Bytes a calendar month, both directions together."""
    hours: str | None = None
    """Such as `22:00-07:00`, local time."""
    gpu_share: float | None = Field(default=None, gt=0, le=1)
    """Of the trainer's time, on whatever device."""
    gpu_power: PositiveInt | None = None
    """Watts, of each GPU."""
    idle_only: bool = False
    pause_on_battery: bool = False

    @property
    def time_share(self) -> float:
        """Of its time, that the trainer works: all of it without a limit."""
        return self.gpu_share or 1.0


class NodeConfig(Frozen):
    """How one machine takes part in one run."""

    data_dir: Path
    """Identity, blobs, journal and ledger of this node."""
    device: str = "cpu"
    """`cpu`, `cuda:0`, ..."""
    more_devices: tuple[str, ...] = ()
    """Further devices of the same kind that the model is spread over (docs/several-gpus.md)."""
    data: tuple[Path, ...] = ()
    """Training text; empty: the installed Python's own sources and documentation."""
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    bootstrap: tuple[str, ...] = ()
    invite_seed: bytes | None = None
    """Secret half of the run's invite key, from the link."""
    capacity: PositiveInt | None = None
    """Most shards to own. Default: all."""
    threads: PositiveInt = 1
    frozen_format: FrozenFormat = "fp32"
    moments: MomentsFormat = "fp32"
    """How the optimizer holds its moments of what this node trains."""
    memory_bytes: PositiveInt | None = None
    """Most memory for training: of the GPU, or of the trainer process on a CPU. Default: what there is."""
    compile: bool = False
    """Compile the attention layers with torch.compile. GPUs only."""
    limits: Limits | None = None
    """None: those that the data folder remembers."""
    stop_after_round: int | None = None
    """Take part until this round is certified, then only serve until told to end."""

    @property
    def num_ranks(self) -> int:
        """Devices that train one model together."""
        return 1 + len(self.more_devices)


_PLAIN = {
    "byte_size": "must be a size such as 10GB",
    "byte_size_unit": "must be a size such as 10GB",
    "extra_forbidden": "there is no such key",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
}


def first_problem(error: ValidationError) -> str:
    """One line of pydantic's report: the key and what is wrong with it."""
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    message = _PLAIN.get(problem["type"], problem["msg"].removeprefix("Value error, "))
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{where}: {message}{more}" if where else f"{message}{more}"
