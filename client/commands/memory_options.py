"""Options of `join` about what training costs in memory, and how it computes."""

from __future__ import annotations

from typing import Annotated

import typer

FrozenFormat = Annotated[
    str | None, typer.Option("--frozen-format", help="How others' experts are stored: fp32, bf16, int8 or int4.")
]
Moments = Annotated[str | None, typer.Option("--moments", help="How the optimizer's moments are stored: fp32 or int8.")]
Memory = Annotated[
    str | None, typer.Option("--memory", help="Most memory to train with, such as 10GB: the GPU's, else RAM.")
]
Compile = Annotated[
    bool | None, typer.Option("--compile/--no-compile", help="Compile the attention layers (GPU only).")
]
