"""The demo's swarm: a bootstrap node and peers, each a process of its own on loopback, all founders of one run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from spes_p2p.client.demo.config import demo_config, write_toml
from spes_p2p.client.demo.processes import END_S, Child, Leftovers, output_of
from spes_p2p.client.demo.texts import deal_texts
from spes_p2p.errors import LocalStateError, MachineError, SpesError, UnreachableError
from spes_p2p.node.control_client import read_snapshot, request_stop
from spes_p2p.node.files import IDENTITY_FILE
from spes_p2p.node.snapshot import NodeSnapshot
from spes_p2p.storage.identity import load_or_create_identity

LOOPBACK_LISTEN = "/ip4/127.0.0.1/tcp/0"
START_S = 120.0
"""Six nodes and five trainers that start at once on two cores took 24 s."""
STALL_S = 180.0
"""A swarm without a new certificate for so long has failed."""
LOOK_EVERY_S = 0.5
NOTE_EVERY_S = 5.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the user asked for."""

    folder: Path
    num_peers: int
    num_rounds: int

    def peer_folder(self, peer: int) -> Path:
        """Data folder of a peer, counted from 1."""
        return self.folder / f"peer-{peer}"

    def text_folder(self, peer: int) -> Path:
        """The own text of a peer, counted from 1."""
        return self.folder / "text" / f"peer-{peer}"

    @property
    def peers(self) -> range:
        """Numbers of the peers."""
        return range(1, self.num_peers + 1)


@dataclass(slots=True)
class Swarm:
    """The running processes, and what they said last."""

    plan: Plan
    say: Say
    stopping: threading.Event
    """Set from outside to end the demo early."""
    began_s: float = field(default_factory=time.monotonic)
    children: list[Child] = field(default_factory=list)
    snapshots: dict[int, NodeSnapshot] = field(default_factory=dict)
    first_certificate_s: float | None = None
    leftovers: Leftovers = field(default_factory=Leftovers)
    link: str = ""

    def elapsed_s(self) -> float:
        """Seconds since the demo began."""
        return time.monotonic() - self.began_s

    def prepare(self) -> None:
        """Texts, identities, and the bootstrap node; then the run, which names all of them."""
        plan = self.plan
        self.say(f"dealing the installed Python's text to {plan.num_peers} peers, and making their identities")
        deal_texts([plan.text_folder(peer) for peer in plan.peers])
        founders = [load_or_create_identity(plan.peer_folder(peer) / IDENTITY_FILE).text for peer in plan.peers]
        config_file = plan.folder / "run.toml"
        write_toml(demo_config(plan.num_peers, plan.num_rounds), config_file)
        self.say("starting the bootstrap node")
        address = self._start_bootstrap()
        self.say("creating the run")
        arguments = ["run", "create", str(config_file), "--json", "--data-dir", str(plan.peer_folder(1))]
        arguments += [f"--founder={founder}" for founder in founders[1:]]
        arguments += [f"--data={plan.text_folder(peer)}" for peer in plan.peers]
        arguments.append(f"--bootstrap={address}")
        self.link = json.loads(output_of("spes_p2p.client", arguments, plan.folder))["link"]

    def _start_bootstrap(self) -> str:
        folder = self.plan.folder
        output = folder / "bootstrap.log"
        arguments = ["--debug", "bootstrap", "--json", "--tied", "--listen", LOOPBACK_LISTEN]
        child = Child("the bootstrap node", [*arguments, "--data-dir", str(folder / "bootstrap")], output)
        self.children.append(child)
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            child.check()
            for line in output.read_text(errors="replace").splitlines():
                if line.startswith("{") and line.endswith("}"):
                    address: str = json.loads(line)["addresses"][0]
                    return address
            self._pause()
        raise MachineError(f"the bootstrap node was not ready within {START_S:.0f} s\nWhat it said: {output}")

    def start_peers(self) -> None:
        """All peers at once."""
        self.say(f"starting {self.plan.num_peers} peers")
        for peer in self.plan.peers:
            arguments = ["--debug", "join", self.link, "--headless", "--log-json", "--tied"]
            arguments += ["--gpu", "none", "--threads", "1"]
            arguments += ["--data-dir", str(self.plan.peer_folder(peer)), "--data", str(self.plan.text_folder(peer))]
            arguments += ["--listen", LOOPBACK_LISTEN, "--rounds", str(self.plan.num_rounds)]
            self.children.append(Child(f"peer {peer}", arguments, self.plan.folder / f"peer-{peer}.log"))

    def follow(self) -> None:
        """Watch the peers until all of them have certified, and evaluated, the last round.

        Raises SpesError if a process ends early or the swarm stalls, KeyboardInterrupt if the user wants an end.
        """
        told, progress_s, noted_s = 0, time.monotonic(), 0.0
        while not self._is_done():
            for child in self.children:
                child.check()
            if time.monotonic() - noted_s > NOTE_EVERY_S:
                self.leftovers.note(self.children)
                noted_s = time.monotonic()
            self._look()
            certified = max((view.certified_round for view in self.snapshots.values()), default=0)
            if certified > told:
                told, progress_s = certified, time.monotonic()
                self._tell(certified)
            if time.monotonic() - progress_s > STALL_S:
                raise SpesError(
                    f"no new certificate for {STALL_S:.0f} s\nWhat the peers said: {self.plan.folder}/*.log"
                )
            self._pause()
        self.leftovers.note(self.children)

    def _look(self) -> None:
        for peer in self.plan.peers:
            try:
                self.snapshots[peer] = read_snapshot(self.plan.peer_folder(peer))
            except (UnreachableError, LocalStateError):
                # not up yet, or too busy for a moment; one that has ended is found by `check`
                continue

    def _tell(self, certified: int) -> None:
        if self.first_certificate_s is None:
            self.first_certificate_s = self.elapsed_s()
        losses = [view.learning.val_curve[-1] for view in self.snapshots.values() if view.learning.val_curve]
        loss = f", held-out loss {max(losses)[1]:.3f} nats per byte after round {max(losses)[0]}" if losses else ""
        self.say(f"{self.elapsed_s():5.0f} s  round {certified} of {self.plan.num_rounds} certified{loss}")

    def _is_done(self) -> bool:
        last = self.plan.num_rounds
        return len(self.snapshots) == self.plan.num_peers and all(
            view.certified_round >= last and any(number >= last for number, _ in view.learning.val_curve)
            for view in self.snapshots.values()
        )

    def _pause(self) -> None:
        if self.stopping.wait(LOOK_EVERY_S):
            raise KeyboardInterrupt

    def end(self) -> None:
        """End all processes: by the local API first, then by signals."""
        self.leftovers.note(self.children)
        for peer in self.plan.peers:
            try:
                request_stop(self.plan.peer_folder(peer))
            except (UnreachableError, LocalStateError):
                continue
        for child in self.children:
            child.ask_to_end()
        until_s = time.monotonic() + END_S
        for child in self.children:
            child.wait_or_kill(until_s)


@contextmanager
def running_swarm(plan: Plan, say: Say, stopping: threading.Event) -> Iterator[Swarm]:
    """A swarm that is gone when the context closes, however that happens. Raises SpesError if something is left."""
    swarm = Swarm(plan, say, stopping)
    try:
        swarm.prepare()
        swarm.start_peers()
        yield swarm
    finally:
        swarm.end()
    for child in swarm.children:
        child.check_end()
    swarm.leftovers.check_gone()
