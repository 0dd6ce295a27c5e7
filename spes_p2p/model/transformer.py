"""The language model: a pre-norm mixture-of-experts transformer of the OLMoE/Qwen3-MoE family.

The names of its parameters are those of `model.shards`: shared modules by module path, an owned expert's matrices as
`layers.{l}.experts.{j}.{gate|up|down}`. Frozen experts are constants, loaded and read under names of the same form.

B batch, T sequence, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain, product
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spes_p2p.config import FrozenFormat, ModelConfig
from spes_p2p.model.attention import Attention, RMSNorm, rotary_table
from spes_p2p.model.head import HeadLosses, head_losses, token_nats
from spes_p2p.model.heap import give_holes_back
from spes_p2p.model.moe import ExpertBank, Router, Routing
from spes_p2p.model.shards import MATRICES, expert_name, expert_shapes, parse_expert_name, psi_shapes


class Layer(nn.Module):
    """x + attention(norm(x)), then x + experts(norm(x))."""

    def __init__(self, config: ModelConfig, frozen_format: FrozenFormat) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.rms_norm_eps)
        self.attention = Attention(config)
        self.moe_norm = RMSNorm(config.width, config.rms_norm_eps)
        self.moe = Router(config)
        self.experts = ExpertBank(config, frozen_format)

    def forward(self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Routing]:
        """[B, T, D] -> [B, T, D], and where the tokens went. The sums and the router stay in the type of `x`; under
        autocast attention and experts compute in its type."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TH, sin_TH)
        normed_TD = self.moe_norm(x_BTD).flatten(0, 1)
        device_type = x_BTD.device.type
        with torch.autocast(device_type, enabled=False):
            routing: Routing = self.moe(normed_TD)
        if torch.is_autocast_enabled(device_type):
            normed_TD = normed_TD.to(torch.get_autocast_dtype(device_type))
        return x_BTD + self.experts(normed_TD, routing).view_as(x_BTD), routing


class Transformer(nn.Module):
    """Tokens to logits. `build` makes one without weights; `load` sets them; `set_owned` chooses what is trained."""

    def __init__(self, config: ModelConfig, frozen_format: FrozenFormat = "fp32") -> None:
        super().__init__()
        self.config = config
        # from values: the random ones that it would draw itself load a compiler, which takes a second
        weight_VD = torch.empty(config.vocab_size, config.width)
        self.embed = nn.Embedding.from_pretrained(weight_VD, freeze=False)  # type: ignore[no-untyped-call]  # untyped in torch
        self.layers = nn.ModuleList(Layer(config, frozen_format) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.width, config.rms_norm_eps)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.gives_back_early = False
        """Whether holes in the heap are given back after every layer, not in the upper half alone."""
        self._rotary_cache: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    @classmethod
    def build(
        cls, config: ModelConfig, frozen_format: FrozenFormat = "fp32", device: torch.device | str = "cpu"
    ) -> Transformer:
        """A model on `device` with all experts frozen and every weight zero, made without PyTorch's own random
        initialisation, which takes seconds for a large model and would be overwritten."""
        with torch.device("meta"):
            model = cls(config, frozen_format)
        model.to_empty(device=device)
        with torch.no_grad():
            for tensor in chain(model.parameters(), model.buffers()):
                tensor.zero_()
        return model

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.head.weight.device

    def forward(self, tokens_BT: Tensor) -> tuple[Tensor, list[Routing]]:
        """(logits_BTV, routing of each layer). Training and evaluation use `losses` and `nats`, which make no logits
        of all tokens at once."""
        hidden_BTD, routings = self.hidden(tokens_BT)
        return self.head(hidden_BTD), routings

    def hidden(self, tokens_BT: Tensor, checkpoint_layers: bool = False) -> tuple[Tensor, list[Routing]]:
        """(what the head reads [B, T, D], routing of each layer).

        With `checkpoint_layers` a layer keeps its input alone and is computed again in the backward pass: the same
        bits for a third more arithmetic.
        """
        cos_TH, sin_TH = self._rotary(tokens_BT.shape[1], tokens_BT.device)
        x_BTD = self.embed(tokens_BT)
        routings: list[Routing] = []
        for index, layer in enumerate(self.layers):
            if checkpoint_layers:
                # nothing here draws random numbers, so their state need not be kept
                x_BTD, routing = checkpoint(layer, x_BTD, cos_TH, sin_TH, use_reentrant=False, preserve_rng_state=False)
            else:
                x_BTD, routing = layer(x_BTD, cos_TH, sin_TH)
            routings.append(routing)
            # in the lower half what is kept is far from its most
            if checkpoint_layers or self.gives_back_early or 2 * index >= len(self.layers):
                give_holes_back(x_BTD)
        return self.norm(x_BTD), routings

    def losses(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        z_weight: float,
        *,
        batch_tokens: int | None = None,
        checkpoint_layers: bool = False,
    ) -> tuple[HeadLosses, list[Routing]]:
        """Cross-entropy and z-loss as `head.head_losses` has them, and the routing of each layer. If the head has a
        gradient already, from an earlier micro-batch, this call adds to it, before any backward pass."""
        hidden_BTD, routings = self.hidden(tokens_BT, checkpoint_layers)
        weight_VD = self.head.weight
        losses = head_losses(
            hidden_BTD.flatten(0, 1),
            weight_VD,
            targets_BT.flatten(),
            z_weight,
            batch_tokens=batch_tokens,
            weight_grad_VD=weight_VD.grad,
        )
        return losses, routings

    @torch.no_grad()
    def nats(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Cross-entropy of each target, [B, T], in nats and fp32. It has no gradient."""
        hidden_BTD, _ = self.hidden(tokens_BT)
        return token_nats(hidden_BTD.flatten(0, 1), self.head.weight, targets_BT.flatten()).view_as(targets_BT)

    def compile_attention(self) -> None:
        """Have torch.compile fuse the norms, rotations and sums around each layer's attention, at its first use. The
        experts are left alone: how many tokens each gets differs in every step, and compiled code is for one shape."""
        for layer in self.layers:
            cast(Layer, layer).attention.compile()

    def tensors(self) -> dict[str, Tensor]:
        """Every weight under its contract name: trained ones themselves, frozen ones as new fp32 copies."""
        found: dict[str, Tensor] = dict(self.named_parameters())
        for index, layer in enumerate(self.layers):
            for expert, matrix in product(range(self.config.num_experts), MATRICES):
                name = expert_name(index, expert, matrix)
                if name not in found:
                    found[name] = cast(Layer, layer).experts.expert(expert).decoded(matrix)
        return found

    def psi(self) -> dict[str, nn.Parameter]:
        """The shared modules, sorted by name."""
        return {name: tensor for name, tensor in sorted(self._trained()) if parse_expert_name(name) is None}

    def owned(self) -> dict[str, nn.Parameter]:
        """The matrices of all owned experts."""
        return {name: tensor for name, tensor in self._trained() if parse_expert_name(name) is not None}

    def set_owned(self, experts: Collection[int]) -> None:
        """Make exactly these experts trainable, in every layer. Raises ValueError for an index the model lacks."""
        if unknown := sorted(j for j in experts if not 0 <= j < self.config.num_experts):
            raise ValueError(f"no expert {unknown[0]} in a model of {self.config.num_experts}")
        for layer in self.layers:
            cast(Layer, layer).experts.set_owned(experts)

    def load(self, tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Take over values by name, frozen ones as far as their storage format can hold them. Raises ValueError for an
        unknown name or another shape, before anything is written."""
        self.require_fitting(tensors)
        with torch.no_grad():
            for name, values in tensors.items():
                if (parsed := parse_expert_name(name)) is None:
                    self.get_parameter(name).copy_(to_torch(values))
                else:
                    layer, expert, matrix = parsed
                    cast(Layer, self.layers[layer]).experts.expert(expert).store_(matrix, to_torch(values))

    def require_fitting(self, tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Raise ValueError unless all names and shapes are the model's."""
        for name, values in tensors.items():
            if self._shape(name) != values.shape:
                raise ValueError(f"the model has no tensor {name} of shape {list(values.shape)}")

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        # a spread model holds frozen experts as parameters too (model.spread)
        return [(name, tensor) for name, tensor in self.named_parameters() if tensor.requires_grad]

    def _shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a weight by its contract name; None if there is none."""
        parsed = parse_expert_name(name)
        if parsed is None:
            return psi_shapes(self.config).get(name)
        fits = parsed[0] < self.config.num_layers and parsed[1] < self.config.num_experts
        return expert_shapes(self.config)[parsed[2]] if fits else None

    def _rotary(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        key = (length, device)
        if key not in self._rotary_cache:
            config = self.config
            self._rotary_cache = {key: rotary_table(length, config.resolved_head_dim, config.rope_theta, device)}
        return self._rotary_cache[key]


def to_torch(values: npt.NDArray[np.float32]) -> Tensor:
    """A tensor of a numpy array's values, without a copy where the array is writable."""
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def to_numpy(tensor: Tensor) -> npt.NDArray[np.float32]:
    """An fp32 copy of a tensor in host memory."""
    return tensor.detach().to(device="cpu", dtype=torch.float32, copy=True).contiguous().numpy()
