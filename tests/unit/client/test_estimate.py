"""`estimate` with a run that is seen as it would be over the network: what is said, and how it was obtained."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.client.estimate import gather, report
from spes_p2p.config import Limits, NodeConfig
from spes_p2p.crypto import Identity
from spes_p2p.errors import MachineError, UnreachableError
from spes_p2p.network.link import parse_link
from spes_p2p.node.node import Node
from spes_p2p.node.sizes import piece_sizes
from spes_p2p.node.step_rate import StepTimes
from spes_p2p.node.visit import Look, linked_back
from spes_p2p.protocol.codec import decode_certificate, encode
from spes_p2p.protocol.head import genesis_head, next_head
from spes_p2p.protocol.messages import SignedRun
from spes_p2p.testing.chains import made_chain
from spes_p2p.testing.protocol_cases import quick_config
from spes_p2p.training.fit import Room, fit

Run = Callable[..., Any]
LINK = f"spes-p2p:{'1f' * 32},bootstrap=/ip4/127.0.0.1/tcp/1/p2p/{Identity.from_seed(bytes(32)).text}"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Look:
    """A run of four founders after five rounds, of which three were watched."""
    config = quick_config()
    chain = made_chain(4, config, piece_sizes(config).num_parts).grow(5)
    bodies = [decode_certificate(data).body for data in chain.certificates]
    manifest = chain.genesis.run.manifest
    head = genesis_head(manifest, piece_sizes(config))
    for body in bodies:
        head = next_head(head, body)
    signed = SignedRun(manifest, chain.peers[manifest.created_by].sign("run", encode(manifest)))
    found = Look(signed=signed, config=config, head=head, bodies=linked_back(head, bodies), peers=())

    async def visit(*_: object) -> tuple[Look, tuple[float, ...]]:
        return found, (9.0, 10.0, 11.0)

    monkeypatch.setattr(gather, "_visit", visit)
    return found


def figures(answer: Any) -> dict[str, Any]:
    assert answer.code == 0, answer.err
    return dict(json.loads(answer.out)["figures"])


def test_every_figure_says_how_it_was_obtained(spes_p2p: Run, seen: Look) -> None:
    answer = spes_p2p("estimate", LINK, "--gpu", "none", "--no-measure", "--upload", "1MB", "--download", "4MB/s")
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "run",
        "pace",
        "memory",
        "steps",
        "rounds",
        "traffic",
        "state",
        "upload",
        "download",
        "limits",
        "deadline",
    ]
    assert all(line.endswith(("[measured now]", "[from certificates]", "[reckoned]")) for line in lines)
    assert answer.err.splitlines() == ["asking the run's peers"]


def test_the_figures_are_those_of_the_run(spes_p2p: Run, seen: Look) -> None:
    found = figures(spes_p2p("estimate", LINK, "--gpu", "none", "--no-measure", "--json", "--memory", "8GB"))
    assert found["run"]["values"] == {"round": 5, "members": 4, "shards": 8, "vacant_shards": 0}
    assert found["pace"]["values"] == {"rounds": 5, "updates": 20, "complete_updates": 0}
    assert found["rounds"]["values"] == {"rounds_per_hour": 360.0, "round_s": 10.0, "watched": 3}
    assert found["memory"]["values"]["shards"] == 2 and found["memory"]["values"]["most_shards"] == 8
    each_way = found["traffic"]["values"]["round_bytes_each_way"]
    assert found["traffic"]["values"]["up_gb_per_day"] == pytest.approx(each_way * 8640 / 1e9)
    assert not {"upload", "download", "limits"} & found.keys()
    assert found["deadline"]["values"]["chance"] is None and "--no-measure" in found["steps"]["text"]


def test_steps_are_measured_and_give_a_chance(spes_p2p: Run, seen: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "MEASURE_S", 0.0)
    found = figures(spes_p2p("estimate", LINK, "--gpu", "none", "--capacity", "1", "--json"))
    assert found["steps"]["values"]["steps"] == 3 and found["steps"]["how"] == "measured now"
    assert 0 <= found["deadline"]["values"]["chance"] <= 1
    assert found["deadline"]["values"]["limit_s"] == 15.0
    assert found["memory"]["values"]["shards"] == 1


def test_a_line_that_is_too_slow_has_no_chance_and_ends_with_5(
    spes_p2p: Run, seen: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "MEASURE_S", 0.0)
    answer = spes_p2p("estimate", LINK, "--gpu", "none", "--capacity", "8", "--upload", "60kB/s", "--json")
    found = json.loads(answer.out)["figures"]
    assert answer.code == 5
    assert not found["limits"]["values"]["enough"] and "too slow" in found["limits"]["text"]
    assert ". Allow at least --upload" in found["limits"]["text"]
    assert found["deadline"]["values"]["chance"] == 0.0


def test_both_lines_on_an_upload_name_the_same_numbers(spes_p2p: Run, seen: Look) -> None:
    found = figures(spes_p2p("estimate", LINK, "--gpu", "none", "--no-measure", "--upload", "150kB/s", "--json"))
    size, takes = re.search(r"shard, (.*), takes (\d+ s);", found["upload"]["text"]).groups()
    assert f"an update of {size} takes {takes}, more than" in found["limits"]["text"]


def test_a_share_of_the_time_makes_steps_longer_and_the_chance_smaller(
    spes_p2p: Run, seen: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten steps of 1 s in the 15 s of a round and its grace; at half of the time they take 20 s."""
    monkeypatch.setattr(gather, "measure_steps", lambda *_: StepTimes(seconds=(1.0, 1.0, 1.0)))
    options = ("estimate", LINK, "--gpu", "none", "--capacity", "1", "--json")
    whole, half = (figures(spes_p2p(*options, *more)) for more in ((), ("--gpu-share", "50%")))
    assert whole["deadline"]["values"]["training_s"] == 10.0 and whole["deadline"]["values"]["chance"] > 0.9
    assert half["deadline"]["values"]["training_s"] == 20.0 and half["deadline"]["values"]["chance"] < 0.1
    assert half["limits"]["values"]["gpu_share"] == 0.5 and half["limits"]["values"]["enough"]
    assert half["steps"]["values"]["steps_per_s"] == 1.0, "what the machine can, not what it may"


async def of_join(limits: Limits, capacity: int | None, seen: Look, folder: Path) -> int | str:
    """Shards that a join of this run would offer, or why it would refuse."""
    node_config = NodeConfig(data_dir=folder, capacity=capacity, limits=limits)
    node = Node(node_config, parse_link(LINK))
    await node._budgets.open(limits)
    ready = fit(seen.config, node_config, Room(device_bytes=8 << 30))  # as the trainer process does
    try:
        return node._fit_line(seen.head, Identity.from_seed(b"n" * 32).peer_id, ready.num_owned)
    except MachineError as error:
        return str(error)


async def test_estimate_says_what_join_does(seen: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a grid of limits: the same shards, or the same refusal; `join` of a node as it is, up to its first blob."""
    invite = parse_link(LINK)
    monkeypatch.setattr(gather, "room_for_ranks", lambda *_: Room(device_bytes=8 << 30))
    rates = (None, 50_000, 100_000, 400_000, 1_000_000)
    said: list[int | str] = []
    for upload, download, share, capacity in product(rates, rates[:3], (None, 0.1), (None, 2, 8)):
        limits = Limits(upload=upload, download=download, gpu_share=share)
        node = NodeConfig(data_dir=tmp_path, capacity=capacity)
        wishes = gather.Wishes(node=node, measure=False, watch_s=30.0, limits=limits)
        facts = await asyncio.to_thread(gather.gather, invite, wishes, lambda text: None)
        answer = {figure.name: figure.values for figure in report.figures(facts)}.get("limits")
        join = await of_join(limits, capacity, seen, tmp_path)
        said.append(facts.judged.refusal or facts.judged.capacity)
        assert said[-1] == join, (limits, capacity)
        assert answer is None or answer["enough"] == isinstance(join, int)
    assert {1, 2, 8} <= set(said) and any(isinstance(one, str) for one in said), "the grid has all kinds of answers"


def test_the_upload_is_the_limit_that_is_set_unless_it_is_named(
    spes_p2p: Run, seen: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rate(*more: str) -> int:
        answer = spes_p2p("estimate", LINK, "--gpu", "none", "--no-measure", "--json", "--data-dir", tmp_path, *more)
        return int(figures(answer)["upload"]["values"]["upload_bytes_per_s"])

    (tmp_path / "limits.json").write_text('{"upload": 300000}')
    assert rate() == 300_000
    monkeypatch.setenv("SPES_UPLOAD", "400kB/s")
    assert rate() == 400_000
    assert rate("--upload", "80kB/s") == 80_000


def test_bits_are_no_bytes(spes_p2p: Run) -> None:
    answer = spes_p2p("estimate", LINK, "--gpu", "none", "--upload", "8Mb/s")
    assert (answer.code, answer.out) == (2, "") and "is in bits" in answer.err


def test_a_run_that_does_not_fit_says_what_would_and_ends_with_5(
    spes_p2p: Run, seen: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "room_for_ranks", lambda *_: Room(device_bytes=1000, of="of the 0.0 GB that are free"))
    answer = spes_p2p("estimate", LINK, "--gpu", "none", "--json")
    values = json.loads(answer.out)["figures"]["memory"]["values"]
    assert (answer.code, values["fits"]) == (5, False)
    assert "not enough memory" in json.loads(answer.out)["figures"]["memory"]["text"]


def test_a_run_that_nobody_answers_for_ends_with_3(spes_p2p: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody(*_: object) -> None:
        raise UnreachableError("none of the bootstrap addresses answered within 20 s:")

    monkeypatch.setattr(gather, "_visit", nobody)
    answer = spes_p2p("estimate", LINK, "--gpu", "none")
    assert (answer.code, answer.out) == (3, "")


def test_nothing_is_left_on_disk(spes_p2p: Run, seen: Look, home: Path, tmp_path: Path) -> None:
    assert spes_p2p("estimate", LINK, "--gpu", "none", "--no-measure", "--data-dir", tmp_path / "new").code == 0
    assert not home.exists() and not (tmp_path / "new").exists()
