"""What memory a process may still take."""

import pytest
import torch

from spes_p2p.node import room
from spes_p2p.node.room import ADDRESSES_PER_BYTE, FREE_SHARE, room_for_ranks, room_for_training
from spes_p2p.training.fit import Room

CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 GB free, and a process that has 1 GB."""
    monkeypatch.setattr(room, "free_main_memory", lambda: 16_000_000_000)
    monkeypatch.setattr(room, "library_bytes", lambda: 50_000_000)
    monkeypatch.setattr(room, "_data_bytes", lambda: 1_000_000_000)


@pytest.mark.usefixtures("machine")
def test_without_a_limit_a_share_of_what_is_free_counts():
    assert room_for_training(CPU, None).device_bytes == int(16e9 * FREE_SHARE) - 50_000_000


@pytest.mark.usefixtures("machine")
def test_a_limit_counts_without_what_the_process_has_and_without_its_holes():
    given = room_for_training(CPU, 6_000_000_000)
    assert given.device_bytes == int(5e9 / ADDRESSES_PER_BYTE) - 50_000_000
    assert given.of == "of the 4.0 GB that the trainer process has left of 6.0 GB (--memory)"


@pytest.mark.usefixtures("machine")
def test_a_limit_beyond_what_is_free_does_not_make_more_of_it():
    assert room_for_training(CPU, 10**12).device_bytes == int(16e9 * FREE_SHARE) - 50_000_000


@pytest.mark.usefixtures("machine")
def test_a_process_that_is_beyond_its_limit_has_no_room():
    assert room_for_training(CPU, 500_000_000).device_bytes == 0


@pytest.mark.usefixtures("machine")
def test_on_a_gpu_its_own_free_memory_counts_and_main_memory_beside_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8_000_000_000, 10_000_000_000))
    free = room_for_training(torch.device("cuda:0"), None)
    assert (free.device_bytes, free.host_bytes) == (int(8e9 * FREE_SHARE), int(16e9 * FREE_SHARE))
    assert room_for_training(torch.device("cuda:0"), 5_000_000_000).device_bytes == 5_000_000_000


@pytest.mark.usefixtures("machine")
def test_ranks_on_a_cpu_share_its_memory():
    assert room_for_ranks([CPU], None) == room_for_training(CPU, None)
    assert room_for_ranks([CPU, CPU], None).device_bytes == (int(16e9 * FREE_SHARE) - 50_000_000) // 2


def test_of_several_gpus_the_one_with_least_counts(monkeypatch: pytest.MonkeyPatch):
    rooms = {0: Room(device_bytes=7, host_bytes=90), 1: Room(device_bytes=5, host_bytes=90)}
    monkeypatch.setattr(room, "room_for_training", lambda device, memory_bytes: rooms[device.index])
    assert room_for_ranks([torch.device("cuda:0"), torch.device("cuda:1")], None) == rooms[1]
