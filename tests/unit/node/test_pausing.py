"""How long a paused node keeps its shards, and what it says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from spes_p2p.crypto import Identity
from spes_p2p.errors import MachineError
from spes_p2p.ids import PeerId
from spes_p2p.node import pausing
from spes_p2p.node.holds import PAUSE, Holds
from spes_p2p.node.pausing import LeaseWatch, Pace, PauseWish, lease_end, pause_view, paused_before_text, remember
from spes_p2p.node.snapshot import PauseView
from spes_p2p.protocol.body import Tenure
from spes_p2p.protocol.codec import sign
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.messages import Leave
from spes_p2p.protocol.state import LeaseRow
from spes_p2p.protocol.wire import NO_DIGEST
from spes_p2p.testing import protocol_cases as cases

PEERS = cases.identities(3)
ME = PEERS[0].peer_id
HEAD = cases.owned_head(PEERS)
LEASE_ROUNDS = HEAD.run.config.protocol.lease_rounds


def held_since(now_ms: int = 0, reason: str = PAUSE) -> Holds:
    holds = Holds(lambda: now_ms)
    holds.set(reason, True)
    return holds


def pace_of(round_ms: int, count: int = 4) -> Pace:
    pace = Pace()
    for number in range(count):
        pace.adopted(number * round_ms)
    return pace


def after_rounds(head: Head, num_rounds: int) -> Head:
    """Everybody is alive, nobody trains."""
    for _ in range(num_rounds):
        head = cases.follow(head, [cases.item_of(cases.alive_of(head, peer)) for peer in PEERS])
    return head


def test_pause_is_remembered_over_a_restart_until_it_ends(tmp_path: Path) -> None:
    PauseWish(tmp_path).store(True)
    assert PauseWish(tmp_path).is_stored
    PauseWish(tmp_path).store(False)
    PauseWish(tmp_path).store(False)
    assert not PauseWish(tmp_path).is_stored


def test_disk_that_refuses_is_told_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MachineError("disk full")

    monkeypatch.setattr(pausing, "write_file", full)
    notes: list[str] = []
    remember(PauseWish(tmp_path), True, lambda level, text: notes.append(text))
    assert notes == ["a restart would forget the pause: disk full"]


def test_pace_is_the_median_and_counts_what_is_left_of_the_open_round() -> None:
    pace = Pace()
    assert pace.until_ms(2, 0) is None
    for at_ms in (0, 10, 20, 60_020, 120_020, 180_020):  # caught up twice, then a minute each
        pace.adopted(at_ms)
    assert pace.round_ms == 60_000
    assert pace.until_ms(1, 45_000) == 15_000
    assert pace.until_ms(3, 45_000) == 135_000
    assert pace.until_ms(1, 90_000) == 0


def test_lease_end_is_the_round_whose_certificate_takes_the_shard() -> None:
    """Followed to the end by the rules themselves."""
    end = lease_end(HEAD, ME)
    assert end is not None
    first, shards = end
    assert first == HEAD.round + LEASE_ROUNDS
    kept = after_rounds(HEAD, first - 1 - HEAD.round)
    assert set(shards) <= set(kept.state.shards_of(ME))
    lapsed = after_rounds(kept, 1)
    begun = {row.shard: owner.begun for row in lapsed.state.leases for owner in row.owners if owner.who == ME}
    assert all(begun.get(shard, first) == first for shard in shards)  # gone, or granted anew
    assert lease_end(HEAD, PeerId(bytes(32))) is None


def test_view_says_how_many_rounds_and_minutes_the_shards_are_kept() -> None:
    view = pause_view(held_since(), HEAD, ME, pace_of(90_000), now_ms=5_000, elapsed_ms=30_000)
    shards = HEAD.state.shards_of(ME)
    assert (view.since_ms, view.lease_ends_round, view.rounds_left, view.shards) == (5_000, 3, 2, shards)
    assert view.lease_ends_in_ms == 150_000
    words = f"shards {', '.join(map(str, shards))}" if len(shards) > 1 else f"shard {shards[0]}"
    assert view.reason == (
        f"{words} kept for 2 rounds, until round 3 ends, in about 2 minutes; then others may get them"
    )


def test_last_round_says_that_the_pause_must_end() -> None:
    view = pause_view(held_since(), after_rounds(HEAD, 1), ME, pace_of(20_000), now_ms=0, elapsed_ms=0)
    assert view.rounds_left == 1
    assert "kept until this round ends, in less than a minute: train again before" in view.reason


def test_without_shards_there_is_nothing_to_lose() -> None:
    view = pause_view(held_since(), HEAD, PeerId(bytes(32)), Pace(), now_ms=0, elapsed_ms=0)
    assert (view.lease_ends_round, view.reason) == (None, "no shard to lose: the node goes on voting and serving")


def test_alone_a_paused_round_lasts_as_long_as_it_may() -> None:
    alone = cases.owned_head(PEERS[:1])
    view = pause_view(held_since(), alone, ME, pace_of(1_000), now_ms=0, elapsed_ms=500)
    assert view.lease_ends_in_ms == LEASE_ROUNDS * alone.run.config.protocol.round_max_ms - 500


def test_volunteer_is_warned_once_in_the_last_round() -> None:
    notes: list[str] = []
    watch = LeaseWatch(ME, lambda level, text: notes.append(text))
    holds, head = held_since(), HEAD

    def look() -> None:
        watch.look(holds, head, pause_view(holds, head, ME, Pace(), now_ms=0, elapsed_ms=0), leaving=False)

    look()
    assert notes == []
    head = after_rounds(head, 1)
    look()
    look()
    assert len(notes) == 1
    assert notes[0].endswith("or others get what was yours (`spes-p2p resume`)")


def head_with(leases: Mapping[int, Sequence[Identity]]) -> Head:
    """HEAD, but these shards are theirs."""
    rows = [
        LeaseRow(row.shard, tuple(Tenure(peer.peer_id, HEAD.round, HEAD.round) for peer in leases[row.shard]))
        if row.shard in leases
        else row
        for row in HEAD.state.leases
    ]
    return replace(HEAD, state=msgspec.structs.replace(HEAD.state, leases=tuple(rows)))


def told_of(after: Head, *, leaving: bool = False) -> list[str]:
    """What a paused node hears when `after` follows HEAD."""
    notes: list[str] = []
    watch = LeaseWatch(ME, lambda level, text: notes.append(text))
    for head in (HEAD, after):
        watch.look(held_since(), head, PauseView(reasons=(PAUSE,), since_ms=0), leaving=leaving)
    return notes


LAPSED = "training was held for longer than the lease lasts: "


def test_loss_says_which_shards_are_others_now_and_which_are_vacant() -> None:
    assert HEAD.state.shards_of(ME) == (2, 4)
    assert told_of(head_with({2: PEERS[1:2], 4: ()})) == [
        f"{LAPSED}shard 2 belongs to others now; shard 4 is vacant, and claimed when training goes on"
    ]
    assert told_of(head_with({2: PEERS[1:2], 4: PEERS[1:]})) == [f"{LAPSED}shards 2, 4 belong to others now"]
    assert told_of(head_with({2: (), 4: ()})) == [f"{LAPSED}shards 2, 4 are vacant, and claimed when training goes on"]
    assert told_of(head_with({2: PEERS, 4: PEERS})) == []  # co-owned: still this node's


def test_whoever_leaves_is_advised_nothing() -> None:
    notes: list[str] = []
    last_round = after_rounds(HEAD, LEASE_ROUNDS - 1)
    watch = LeaseWatch(ME, lambda level, text: notes.append(text))
    holds = held_since()
    view = pause_view(holds, last_round, ME, Pace(), now_ms=7, elapsed_ms=0, leaving=True)
    assert view == PauseView(reasons=(PAUSE,), since_ms=7)
    # the leave may have been asked for since the view was made
    for seen in (view, pause_view(holds, last_round, ME, Pace(), now_ms=7, elapsed_ms=0)):
        watch.look(holds, last_round, seen, leaving=True)
    assert notes == []
    assert told_of(head_with({2: PEERS[1:2], 4: ()}), leaving=True) == [
        f"{LAPSED}shard 2 belongs to others now; shard 4 is vacant"
    ]
    assert paused_before_text(leaving=True) == "paused before this start, and still"
    assert paused_before_text(leaving=False).endswith("and still: `spes-p2p resume` trains again")


def test_what_a_leave_hands_over_is_no_loss() -> None:
    leave = sign(PEERS[0], Leave(HEAD.run.run_id, HEAD.epoch, HEAD.round + 1, NO_DIGEST, 0))
    left = cases.follow(HEAD, [cases.item_of(leave)])
    assert (left.state.row(ME), left.state.shards_of(ME)) == (None, ())
    assert told_of(left, leaving=True) == []


def test_nothing_is_told_while_nothing_is_held() -> None:
    notes: list[str] = []
    watch = LeaseWatch(ME, lambda level, text: notes.append(text))
    for head in (HEAD, after_rounds(HEAD, 1), after_rounds(HEAD, 3)):
        watch.look(Holds(), head, None, leaving=False)
    assert notes == []
