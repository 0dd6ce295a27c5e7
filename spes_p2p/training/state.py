"""All that a trainer must not lose, as tensors and a little text: for checkpoints.

Kept: the shared modules and masters as they are, moments, residual, updates under way, data position. Not kept: frozen
experts and the agreed start, which every round brings anew.

Moments are kept as the optimizer holds them, so that 8-bit ones stay small and come back with the same bits. A trainer
of the other format converts them.

A state is as large as all that the trainer owns, so it never exists as one block of memory: it is written tensor by
tensor, and nothing is copied that is in host memory already. What only a later certificate asks for, residual and
updates under way, is afterwards read where it was written (`rest_on`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from spes_p2p.config import RunConfig
from spes_p2p.digests import digest
from spes_p2p.errors import LocalStateError, SchemaError
from spes_p2p.model.shards import parse_expert_name, shard_of_expert
from spes_p2p.model.transformer import to_torch
from spes_p2p.training.arrays import F32, Bytes, Tensors
from spes_p2p.training.data import Place
from spes_p2p.training.engine import StateTensor
from spes_p2p.training.moments import AnyMoments, HeldMoments, PackedMoments, PlainMoments
from spes_p2p.training.own_work import OwnWork, PendingUpdate
from spes_p2p.training.tensorfile import DtypeName, TensorSpec, header_of, open_tensors
from spes_p2p.training.trainer import Trainer

STATE_VERSION = 3
_NOTE = "spes_trainer_state"
_DTYPE_NAMES: dict[torch.dtype, DtypeName] = {torch.float32: "F32", torch.int8: "I8"}


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
    position: tuple[tuple[int, int, int], ...]
    """Pass, place and offset of each lane of the data stream."""
    num_steps: dict[str, int]
    """Optimizer steps behind each weight's moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateStream:
    """A state as safetensors bytes, piece by piece; to be used before the trainer goes on."""

    header: bytes
    specs: tuple[TensorSpec, ...]
    arrays: Callable[[], Iterator[npt.NDArray[Any]]]
    """One for each spec, brought to host memory when it is its turn."""

    @property
    def size_bytes(self) -> int:
        """Of all pieces."""
        return len(self.header) + sum(spec.size_bytes for spec in self.specs)

    def pieces(self) -> Iterator[Bytes]:
        """The bytes, in order."""
        yield self.header
        for array in self.arrays():
            yield array.reshape(-1).view(np.uint8).data
            del array  # before the next one is made


def stream_state(trainer: Trainer) -> StateStream:
    """The trainer's own state."""
    tensors = trainer.engine.state()
    tensors |= {name: _of(array) for name, array in _work_arrays(trainer.work)}
    specs = [TensorSpec(name, _DTYPE_NAMES[tensor.dtype], tensor.shape) for name, tensor in tensors.items()]
    specs.sort(key=lambda spec: (spec.dtype != "F32", spec.name))  # 4-byte values first: so they lie aligned
    note = StateNote(
        version=STATE_VERSION,
        run=_run_hash(trainer.config),
        round=trainer.round,
        base=trainer.base.hex(),
        global_step=trainer.global_step,
        owned=trainer.owned,
        finite=trainer.finite,
        position=tuple((lane.pass_number, lane.place, lane.offset) for lane in trainer.stream.position),
        num_steps=trainer.engine.num_steps(),
    )
    return StateStream(
        header=header_of(specs, {_NOTE: msgspec.json.encode(note).decode()}),
        specs=tuple(specs),
        arrays=lambda: (tensors[spec.name].read() for spec in specs),
    )


def save_state(trainer: Trainer) -> bytes:
    """The same as one block."""
    return b"".join(stream_state(trainer).pieces())


def rest_on(trainer: Trainer, data: Bytes) -> None:
    """Let the trainer read its residual and its updates under way in `data`, the bytes of its present state, from now
    on. Memory-mapped from the checkpoint's file they need no memory of their own; `data` must stay as it is."""
    _take_work(trainer, open_tensors(data)[0])


def restore_state(trainer: Trainer, data: Bytes) -> None:
    """Bring a fresh trainer to a saved state; `load_start` must follow.

    Raises LocalStateError if the bytes are damaged, of another run or of another version; the trainer is then to be
    thrown away.
    """
    try:
        tensors, metadata = open_tensors(data)
        note = msgspec.json.decode(metadata[_NOTE], type=StateNote)
    except (SchemaError, msgspec.MsgspecError, KeyError) as error:
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
    for name, steps in note.num_steps.items():  # one by one: they are copied
        trainer.engine.load_held({name: HeldMoments(moments=_moments(name, tensors), num_steps=steps)})
    _take_work(trainer, tensors)
    trainer.stream.position = tuple(
        Place(pass_number=pass_number, place=place, offset=offset) for pass_number, place, offset in note.position
    )


def _take_work(trainer: Trainer, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    work = trainer.work
    if tensors["residual"].shape != work.residual.shape:
        raise SchemaError("residual of another size")
    work.residual = tensors["residual"]
    for number in sorted({int(name.split("/")[1]) for name in tensors if name.startswith("pending/")}):
        work.published(number, _pending(trainer.config, _below(f"pending/{number}/", tensors)))


def _moments(name: str, tensors: Mapping[str, npt.NDArray[Any]]) -> AnyMoments:
    form = PackedMoments if f"mean_scales/{name}" in tensors else PlainMoments
    kinds = [field.name for field in fields(form)]
    moments = form(**{kind: to_torch(tensors[f"{kind}/{name}"]) for kind in kinds})
    for kind, tensor in moments.tensors().items():
        wanted = torch.int8 if form is PackedMoments and kind in ("mean", "square") else torch.float32
        if tensor.dtype != wanted:
            raise SchemaError(f"{kind} of {name} is {tensor.dtype}")
    return moments


def _work_arrays(work: OwnWork) -> Iterator[tuple[str, F32]]:
    yield "residual", work.residual
    for number, update in work.pending.items():
        yield f"pending/{number}/wanted", update.wanted
        yield f"pending/{number}/left_over", update.left_over
        for remainder in update.remainders.values():
            for name, values in remainder.items():
                yield f"pending/{number}/remainder/{name}", values


def _of(array: F32) -> StateTensor:
    return StateTensor(dtype=torch.float32, shape=array.shape, read=lambda: np.ascontiguousarray(array))


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


def _run_hash(config: RunConfig) -> str:
    return digest("spes trainer state", config.to_json()).hex()
