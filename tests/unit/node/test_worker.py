"""The trainer process and its supervisor, with real processes."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from spes_p2p.errors import BlobError, ConfigError, DataError, MachineError, TrainerError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.node.failed_plan import FILE, FailedPlan
from spes_p2p.node.worker import CLOSE_TIMEOUT_S, BackOff, Restarting, Worker
from spes_p2p.node.worker_messages import Done, Hello, LoadStart, Progress, ReplyEnvelope, to_frame
from spes_p2p.storage.blobs import DiskBlobs
from spes_p2p.testing.blobs import MemoryBlobs
from spes_p2p.testing.training import tiny_documents, tiny_run
from spes_p2p.training.checks import check_expert_blob, check_psi_piece
from spes_p2p.training.data import TokenStream, data_key, load_corpus
from spes_p2p.training.documents import document_hash
from spes_p2p.training.genesis import genesis_start, make_genesis
from spes_p2p.training.heldout import encode_held_out
from spes_p2p.training.publish import publish
from spes_p2p.training.start import StartReader, StartSpec
from spes_p2p.training.tokenizer import ByteTokenizer
from spes_p2p.training.trainer import RoundStart, Trainer

pytestmark = pytest.mark.live

CONFIG = tiny_run()
PEER = PeerId(b"p" * 32)
HELD_OUT = tiny_documents()[:2]
FOREVER = 10_000_000
TIMEOUT_S = 240.0
"""Each of up to three processes loads PyTorch, which takes half a minute on a very busy machine."""


class Listener:
    """Keeps what it hears, and calls back at the first progress."""

    def __init__(self) -> None:
        self.progresses: list[Progress] = []
        self.restarts: list[Restarting] = []
        self.at_progress: Callable[[], None] = lambda: None

    def progress(self, progress: Progress) -> None:
        self.progresses.append(progress)
        at_progress, self.at_progress = self.at_progress, lambda: None
        at_progress()

    def restarting(self, event: Restarting) -> None:
        self.restarts.append(event)


def write_text(folder: Path) -> Path:
    folder.mkdir()
    for number, document in enumerate(tiny_documents()):
        (folder / f"{number}.txt").write_bytes(document)
    return folder


def make_hello(folder: Path, **changes: object) -> Hello:
    store = DiskBlobs(folder / "blobs")
    fields: dict[str, object] = {
        "config": CONFIG.to_json(),
        "peer": PEER,
        "blobs_dir": str(folder / "blobs"),
        "state_dir": str(folder / "trainer"),
        "data": (str(write_text(folder / "text")),),
        "held_out": store.put(encode_held_out(HELD_OUT)),
    }
    return Hello(**(fields | changes))


def genesis(folder: Path) -> StartSpec:
    return genesis_start(make_genesis(CONFIG, DiskBlobs(folder / "blobs")))


@asynccontextmanager
async def running(hello: Hello, listener: Listener, *command: str) -> AsyncIterator[Worker]:
    arguments = {"command": command} if command else {}
    worker = Worker(hello, listener, BackOff(first_ms=1, most_ms=2), **arguments)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield worker
    finally:
        await worker.close()
        assert worker.pid is None


def has_ended(pid: int) -> bool:
    """Wait until a process that may not be our child is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], TIMEOUT_S)[0])
    finally:
        os.close(descriptor)


async def test_a_round_in_the_process_gives_the_blobs_that_it_gives_in_memory(tmp_path):
    listener = Listener()
    async with running(make_hello(tmp_path), listener) as worker:
        ready = await worker.start()
        spec = genesis(tmp_path)
        begun = await worker.load_start(LoadStart(spec=spec, owned=(1, 2), evaluate_bytes=None))
        trained = await worker.train(4)
        update = await worker.publish()

    held_out = {document_hash(document) for document in HELD_OUT}
    corpus = load_corpus([tmp_path / "text"], held_out, key=data_key(CONFIG.seed, PEER))
    trainer = Trainer(CONFIG, TokenStream(corpus.documents, ByteTokenizer(), data_key(CONFIG.seed, PEER)))
    store = MemoryBlobs()
    reader = StartReader(CONFIG, store, genesis_start(make_genesis(CONFIG, store)))
    trainer.load_start(RoundStart(round=1, global_step=0, psi=reader.psi(), shards=reader.starts(), owned=(1, 2)))
    assert begun.round == 1
    assert begun.nats_per_byte == trainer.evaluate(HELD_OUT).nats_per_byte
    result = trainer.train(4)
    expected = publish(trainer, store, reader.row_tensor)

    assert (ready.num_documents, ready.num_held_out, ready.resumed_round) == (6, 2, None)
    assert ready.capacity == CONFIG.num_shards
    assert ready.memory.startswith(
        "memory: room for 4 of 4 shards in micro-batches of 2 sequences; that needs 1.6 MB of"
    )
    assert (trained.num_steps, trained.tokens, trained.mean_loss) == (4, result.tokens, result.mean_loss)
    assert [piece.blob for piece in update.psi + update.experts] == [
        piece.blob for piece in expected.psi + expected.experts
    ]
    assert all(DiskBlobs(tmp_path / "blobs").has(piece.blob) for piece in update.psi + update.experts)
    assert (update.round, update.tokens, update.mean_loss) == (1, result.tokens, result.mean_loss)
    assert listener.progresses[-1].local_step == 4
    assert listener.restarts == []


async def test_a_model_beyond_the_memory_that_was_allowed_is_an_error_that_says_what_would_help(tmp_path):
    run = tiny_run(model=tiny_run().model.model_copy(update={"width": 256, "vocab_size": 512 * 1024}).model_dump())
    hello = make_hello(tmp_path, config=run.to_json(), memory_bytes=600 << 20)  # psi and gradients alone need 2 GB
    async with running(hello, Listener()) as worker:
        with pytest.raises(MachineError, match=r"not enough memory for 1 shard of this run(.|\n)*--memory"):
            await worker.start()
        assert worker.restarts == 0


async def test_a_capacity_beyond_the_memory_is_refused_and_a_smaller_one_that_fits_is_named(tmp_path):
    model = tiny_run().model.model_copy(update={"width": 512, "num_experts": 16, "expert_width": 4096})
    hello = make_hello(tmp_path, config=tiny_run(model=model.model_dump()).to_json(), memory_bytes=2 << 30, capacity=16)
    async with running(hello, Listener()) as worker:
        with pytest.raises(MachineError, match=r"for 16 shards of this run(.|\n)*--capacity \d+ fits"):
            await worker.start()


async def test_stop_ends_training_early_and_what_was_trained_counts(tmp_path):
    listener = Listener()
    async with running(make_hello(tmp_path), listener) as worker:
        await worker.load_start(LoadStart(spec=genesis(tmp_path), owned=(0,)))
        listener.at_progress = worker.stop_training
        trained = await worker.train(FOREVER)
        update = await worker.publish()
        assert 0 < trained.num_steps < FOREVER
        assert update.num_steps == trained.num_steps
        assert (await worker.train(2)).num_steps == 2, "a stop holds for one training only"


async def test_a_trainer_that_is_killed_is_started_again_and_finishes(tmp_path):
    listener = Listener()
    async with running(make_hello(tmp_path), listener) as worker:
        await worker.load_start(LoadStart(spec=genesis(tmp_path), owned=(0,)))
        first_pid = worker.pid
        listener.at_progress = lambda: os.kill(first_pid, signal.SIGKILL)
        trained = await worker.train(400)
        assert trained.num_steps == 400
        assert worker.restarts == 1
        assert worker.pid != first_pid
        assert worker.ready.resumed_round == 1
        assert [event.reason for event in listener.restarts] == ["ended by SIGKILL"]
        # what was trained dies with the process: it is not published as if it were there
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(TrainerError):
            await worker.publish()


async def test_a_missing_blob_is_an_error_and_the_trainer_goes_on(tmp_path):
    async with running(make_hello(tmp_path), Listener()) as worker:
        spec = genesis(tmp_path)
        lost = StartSpec(
            round=spec.round, global_step=0, parts=(Digest(b"x" * 32), *spec.parts[1:]), shards=spec.shards
        )
        with pytest.raises(BlobError):
            await worker.load_start(LoadStart(spec=lost, owned=(0,)))
        with pytest.raises(TrainerError, match="no start is loaded"):
            await worker.train(1)
        await worker.load_start(LoadStart(spec=spec, owned=(0,)))
        exported = await worker.export_handover(0)
        taken = await worker.import_handover(0, exported.blob)
        assert taken.refused == ""
        refused = await worker.import_handover(0, spec.parts[0])
        assert "bytes instead of" in refused.refused
        with pytest.raises(TrainerError, match="shard 1 is not owned here"):
            await worker.export_handover(1)
        assert worker.restarts == 0


@pytest.mark.parametrize(
    ("changes", "error"),
    [({"data": ("/nowhere/at-all",)}, DataError), ({"device": "cuda:99"}, MachineError)],
)
async def test_what_the_user_got_wrong_is_reported_once_and_not_retried(tmp_path, changes, error):
    listener = Listener()
    async with running(make_hello(tmp_path, **changes), listener) as worker:
        with pytest.raises(error):
            await worker.start()
        assert worker.pid is None
        assert listener.restarts == []


async def test_a_trainer_that_keeps_dying_is_given_up_with_its_last_words(tmp_path):
    listener = Listener()
    script = "import sys; print('Out of paper', file=sys.stderr); sys.exit(3)"
    async with running(make_hello(tmp_path), listener, sys.executable, "-c", script) as worker:
        with pytest.raises(TrainerError, match="exit code 3: Out of paper"):
            await worker.start()
        assert [event.restarts for event in listener.restarts] == [1, 2]


async def test_a_trainer_that_sends_nonsense_is_ended(tmp_path):
    script = "import sys; sys.stdout.buffer.write(b'\\xff' * 99); sys.stdout.flush(); sys.stdin.read()"
    async with running(make_hello(tmp_path), Listener(), sys.executable, "-c", script) as worker:
        with pytest.raises(TrainerError, match="nonsense"):
            await worker.start()


async def test_closing_ends_training_early_and_a_closed_worker_stays_closed(tmp_path):
    listener = Listener()
    async with running(make_hello(tmp_path), listener) as worker:
        await worker.load_start(LoadStart(spec=genesis(tmp_path), owned=(0,)))
        seen = asyncio.Event()
        listener.at_progress = seen.set
        training = asyncio.create_task(worker.train(FOREVER))
        await seen.wait()
        pid = worker.pid
        await worker.close()
        assert has_ended(pid)
        assert 0 < (await training).num_steps < FOREVER
        with pytest.raises(TrainerError, match="stopped"):
            await worker.train(1)


async def test_closing_does_not_wait_for_a_process_that_has_not_begun(tmp_path):
    silent = (sys.executable, "-c", "import signal; signal.pause()")
    worker = Worker(make_hello(tmp_path), Listener(), command=silent)
    starting = asyncio.create_task(worker.start())
    async with asyncio.timeout(TIMEOUT_S):
        while worker.pid is None:
            await asyncio.sleep(0)
    pid = worker.pid
    async with asyncio.timeout(CLOSE_TIMEOUT_S):
        await worker.close()
    assert has_ended(pid)
    with pytest.raises(TrainerError, match="stopped"):
        await starting


PARENT = """
import asyncio, pathlib, sys
sys.path.insert(0, {tests!r})
import test_worker as t

class Printer(t.Listener):
    def progress(self, progress):
        print("training", flush=True)

async def main():
    folder = pathlib.Path({folder!r})
    worker = t.Worker(t.make_hello(folder), Printer())
    await worker.load_start(t.LoadStart(spec=t.genesis(folder), owned=(0,)))
    print(worker.pid, flush=True)
    await worker.train(t.FOREVER)

asyncio.run(main())
"""


def test_a_node_that_is_killed_leaves_no_trainer(tmp_path):
    script = PARENT.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline() == "training\n"
        parent.kill()
    assert has_ended(pid)


def test_a_trainer_ends_when_its_input_does():
    command = [sys.executable, "-m", "spes_p2p.node.trainer_main", "--parent", str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        trainer.stdin.close()
        assert trainer.wait(TIMEOUT_S) == 0


def test_a_trainer_whose_parent_is_another_does_not_start():
    command = [sys.executable, "-m", "spes_p2p.node.trainer_main", "--parent", "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        assert trainer.wait(TIMEOUT_S) == 0


def test_what_libraries_print_does_not_get_between_the_replies():
    script = (
        "import os; from spes_p2p.node import trainer_main as t, worker_messages as m; pipes = t.Pipes();"
        "print('noise', flush=True); os.system('echo noise'); pipes.reply(5, m.Done())"
    )
    done = subprocess.run([sys.executable, "-c", script], stdin=subprocess.DEVNULL, capture_output=True, check=True)
    assert done.stdout == to_frame(ReplyEnvelope(5, Done()))
    assert done.stderr == b"noise\nnoise\n"


# ------------------------------------------------------------------------------------------------- with a second rank


def rank_of(worker) -> int:
    [child] = psutil.Process(worker.pid).children()
    return child.pid


async def test_a_round_over_two_ranks_gives_an_update_that_ackers_accept(tmp_path):
    listener = Listener()
    async with running(make_hello(tmp_path, more_devices=("cpu",), frozen_format="int8"), listener) as worker:
        await worker.start()
        spec = genesis(tmp_path)
        begun = await worker.load_start(LoadStart(spec=spec, owned=(1, 2)))
        trained = await worker.train(3)
        update = await worker.publish()
        exported = await worker.export_handover(1)
        again = await worker.load_start(LoadStart(spec=spec, owned=(1, 2)))
        pids = (worker.pid, rank_of(worker))
    assert listener.restarts == []
    assert all(map(has_ended, pids))
    assert begun.nats_per_byte == pytest.approx(again.nats_per_byte, rel=1e-2)
    assert (trained.num_steps, trained.finite) == (3, True)
    assert [piece.index for piece in update.experts] == [1, 2]
    store = DiskBlobs(tmp_path / "blobs")
    reader = StartReader(CONFIG, store, spec)
    for piece in update.psi:
        assert piece.squared_norm > 0
        assert check_psi_piece(CONFIG, piece.index, store.read(piece.blob), piece.squared_norm) is None
    for piece in update.experts:
        data = store.read(piece.blob)
        assert piece.squared_norm > 0
        assert check_expert_blob(CONFIG, piece.index, data, reader.row_tensor, piece.squared_norm) is None
    assert exported.size_bytes == len(store.read(exported.blob))


async def test_several_devices_do_not_try_again_what_ran_out_of_memory(tmp_path):
    (tmp_path / "trainer").mkdir()
    whole = -(-CONFIG.training.batch_sequences // 2)
    note = FailedPlan(num_owned=1, micro_sequences=whole, checkpoint=False, node_pid=os.getpid())
    (tmp_path / "trainer" / FILE).write_bytes(msgspec.json.encode(note))
    async with running(make_hello(tmp_path, more_devices=("cpu",)), Listener()) as worker:
        await worker.start()
        begun = await worker.load_start(LoadStart(spec=genesis(tmp_path), owned=(1, 2)))
        assert (await worker.train(1)).num_steps == 1
        again = await worker.load_start(LoadStart(spec=genesis(tmp_path), owned=(1, 2)))
    (notice,) = begun.notices
    assert notice.startswith(f"out of memory on several devices with {note.plan}; going on with micro-batches of ")
    assert again.notices == ()  # it is said once, not in every round


async def test_a_rank_that_is_killed_is_a_death_of_the_trainer_and_training_goes_on(tmp_path):
    listener = Listener()
    async with running(make_hello(tmp_path, more_devices=("cpu",)), listener) as worker:
        await worker.load_start(LoadStart(spec=genesis(tmp_path), owned=(0,)))
        rank = rank_of(worker)
        listener.at_progress = lambda: os.kill(rank, signal.SIGKILL)
        trained = await worker.train(60)
        assert trained.num_steps == 60
        assert [event.reason for event in listener.restarts] == [
            "exit code 1: the trainer's process of cpu: ended by SIGKILL"
        ]
        assert worker.ready.resumed_round == 1
        # what was trained dies with any rank
        os.kill(rank_of(worker), signal.SIGKILL)
        with pytest.raises(TrainerError, match="ended by SIGKILL"):
            await worker.publish()


async def test_a_trainer_that_is_killed_leaves_no_rank(tmp_path):
    listener = Listener()
    async with running(make_hello(tmp_path, more_devices=("cpu",)), listener) as worker:
        await worker.start()
        rank = rank_of(worker)
        os.kill(worker.pid, signal.SIGKILL)
        assert has_ended(rank)


async def test_compiling_is_not_for_several_devices(tmp_path):
    async with running(make_hello(tmp_path, more_devices=("cpu",), compile=True), Listener()) as worker:
        with pytest.raises(ConfigError, match="several GPUs"):
            await worker.start()
