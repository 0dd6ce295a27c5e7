"""All that a trainer must not lose, as tensors and a little text: for checkpoints.

Kept: the shared modules and masters as they are, moments, residual, updates under way, data position. Not kept: frozen
experts and the agreed start, which every round brings anew.

Moments are kept as the optimizer holds them, so that 8-bit ones stay small and come back with the same bits. A trainer
of the other format converts them. Nothing is copied on the way to the bytes that is in host memory already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec
import numpy.typing as npt
import safetensors
import safetensors.numpy
import torch
from torch import Tensor

from spes_p2p.config import RunConfig
from spes_p2p.digests import digest
from spes_p2p.errors import LocalStateError, SchemaError
from spes_p2p.model.shards import parse_expert_name, shard_of_expert
from spes_p2p.training.arrays import F32, Bytes, Tensors
from spes_p2p.training.data import Position
from spes_p2p.training.moments import AnyMoments, HeldMoments, PackedMoments, PlainMoments
from spes_p2p.training.own_work import PendingUpdate
from spes_p2p.training.trainer import Trainer

STATE_VERSION = 2
_NOTE = "spes_trainer_state"


class StateNote(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a checkpoint that is not tensors."""

    version: int
    run: str
    """Hash of the run's configuration, in hex."""
    round: int
    base: str
    """Hash of the certificate that the round starts from, in hex."""
    global_step: int
    owned: tuple[int, ...]
    finite: bool
    position: tuple[int, int, int]
    """Pass, place and offset of the data stream."""
    num_steps: dict[str, int]
    """Optimizer steps behind each weight's moments."""


def save_state(trainer: Trainer) -> bytes:
    """The trainer's own state as safetensors bytes."""
    tensors: dict[str, npt.NDArray[Any]] = {
        f"weight/{name}": _in_host_memory(weight) for name, weight in trainer.engine.held_weights().items()
    }
    held = trainer.engine.held_moments()
    for name, values in held.items():
        for kind, tensor in values.moments.tensors().items():
            tensors[f"{kind}/{name}"] = _in_host_memory(tensor)
    tensors["residual"] = trainer.work.residual
    for number, update in trainer.work.pending.items():
        tensors[f"pending/{number}/wanted"] = update.wanted
        tensors[f"pending/{number}/left_over"] = update.left_over
        for remainder in update.remainders.values():
            tensors |= {f"pending/{number}/remainder/{name}": values for name, values in remainder.items()}
    position = trainer.stream.position
    note = StateNote(
        version=STATE_VERSION,
        run=_run_hash(trainer.config),
        round=trainer.round,
        base=trainer.base.hex(),
        global_step=trainer.global_step,
        owned=trainer.owned,
        finite=trainer.finite,
        position=(position.pass_number, position.place, position.offset),
        num_steps={name: values.num_steps for name, values in held.items()},
    )
    return safetensors.numpy.save(tensors, metadata={_NOTE: msgspec.json.encode(note).decode()})


def restore_state(trainer: Trainer, data: Bytes) -> None:
    """Bring a fresh trainer to a saved state; `load_start` must follow.

    Raises LocalStateError if the bytes are damaged, of another run or of another version; the trainer is then to be
    thrown away.
    """
    raw = bytes(data)
    try:
        tensors = safetensors.numpy.load(raw)
        note = _note_of(raw)
    except (safetensors.SafetensorError, msgspec.MsgspecError, KeyError, ValueError) as error:
        raise LocalStateError(f"the trainer's checkpoint is damaged: {error}") from error
    if note.version != STATE_VERSION or note.run != _run_hash(trainer.config):
        raise LocalStateError("the trainer's checkpoint belongs to another run or version")
    try:
        _restore(trainer, note, tensors)
    except (KeyError, ValueError, SchemaError) as error:
        raise LocalStateError(f"the trainer's checkpoint does not fit the run: {error}") from error


def _restore(trainer: Trainer, note: StateNote, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    trainer.adopt(note.owned, note.round, bytes.fromhex(note.base), note.global_step, note.finite)
    trainer.engine.load(_below("weight/", tensors))
    trainer.engine.load_held(
        {name: HeldMoments(moments=_moments(name, tensors), num_steps=steps) for name, steps in note.num_steps.items()}
    )
    work = trainer.work
    if tensors["residual"].shape != work.residual.shape:
        raise SchemaError("residual of another size")
    work.residual = tensors["residual"]
    for number in sorted({int(name.split("/")[1]) for name in tensors if name.startswith("pending/")}):
        work.published(number, _pending(trainer.config, _below(f"pending/{number}/", tensors)))
    pass_number, place, offset = note.position
    trainer.stream.position = Position(pass_number=pass_number, place=place, offset=offset)


def _moments(name: str, tensors: Mapping[str, npt.NDArray[Any]]) -> AnyMoments:
    form = PackedMoments if f"mean_scales/{name}" in tensors else PlainMoments
    kinds = [field.name for field in fields(form)]
    moments = form(**{kind: torch.from_numpy(tensors[f"{kind}/{name}"]) for kind in kinds})
    for kind, tensor in moments.tensors().items():
        wanted = torch.int8 if form is PackedMoments and kind in ("mean", "square") else torch.float32
        if tensor.dtype != wanted:
            raise SchemaError(f"{kind} of {name} is {tensor.dtype}")
    return moments


def _in_host_memory(tensor: Tensor) -> npt.NDArray[Any]:
    """A view where the tensor is there already."""
    return tensor.detach().cpu().contiguous().numpy()


def _pending(config: RunConfig, tensors: Tensors) -> PendingUpdate:
    remainders: dict[int, Tensors] = {}
    for name, values in _below("remainder/", tensors).items():
        parsed = parse_expert_name(name)
        if parsed is None:
            raise SchemaError(f"{name} is not an expert's tensor")
        remainders.setdefault(shard_of_expert(parsed[1], config.experts_per_shard), {})[name] = values
    return PendingUpdate(wanted=tensors["wanted"], left_over=tensors["left_over"], remainders=remainders)


def _below(prefix: str, tensors: Mapping[str, F32]) -> Tensors:
    return {name.removeprefix(prefix): values for name, values in tensors.items() if name.startswith(prefix)}


def _note_of(raw: bytes) -> StateNote:
    header_bytes = int.from_bytes(raw[:8], "little")
    header = msgspec.json.decode(raw[8 : 8 + header_bytes], type=dict[str, msgspec.Raw])
    metadata = msgspec.json.decode(header["__metadata__"], type=dict[str, str])
    return msgspec.json.decode(metadata[_NOTE], type=StateNote)


def _run_hash(config: RunConfig) -> str:
    return digest("spes trainer state", config.to_json()).hex()
