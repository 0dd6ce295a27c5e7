"""A swarm put together by hand from the commands: joining late, a killed voter, a proper leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from spes_p2p.client.demo.texts import deal_texts
from spes_p2p.testing.live import LiveSwarm, live_swarm, quick_config

pytestmark = [pytest.mark.live, pytest.mark.timeout(540)]

FOUNDERS = ["ada", "ben", "cleo", "dan"]


def owned_by(swarm: LiveSwarm, looker: str, peer: str) -> list[int]:
    snapshot = swarm.look(looker)
    return [] if snapshot is None else [view.shard for view in snapshot.shards if peer in view.owners]


def sole_owner(swarm: LiveSwarm, looker: str, peer: str) -> bool:
    snapshot = swarm.look(looker)
    return snapshot is not None and any(view.owners == (peer,) for view in snapshot.shards)


def test_swarm_by_hand_survives_a_late_joiner_a_killed_voter_and_a_leaver(tmp_path: Path) -> None:
    texts = {name: tmp_path / "text" / name for name in [*FOUNDERS, "eve"]}
    deal_texts(list(texts.values()), text_bytes=100_000)
    with live_swarm(tmp_path / "swarm", quick_config()) as swarm:
        swarm.start_bootstrap()
        swarm.create_run(FOUNDERS, texts["ada"])
        for name in FOUNDERS:
            swarm.join(name, texts[name])
        swarm.wait_round(3, FOUNDERS, 150)
        peers = {name: swarm.peer_id(name) for name in FOUNDERS}

        def each_has_a_shard() -> bool:
            return all(len(owned_by(swarm, "ada", peer)) == 1 for peer in peers.values())

        swarm.wait(each_has_a_shard, 60, "shard for each founder")

        # a fifth peer joins in the middle: it gets the model, a shard, and its updates count
        swarm.join("eve", texts["eve"])
        eve = swarm.peer_id("eve")
        swarm.wait(lambda: bool(owned_by(swarm, "ada", eve)), 120, "shard for the newcomer")

        def eve_counts() -> bool:
            snapshot = swarm.look("eve")
            return snapshot is not None and any(view.verdict == "accepted" for view in snapshot.learning.updates)

        swarm.wait(eve_counts, 90, "accepted update of the newcomer")
        everybody = [*FOUNDERS, "eve"]
        reached = swarm.certified("eve")
        swarm.wait_round(reached, everybody, 60)
        digests = {record.psi_digest for name in everybody for record in swarm.history(name) if record.round == reached}
        assert len(digests) == 1

        # a voter is killed: rounds go on, and its shard has an owner again once the lease has lapsed
        ben = peers["ben"]
        swarm.wait(lambda: bool(owned_by(swarm, "ada", ben)), 60, "shard of the victim")
        killed_at = max(record.round for record in swarm.history("ada"))
        swarm.kill("ben")
        survivors = ["ada", "cleo", "dan", "eve"]
        lapse = swarm.config.protocol.lease_rounds
        swarm.wait_round(killed_at + lapse + 4, survivors, 200)
        record = swarm.history("ada")[-1]
        assert all(owners and ben not in owners for owners in record.owners.values())

        # one leaves properly: it ends by itself with exit code 0, and its shard has an owner at once, who goes on with
        # its masters and moments
        leavers: list[str] = []

        def one_owns_alone() -> bool:
            leavers.extend(name for name in ("cleo", "dan") if sole_owner(swarm, "ada", peers[name]))
            return bool(leavers)

        swarm.wait(one_owns_alone, 60, "founder that owns a shard alone")
        leaver, gone = leavers[0], peers[leavers[0]]
        done = swarm.command("leave", "--data-dir", str(swarm.data_dir(leaver)))
        assert done.returncode == 0, done.stderr
        swarm.wait(lambda: swarm.children[leaver].exit_code() is not None, 90, "end of the leaver")
        assert swarm.children[leaver].exit_code() == 0
        rest = [name for name in survivors if name != leaver]
        swarm.wait(lambda: gone not in swarm.history("ada")[-1].members, 60, "certificate of the leave")
        left_in = next(record for record in swarm.history("ada") if gone not in record.members)
        assert all(owners and gone not in owners for owners in left_in.owners.values())
        swarm.wait_round(left_in.round + 2, rest, 90)

        def both_count() -> bool:
            return any(record.updates >= 2 for record in swarm.history("ada") if record.round > left_in.round)

        swarm.wait(both_count, 90, "round after the leave with updates of both who stay")

        def is_taken_over() -> bool:
            return any("took over shard" in swarm.said(name) for name in rest)

        swarm.wait(is_taken_over, 60, "masters at an heir")
