"""SPES written down plainly, in one process: what a swarm must equal.

Same model code, losses, optimizer, seeds and data; partition, schedule, averaging and merge are written here again, on
plain dictionaries of tensors, and know nothing of parts, pieces, rows, lists or certificates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from spes_p2p.config import RunConfig, TrainingConfig
from spes_p2p.model.init import initial_psi, initial_shard
from spes_p2p.model.transformer import Transformer, to_numpy
from spes_p2p.training.data import TokenStream
from spes_p2p.training.losses import batch_losses

Theta: TypeAlias = dict[str, torch.Tensor]
"""All weights by name."""

_MATRICES = ("gate", "up", "down")


class PlainSpes:
    """The whole swarm. `streams`: every peer's text; `experts`: which experts each of them owns, for the whole run."""

    def __init__(self, config: RunConfig, streams: Sequence[TokenStream], experts: Sequence[Sequence[int]]) -> None:
        self.config = config
        self.step = 0
        self.theta: Theta = {
            name: torch.from_numpy(values) for name, values in initial_psi(config.model, config.seed).items()
        }
        for shard in range(config.num_shards):
            values = initial_shard(config.model, config.experts_per_shard, config.seed, shard)
            self.theta |= {name: torch.from_numpy(tensor) for name, tensor in values.items()}
        self._peers = [_Peer(config, stream, own) for stream, own in zip(streams, experts, strict=True)]

    def round(self, steps: Sequence[int], inner_steps: int) -> Theta:
        """One round: the peers make so many steps each, and the schedule moves on by `inner_steps`.

        Returns theta before its merge; `theta` is the one after it, which the next round starts from.
        """
        trained = [peer.train(self.theta, self.step, num) for peer, num in zip(self._peers, steps, strict=True)]
        mean: Theta = {}
        for name in self.theta:
            having = [(weights[name], num) for weights, num in zip(trained, steps, strict=True) if name in weights]
            total = torch.zeros_like(self.theta[name])
            for weight, num in having:
                total = total + weight * num
            mean[name] = total / sum(num for _, num in having)
        before, self.step = self.step, self.step + inner_steps
        merge = self.config.training.merge
        is_due = self.step // merge.interval_steps > before // merge.interval_steps and self.step < merge.warmup_steps
        self.theta = _merge(self.config, mean, self.step) if is_due else mean
        return mean


class _Peer:
    """A model, and an AdamW over psi and its own experts that lives as long as the run."""

    def __init__(self, config: RunConfig, stream: TokenStream, experts: Sequence[int]) -> None:
        self.config = config
        self.stream = stream
        self.model = Transformer.build(config.model)
        self.model.set_owned(list(experts))
        self.weights = dict(self.model.named_parameters())
        training = config.training
        psi = self.model.psi()
        groups = [list(psi.values()), [weight for name, weight in self.weights.items() if name not in psi]]
        self.adamw = torch.optim.AdamW(
            [{"params": group} for group in groups],
            lr=1.0,
            betas=(training.beta1, training.beta2),
            eps=training.adam_eps,
            weight_decay=training.weight_decay,
            fused=True,
        )

    def train(self, theta: Theta, first_step: int, num_steps: int) -> Theta:
        """Weights of psi and the own experts after some steps from `theta`."""
        training = self.config.training
        self.model.load({name: to_numpy(values) for name, values in theta.items()})
        for step in range(first_step, first_step + num_steps):
            tokens = torch.from_numpy(self.stream.next_batch(training.batch_sequences, training.sequence_length))
            logits, routings = self.model(tokens[:, :-1])
            losses = batch_losses(logits.flatten(0, 1), tokens[:, 1:].flatten(), routings, training)
            losses.total.backward()  # type: ignore[no-untyped-call]  # untyped in torch
            for weight in self.weights.values():
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            torch.nn.utils.clip_grad_norm_(self.weights.values(), training.clip_norm)
            psi, experts = self.adamw.param_groups
            experts["lr"] = _rate(training, step)
            psi["lr"] = training.psi_lr_ratio * experts["lr"]
            self.adamw.step()
            self.adamw.zero_grad()
        return {name: weight.detach().clone() for name, weight in self.weights.items()}


def _rate(training: TrainingConfig, step: int) -> float:
    """Linear from a tenth of the peak (min_lr_ratio) to the peak, then a half cosine back to it."""
    peak, low = training.peak_lr, training.peak_lr * training.min_lr_ratio
    if step < training.warmup_steps:
        return low + (peak - low) * step / training.warmup_steps
    way = (step - training.warmup_steps) / (training.total_steps - training.warmup_steps)
    return low + (peak - low) * (1 + math.cos(math.pi * way)) / 2


def _merge(config: RunConfig, theta: Theta, step: int) -> Theta:
    """Every expert moves alpha of the way to the mean of the experts whose gates are most like its own."""
    merge, num_experts = config.training.merge, config.model.num_experts
    alpha = merge.alpha * (1 - step / merge.warmup_steps)
    merged = dict(theta)
    for layer in range(config.model.num_layers):
        gates = [theta[f"layers.{layer}.experts.{j}.gate"].double().flatten() for j in range(num_experts)]
        for j in range(num_experts):
            likeness = {
                k: torch.nn.functional.cosine_similarity(gates[j], gates[k], dim=0).item()
                for k in range(num_experts)
                if k != j
            }
            donors = sorted(likeness, key=lambda k: -likeness[k])[: merge.top_k]
            for matrix in _MATRICES:
                own = theta[f"layers.{layer}.experts.{j}.{matrix}"]
                given = torch.stack([theta[f"layers.{layer}.experts.{k}.{matrix}"] for k in donors])
                merged[f"layers.{layer}.experts.{j}.{matrix}"] = own + alpha * (given.mean(dim=0) - own)
    return merged


def largest_difference(swarm: Mapping[str, np.ndarray[Any, Any]], plain: Theta) -> float:
    """Largest difference of a value, over the tensors that `swarm` has."""
    return max(float(np.abs(values - plain[name].numpy()).max()) for name, values in swarm.items())
