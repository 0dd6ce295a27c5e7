"""A swarm of real processes on loopback, put together from the commands as a person would, for the live tests.

Everything lives under one folder; waits are bounded and end when their condition holds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from spes_p2p.client.demo.config import write_toml
from spes_p2p.client.demo.processes import Child, Leftovers, child_environment
from spes_p2p.client.demo.texts import deal_texts
from spes_p2p.config import RunConfig
from spes_p2p.crypto import peer_from_text
from spes_p2p.errors import LocalStateError, SpesError, UnreachableError
from spes_p2p.ids import Digest, RoundNumber
from spes_p2p.node.control_client import read_snapshot
from spes_p2p.node.files import LEDGER_FILE
from spes_p2p.node.history import RoundRecord, read_history, read_manifest, replay, sizes_of_nothing
from spes_p2p.node.snapshot import NodeSnapshot
from spes_p2p.node.stored import LAST_ROUND
from spes_p2p.protocol.head import genesis_head
from spes_p2p.storage.ledger import Ledger

LISTEN = "/ip4/127.0.0.1/tcp/0"
_POLL_S = 0.2
_FINE_POLL_S = 0.02
_END_S = 60.0
_NOTE_EVERY_S = 1.0
_ORPHANS_S = 10.0
"""How long the kernel and a closed pipe may take to end the children of a killed node."""

Finals = dict[tuple[int, int], Digest]
"""(epoch, round) -> hash of the final certificate."""


def quick_config(**protocol: object) -> RunConfig:
    """A run small enough for six peers on two cores, with rounds of a few seconds."""
    return RunConfig.model_validate(
        {
            "name": "live",
            "experts_per_shard": 2,
            "model": {"width": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "expert_width": 32},
            "training": {
                "sequence_length": 64,
                "batch_sequences": 4,
                "inner_steps": [[0, 10]],
                "total_steps": 200,
                "warmup_steps": 5,
                "peak_lr": 3e-3,
                "merge": {"interval_steps": 10, "warmup_steps": 60},
            },
            "protocol": {
                "round_max_ms": 20_000,
                "round_min_ms": 1_000,
                "train_grace_ms": 3_000,
                "min_rate_bytes_per_s": 5_000_000,
                "view_timeout_base_ms": 2_000,
                "view_timeout_step_ms": 1_000,
                "resend_ms": 1_000,
                "parts": 4,
                **protocol,
            },
            "held_out_bytes": 8_192,
        }
    )


class LiveSwarm:
    """The processes of one swarm, by name."""

    ports_are_local = True
    """Whether a port of a peer is one of this machine as the test sees it."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.folder = folder
        self.config = config
        self.children: dict[str, Child] = {}
        self.texts: dict[str, Path] = {}
        self._frozen: set[str] = set()
        self._noted_s = 0.0
        self.leftovers = Leftovers()
        self.link = ""
        self.addresses: dict[str, str] = {}
        """First address of each bootstrap node, by its name."""
        folder.mkdir(parents=True, exist_ok=True)

    # --- commands ----------------------------------------------------------------------------------------------------

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [sys.executable, "-m", "spes_p2p.client", *arguments],
            capture_output=True,
            text=True,
            env=child_environment(self.folder),
            stdin=subprocess.DEVNULL,
            timeout=120,
            check=False,
        )

    def output(self, *arguments: str) -> str:
        """What a command that must succeed prints."""
        done = self.command(*arguments)
        if done.returncode != 0:
            raise SpesError(f"{arguments} ended with {done.returncode}: {done.stderr}")
        return done.stdout.strip()

    def data_dir(self, name: str) -> Path:
        """Data folder of a peer."""
        return self.folder / name

    def peer_id(self, name: str) -> str:
        """Peer id of a peer; its identity is made if there is none."""
        return str(
            json.loads(self.output("identity", "show", "--json", "--data-dir", str(self.data_dir(name))))["peer"]
        )

    def found(
        self, names: Sequence[str], text_bytes: int = 100_000, options: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        """Deal out texts, start a bootstrap node, create a run of these founders and start them all, each with its
        further `options` of `join`."""
        texts = {name: self.folder / "text" / name for name in names}
        deal_texts(list(texts.values()), text_bytes)
        self.start_bootstrap()
        self.create_run(names, texts[names[0]])
        for name in names:
            self.join(name, texts[name], *(options or {}).get(name, ()))

    @property
    def address(self) -> str:
        """Address of the first bootstrap node; empty before there is one."""
        return next(iter(self.addresses.values()), "")

    def start_bootstrap(self, name: str = "bootstrap", *more: str) -> None:
        """`spes-p2p bootstrap`; several may be started, each with a name of its own and told of the earlier ones."""
        listen, folder = self.listen_address(name), self.folder / name
        others = [f"--bootstrap={address}" for other, address in self.addresses.items() if other != name]
        arguments = ["bootstrap", "--json", "--listen", listen, "--data-dir", str(folder), *others, *more]
        child = Child(name, arguments, self.folder / f"{name}.log", self.within(name))
        self.children[name] = child

        def ready() -> bool:
            child.check()
            lines = [line for line in child.output.read_text().splitlines() if line.startswith("{")]
            if lines:
                self.addresses[name] = json.loads(lines[0])["addresses"][0]
            return bool(lines)

        self.wait(ready, 90, "the bootstrap node's address")

    def create_run(self, founders: Sequence[str], text: Path) -> None:
        """`spes-p2p run create`, by the first of the founders."""
        config_file = self.folder / "run.toml"
        write_toml(self.config, config_file)
        others = [f"--founder={self.peer_id(name)}" for name in founders[1:]]
        bootstraps = [f"--bootstrap={address}" for address in self.addresses.values()]
        self.link = self.output(
            "run", "create", str(config_file), *others, *bootstraps, f"--data={text}",
            "--data-dir", str(self.data_dir(founders[0])),
        )  # fmt: skip

    def join(self, name: str, text: Path, *more: str) -> Child:
        """`spes-p2p join` as a process. The output of an earlier start of the same peer is put beside the new one."""
        arguments = ["--debug", "join", self.link, "--headless", "--gpu", "none", "--listen", self.listen_address(name)]
        log = self.folder / f"{name}.log"
        if log.exists():
            log.rename(self.folder / f"{name}.{len(list(self.folder.glob(f'{name}.*.log'))) + 1}.log")
        child = Child(
            name,
            [*arguments, "--data", str(text), "--data-dir", str(self.data_dir(name)), *more],
            log,
            self.within(name),
        )
        self.texts[name] = text
        self.children[name] = child
        return child

    def restart(self, name: str) -> Child:
        """Start a peer again that has ended, on its folder and with its text."""
        return self.join(name, self.texts[name])

    def listen_address(self, name: str) -> str:
        """Where a peer listens."""
        return LISTEN

    def within(self, name: str) -> tuple[str, ...]:
        """The command that a peer's process is started with; empty: none."""
        return ()

    # --- what befalls it ---------------------------------------------------------------------------------------------

    def kill(self, *names: str) -> None:
        """SIGKILL peers at once and wait for their end. Their sockets' folders stay until a later start sweeps them.

        Raises SpesError if a process that they had started is still there after that.
        """
        held = Leftovers()
        held.note([self.children[name] for name in names])
        for name in names:
            os.kill(self.children[name].pid, signal.SIGKILL)
        for name in names:
            self.children[name].wait_or_kill(time.monotonic() + _END_S)
        self.leftovers.socket_files -= held.socket_files
        self._frozen -= set(names)
        self.wait(lambda: not self.orphans(), _ORPHANS_S, f"end of what {', '.join(names)} had started")

    def stop(self, name: str) -> None:
        """SIGTERM a peer and wait for its end."""
        self.children[name].ask_to_end()
        self.children[name].wait_or_kill(time.monotonic() + _END_S)

    def freeze(self, name: str) -> None:
        """SIGSTOP a peer and all its processes, as a machine that sleeps."""
        self._frozen.add(name)
        for process in self._family(name):
            process.suspend()

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        self._frozen.discard(name)
        for process in reversed(self._family(name)):
            process.resume()

    def _family(self, name: str) -> list[psutil.Process]:
        process = psutil.Process(self.children[name].pid)
        return [process, *process.children(recursive=True)]

    def orphans(self) -> list[str]:
        """Processes of this swarm that descend from none of its running peers."""
        running = {child.pid for child in self.children.values() if child.exit_code() is None}
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                is_ours = process.environ().get("SPES_HOME") == str(self.folder)
                if is_ours and not running & {process.pid, *(parent.pid for parent in process.parents())}:
                    found.append(f"{process.pid} ({process.name()})")
        return found

    # --- looking -----------------------------------------------------------------------------------------------------

    def look(self, name: str) -> NodeSnapshot | None:
        """The node's snapshot; None while it does not answer."""
        try:
            return read_snapshot(self.data_dir(name))
        except (UnreachableError, LocalStateError):
            return None

    def certified(self, name: str) -> int:
        """Newest certified round that a node reports; -1 while it does not answer."""
        snapshot = self.look(name)
        return -1 if snapshot is None else snapshot.certified_round

    def history(self, name: str) -> list[RoundRecord]:
        """The rounds in a node's ledger."""
        return read_history(self.data_dir(name))

    def finals(self, name: str) -> Finals:
        """Hashes of the final certificates on a peer's disk, whether it runs or not."""
        path = self.data_dir(name) / LEDGER_FILE
        if not path.exists():
            return {}
        ledger = Ledger(path)
        try:
            return {(entry.epoch, entry.round): entry.hash for entry in ledger.range(RoundNumber(0), LAST_ROUND)}
        finally:
            ledger.close()

    def accepted_bases(self, name: str, peer: str) -> dict[int, int]:
        """Round of a certificate -> base round of the newest update of `peer` that it accepted, by a peer's ledger."""
        signed = read_manifest(self.data_dir(name))
        if signed is None:
            return {}
        ledger = Ledger(self.data_dir(name) / LEDGER_FILE)
        try:
            found: dict[int, int] = {}
            chain = replay(ledger, genesis_head(signed.manifest, sizes_of_nothing(signed.manifest)))
            for before, _, after in chain:
                rows = [head.state.row(peer_from_text(peer)) for head in (before, after)]
                base, base_before = (row.base_round if row is not None else 0 for row in reversed(rows))
                if base > base_before:
                    found[after.round] = base
            return found
        finally:
            ledger.close()

    def said(self, name: str) -> str:
        """Everything that a peer has printed, in all its starts."""
        logs = [*self.folder.glob(f"{name}.*.log"), self.folder / f"{name}.log"]
        return "".join(log.read_text(errors="replace") for log in logs if log.exists())

    def wait(self, condition: Callable[[], bool], limit_s: float, what: str, poll_s: float = _POLL_S) -> None:
        """Look until the condition holds. Raises SpesError after the limit, with the ends of all logs."""
        until_s = time.monotonic() + limit_s
        pause = threading.Event()
        while not condition():
            self._note()
            if time.monotonic() > until_s:
                ends = "\n".join(f"{name}: {child.last_line()}" for name, child in self.children.items())
                raise SpesError(f"no {what} within {limit_s} s\n{ends}")
            pause.wait(poll_s)

    def _note(self) -> None:
        """Remember what the processes hold, now and then: looking at all sockets takes a tenth of a second."""
        if time.monotonic() - self._noted_s >= _NOTE_EVERY_S:
            self.leftovers.note(self.children.values())
            self._noted_s = time.monotonic()

    def wait_phase(self, name: str, phases: Sequence[str], limit_s: float) -> bool:
        """Until a peer is in one of these phases. False if it was not within the limit: phases may be short."""
        until_s, found = time.monotonic() + limit_s, False

        def reached() -> bool:
            nonlocal found
            snapshot = self.look(name)
            found = snapshot is not None and snapshot.round.phase in phases
            return found or time.monotonic() >= until_s

        self.wait(reached, 2 * limit_s, f"phase {', '.join(phases)} of {name}", _FINE_POLL_S)
        return found

    def wait_member(self, name: str, number: int, limit_s: float) -> None:
        """Until a peer is a member that has adopted that round."""

        def reached() -> bool:
            snapshot = self.look(name)
            return snapshot is not None and snapshot.member and snapshot.certified_round >= number

        self.wait(reached, limit_s, f"membership of {name} in round {number}")

    def wait_round(self, number: int, names: Sequence[str], limit_s: float) -> None:
        """Until all of them report that round as certified."""
        self.wait(lambda: all(self.certified(name) >= number for name in names), limit_s, f"round {number}")

    def end(self) -> None:
        """End everything and look for what is left. Raises SpesError that names it."""
        self.leftovers.note(self.children.values())
        for name in tuple(self._frozen):
            with suppress(psutil.NoSuchProcess):
                self.thaw(name)
        for child in self.children.values():
            child.ask_to_end()
        until_s = time.monotonic() + _END_S
        for child in self.children.values():
            child.wait_or_kill(until_s)
        if not self.ports_are_local:
            self.leftovers.ports.clear()
        self.leftovers.check_gone()


@contextmanager
def live_swarm(folder: Path, config: RunConfig) -> Iterator[LiveSwarm]:
    """A swarm whose processes are gone when the context closes."""
    swarm = LiveSwarm(folder, config)
    try:
        yield swarm
    finally:
        swarm.end()
