"""A wish to leave, which outlives a restart, and what a proper leave hands over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from spes_p2p.errors import MachineError, TrainerError
from spes_p2p.ids import Digest
from spes_p2p.node.driver import Driver
from spes_p2p.node.files import LEAVE_FILE
from spes_p2p.node.handover import encode_index
from spes_p2p.node.training import Training
from spes_p2p.ports import BlobStore
from spes_p2p.protocol import effects as fx
from spes_p2p.storage.atomic import write_file


class LeaveWish:
    """Whether the node was asked to leave properly: `wanted`, and a file in the data folder until it is done."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / LEAVE_FILE
        self.wanted = asyncio.Event()

    @property
    def is_stored(self) -> bool:
        """Whether a leave was asked for that has not come to its end, perhaps before a restart."""
        return self._path.exists()

    def want(self) -> None:
        """Leave. Raises MachineError if the wish cannot be stored; it holds all the same until the node ends."""
        self.wanted.set()
        write_file(self._path, b"")

    def forget(self) -> None:
        """It is done, or void."""
        self._path.unlink(missing_ok=True)


async def leave_properly(
    driver: Driver, training: Training, blobs: BlobStore, notify: Callable[[str, str], None]
) -> None:
    """Let the training that is under way end and its update go out, export masters and moments, and say the leave.

    Nothing is trained after the export: what is handed over is what the last update published.
    """
    shards: dict[int, tuple[Digest, int]] = {}
    await driver.rounds.finish()
    if driver.machine.is_member:
        try:
            shards = await training.export()
        except (TrainerError, MachineError) as error:
            notify("warning", f"nothing is handed over: {error}")
    if not shards:
        driver.give(fx.LeaveWanted(handover=None, handover_bytes=0))
        return
    index = encode_index(shards)
    blob = await asyncio.to_thread(blobs.put, index)
    driver.pin([blob, *(shard_blob for shard_blob, _ in shards.values())])
    driver.give(fx.LeaveWanted(handover=blob, handover_bytes=len(index)))
