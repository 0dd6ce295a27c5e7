"""When other programs count as using the machine, and what is measured of them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from spes_p2p.node.budgets import facts
from spes_p2p.node.budgets.facts import on_battery
from spes_p2p.node.budgets.idleness import QUIET_S, Idleness


def busy_after(idleness: Idleness, begin_s: int, end_s: int, cores: float) -> list[bool]:
    found = []
    for second in range(begin_s, end_s):
        idleness.look(float(second), cores)
        found.append(idleness.busy)
    return found


def test_load_that_lasts_is_somebody_and_a_minute_of_quiet_is_nobody() -> None:
    idleness = Idleness()
    assert not any(busy_after(idleness, 0, 30, 0.1))
    assert busy_after(idleness, 30, 45, 1.0)[-1]
    quiet = busy_after(idleness, 45, 45 + int(QUIET_S) + 15, 0.05)
    assert quiet[:50] == [True] * 50
    assert not quiet[-1]


def test_a_short_burst_is_nobody() -> None:
    idleness = Idleness()
    busy_after(idleness, 0, 20, 0.1)
    assert not any(busy_after(idleness, 20, 23, 1.0))
    assert not any(busy_after(idleness, 23, 60, 0.1))
    assert not any(busy_after(Idleness(), 0, 3, 4.0)), "nor where nothing was measured before"


def test_a_load_at_the_border_does_not_switch_on_and_off() -> None:
    idleness = Idleness()
    busy_after(idleness, 0, 30, 0.6)
    assert all(busy_after(idleness, 30, 300, 0.4))
    fresh = Idleness()
    assert not any(busy_after(fresh, 0, 300, 0.4))


def test_what_this_node_and_its_children_take_is_not_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, busy = [0.0], [100.0]
    own: dict[tuple[int, float], float] = {(1, 0.5): 10.0, (2, 0.7): 3.0}
    monkeypatch.setattr(facts.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(facts, "_busy_s", lambda: busy[0])
    monkeypatch.setattr(facts, "_own_s", lambda: dict(own))
    load = facts.OtherLoad()
    clock[0], busy[0] = 10.0, 125.0
    own[1, 0.5] = 18.0
    own[3, 9.9] = 2.0  # a trainer that was started meanwhile
    del own[2, 0.7]
    assert load.cores() == pytest.approx((25.0 - 8.0 - 2.0) / 10.0)
    clock[0], busy[0] = 20.0, 126.0
    own[1, 0.5] = 21.0
    assert load.cores() == 0.0


def test_the_machine_and_a_child_are_really_measured() -> None:
    before_s = facts._busy_s()
    with subprocess.Popen([sys.executable, "-c", "print('up', flush=True); input()"], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert {pid for pid, _ in facts._own_s()} >= {os.getpid(), child.pid}
        child.communicate(b"\n")
    assert facts._busy_s() >= before_s > 0.0


def test_another_node_on_this_machine_is_nobody_at_work() -> None:
    looks = "from spes_p2p.node.budgets import facts; print(*(pid for pid, _ in facts._own_s()))"
    node = [sys.executable, "-m", "spes_p2p.client.node_process"]  # waits for its order
    with subprocess.Popen(node, stdin=-1) as other, subprocess.Popen(["cat"], stdin=-1) as somebody:
        seen = set(map(int, subprocess.check_output([sys.executable, "-c", looks], text=True).split()))
        for process in (other, somebody):
            process.communicate(b"")
    assert other.pid in seen
    assert seen.isdisjoint({somebody.pid, os.getpid()})


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("/venv/bin/python /venv/bin/spes-p2p join LINK", True),
        ("/usr/local/bin/spes-p2p-bootstrap --listen /ip4/0.0.0.0/tcp/31337", True),
        ("python3.11 -X utf8 -m spes_p2p.node.trainer_main --parent 7", True),
        ("python -m spes_p2p_other", False),
        ("python build.py --keep spes-p2p", False),
        ("vim spes_p2p/config.py", False),
        ("", False),
    ],
)
def test_our_processes_are_known_by_what_they_run(line: str, ours: bool) -> None:
    assert facts.is_ours(line.split()) is ours


def test_children_of_our_processes_are_ours_at_any_depth() -> None:
    parents = {1: 0, 20: 1, 5: 20, 30: 5, 31: 30, 40: 1, 41: 40}
    assert facts.with_descendants({5, 40}, parents) == {5, 30, 31, 40, 41}


def test_battery_is_asked_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    class Battery:
        power_plugged: bool | None = False

    monkeypatch.setattr(psutil, "sensors_battery", Battery, raising=False)
    assert on_battery() is True
    monkeypatch.setattr(Battery, "power_plugged", True)
    assert on_battery() is False
    monkeypatch.setattr(Battery, "power_plugged", None)
    assert on_battery() is None
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None, raising=False)
    assert on_battery() is None
    monkeypatch.delattr(psutil, "sensors_battery")
    assert on_battery() is None
