"""Tentative branches: what they may not do to votes, locks, roster, leases, final certificates and the key's epochs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.codec import body_hash, decode
from spes_p2p.protocol.head import Terms
from spes_p2p.protocol.messages import Signed, Vote
from spes_p2p.protocol.recovery import recover, sign_recovery
from spes_p2p.protocol.wire import Step
from spes_p2p.testing.adversary import inject
from spes_p2p.testing.directed import MINUTE_MS, swarm_of
from spes_p2p.testing.one_voter import OneVoter
from spes_p2p.testing.protocol_cases import alive_of, identities, item_of, owned_head, vote_of
from spes_p2p.testing.swarm import SimPeer, Swarm, identity_of


def in_round_3(num_founders: int, *, capacity: int = 2, **protocol: object) -> tuple[Swarm, list[SimPeer]]:
    """A healthy swarm that has certified two rounds, and its peers."""
    swarm = swarm_of(num_founders, **protocol)
    peers = list(swarm.peers.values())
    for peer in peers:
        swarm.restart(peer, capacity=capacity)
    assert swarm.run_to_round(2, 5 * MINUTE_MS)
    return swarm, peers


def cut_off(swarm: Swarm, *groups: Iterable[SimPeer]) -> None:
    """Only peers of one group reach each other."""
    place = {peer.peer_id: number for number, group in enumerate(groups) for peer in group}
    swarm.blocked = lambda sender, receiver: place[sender] != place[receiver]


def final_again(swarm: Swarm, peers: list[SimPeer]) -> bool:
    """Heal; until all have a final certificate on top of what they made alone."""
    swarm.blocked = lambda sender, receiver: False
    stood = max(peer.machine.head.round for peer in peers)
    return swarm.run(lambda: all(peer.machine.head.last_final.round > stood for peer in peers), 3 * MINUTE_MS)


def test_a_tentative_vote_does_not_count_in_a_final_quorum() -> None:
    peers = identities(4)
    head = owned_head(peers)
    voter = OneVoter(head, peers)
    alive = [item_of(alive_of(head, peer)) for peer in peers]
    voter.hear_all(*(item.signed for item in alive))
    identity = voter.propose(voter.quiet_body(alive))
    voter.others_vote(Step.PREVOTE, identity)
    attempt = Terms(head, tuple(sorted(peer.peer_id for peer in voter.others[:2])))
    for peer in voter.others[:2]:
        with suppress(RemoteProtocolError):
            voter.hear(peer, vote_of(attempt, peer, Step.PRECOMMIT, identity))
    assert voter.votes(Step.PRECOMMIT) == [(identity, False)]
    assert voter.round.voting.decided() is None
    for peer in voter.others[:2]:
        voter.hear(peer, vote_of(voter.terms, peer, Step.PRECOMMIT, identity))
    assert voter.round.voting.decided() is not None


def final_vote(send: fx.Send) -> Vote | None:
    """A vote of the height's final voting, if this is one."""
    message = decode(send.data)
    body = message.body if isinstance(message, Signed) else None
    return body if isinstance(body, Vote) and not body.branch else None


def no_precommits(sender: SimPeer, send: fx.Send) -> PeerId | None:
    vote = final_vote(send)
    return None if vote is not None and vote.step is Step.PRECOMMIT else send.to


def no_votes_of_view_0(sender: SimPeer, send: fx.Send) -> PeerId | None:
    vote = final_vote(send)
    return None if vote is not None and (vote.round, vote.view) == (3, 0) else send.to


def test_a_lock_outlives_a_tentative_detour() -> None:
    """The votes of view 0 are lost for good, and nobody asks for view 1 before: locks are all that is left."""
    swarm, peers = in_round_3(4, view_timeout_base_ms=MINUTE_MS)
    swarm.route = no_precommits

    def locks() -> list[bytes]:
        return [data for peer in peers for key, data in peer.journal.items() if key.endswith("ballot/lock")]

    assert swarm.run(lambda: len(locks()) == 4, 2 * MINUTE_MS)
    (body,) = {lock.split()[1] for lock in locks()}
    cut_off(swarm, peers[:2], peers[2:])
    assert swarm.run(lambda: all(peer.machine.head.num_tentative == 2 for peer in peers), 5 * MINUTE_MS)
    swarm.route = no_votes_of_view_0
    swarm.blocked = lambda sender, receiver: False
    assert swarm.run(lambda: all(peer.machine.head.last_final.round > 2 for peer in peers), 5 * MINUTE_MS)
    final = [head for head in peers[0].heads if head.is_final][3]
    assert (final.round, final.hash.hex().encode()) == (3, body)


def test_a_tentative_certificate_lets_nobody_leave() -> None:
    swarm, peers = in_round_3(4)
    cut_off(swarm, peers[:2], peers[2:])
    swarm.give(peers[0], fx.LeaveWanted(handover=None, handover_bytes=0))
    for number in (1, 2):
        assert swarm.run(lambda: peers[1].machine.head.num_tentative == number, 5 * MINUTE_MS)  # noqa: B023  # runs now
        assert peers[1].machine.head.state.members == tuple(sorted(swarm.peers))
    rest = peers[1:]
    assert final_again(swarm, rest)
    assert rest[0].machine.head.last_final.state.members == tuple(sorted(peer.peer_id for peer in rest))


def test_two_branches_of_two_founders_become_one_whatever_came_first() -> None:
    swarm, peers = in_round_3(2)
    cut_off(swarm, peers[:1], peers[1:])
    assert swarm.run_to_round(5, 5 * MINUTE_MS)
    assert len({peer.machine.head.hash for peer in peers}) == 2
    assert final_again(swarm, peers)
    assert len({peer.machine.head.last_final.hash for peer in peers}) == 1


def test_a_half_of_four_voters_stops_after_as_many_certificates_as_it_may_make() -> None:
    swarm, peers = in_round_3(4)
    cut_off(swarm, peers[:2], peers[2:])
    swarm.run(lambda: False, 5 * MINUTE_MS)
    most = swarm.config.protocol.max_tentative
    assert [peer.machine.head.num_tentative for peer in peers] == [most] * 4
    assert all(peer.machine.progress(swarm.now_ms).waiting != "" for peer in peers)


def test_a_recovery_that_another_key_signed_is_nothing() -> None:
    swarm, peers = in_round_3(4)
    thief = next(peer for peer in peers if peer.peer_id != swarm.genesis.run.manifest.recovery_key)
    body = recover(thief.machine.terms, {thief.peer_id})
    stolen = sign_recovery(body, identity_of(thief.name))
    for peer in peers:
        inject(swarm, thief, peer.peer_id, stolen)
    assert swarm.run_to_round(4, MINUTE_MS)
    assert {(peer.machine.head.epoch, len(peer.machine.head.state.members)) for peer in peers} == {(0, 4)}
    assert sum("did not sign" in problem for problem in swarm.problems) == 4


def test_a_final_certificate_is_left_for_no_tentative_one() -> None:
    swarm, peers = in_round_3(3)
    cut_off(swarm, peers[:1], peers[1:])
    assert swarm.run(lambda: peers[1].machine.head.num_tentative == 2, 5 * MINUTE_MS)
    assert final_again(swarm, peers)
    stood = len(peers[1].heads)
    tip = peers[1].machine.head
    assert tip.is_final
    assert swarm.run_to_round(tip.round + 2, 2 * MINUTE_MS)
    after = peers[1].heads[stood:]
    assert [(head.is_final, head.round) for head in after][:2] == [(True, tip.round + 1), (True, tip.round + 2)]
    first = next(certificate.body for certificate in peers[1].certificates if certificate.body.round == tip.round + 1)
    assert (first.prev, body_hash(first)) == (tip.hash, after[0].hash)


def test_a_shard_that_others_trained_meanwhile_goes_back_to_its_owner() -> None:
    swarm, peers = in_round_3(3, capacity=4)
    lost, rest = peers[0], peers[1:]
    owned = lost.machine.head.state.shards_of(lost.peer_id)
    assert owned != ()
    cut_off(swarm, [lost], rest)
    swarm.kill(lost)
    assert swarm.run_to_round(6, 5 * MINUTE_MS, rest)
    assert rest[0].machine.head.state.shards_of(lost.peer_id) == ()
    swarm.restart(lost, capacity=4)
    assert final_again(swarm, peers)
    assert {peer.machine.head.last_final.state.shards_of(lost.peer_id) for peer in peers} == {owned}
