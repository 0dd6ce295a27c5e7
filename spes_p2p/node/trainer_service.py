"""What the trainer process does for each request, apart from pipes and signals."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from spes_p2p.config import NodeConfig, RunConfig
from spes_p2p.errors import ConfigError, LocalStateError, MachineError, NotFiniteError, TrainerError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.node.budgets.duty import DutyCycle
from spes_p2p.node.failed_plan import note_failed_plan, read_failed_plan
from spes_p2p.node.ranks import RankProcesses, die
from spes_p2p.node.room import room_for_ranks
from spes_p2p.node.trainer_files import CheckpointFiles
from spes_p2p.node.worker_messages import (
    ExportHandover,
    HandoverExported,
    HandoverImported,
    Hello,
    ImportHandover,
    LoadStart,
    Piece,
    Progress,
    Publish,
    Published,
    Ready,
    Reply,
    Request,
    Started,
    Train,
    Trained,
)
from spes_p2p.storage.atomic import make_folder
from spes_p2p.storage.blobs import DiskBlobs
from spes_p2p.training.data import DEFAULT_MAX_BYTES, TokenStream, data_key, load_corpus
from spes_p2p.training.engine import Engine
from spes_p2p.training.fit import fit, largest_plan, told
from spes_p2p.training.handover import export_handover, import_handover
from spes_p2p.training.heldout import decode_held_out, held_out_hashes
from spes_p2p.training.out_of_memory import is_out_of_memory, limit_memory, says_out_of_memory
from spes_p2p.training.own_work import OwnWork
from spes_p2p.training.plan import StepPlan
from spes_p2p.training.publish import StoredPiece, publish
from spes_p2p.training.selftest import self_test
from spes_p2p.training.spread import RankFailure, SpreadEngine
from spes_p2p.training.start import NO_BASE, StartReader
from spes_p2p.training.state import rest_on, restore_state, stream_state
from spes_p2p.training.tokenizer import ByteTokenizer
from spes_p2p.training.trainer import RoundStart, StepReport, Trainer, TrainResult

PROGRESS_INTERVAL_S = 0.1


class TrainerService:
    """One trainer and what it needs around it. Requests are handled one after the other.

    Making one answers Hello. Raises DataError, MachineError, ConfigError, BlobError.
    """

    def __init__(self, hello: Hello) -> None:
        self_test()
        devices = (hello.device, *hello.more_devices)
        for device in devices:
            check_device(device)
        if hello.compile and hello.more_devices:
            raise ConfigError("--compile does not go together with several GPUs")
        torch.set_num_threads(hello.threads)
        self._notices: list[str] = []
        if hello.memory_bytes is not None and not limit_memory(torch.device(hello.device), hello.memory_bytes):
            self._notices.append("--memory has no effect: this system cannot limit what a process on the CPU takes")
        self._state_dir = Path(hello.state_dir)
        self._planned: tuple[int, StepPlan] | None = None
        """The trainer's plan as it was chosen, for so many owned shards; what failed since then is not tried again."""
        self._team: RankProcesses | None = None
        if hello.more_devices:
            make_folder(self._state_dir)
            self._team = RankProcesses(
                devices,
                self._state_dir,
                threads=hello.threads,
                memory_bytes=hello.memory_bytes,
                on_death=self._rank_died,
            )
        self._config = RunConfig.from_json(hello.config)
        self._node = _node_config(hello)
        self._store = DiskBlobs(Path(hello.blobs_dir))
        self._files = CheckpointFiles(Path(hello.state_dir))
        self._held_out: tuple[bytes, ...] = ()
        if hello.held_out is not None:
            self._held_out = decode_held_out(self._store.read(hello.held_out))
        key = data_key(self._config.seed, PeerId(hello.peer))
        corpus = load_corpus(
            [Path(path) for path in hello.data],
            held_out_hashes(self._held_out),
            hello.max_data_bytes or DEFAULT_MAX_BYTES,
            key,
        )

        self._room = room_for_ranks([torch.device(device) for device in devices], hello.memory_bytes)
        offer = fit(self._config, self._node, self._room)
        if self._team is not None:
            self._team.meet()

        def new_trainer() -> Trainer:
            stream = TokenStream(corpus.documents, ByteTokenizer(), key)
            trainer = Trainer(self._config, stream, plan=offer.plan, engine=self._new_engine(hello))
            if hello.compile:
                trainer.model.compile_attention()
            return trainer

        self._trainer, resumed, damaged = self._resume(new_trainer)
        self._reader: StartReader | None = None
        self._trained: TrainResult | None = None
        self.ready = Ready(
            num_documents=len(corpus.documents),
            num_bytes=corpus.num_bytes,
            num_held_out=corpus.num_held_out,
            capacity=offer.num_owned,
            memory=told(self._config, offer, self._room),
            bounded=corpus.bounded,
            resumed_round=self._trainer.round if resumed else None,
            resumed_base=Digest(self._trainer.base) if resumed else NO_BASE,
            damaged="; ".join(damaged),
        )

    def _new_engine(self, hello: Hello) -> Engine:
        if self._team is None:
            return Engine(self._config, device=hello.device, frozen_format=hello.frozen_format, moments=hello.moments)
        return SpreadEngine(self._config, self._team, frozen_format=hello.frozen_format, moments=hello.moments)

    def _rank_died(self, reason: str) -> None:
        """End this process. Called in another thread."""
        if says_out_of_memory(reason):
            self._note_failed_plan()
        die(reason)

    def _note_failed_plan(self) -> None:
        with suppress(MachineError):  # without the note the same is tried again
            if self._planned is not None:
                note_failed_plan(self._state_dir, *self._planned)

    def close(self) -> None:
        """End the processes of other ranks, if there are any."""
        if self._team is not None:
            self._team.close()

    def _resume(self, new_trainer: Callable[[], Trainer]) -> tuple[Trainer, bool, list[str]]:
        """A trainer in the state of the newest sound checkpoint, or a fresh one."""
        damaged: list[str] = []
        for path, state in self._files.load():
            if isinstance(state, LocalStateError):
                damaged.append(str(state))
                continue
            trainer = new_trainer()
            try:
                restore_state(trainer, state)
            except LocalStateError as error:
                damaged.append(f"{path}: {error}")
                continue
            return trainer, True, damaged
        return new_trainer(), False, damaged

    @property
    def own_work(self) -> OwnWork:
        """What this peer carries from round to round."""
        return self._trainer.work

    def handle(
        self,
        request: Request,
        should_stop: Callable[[], bool],
        on_progress: Callable[[Progress], None],
        share: Callable[[], float] = lambda: 1.0,
    ) -> Reply:
        """Answer one request. `share`: of the time that training may take.

        Raises SpesError for what can be foreseen.
        """
        match request:
            case LoadStart():
                return self._load_start(request)
            case Train():
                return self._train(request, DutyCycle(share, should_stop), on_progress)
            case Publish():
                return self._publish()
            case ExportHandover():
                self._started()
                if request.shard not in self._trainer.owned:
                    # a later start, loaded in between, may have taken it
                    raise TrainerError(f"shard {request.shard} is not owned here: there is nothing to hand over")
                data = export_handover(self._trainer, request.shard)
                return HandoverExported(shard=request.shard, blob=self._store.put(data), size_bytes=len(data))
            case ImportHandover():
                row = self._started().row(request.shard)
                refused = import_handover(self._trainer, request.shard, self._store.read(request.blob), row)
                self._save()
                return HandoverImported(shard=request.shard, refused=refused or "")
            case _:
                raise TrainerError(f"a trainer that is ready cannot answer {type(request).__name__}")

    def _load_start(self, request: LoadStart) -> Started:
        self._trained = None
        reader = StartReader(self._config, self._store, request.spec)
        start = RoundStart(
            round=request.spec.round + 1,
            base=request.spec.base,
            global_step=request.spec.global_step,
            psi=reader.psi_where_it_lies(),
            shards=reader.starts(),
            owned=request.owned,
            masters=request.masters,
            residual=request.residual,
            accepted_update=request.accepted_update,
            kept_parts=request.kept_parts,
        )
        self._trainer.load_start(start)
        self._plan_for(len(request.owned))
        self._reader = reader
        self._save()
        nats_per_byte = None
        if self._held_out and request.evaluate_bytes != 0:
            nats_per_byte = self._trainer.evaluate(self._held_out, request.evaluate_bytes).nats_per_byte
        return Started(round=start.round, nats_per_byte=nats_per_byte, notices=self._take_notices())

    def _plan_for(self, num_owned: int) -> None:
        """Cut steps as little as these shards allow, but for what once failed with as many."""
        note = read_failed_plan(self._state_dir) if self._team is not None else None
        failed = note.plan if note is not None and note.num_owned <= num_owned else None
        need = largest_plan(self._config, self._node, num_owned, self._room, failed)
        if need is None and failed is not None:
            self._trainer.plan = failed  # nothing is smaller: it is tried once more
        if need is None:
            return  # more than was offered: it is tried as it is, and made smaller where memory really runs out
        if self._planned is None or num_owned != self._planned[0]:
            self._trainer.plan = need.plan
            self._planned = num_owned, need.plan
            if failed is not None:
                self._notices.append(f"out of memory on several devices with {failed}; going on with {need.plan}")

    def _train(self, request: Train, duty: DutyCycle, on_progress: Callable[[Progress], None]) -> Trained:
        self._started()
        meter = ProgressMeter(request.num_inner_steps, self._config.training.batch_tokens, on_progress)

        def on_step(report: StepReport) -> None:
            duty.after_step()
            meter.step(report)

        try:
            result = self._trainer.train(request.num_inner_steps, duty.before_step, on_step)
        except RankFailure as error:
            if error.__cause__ is not None and is_out_of_memory(error.__cause__):
                self._note_failed_plan()
            raise
        self._trained = result
        return Trained(
            round=self._trainer.round,
            num_steps=result.num_steps,
            num_skipped=result.num_skipped,
            tokens=result.tokens,
            mean_loss=result.mean_loss,
            seconds=result.seconds,
            finite=result.finite,
            notices=self._take_notices(),
        )

    def _publish(self) -> Published:
        reader, trained = self._started(), self._trained
        if trained is None:
            raise TrainerError("nothing was trained since the start was loaded")
        if not trained.finite:
            raise NotFiniteError("the trained weights are not finite: the update is withheld")
        update = publish(self._trainer, self._store, reader.row_tensor)
        self._save()
        return Published(
            round=self._trainer.round,
            tokens=trained.tokens,
            num_steps=trained.num_steps,
            mean_loss=trained.mean_loss,
            psi=tuple(map(_piece, update.psi)),
            experts=tuple(map(_piece, update.experts)),
        )

    def _save(self) -> None:
        """A checkpoint of the trainer, on which it then rests."""
        state = stream_state(self._trainer)
        rest_on(self._trainer, self._files.save(state.size_bytes, state.pieces()))

    def _take_notices(self) -> tuple[str, ...]:
        notices, self._notices = (*self._notices, *self._trainer.take_notices()), []
        return notices

    def _started(self) -> StartReader:
        if self._reader is None:
            raise TrainerError("no start is loaded")
        return self._reader


class ProgressMeter:
    """Turns steps into Progress messages, at most ten a second, the last step always among them."""

    def __init__(self, num_inner_steps: int, batch_tokens: int, send: Callable[[Progress], None]) -> None:
        self._num_inner_steps = num_inner_steps
        self._batch_tokens = batch_tokens
        self._send = send
        self._began = self._sent_at = time.monotonic()
        self._num_seen = self._num_skipped = 0
        self._losses: list[float] = []

    def step(self, report: StepReport) -> None:
        """One step was made or skipped."""
        self._num_seen += 1
        if report.gradient_norm is None:
            self._num_skipped += 1
        else:
            self._losses.append(report.loss)
        now = time.monotonic()
        if now - self._sent_at < PROGRESS_INTERVAL_S and self._num_seen < self._num_inner_steps:
            return
        tokens = (self._num_seen - self._num_skipped) * self._batch_tokens
        self._send(
            Progress(
                local_step=report.local_step,
                num_inner_steps=self._num_inner_steps,
                global_step=report.global_step,
                loss=math.fsum(self._losses) / len(self._losses) if self._losses else math.nan,
                tokens=tokens,
                tokens_per_s=tokens / max(now - self._began, 1e-9),
                num_skipped=self._num_skipped,
            )
        )
        self._sent_at = now
        self._losses.clear()


def _node_config(hello: Hello) -> NodeConfig:
    """Of the node, what decides on memory."""
    return NodeConfig(
        data_dir=Path(hello.state_dir),
        device=hello.device,
        more_devices=hello.more_devices,
        capacity=hello.capacity,
        frozen_format=hello.frozen_format,
        moments=hello.moments,
    )


def check_device(device: str) -> None:
    """Raise MachineError if PyTorch cannot use this device."""
    if device == "cpu":
        return
    if device.startswith("cuda"):
        number = int(device.partition(":")[2] or 0)
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if number < count:
            return
        raise MachineError(f"no GPU {number}: PyTorch sees {count} CUDA devices here; use `--gpu none` for the CPU")
    raise MachineError(f"{device!r} is not a device this program trains on (cpu, cuda:0, ...)")


def _piece(stored: StoredPiece) -> Piece:
    return Piece(index=stored.index, blob=stored.blob, size_bytes=stored.size_bytes, squared_norm=stored.squared_norm)
