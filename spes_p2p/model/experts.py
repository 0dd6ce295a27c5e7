"""One SwiGLU expert, owned or frozen: (silu(x gate^T) * (x up^T)) down^T, with gate and up [F, D], down [D, F].

Both kinds answer the same questions about their matrices, so that whoever loads, moves or computes with an expert does
not ask which it is. The arithmetic on them is that of a whole layer (`expert_loop`, `expert_grouped`).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from spes_p2p.config import FrozenFormat, ModelConfig
from spes_p2p.model.frozen import FrozenMatrix, frozen_matrix
from spes_p2p.model.shards import expert_shapes


class OwnedExpert(nn.Module):
    """A trained expert: fp32 parameters gate, up [F, D] and down [D, F]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shapes = expert_shapes(config)
        self.gate = nn.Parameter(torch.zeros(shapes["gate"]))
        self.up = nn.Parameter(torch.zeros(shapes["up"]))
        self.down = nn.Parameter(torch.zeros(shapes["down"]))

    def shape(self, matrix: str) -> torch.Size:
        """[rows, columns] of a matrix, by its name."""
        return self.get_parameter(matrix).shape

    def store_(self, matrix: str, values: Tensor) -> None:
        """Set a matrix."""
        with torch.no_grad():
            self.get_parameter(matrix).copy_(values)

    def decode_(self, matrix: str, out: Tensor) -> Tensor:
        """Write a matrix into a contiguous floating-point one. Returns it."""
        return out.copy_(self.get_parameter(matrix).detach())

    def dense(self, matrix: str, scratch: Tensor) -> Tensor:
        """A matrix in the type of the flat `scratch`: written there, or the parameter's own values."""
        weight = self.get_parameter(matrix).detach()
        return weight if weight.dtype == scratch.dtype else scratch[: weight.numel()].view(weight.shape).copy_(weight)

    def decoded(self, matrix: str) -> Tensor:
        """A new fp32 copy of a matrix."""
        return self.get_parameter(matrix).detach().clone()


class FrozenExpert(nn.Module):
    """An expert that somebody else trains, as constants in a storage format. No parameters, no gradients."""

    def __init__(self, config: ModelConfig, frozen_format: FrozenFormat) -> None:
        super().__init__()
        for matrix, shape in expert_shapes(config).items():
            self.add_module(matrix, frozen_matrix(frozen_format, shape))

    def matrix(self, name: str) -> FrozenMatrix:
        """The storage of a matrix."""
        return cast(FrozenMatrix, self.get_submodule(name))

    def shape(self, matrix: str) -> torch.Size:
        """[rows, columns] of a matrix, by its name."""
        return self.matrix(matrix).shape

    def store_(self, matrix: str, values: Tensor) -> None:
        """Set a matrix, as far as the format can hold the values."""
        self.matrix(matrix).store_(values)

    def decode_(self, matrix: str, out: Tensor) -> Tensor:
        """Write a matrix into a contiguous floating-point one. Returns it."""
        return self.matrix(matrix).decode_(out)

    def dense(self, matrix: str, scratch: Tensor) -> Tensor:
        """A matrix in the type of the flat `scratch`: written there, or the storage itself."""
        return self.matrix(matrix).dense(scratch)

    def decoded(self, matrix: str) -> Tensor:
        """A new fp32 copy of a matrix."""
        return self.matrix(matrix).decoded()


Expert = OwnedExpert | FrozenExpert
