"""Tentative branches, healing, epochs and recovery (docs/protocol.md, section 9)."""

from collections.abc import Callable, Iterable

import pytest

from spes_p2p.ids import PeerId
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.codec import body_hash, decode, decode_signed, statement_hash
from spes_p2p.protocol.messages import Signed, Vote
from spes_p2p.protocol.wire import NO_DIGEST, ItemKind, Step
from spes_p2p.testing.swarm import SimPeer, Swarm

Make = Callable[..., Swarm]
Peers = Callable[[Swarm], list[SimPeer]]
MINUTE_MS = 60_000
PATIENCE_MS = 10_000


def cut_off(swarm: Swarm, *groups: Iterable[SimPeer]) -> None:
    """Only peers of one group reach each other."""
    place = {peer.peer_id: number for number, group in enumerate(groups) for peer in group}
    swarm.blocked = lambda sender, receiver: place[sender] != place[receiver]


def heal(swarm: Swarm) -> None:
    swarm.blocked = lambda sender, receiver: False


def final_after(swarm: Swarm, number: int, limit_ms: int, peers: list[SimPeer]) -> bool:
    """Until these peers have a final certificate of a later round."""
    return swarm.run(lambda: all(peer.machine.head.last_final.round > number for peer in peers), limit_ms)


def tentative_of(peer: SimPeer) -> list[Certificate]:
    return [certificate for certificate in peer.certificates if not certificate.body.final]


def newest(peers: list[SimPeer]) -> int:
    return max(peer.machine.head.round for peer in peers)


def one_tip(peers: list[SimPeer]) -> bool:
    return len({peer.machine.head.hash for peer in peers}) == 1


# --- few voters ------------------------------------------------------------------------------------------------------


def test_a_leaver_that_is_alone_makes_no_rounds_that_nobody_trains_in(swarm_of: Make, peers_of: Peers) -> None:
    swarm = swarm_of(2, seed=1)
    one, other = peers_of(swarm)
    assert swarm.run_to_round(2, 5 * MINUTE_MS)
    cut_off(swarm, [one], [other])
    swarm.give(one, fx.LeaveWanted(handover=NO_DIGEST, handover_bytes=0))
    protocol = one.machine.head.run.config.protocol
    before, num_rounds = newest([one]), 10
    swarm.run(lambda: False, num_rounds * protocol.round_max_ms)
    assert before < newest([one]) <= before + num_rounds + 1
    heal(swarm)
    assert swarm.run(lambda: one.left, 5 * MINUTE_MS)  # the leave is in a final certificate
    assert final_after(swarm, before, MINUTE_MS, [other])


@pytest.mark.parametrize(("num_founders", "seed"), [(2, 1), (2, 2), (3, 3), (3, 4)])
def test_few_voters_go_on_without_a_silent_one_and_are_one_again_when_it_is_back(
    swarm_of: Make, peers_of: Peers, num_founders: int, seed: int
) -> None:
    swarm = swarm_of(num_founders, seed=seed)
    peers = peers_of(swarm)
    assert swarm.run_to_round(2, 5 * MINUTE_MS)
    lost, rest = peers[0], peers[1:]
    swarm.kill(lost)
    assert swarm.run_to_round(6, 5 * MINUTE_MS, rest)
    made = tentative_of(rest[0])
    assert [certificate.body.round for certificate in made[:4]] == [3, 4, 5, 6]
    assert all(len(c.signatures) == len(rest) for c in made)
    assert {peer.machine.head.last_final.round for peer in rest} == {2}
    assert all(peer.machine.progress(swarm.now_ms).tentative for peer in rest)
    swarm.restart(lost)
    stood = newest(rest)
    assert final_after(swarm, stood, 2 * MINUTE_MS, peers)
    assert one_tip(peers)
    first_final = next(c for c in rest[0].certificates if c.body.final and c.body.round > 2)
    assert first_final.body.round <= stood + 2
    assert first_final.body.via == body_hash(tentative_of(rest[0])[-1].body)
    assert first_final.body.prev == body_hash(rest[0].certificates[1].body)
    assert not lost.machine.progress(swarm.now_ms).tentative
    assert swarm.problems == []


def test_only_the_first_tentative_round_waits_for_patience(swarm_of: Make, peers_of: Peers) -> None:
    swarm = swarm_of(2)
    peers = peers_of(swarm)
    assert swarm.run_to_round(2, 5 * MINUTE_MS)
    cut_off(swarm, peers[:1], peers[1:])
    begun_ms = swarm.now_ms
    assert swarm.run_to_round(3, 5 * MINUTE_MS, peers[:1])
    assert swarm.now_ms - begun_ms > PATIENCE_MS
    begun_ms = swarm.now_ms
    assert swarm.run_to_round(7, 5 * MINUTE_MS, peers[:1])
    assert swarm.now_ms - begun_ms < 4 * 10_000


def test_two_branches_of_two_founders_become_one(swarm_of: Make, peers_of: Peers) -> None:
    swarm = swarm_of(2)
    peers = peers_of(swarm)
    assert swarm.run_to_round(2, 5 * MINUTE_MS)
    cut_off(swarm, peers[:1], peers[1:])
    assert swarm.run_to_round(5, 5 * MINUTE_MS)
    assert not one_tip(peers)
    heal(swarm)
    stood = newest(peers)
    assert final_after(swarm, stood, 2 * MINUTE_MS, peers)
    assert one_tip(peers)
    assert peers[0].heads[-1].round <= stood + 2


@pytest.mark.parametrize("seed", range(3))
def test_a_voter_that_trains_for_long_is_not_silent(swarm_of: Make, peers_of: Peers, seed: int) -> None:
    swarm = swarm_of(3, seed=seed)
    peers_of(swarm)[seed].hangs = True  # the others wait for its votes for more than the patience
    assert swarm.run_to_round(4, 10 * MINUTE_MS)
    assert [tentative_of(peer) for peer in peers_of(swarm)] == [[], [], []]


def test_a_peer_that_was_stopped_does_not_take_the_others_for_silent(swarm_of: Make, peers_of: Peers) -> None:
    swarm = swarm_of(3)
    peers = peers_of(swarm)
    assert swarm.run_to_round(2, 5 * MINUTE_MS)
    swarm.run(lambda: False, 9_000)  # it is in its voting phase, or about to be
    frozen, rest = peers[0], peers[1:]
    frozen.alive = False
    assert swarm.run_to_round(5, 5 * MINUTE_MS, rest)
    frozen.alive = True
    swarm.give(frozen, fx.Tick())
    assert final_after(swarm, newest(rest), 2 * MINUTE_MS, peers)
    assert all(set(head.side) in ({peer.peer_id for peer in rest}, set()) for head in frozen.heads)
    assert any(not head.is_final for head in frozen.heads)


# --- four voters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_two_halves_make_some_tentative_certificates_then_wait_and_heal(
    swarm_of: Make, peers_of: Peers, seed: int
) -> None:
    swarm = swarm_of(4, seed=seed)
    peers = peers_of(swarm)
    assert swarm.run_to_round(2, 5 * MINUTE_MS)
    cut_off(swarm, peers[:2], peers[2:])
    swarm.run(lambda: False, 5 * MINUTE_MS)
    stood = newest(peers)
    base = peers[0].machine.head.last_final.round
    assert stood == base + 3
    assert [len(tentative_of(peer)) for peer in peers] == [3] * 4
    waiting = {peer.machine.progress(swarm.now_ms).waiting for peer in peers}
    assert waiting == {"2 of 4 voters heard, 3 needed"}
    assert all(any(text == "waiting: 2 of 4 voters heard, 3 needed" for _, _, text in peer.notes) for peer in peers)
    heal(swarm)
    assert final_after(swarm, stood, 2 * MINUTE_MS, peers)
    assert one_tip(peers)
    assert newest(peers) <= stood + 2
    assert {peer.machine.progress(swarm.now_ms).waiting for peer in peers} == {""}


def test_one_voter_of_four_alone_makes_nothing_that_others_would_build_on(swarm_of: Make, peers_of: Peers) -> None:
    swarm = swarm_of(4)
    peers = peers_of(swarm)
    assert swarm.run_to_round(2, 5 * MINUTE_MS)
    cut_off(swarm, peers[:1], peers[1:])
    assert swarm.run_to_round(5, 5 * MINUTE_MS, peers[1:])
    assert [certificate.body.final for certificate in peers[1].certificates] == [True] * len(peers[1].certificates)
    swarm.run(lambda: False, MINUTE_MS)
    assert tentative_of(peers[0]) == []
    assert "1 of 4 voters heard" in peers[0].machine.progress(swarm.now_ms).waiting


@pytest.mark.parametrize("seed", range(3))
def test_the_first_update_of_the_losing_side_enters_late(swarm_of: Make, peers_of: Peers, seed: int) -> None:
    swarm = swarm_of(4, seed=seed)
    peers = peers_of(swarm)
    assert swarm.run_to_round(2, 5 * MINUTE_MS)
    cut_off(swarm, peers[:2], peers[2:])
    assert swarm.run_to_round(3, 5 * MINUTE_MS)
    sides = [set(peers[place].machine.head.side) for place in (0, 2)]
    assert len(sides[0] & sides[1]) == 0
    firsts = {
        peer.peer_id: statement_hash(decode_signed(data))
        for peer in peers
        for key, data in peer.journal.items()
        if key.endswith("signed/manifest/3")
    }
    heal(swarm)
    assert final_after(swarm, 3, 3 * MINUTE_MS, peers)
    chain = [certificate.body for certificate in peers[0].certificates if certificate.body.round > 2]
    named = {entry.statement for body in chain for entry in body.entries if entry.kind is ItemKind.UPDATE}
    assert set(firsts.values()) <= named
    assert swarm.problems == []


def no_final_precommits(sender: SimPeer, send: fx.Send) -> PeerId | None:
    message = decode(send.data)
    lost = isinstance(message, Signed) and isinstance(message.body, Vote) and message.body.step is Step.PRECOMMIT
    return None if lost and isinstance(message, Signed) and not getattr(message.body, "branch", b"") else send.to


@pytest.mark.parametrize("seed", range(3))
def test_a_locked_body_is_the_only_one_that_can_become_final_after_a_detour(
    swarm_of: Make, peers_of: Peers, seed: int
) -> None:
    swarm = swarm_of(4, seed=seed)
    peers = peers_of(swarm)
    assert swarm.run_to_round(2, 5 * MINUTE_MS)
    right, swarm.route = swarm.route, no_final_precommits

    def all_locked() -> bool:
        return all(any(key.endswith("ballot/lock") for key in peer.journal) for peer in peers)

    assert swarm.run(all_locked, 2 * MINUTE_MS)
    body = {data.split()[1] for p in peers for key, data in p.journal.items() if key.endswith("ballot/lock")}
    assert len(body) == 1
    cut_off(swarm, peers[:2], peers[2:])
    assert swarm.run(lambda: all(len(tentative_of(peer)) == 2 for peer in peers), 5 * MINUTE_MS)
    swarm.route = right
    heal(swarm)
    assert swarm.run(lambda: all(p.machine.head.last_final.round > 2 for p in peers), 3 * MINUTE_MS)
    finals = [head for head in peers[0].heads if head.is_final]
    assert (finals[3].round, finals[3].hash.hex().encode()) == (3, body.pop())
    assert swarm.run_to_round(5, 3 * MINUTE_MS)


# --- leases ----------------------------------------------------------------------------------------------------------


def test_shards_of_a_silent_owner_are_trained_by_the_rest_meanwhile_and_go_back(
    swarm_of: Make, peers_of: Peers
) -> None:
    swarm = swarm_of(3)
    peers = peers_of(swarm)
    for peer in peers:
        swarm.restart(peer, capacity=4)
    assert swarm.run_to_round(2, 5 * MINUTE_MS)
    lost, rest = peers[0], peers[1:]
    owned = lost.machine.head.state.shards_of(lost.peer_id)
    assert owned != ()
    swarm.kill(lost)
    assert swarm.run_to_round(6, 5 * MINUTE_MS, rest)
    state = rest[0].machine.head.state
    assert all(lost.peer_id not in state.owners(shard) for shard in owned)
    assert [row.owners != () for row in state.leases] == [True] * 8
    assert state.members == rest[0].machine.head.last_final.state.members
    before = rest[0].machine.head.last_final.state.shards
    assert all(state.shards[shard] != before[shard] for shard in owned)
    swarm.restart(lost, capacity=4)
    assert final_after(swarm, newest(rest), 2 * MINUTE_MS, peers)
    assert lost.machine.head.state.shards_of(lost.peer_id) == owned


# --- recovery --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_founders", [2, 4])
def test_the_holder_of_the_key_begins_a_new_epoch_with_those_it_hears(
    swarm_of: Make, peers_of: Peers, num_founders: int
) -> None:
    swarm = swarm_of(num_founders)
    peers = peers_of(swarm)
    swarm.key_holders.add(peers[0].peer_id)
    swarm.restart(peers[0])
    assert swarm.run_to_round(2, 5 * MINUTE_MS)
    kept, gone = peers[: num_founders // 2], peers[num_founders // 2 :]
    for peer in gone:
        swarm.kill(peer)
    assert swarm.run(lambda: all(peer.machine.head.epoch == 1 for peer in kept), 15 * MINUTE_MS)
    head = next(head for head in kept[0].heads if head.epoch == 1)
    assert head.is_final
    assert set(head.state.members) == {peer.peer_id for peer in kept}
    assert set(head.state.voters) == {peer.peer_id for peer in kept}
    assert final_after(swarm, head.round + 2, 5 * MINUTE_MS, kept)
    assert kept[0].machine.head.is_final
    for peer in gone:
        swarm.restart(peer)
    everybody = {peer.peer_id for peer in peers}
    assert swarm.run(lambda: set(kept[0].machine.head.state.members) == everybody, 10 * MINUTE_MS)
    assert all(peer.machine.head.epoch == 1 for peer in peers)


def test_the_operator_may_recover_sooner_but_not_a_run_that_can_go_on(swarm_of: Make, peers_of: Peers) -> None:
    swarm = swarm_of(4)
    peers = peers_of(swarm)
    swarm.key_holders.add(peers[0].peer_id)
    swarm.restart(peers[0])
    assert swarm.run_to_round(2, 5 * MINUTE_MS)
    swarm.give(peers[0], fx.RecoverWanted(keep=()))
    assert peers[0].machine.head.epoch == 0
    assert any("this one can" in text for _, _, text in peers[0].notes)
    for peer in peers[1:]:
        swarm.kill(peer)
    assert swarm.run(lambda: peers[0].machine.progress(swarm.now_ms).waiting != "", 3 * MINUTE_MS)
    swarm.give(peers[0], fx.RecoverWanted(keep=()))
    assert peers[0].machine.head.epoch == 1
    assert peers[0].machine.head.state.members == (peers[0].peer_id,)
    assert peers[0].certificates[-1].body.via == NO_DIGEST
