"""What taking part would mean: sums and chances whose results can be told in advance."""

from __future__ import annotations

import pytest

from spes_p2p.client.demo.config import demo_config
from spes_p2p.config import NodeConfig, RunConfig
from spes_p2p.node.outlook import (
    RATE_SPREAD,
    crowd_with_one_more,
    deadline,
    likely_shards,
    num_vacant,
    pace_of,
    round_time,
)
from spes_p2p.node.sizes import piece_sizes
from spes_p2p.node.step_rate import StepTimes, measure_steps
from spes_p2p.node.traffic import Crowd, round_traffic, state_bytes
from spes_p2p.protocol.codec import decode_certificate
from spes_p2p.protocol.params import PieceSizes
from spes_p2p.testing.chains import made_chain
from spes_p2p.testing.protocol_cases import NUM_PARTS, quick_config
from spes_p2p.testing.training import tiny_run
from spes_p2p.training.fit import Room, fit

SIZES = PieceSizes(expert_blob_bytes=1000, psi_piece_bytes=10, part_result_bytes=40, num_parts=4, num_shards=8)
QUICK = quick_config()
"""round_max 40 s, grace 5 s, H = 10."""


def test_the_traffic_sum_is_that_of_its_terms() -> None:
    traffic = round_traffic(SIZES, Crowd(num_members=5, num_eligible=4, num_replicas=2), num_owned=2)
    assert traffic.experts_bytes == 6 * 1000
    assert traffic.pieces_bytes == 3 * 4 * 40 // 4  # three of four eligible get the pieces of four others
    assert traffic.results_bytes == 160 // 2
    assert traffic.each_way_bytes == 6000 + 120 + 80
    assert state_bytes(SIZES) == 8 * 1000 + 160


def test_a_peer_alone_moves_nothing() -> None:
    assert round_traffic(SIZES, Crowd(num_members=1, num_eligible=1, num_replicas=1), 8).each_way_bytes == 0


def test_the_sum_agrees_with_what_the_demo_measured() -> None:
    """54.2 MB each way, 4 peers, 8 rounds (README): the first round, for claims, has no experts; late ones make up."""
    crowd = Crowd(num_members=4, num_eligible=4, num_replicas=2)
    each_way = round_traffic(piece_sizes(demo_config(4, 8)), crowd, num_owned=1).each_way_bytes
    assert each_way * 4 * 8 == pytest.approx(54.2e6, rel=0.02)


def test_more_shards_of_ones_own_are_fewer_to_load() -> None:
    crowd = Crowd(num_members=64, num_eligible=64, num_replicas=2)
    loads = [round_traffic(SIZES, crowd, owned).experts_bytes for owned in range(9)]
    assert loads == sorted(loads, reverse=True) and loads[8] == 0


def test_pace_counts_complete_updates_of_rounds_whose_steps_are_known() -> None:
    training = {"inner_steps": [[0, 2]], "sequence_length": 50, "batch_sequences": 10}
    config = RunConfig.model_validate({**QUICK.model_dump(), "training": training})
    chain = made_chain(4, config, NUM_PARTS).grow(6)
    bodies = [decode_certificate(data).body for data in chain.certificates]
    whole = pace_of(config, chain.head, bodies)
    assert (whole.num_rounds, whole.num_updates, whole.num_complete) == (6, 24, 24)  # 1,000 tokens are 2 x 500
    assert whole.updates_per_round == 4.0
    part = pace_of(config, chain.head, bodies[2:])
    assert part.num_rounds == 3, "H of the first one is in a certificate that was not looked at"
    slow = pace_of(QUICK, chain.head, bodies)  # 10 steps of 1,024 tokens were asked for
    assert (slow.num_updates, slow.num_complete) == (24, 0)
    assert pace_of(QUICK, chain.genesis, []).num_rounds == 0


def test_a_newcomer_shares_the_shards_with_the_members() -> None:
    head = made_chain(3, QUICK, NUM_PARTS).grow(2).head
    assert (crowd_with_one_more(QUICK, head).num_members, num_vacant(head)) == (4, 0)
    assert [likely_shards(head, possible) for possible in (8, 2, 1)] == [2, 2, 1]
    assert num_vacant(made_chain(3, QUICK, NUM_PARTS).head) == 8


def test_round_time_is_watched_or_reckoned() -> None:
    watched = round_time(QUICK, (9.0, 11.0), 5.0, 4.0)
    assert (watched.seconds, watched.watched, watched.rounds_per_hour) == (10.0, 2, 360.0)
    assert round_time(QUICK, (), None, 4.0).seconds == 44.0
    assert round_time(QUICK, (), 5.0, 4.0).seconds == 7.0
    assert round_time(QUICK, (), 500.0, 4.0).seconds == 42.0


@pytest.mark.parametrize(
    ("step_s", "durations", "low", "high"),
    [
        (0.1, (), 0.999, 1.0),
        (4.0, (), 0.499, 0.501),
        (40.0, (), 0.0, 0.001),
        (0.5, (10.0,), 0.999, 1.0),
        (1.5, (10.0,), 0.49, 0.51),
    ],
)
def test_the_chance_falls_with_the_time_of_a_step(
    step_s: float, durations: tuple[float, ...], low: float, high: float
) -> None:
    found = deadline(QUICK, 10, (step_s, 0.0), round_time(QUICK, durations, None, 4.0))
    assert found.limit_s == (15.0 if durations else 40.0)
    assert found.training_s == pytest.approx(10 * step_s)
    assert low <= found.chance <= high


def test_one_standard_deviation_is_84_percent() -> None:
    training_s = 40.0 / (1 + RATE_SPREAD)
    found = deadline(QUICK, 10, (training_s / 10, 0.0), round_time(QUICK, (), None, 4.0))
    assert found.chance == pytest.approx(0.8413, abs=1e-3)


def test_time_that_publishing_needs_is_taken_from_training() -> None:
    rounds = round_time(QUICK, (10.0,), None, 4.0)
    found = deadline(QUICK, 10, (0.5, 0.0), rounds, 3.0)
    assert (found.limit_s, found.training_s) == (12.0, 5.0)
    assert "less 3.0 s for the upload" in found.why
    assert deadline(QUICK, 10, (0.5, 0.0), rounds, 99.0).chance < 0.001


def test_steps_are_really_made_and_timed() -> None:
    config = tiny_run()
    node = NodeConfig(data_dir=".")  # type: ignore[arg-type]  # pydantic makes a Path of it
    times = measure_steps(config, node, fit(config, node, Room(device_bytes=1 << 30)), limit_s=0.0)
    assert len(times.seconds) == 3 and all(one > 0 for one in times.seconds)


def test_mean_and_deviation_of_steps() -> None:
    times = StepTimes(seconds=(1.0, 2.0, 3.0))
    assert (times.mean_s, times.deviation_s) == (2.0, 1.0)
    assert StepTimes(seconds=(1.0,)).deviation_s == 0.0
