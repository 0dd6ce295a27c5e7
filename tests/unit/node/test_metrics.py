"""What Prometheus reads of a node."""

from __future__ import annotations

import re

import msgspec

from spes_p2p.node.metrics import Metric, exposition, metrics_of
from spes_p2p.testing.handle import imagined_peer, imagined_snapshot

LINE = re.compile(r'[a-z_:]+(\{[a-z_]+="([^"\\\n]|\\.)*"(,[a-z_]+="([^"\\\n]|\\.)*")*\})? -?[0-9.e+-]+')


def test_each_metric_has_its_help_and_type_once_before_its_values() -> None:
    text = exposition(metrics_of(imagined_snapshot()))
    helped: list[str] = []
    for line in text.splitlines():
        if line.startswith("# HELP "):
            helped.append(line.split()[2])
        elif not line.startswith("#"):
            assert LINE.fullmatch(line), line
            assert re.split("[{ ]", line)[0] == helped[-1]
    assert len(helped) == len(set(helped))
    assert text.endswith("\n")


def test_values_are_those_of_the_snapshot() -> None:
    snapshot = msgspec.structs.replace(imagined_snapshot(), paused=True, waiting="2 of 4 voters heard")
    lines = exposition(metrics_of(snapshot)).splitlines()
    for line in (
        "spes_round 7",
        "spes_final_round 6",
        'spes_state{state="paused"} 1',
        'spes_state{state="leaving"} 0',
        "spes_waiting 1",
        'spes_shards{owner="me"} 2',
        'spes_shards{owner="nobody"} 1',
        'spes_shards{owner="others"} 5',
        'spes_network_bytes_total{direction="sent"} 12000000',
        "spes_members 4",
        "spes_members_connected 2",
        "spes_tokens_per_second 12345.6",
        "spes_rounds_adopted_total 6",
    ):
        assert line in lines
    assert any(f'peer="{imagined_peer(0)}"' in line for line in lines if line.startswith("spes_node_info{"))


def test_labels_are_escaped() -> None:
    metric = Metric("spes_x", "gauge", "X.", 1, (("run", 'a "b"\\\n'),))
    assert exposition(iter([metric])).splitlines()[-1] == r'spes_x{run="a \"b\"\\\n"} 1'
