"""The keeper on a machine, a line and a trainer that exist in this test alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from spes_p2p.config import Limits
from spes_p2p.digests import digest
from spes_p2p.errors import ConfigError, MachineError
from spes_p2p.ids import Digest
from spes_p2p.node.budgets import keeper
from spes_p2p.node.budgets.keeper import Budgets, Machine
from spes_p2p.node.budgets.keeping_up import Demand
from spes_p2p.node.budgets.power import GpuPower
from spes_p2p.node.budgets.store import read_limits, read_month
from spes_p2p.node.holds import PAUSE, Holds
from spes_p2p.node.traffic import Crowd
from spes_p2p.protocol.params import PieceSizes
from spes_p2p.testing.gpu_driver import FakeNvml

DEMAND = Demand(
    sizes=PieceSizes(
        expert_blob_bytes=10_000_000,
        psi_piece_bytes=1_000_000,
        part_result_bytes=4_000_000,
        num_parts=1,
        num_shards=4,
    ),
    crowd=Crowd(num_members=4, num_eligible=4, num_replicas=2),
    expert_acks=1,
    inner_steps=100,
    transfer_s=60.0,
    round_max_s=300.0,
)


class PretendMachine(Machine):
    def __init__(self) -> None:
        self.at = datetime(2026, 11, 29, 23, 0)
        self.at_s = 0.0
        self.cores: float | None = 0.0
        self.battery: bool | None = None

    def now(self) -> datetime:
        return self.at

    def now_s(self) -> float:
        return self.at_s

    def other_cores(self) -> float | None:
        return self.cores

    def on_battery(self) -> bool | None:
        return self.battery


@dataclass
class PretendLine:
    rates: tuple[float | None, float | None] = (None, None)
    no_blobs: str = ""
    spared: frozenset[Digest] = frozenset()
    up: int = 0
    down: int = 0

    def set_rates(self, up_bytes_per_s: float | None, down_bytes_per_s: float | None) -> None:
        self.rates = (up_bytes_per_s, down_bytes_per_s)

    def set_no_blobs(self, reason: str, spared: frozenset[Digest]) -> None:
        self.no_blobs, self.spared = reason, spared

    def bytes_up(self) -> int:
        return self.up

    def bytes_down(self) -> int:
        return self.down


@dataclass
class PretendWorker:
    share: float = 1.0

    def set_share(self, share: float) -> None:
        self.share = share


@dataclass
class Bench:
    """A keeper and all that is around it."""

    folder: Path
    machine: PretendMachine = field(default_factory=PretendMachine)
    line: PretendLine = field(default_factory=PretendLine)
    worker: PretendWorker = field(default_factory=PretendWorker)
    holds: Holds = field(default_factory=Holds)
    told: list[str] = field(default_factory=list)
    power: GpuPower = field(default_factory=lambda: GpuPower(("cpu",), nvml=None))

    async def start(self, wanted: Limits | None = None) -> Budgets:
        budgets = Budgets(
            self.folder, self.holds.set, lambda level, text: self.told.append(text), self.power, self.machine
        )
        await budgets.open(wanted)
        await budgets.limit_line(self.line)
        budgets.limit_worker(self.worker)
        return budgets

    async def later(self, budgets: Budgets, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.machine.at_s += 1.0
            self.machine.at += timedelta(seconds=1)
            await budgets.look()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_limits_hold_at_once_and_over_restarts(bench: Bench) -> None:
    budgets = await bench.start(Limits(upload=1_000_000, gpu_share=0.5))
    assert (bench.line.rates, bench.worker.share) == ((1_000_000, None), 0.5)
    shown = await budgets.change({"upload": "2MB/s", "download": "4MB/s", "gpu_share": "off"})
    assert (bench.line.rates, bench.worker.share) == ((2_000_000, 4_000_000), 1.0)
    assert [row.name for row in shown.limits] == ["upload", "download"]
    again = Bench(bench.folder)
    assert (await again.start()).limits == Limits(upload=2_000_000, download=4_000_000) == read_limits(bench.folder)
    assert again.line.rates == (2_000_000, 4_000_000)


async def test_a_change_that_is_wrong_or_impossible_changes_nothing(bench: Bench) -> None:
    budgets = await bench.start(Limits(upload=1_000_000))
    budgets.fit_run(DEMAND, 4, stated=False)
    budgets.follow_run(lambda: (DEMAND, 2))
    changes: list[tuple[Mapping[str, str], type[Exception], str]] = [
        ({"download": "4MB/s", "upload": "slow"}, ConfigError, "--upload"),
        ({"download": "4MB/s", "gpu_power": "200W"}, MachineError, "trains on the CPU"),
        ({"upload": "60kB/s"}, MachineError, "--upload 60 kB/s is too slow for this run: with 2 shards"),
    ]
    for change, kind, words in changes:
        with pytest.raises(kind, match=words):
            await budgets.change(change)
    assert budgets.limits == Limits(upload=1_000_000) == read_limits(bench.folder)
    assert bench.line.rates == (1_000_000, None)


async def test_a_disk_that_refuses_takes_the_power_back_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MachineError("disk full")

    bench.power = GpuPower(("cuda:0",), driver := FakeNvml())
    budgets = await bench.start(Limits(gpu_power=200))
    monkeypatch.setattr(keeper, "write_limits", full)
    with pytest.raises(MachineError, match=r"^disk full$"):
        await budgets.change({"gpu_power": "150W", "upload": "1MB/s"})
    assert (driver.watts[0], budgets.limits, bench.line.rates) == (200, Limits(gpu_power=200), (None, None))
    driver.refuses.add((0, 200))
    with pytest.raises(MachineError, match=r"disk full\nThe GPUs' power could not be put back: .* refuses it"):
        await budgets.change({"gpu_power": "150W"})
    assert budgets.limits == Limits(gpu_power=200)
    await budgets.close()
    assert driver.watts[0] == 300


async def test_power_that_cannot_be_set_changes_no_other_limit(bench: Bench) -> None:
    bench.power = GpuPower(("cuda:0", "cuda:1"), driver := FakeNvml())
    budgets = await bench.start(Limits(upload=1_000_000))
    driver.refuses.add((1, 200))
    with pytest.raises(MachineError, match="--gpu-power 200W: the driver refuses it"):
        await budgets.change({"gpu_power": "200W", "upload": "2MB/s", "gpu_share": "50%"})
    assert (driver.watts[0], driver.watts[1]) == (300, 310)
    assert (bench.worker.share, bench.line.rates) == (1.0, (1_000_000, None))
    assert budgets.limits == Limits(upload=1_000_000) == read_limits(bench.folder)


async def test_another_limit_changes_though_the_driver_takes_no_power_any_more(bench: Bench) -> None:
    bench.power = GpuPower(("cuda:0",), driver := FakeNvml())
    budgets = await bench.start(Limits(gpu_power=200))
    driver.refuses.add((0, 200))
    await budgets.change({"upload": "1MB/s"})
    assert budgets.limits == Limits(gpu_power=200, upload=1_000_000)


async def test_reasons_come_and_go_beside_those_of_others(bench: Bench) -> None:
    bench.holds.set(PAUSE, True)
    budgets = await bench.start(Limits(hours="22:00-07:00", pause_on_battery=True))
    assert bench.holds.reasons == (PAUSE,)
    bench.machine.battery = True
    await bench.later(budgets, 1)
    assert len(bench.holds.reasons) == 2
    bench.machine.at = datetime(2026, 11, 30, 7, 0)
    await bench.later(budgets, 1)
    assert "it is outside the hours 22:00-07:00" in bench.holds.reasons
    bench.machine.battery = False
    await budgets.change({"hours": "06:00-08:00"})
    assert bench.holds.reasons == (PAUSE,)
    assert bench.line.no_blobs == ""


async def test_idle_only_follows_the_load_of_others(bench: Bench) -> None:
    budgets = await bench.start(Limits(idle_only=True))
    bench.machine.cores = 1.5
    await bench.later(budgets, 15)
    assert bench.holds.reasons == ("other programs use this machine",)
    await budgets.change({"idle_only": "no"})
    assert not bench.holds.held


async def test_a_month_used_up_holds_training_and_blobs_until_it_ends_or_the_limit_is_raised(bench: Bench) -> None:
    budgets = await bench.start(Limits(monthly=100_000_000))
    bench.line.up, bench.line.down = 60_000_000, 39_000_000
    await bench.later(budgets, 1)
    assert (bench.holds.held, bench.line.no_blobs) == (False, "")
    bench.line.down = 40_000_000
    await bench.later(budgets, 1)
    assert bench.line.no_blobs == "this month's 100 MB are used up"
    assert bench.holds.reasons == (bench.line.no_blobs,)
    # killed: the next start knows
    killed = Bench(bench.folder)
    await killed.start()
    assert killed.line.no_blobs
    await budgets.change({"monthly": "200MB"})
    assert (bench.holds.held, bench.line.no_blobs) == (False, "")
    await budgets.change({"monthly": "100MB"})
    assert bench.holds.held
    bench.machine.at = datetime(2026, 12, 1, 0, 0)
    await bench.later(budgets, 1)
    assert (bench.holds.held, bench.line.no_blobs) == (False, "")


async def test_what_was_promised_is_served_while_anything_of_the_month_is_left(bench: Bench) -> None:
    budgets = await bench.start(Limits(monthly=100_000_000))
    budgets.follow_run(lambda: (replace(DEMAND, crowd=Crowd(num_members=1, num_eligible=1, num_replicas=1)), 2))
    bench.line.up = 40_000_000
    await bench.later(budgets, 1)
    assert budgets.handover_refusal(50_000_000, 60.0) == ""
    assert budgets.handover_refusal(60_000_000, 60.0).startswith("60 MB are left of this month's 100 MB")
    promised = digest("masters")
    budgets.promise({promised: 50_000_000})
    for used, stops, spared in ((48, False, set()), (49, True, {promised}), (99, True, {promised}), (100, True, set())):
        bench.line.up = used * 1_000_000
        await bench.later(budgets, 1)
        assert (bool(bench.line.no_blobs), bench.line.spared) == (stops, spared), used
    assert budgets.handover_refusal(1, 60.0) == "this month's 100 MB are used up"


async def test_a_proper_end_stores_the_month_to_the_byte(bench: Bench) -> None:
    budgets = await bench.start()
    bench.line.up, bench.line.down = 5_000_000, 70
    await budgets.close()
    stored = read_month(bench.folder)
    assert stored is not None
    assert (stored.up_bytes, stored.down_bytes) == (5_000_000, 70)


async def test_a_full_disk_is_told_once_and_counting_goes_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = await bench.start()

    def full(*_: object) -> None:
        raise MachineError("disk full")

    monkeypatch.setattr(keeper, "write_month", full)
    for size in (10**8, 10**9, 10**10):
        bench.line.up = size
        await bench.later(budgets, 1)
    assert [text for text in bench.told if "disk full" in text] == [
        "a restart would forget this month's bytes: disk full"
    ]


async def test_rates_are_those_of_the_last_seconds(bench: Bench) -> None:
    budgets = await bench.start(Limits(upload=1_000_000))
    for _ in range(10):
        bench.line.up += 500_000
        await bench.later(budgets, 1)
    assert budgets.view().limits[0].used == "500 kB/s"


async def test_the_run_decides_how_many_shards_and_steps(bench: Bench) -> None:
    budgets = await bench.start(Limits(upload=1_000_000))
    assert budgets.fit_run(DEMAND, 4, stated=False) == 2
    assert "2 of 4 shards" in budgets.view().note or "2 of 4 shards" in bench.told[-1]
    budgets.follow_run(lambda: (DEMAND, 2))
    assert budgets.inner_steps(100, 1.0) == 100
    budgets.follow_run(lambda: (DEMAND, 4))
    assert 25 <= budgets.inner_steps(100, 1.0) < 100
    assert (await Bench(bench.folder).start(Limits())).fit_run(DEMAND, 4, stated=False) == 4


async def test_a_line_that_the_run_has_outgrown_gives_what_it_can_and_says_so_once(bench: Bench) -> None:
    budgets = await bench.start(Limits(upload=100_000))
    small = replace(
        DEMAND,
        sizes=replace(DEMAND.sizes, expert_blob_bytes=100_000, psi_piece_bytes=10_000, part_result_bytes=4_000),
        crowd=Crowd(num_members=2, num_eligible=2, num_replicas=1),
    )
    assert budgets.fit_run(small, 4, stated=False) == 4
    budgets.follow_run(lambda: (DEMAND, 4))
    for _ in range(3):
        assert budgets.inner_steps(100, 1.0) == 25
    assert len([text for text in bench.told if "too slow for this run" in text]) == 1


async def test_a_limit_that_is_changed_lets_nothing_begin_in_between(bench: Bench) -> None:
    at_night = "it is outside the hours 01:00-02:00"
    budgets = await bench.start(Limits(hours="00:00-01:00"))
    held: list[bool] = []
    told_before = len(bench.told)

    def set_hold(reason: str, hold: bool) -> None:
        bench.holds.set(reason, hold)
        held.append(bench.holds.held)

    budgets._set_hold = set_hold
    await budgets.change({"hours": "01:00-02:00"})
    assert (bench.holds.reasons, held) == ((at_night,), [True, True])
    # whoever holds training tells of it, and nobody else
    assert bench.told[told_before:] == ["limits changed: hours 01:00-02:00"]
