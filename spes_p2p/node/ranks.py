"""The processes of the other ranks, as the trainer process sees them: started, told, watched and ended here.

A rank that ends takes the whole trainer with it, whatever that is doing: it may be waiting in an exchange for the one
that is gone. The node then starts another trainer, as after any death.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from spes_p2p.node.rank_messages import Join
from spes_p2p.node.worker_messages import to_frame
from spes_p2p.training.orders import Order
from spes_p2p.training.ranks import GroupRanks

RANK_COMMAND = (sys.executable, "-m", "spes_p2p.node.rank_main")
MEETING_FILE = "ranks"
CULPRIT_WAIT_S = 3.0
"""An exchange fails here at most so long before the end of the rank that broke it is known."""
FAILED = 1


def die(reason: str) -> None:
    """End this process; the node finds the reason at the end of its log."""
    print(reason, file=sys.stderr, flush=True)
    os._exit(FAILED)


class RankProcesses:
    """One process for each device but the first, which is this process's own. A `training.spread.Team` after `meet`."""

    def __init__(
        self,
        devices: Sequence[str],
        folder: Path,
        *,
        threads: int = 1,
        memory_bytes: int | None = None,
        on_death: Callable[[str], None] = die,
    ) -> None:
        """Starts them; must be called in the main thread, to whose life theirs is tied. `on_death` is called in
        another thread."""
        self._closing = False
        self._on_death = on_death
        self._death = threading.Event()
        self._ranks: GroupRanks | None = None
        self._place = folder / MEETING_FILE
        self._place.unlink(missing_ok=True)  # of a trainer that was killed
        self._devices = tuple(devices)
        self._processes: list[subprocess.Popen[bytes]] = []
        for index, device in list(enumerate(devices))[1:]:
            join = Join(
                index=index,
                count=len(devices),
                device=device,
                meeting_place=str(self._place),
                threads=threads,
                memory_bytes=memory_bytes,
            )
            command = (*RANK_COMMAND, "--parent", str(os.getpid()))
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(process, device), name=f"end of {device}", daemon=True).start()
            _write(process, join)

    def meet(self) -> None:
        """Wait until all ranks are up and know each other."""
        self._ranks = meet(0, len(self._devices), self._devices[0], self._place)

    @property
    def ranks(self) -> GroupRanks:
        """Rank 0's side of the process group. Raises ValueError before `meet`."""
        if self._ranks is None:
            raise ValueError("the ranks have not met")
        return self._ranks

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1, 2, ..."""
        return tuple(process.pid for process in self._processes)

    def tell(self, order: Order) -> None:
        """Have every other rank perform this order. Raises OSError if one is gone."""
        for process in self._processes:
            _write(process, order)

    def await_culprit(self) -> None:
        """Let a rank that has ended be found, so that its reason is told and not what followed from it here."""
        self._death.wait(CULPRIT_WAIT_S)

    def close(self) -> None:
        """End them, by force: they have nothing to store."""
        self._closing = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()

    def _watch(self, process: subprocess.Popen[bytes], device: str) -> None:
        reason = process.stdout.read().decode(errors="replace") if process.stdout is not None else ""
        code = process.wait()
        if not self._closing:
            end = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            self._on_death(f"the trainer's process of {device}: {reason or end}")
            self._death.set()


def meet(index: int, count: int, device: str, place: Path) -> GroupRanks:
    """Join the process group of a peer's ranks, which are all on this machine."""
    # nobody else can reach it then
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    own = torch.device(device)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    return GroupRanks(index, count, own, place)


def _write(process: subprocess.Popen[bytes], message: msgspec.Struct) -> None:
    if process.stdin is None:
        raise BrokenPipeError("the rank has no input")
    process.stdin.write(to_frame(message))
    process.stdin.flush()
