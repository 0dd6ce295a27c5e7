"""What the node and its trainer process say to each other over two pipes.

A frame is a 4-byte little-endian length and a msgpack object: an envelope with a number and one message. The node
numbers its requests; every request but StopTraining and SetShare is answered once, under its number. Progress comes
unasked, under the number of the Train it belongs to. Tensors never travel here: they are blobs in the store that both
sides share.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from spes_p2p.config import FrozenFormat, MomentsFormat
from spes_p2p.ids import Digest
from spes_p2p.training.own_work import MasterRule, ResidualRule
from spes_p2p.training.start import NO_BASE, StartSpec

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 16 << 20


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The first request: what to train, with what, and where things lie. Answered by Ready."""

    config: bytes
    """`RunConfig.to_json`."""
    peer: bytes
    blobs_dir: str
    state_dir: str
    """Checkpoints and the trainer's log."""
    data: tuple[str, ...] = ()
    """Files, folders and patterns; empty: the default text."""
    max_data_bytes: int | None = None
    held_out: Digest | None = None
    """Blob of the held-out set; it must be in the store."""
    device: str = "cpu"
    more_devices: tuple[str, ...] = ()
    """Of the same kind: the model is spread over them all, one process each."""
    frozen_format: FrozenFormat = "fp32"
    moments: MomentsFormat = "fp32"
    threads: int = 1
    memory_bytes: int | None = None
    """Most memory for training, of the GPU or of the trainer process; None: what there is."""
    compile: bool = False
    capacity: int | None = None
    """Shards to have room for; None: as many as fit."""
    share: float = 1.0
    """Of the time, above 0: after each step the trainer rests."""


class LoadStart(msgspec.Struct, frozen=True, kw_only=True, tag="load_start"):
    """Load the start of round `spec.round + 1` from the store. Answered by Started."""

    spec: StartSpec
    owned: tuple[int, ...]
    """Shards this peer owns in that round."""
    masters: dict[int, MasterRule] = {}
    """Rule of an owned shard's master; `start` where missing."""
    residual: ResidualRule = "keep"
    accepted_update: int | None = None
    """Round of this peer's update that the certificate accepted."""
    kept_parts: tuple[int, ...] = ()
    evaluate_bytes: int | None = 16_384
    """Evaluate on so many bytes of the held-out set; None: on all of it; 0: not at all."""


class Train(msgspec.Struct, frozen=True, kw_only=True, tag="train"):
    """Make inner steps. Answered by Trained, with Progress before."""

    num_inner_steps: int


class StopTraining(msgspec.Struct, frozen=True, kw_only=True, tag="stop_training"):
    """End the Train of the envelope's number after the step it is at, also if it has not begun. Not answered itself."""


class SetShare(msgspec.Struct, frozen=True, kw_only=True, tag="set_share"):
    """Work for this share of the time from now on, a Train that is under way included. Not answered."""

    share: float


class Publish(msgspec.Struct, frozen=True, kw_only=True, tag="publish"):
    """Put the trained round's pieces into the store. Answered by Published."""


class ExportHandover(msgspec.Struct, frozen=True, kw_only=True, tag="export_handover"):
    """Put a shard's masters and moments into the store. Answered by HandoverExported."""

    shard: int


class ImportHandover(msgspec.Struct, frozen=True, kw_only=True, tag="import_handover"):
    """Take over a gained shard from a blob, after LoadStart. Answered by HandoverImported."""

    shard: int
    blob: Digest


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """Stop training if it is under way, and end. Answered by Done."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The trainer has its text and, if there was one, its checkpoint."""

    num_documents: int
    num_bytes: int
    num_held_out: int
    """Documents left out because they are in the held-out set."""
    capacity: int
    """Most shards that there is memory for."""
    memory: str
    """What was reckoned of the memory, one line for people."""
    bounded: bool
    """There was more text than `max_data_bytes`."""
    resumed_round: int | None
    """Round of the checkpoint; None: it begins without one."""
    resumed_base: Digest = NO_BASE
    """Hash of the certificate that the checkpoint's round starts from."""
    damaged: str = ""
    """What was wrong with checkpoints that could not be used."""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """A start is loaded."""

    round: int
    """The round to train in."""
    nats_per_byte: float | None
    """Held-out loss of the loaded state; None: not asked for, or no held-out set."""
    notices: tuple[str, ...] = ()
    """What the user should hear of how it went."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Where a Train is; at most ten a second."""

    local_step: int
    num_inner_steps: int
    global_step: int
    loss: float
    """Mean cross-entropy of the steps since the last Progress, nats per token."""
    tokens: int
    """Trained in this Train so far."""
    tokens_per_s: float
    num_skipped: int


class Trained(msgspec.Struct, frozen=True, kw_only=True, tag="trained"):
    """A Train has ended."""

    round: int
    num_steps: int
    num_skipped: int
    tokens: int
    mean_loss: float
    """NaN without steps."""
    seconds: float
    finite: bool
    """False: the update must be withheld."""
    notices: tuple[str, ...] = ()
    """What the user should hear of how it went."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of an update, in the store."""

    index: int
    blob: Digest
    size_bytes: int
    squared_norm: float


class Published(msgspec.Struct, frozen=True, kw_only=True, tag="published"):
    """The pieces of this round's update."""

    round: int
    tokens: int
    num_steps: int
    mean_loss: float
    psi: tuple[Piece, ...]
    """By part."""
    experts: tuple[Piece, ...]
    """By shard."""


class HandoverExported(msgspec.Struct, frozen=True, kw_only=True, tag="handover_exported"):
    """The blob of a shard's masters and moments."""

    shard: int
    blob: Digest
    size_bytes: int


class HandoverImported(msgspec.Struct, frozen=True, kw_only=True, tag="handover_imported"):
    """Whether a hand-over was taken."""

    shard: int
    refused: str
    """Why not; empty: it was taken."""


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The trainer ends."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The request failed in a foreseen way; the trainer goes on."""

    kind: str
    """Name of an exception of `spes_p2p.errors`."""
    message: str


Request: TypeAlias = (
    Hello | LoadStart | Train | StopTraining | SetShare | Publish | ExportHandover | ImportHandover | Shutdown
)
Reply: TypeAlias = (
    Ready | Started | Progress | Trained | Published | HandoverExported | HandoverImported | Done | Failed
)


class RequestEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """A request under its number."""

    number: int
    body: Request


class ReplyEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """A reply under the number of its request."""

    number: int
    body: Reply


def to_frame(message: msgspec.Struct) -> bytes:
    """Bytes of one frame. Raises ValueError if it is too long."""
    payload = msgspec.msgpack.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(payload)} bytes is over {MAX_FRAME_BYTES}")
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


def frame_length(header: bytes) -> int:
    """Length of the payload behind a frame's first bytes. Raises ValueError if it is too long."""
    length = int.from_bytes(header, "little")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes is over {MAX_FRAME_BYTES}")
    return length


def read_request(payload: bytes) -> RequestEnvelope:
    """Inverse of `to_frame`, without the length. Raises msgspec.MsgspecError."""
    return msgspec.msgpack.decode(payload, type=RequestEnvelope)


def read_reply(payload: bytes) -> ReplyEnvelope:
    """Inverse of `to_frame`, without the length. Raises msgspec.MsgspecError."""
    return msgspec.msgpack.decode(payload, type=ReplyEnvelope)
