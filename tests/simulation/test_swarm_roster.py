"""Joining, leaving, stopping, growing."""

from collections.abc import Callable

import pytest

from spes_p2p.digests import digest
from spes_p2p.ids import Digest
from spes_p2p.protocol import cuts, updates
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.wire import ItemKind
from spes_p2p.testing.swarm import Line, SimPeer, Swarm

Make = Callable[..., Swarm]
Peers = Callable[[Swarm], list[SimPeer]]
MINUTE_MS = 60_000
HANDOVER = Digest(digest("hand-over"))


def updates_in(peer: SimPeer, number: int) -> int:
    """Updates in the certificate of a round."""
    certificate = next(c for c in peer.certificates if c.body.round == number)
    return sum(entry.kind is ItemKind.UPDATE for entry in certificate.body.entries)


@pytest.mark.parametrize("seed", range(3))
def test_a_joiner_in_the_middle_gets_a_shard_contributes_and_votes(swarm_of: Make, peers_of: Peers, seed: int) -> None:
    swarm = swarm_of(4, seed=seed)
    assert swarm.run_to_round(3, 5 * MINUTE_MS)
    joiner = swarm.add("joiner", knows=[peer.peer_id for peer in peers_of(swarm)[:2]])
    assert swarm.run(lambda: joiner.machine.is_member, 2 * MINUTE_MS)
    joined = joiner.machine.head.round
    assert len(joiner.machine.head.state.shards_of(joiner.peer_id)) == 1
    assert swarm.run_to_round(joined + 2, 5 * MINUTE_MS)
    assert updates_in(peers_of(swarm)[0], joined + 1) == 5
    assert joiner.peer_id in joiner.machine.terms.voters


def test_a_joiner_has_the_same_head_as_everybody_in_every_round(swarm_of: Make, peers_of: Peers) -> None:
    swarm = swarm_of(4)
    assert swarm.run_to_round(3, 5 * MINUTE_MS)
    joiner = swarm.add("joiner", knows=[peers_of(swarm)[0].peer_id])
    assert swarm.run_to_round(7, 5 * MINUTE_MS)
    old = {head.round: head for head in peers_of(swarm)[1].heads}
    assert all(head == old[head.round] for head in joiner.heads if head.round <= 7)
    assert [head.round for head in joiner.heads][:8] == list(range(8))


def test_a_joiner_at_a_high_round_follows_the_chain_quickly(swarm_of: Make, peers_of: Peers) -> None:
    swarm = swarm_of(2, line=Line(train_ms=500), round_min_ms=100)
    assert swarm.run_to_round(70, 60 * MINUTE_MS)
    begun, tip = swarm.now_ms, peers_of(swarm)[0].machine.head.round
    joiner = swarm.add("joiner", knows=[peer.peer_id for peer in peers_of(swarm)], line=Line(train_ms=500))
    assert swarm.run(lambda: joiner.machine.head.round >= tip, MINUTE_MS)
    assert swarm.now_ms - begun < 15_000
    assert swarm.run(lambda: joiner.machine.is_member, MINUTE_MS)


def test_others_join_a_lone_founder_and_vote_once_there_are_four(swarm_of: Make, peers_of: Peers) -> None:
    swarm = swarm_of(1)
    assert swarm.run_to_round(3, 5 * MINUTE_MS)
    founder = peers_of(swarm)[0]
    for number in range(3):
        swarm.add(f"j{number}", knows=[founder.peer_id])
    assert swarm.run(lambda: len(founder.machine.terms.members) == 4, 2 * MINUTE_MS)
    assert founder.machine.terms.voters == (founder.peer_id,)
    assert swarm.run(lambda: len(founder.machine.terms.voters) == 4, 2 * MINUTE_MS)
    assert swarm.run_to_round(founder.machine.head.round + 2, 5 * MINUTE_MS)


def test_more_joiners_than_a_voter_keeps_stop_no_round_and_are_all_let_in(
    swarm_of: Make, peers_of: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (updates, cuts):
        monkeypatch.setattr(module, "MAX_JOINERS", 2)
    swarm = swarm_of(4)
    assert swarm.run_to_round(2, MINUTE_MS)
    founders = peers_of(swarm)
    joiners = [swarm.add(f"j{number}", knows=[peer.peer_id for peer in founders]) for number in range(7)]
    assert swarm.run(lambda: all(joiner.machine.is_member for joiner in joiners), 2 * MINUTE_MS)
    assert {certificate.view for certificate in founders[0].certificates} == {0}


def test_a_peer_without_an_invitation_stays_outside_and_harms_nobody(swarm_of: Make, peers_of: Peers) -> None:
    swarm = swarm_of(4)
    swarm.invite = peers_of(swarm)[0].identity
    stranger = swarm.add("stranger", knows=[peer.peer_id for peer in peers_of(swarm)])
    assert swarm.run_to_round(4, 5 * MINUTE_MS, peers_of(swarm)[:4])
    assert not stranger.machine.is_member
    assert any("does not admit this node" in text for _, level, text in stranger.notes if level == "error")


def test_a_leaver_stays_until_it_is_certified_and_its_successors_have_taken_over(
    swarm_of: Make, peers_of: Peers
) -> None:
    swarm = swarm_of(5)
    for peer in peers_of(swarm):
        swarm.restart(peer, capacity=3)
    assert swarm.run_to_round(3, 5 * MINUTE_MS)
    leaver, other = peers_of(swarm)[0], peers_of(swarm)[1]
    shards = other.machine.head.state.shards_of(leaver.peer_id)
    swarm.give(leaver, fx.LeaveWanted(handover=HANDOVER, handover_bytes=3))
    assert swarm.run(lambda: leaver.left, MINUTE_MS)
    certified = next(c.body.round for c in other.certificates if any(e.kind is ItemKind.LEAVE for e in c.body.entries))
    assert leaver.machine.head.round == certified
    swarm.kill(leaver)
    assert swarm.run_to_round(certified + 2, 5 * MINUTE_MS, peers_of(swarm)[1:])
    state = other.machine.head.state
    assert leaver.peer_id not in state.members
    assert all(state.owners(shard) != () for shard in shards)


def test_a_leaver_waits_for_a_dead_successor_no_longer_than_round_max(swarm_of: Make, peers_of: Peers) -> None:
    swarm = swarm_of(4)
    for peer in peers_of(swarm):
        swarm.restart(peer, capacity=4)
    assert swarm.run_to_round(2, 5 * MINUTE_MS)
    leaver = peers_of(swarm)[0]
    for peer in peers_of(swarm)[1:]:
        peer.takes_over = False
    swarm.give(leaver, fx.LeaveWanted(handover=HANDOVER, handover_bytes=3))
    assert swarm.run(lambda: leaver.machine.head.state.row(leaver.peer_id) is None, MINUTE_MS)
    certified_ms = swarm.now_ms
    assert swarm.run(lambda: leaver.left, 2 * MINUTE_MS)
    assert 39_000 <= swarm.now_ms - certified_ms <= 60_000


def test_the_last_member_may_leave_and_nothing_breaks(swarm_of: Make, peers_of: Peers) -> None:
    swarm = swarm_of(2)
    assert swarm.run_to_round(3, 5 * MINUTE_MS)
    for peer in peers_of(swarm):
        swarm.give(peer, fx.LeaveWanted(handover=None, handover_bytes=0))
    assert swarm.run(lambda: all(peer.left for peer in peers_of(swarm)), MINUTE_MS)
    swarm.run(lambda: False, 5 * MINUTE_MS)
    assert [peer.machine.terms.members for peer in peers_of(swarm)] == [(), ()]


def test_two_of_three_founders_may_leave_one_after_the_other(swarm_of: Make, peers_of: Peers) -> None:
    swarm = swarm_of(3)
    assert swarm.run_to_round(2, 5 * MINUTE_MS)
    for leaver in peers_of(swarm)[:2]:
        swarm.give(leaver, fx.LeaveWanted(handover=None, handover_bytes=0))
        assert swarm.run(lambda peer=leaver: peer.left, 2 * MINUTE_MS)
        swarm.kill(leaver)
    last = peers_of(swarm)[2]
    assert swarm.run_to_round(last.machine.head.round + 2, 5 * MINUTE_MS, [last])
    assert last.machine.terms.voters == (last.peer_id,)


def test_peers_that_stop_after_a_round_certify_it_and_train_no_more(swarm_of: Make, peers_of: Peers) -> None:
    swarm = swarm_of(4)
    for peer in peers_of(swarm):
        swarm.restart(peer, stop_after_round=4)
    assert swarm.run_to_round(4, 5 * MINUTE_MS)
    swarm.run(lambda: False, 10 * MINUTE_MS)
    assert all(peer.machine.head.round <= 4 + 15 for peer in peers_of(swarm))  # an idle round lasts round_max
    assert all(peer.training is None for peer in peers_of(swarm))
    assert all(len(peer.machine.terms.members) == 4 for peer in peers_of(swarm))
