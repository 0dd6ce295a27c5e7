"""How much memory this process may still take for training: asked of the system, once, before the model is made."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from spes_p2p.model.products import library_bytes
from spes_p2p.node.main_memory import free_main_memory
from spes_p2p.training.fit import Room
from spes_p2p.units import bytes_text

FREE_SHARE = 0.9
"""Of what is free now: other programs want something later."""
ADDRESSES_PER_BYTE = 1.25
"""Linux's limit counts a process's addresses, holes whose pages were given back among them (docs/LOG.md)."""


def room_for_ranks(devices: Sequence[torch.device], memory_bytes: int | None) -> Room:
    """The room of each of these devices, which train one model together: that of the one with least. Ranks on a CPU
    share its main memory."""
    rooms = [room_for_training(device, memory_bytes) for device in devices]
    least = min(rooms, key=lambda room: room.device_bytes)
    if len(devices) == 1 or least.host_bytes is not None:
        return least
    return replace(least, device_bytes=least.device_bytes // len(devices))


def room_for_training(device: torch.device, memory_bytes: int | None) -> Room:
    """Of the GPU's free memory or of main memory, at most what `--memory` allows, which `limit_memory` enforces."""
    free_host = int(free_main_memory() * FREE_SHARE)
    if device.type == "cuda":
        free = int(torch.cuda.mem_get_info(device)[0] * FREE_SHARE)
        if memory_bytes is not None and memory_bytes <= free:
            return Room(device_bytes=memory_bytes, host_bytes=free_host, of=_allowed(memory_bytes))
        return Room(device_bytes=free, host_bytes=free_host, of=f"of the {bytes_text(free)} that are free on the GPU")
    free_host = max(0, free_host - library_bytes())
    if memory_bytes is not None:
        allowed = int((memory_bytes - _data_bytes()) / ADDRESSES_PER_BYTE) - library_bytes()
        if allowed <= free_host:
            left = max(0, allowed)
            of = f"of the {bytes_text(left)} that the trainer process has left of {bytes_text(memory_bytes)} (--memory)"
            return Room(device_bytes=left, of=of)
    return Room(device_bytes=free_host, of=f"of the {bytes_text(free_host)} of main memory that are free")


def _data_bytes() -> int:
    """What Linux counts against the limit on a process's data; elsewhere what it occupies."""
    if sys.platform != "linux":
        return psutil.Process().memory_info().rss
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmData:")) * 1024


def _allowed(memory_bytes: int) -> str:
    return f"of the {bytes_text(memory_bytes)} of --memory"
