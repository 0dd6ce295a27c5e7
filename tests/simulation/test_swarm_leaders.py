"""Leaders that die at each of their steps, and leaders that lie."""

import itertools
from collections.abc import Callable

import msgspec
import pytest

from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Cut
from spes_p2p.protocol.codec import body_hash, cut_hash, decode, encode, sign
from spes_p2p.protocol.messages import (
    CutAnnouncement,
    CutMessage,
    Manifest,
    Message,
    Proposal,
    ProposalMessage,
    Signed,
    Vote,
)
from spes_p2p.protocol.wire import ItemKind, Step
from spes_p2p.testing.protocol_cases import kept_body
from spes_p2p.testing.swarm import SimPeer, Swarm

Make = Callable[..., Swarm]
Peers = Callable[[Swarm], list[SimPeer]]
MINUTE_MS = 60_000


def leader_after(swarm: Swarm, number: int) -> SimPeer:
    """The peer that leads view 0 of the round after `number`, once everybody is there."""
    assert swarm.run_to_round(number, 10 * MINUTE_MS)
    any_peer = next(iter(swarm.peers.values()))
    return swarm.peers[any_peer.machine.terms.leader(0)]


def is_cut(message: Message, me: SimPeer) -> bool:
    return isinstance(message, CutMessage) and message.announcement.peer == me.peer_id


def is_proposal(message: Message, me: SimPeer) -> bool:
    return isinstance(message, ProposalMessage) and message.proposal.peer == me.peer_id


def is_vote(step: Step) -> Callable[[Message, SimPeer], bool]:
    def check(message: Message, me: SimPeer) -> bool:
        if not isinstance(message, Signed) or message.peer != me.peer_id:
            return False
        return isinstance(message.body, Vote) and message.body.step is step

    return check


STEPS = {
    "cut": is_cut,
    "proposal": is_proposal,
    "prevote": is_vote(Step.PREVOTE),
    "precommit": is_vote(Step.PRECOMMIT),
}


@pytest.mark.parametrize("num_delivered", [0, 1, 2])
@pytest.mark.parametrize("step", sorted(STEPS))
def test_a_leader_that_dies_at_any_step_costs_at_most_its_view(swarm_of: Make, step: str, num_delivered: int) -> None:
    swarm = swarm_of(4, seed=num_delivered)
    leader = leader_after(swarm, 2)
    survivors = [peer for peer in swarm.peers.values() if peer is not leader]
    delivered = []

    def dies(send: fx.Send) -> bytes | None:
        if not leader.alive:
            return None
        if STEPS[step](decode(send.data), leader):
            if len(delivered) == num_delivered:
                swarm.kill(leader)
                return None
            delivered.append(send.to)
        return send.data

    leader.tampers = dies
    assert swarm.run(lambda: not leader.alive, 2 * MINUTE_MS)
    assert swarm.run_to_round(5, 5 * MINUTE_MS, survivors)
    assert max(c.view for c in survivors[0].certificates) <= 2
    leader.tampers = None
    swarm.restart(leader)
    target = survivors[0].machine.head.round + 4
    assert swarm.run_to_round(target, 10 * MINUTE_MS)
    assert leader.machine.is_member


def lying_swarm(
    swarm_of: Make, tamper: Callable[[Swarm, SimPeer, fx.Send, Message], bytes | None], num_founders: int = 4
) -> tuple[Swarm, SimPeer, SimPeer]:
    """A swarm whose leader of round 3 lies in that round; it, and an honest peer."""
    swarm = swarm_of(num_founders)
    liar = leader_after(swarm, 2)
    liar.tampers = lambda send: (
        tamper(swarm, liar, send, decode(send.data)) if liar.machine.terms.round == 3 else send.data
    )
    honest = next(peer for peer in swarm.peers.values() if peer is not liar)
    assert swarm.run_to_round(5, 10 * MINUTE_MS)
    return swarm, liar, honest


def reannounced(liar: SimPeer, message: CutMessage, cut: Cut) -> bytes:
    announcement = message.announcement.body
    assert isinstance(announcement, CutAnnouncement)
    body = msgspec.structs.replace(announcement, cut=cut_hash(cut))
    return encode(CutMessage(sign(liar.identity, body), cut))


def test_a_leader_that_leaves_out_a_receipted_update_is_voted_down(swarm_of: Make) -> None:
    def omit(swarm: Swarm, liar: SimPeer, send: fx.Send, message: Message) -> bytes | None:
        if isinstance(message, ProposalMessage) and message.proposal.peer == liar.peer_id:
            return None
        if not is_cut(message, liar):
            return send.data
        assert isinstance(message, CutMessage)
        victim = next(i for i in message.cut.items if i.kind is ItemKind.UPDATE and i.peer != liar.peer_id)
        items = tuple(item for item in message.cut.items if item != victim)
        return reannounced(liar, message, msgspec.structs.replace(message.cut, items=items))

    _, _, honest = lying_swarm(swarm_of, omit)
    entries = honest.certificates[2].body.entries
    assert honest.certificates[2].view >= 1
    assert sum(entry.kind is ItemKind.UPDATE for entry in entries) == 4


def test_a_cut_that_names_what_does_not_exist_stops_one_view_only(swarm_of: Make) -> None:
    def invent(swarm: Swarm, liar: SimPeer, send: fx.Send, message: Message) -> bytes | None:
        if not is_cut(message, liar):
            return send.data
        assert isinstance(message, CutMessage)
        ghost = msgspec.structs.replace(message.cut.items[-1], kind=ItemKind.EVIDENCE, statement=b"\xff" * 32)
        return reannounced(liar, message, msgspec.structs.replace(message.cut, items=(*message.cut.items, ghost)))

    _, _, honest = lying_swarm(swarm_of, invent)
    assert honest.certificates[2].view == 1
    assert sum(entry.kind is ItemKind.UPDATE for entry in honest.certificates[2].body.entries) == 4


@pytest.mark.parametrize(
    "change", [{"global_step": 7}, {"lease_delta": ()}, {"roster_root": b"\1" * 32}, {"tokens": 1}]
)
def test_a_leader_that_proposes_what_does_not_follow_gets_nil(swarm_of: Make, change: dict[str, object]) -> None:
    def alter(swarm: Swarm, liar: SimPeer, send: fx.Send, message: Message) -> bytes | None:
        if not isinstance(message, ProposalMessage) or message.proposal.peer != liar.peer_id:
            return send.data
        body = msgspec.structs.replace(message.body, **change)
        proposal = message.proposal.body
        assert isinstance(proposal, Proposal)
        signed = sign(liar.identity, msgspec.structs.replace(proposal, body=body_hash(body)))
        return encode(ProposalMessage(signed, body, message.merge_lists))

    swarm, liar, honest = lying_swarm(swarm_of, alter)
    assert honest.certificates[2].view == 1
    others = [peer for peer in swarm.peers.values() if peer is not liar]
    assert all(any("prevote nil: not what follows" in text for _, _, text in peer.notes) for peer in others)


def test_a_leader_that_keeps_all_parts_without_need_is_voted_down(swarm_of: Make) -> None:
    def keep(swarm: Swarm, liar: SimPeer, send: fx.Send, message: Message) -> bytes | None:
        if not isinstance(message, ProposalMessage) or message.proposal.peer != liar.peer_id:
            return send.data
        head = liar.machine.head
        body = kept_body(head, message.body)
        proposal = message.proposal.body
        assert isinstance(proposal, Proposal)
        signed = sign(liar.identity, msgspec.structs.replace(proposal, body=body_hash(body)))
        return encode(ProposalMessage(signed, body, message.merge_lists))

    _, _, honest = lying_swarm(swarm_of, keep)
    assert honest.certificates[2].view >= 1
    assert honest.certificates[2].body.kept == b"\0"


def test_a_leader_with_two_cuts_for_one_view_forks_nothing(swarm_of: Make) -> None:
    def two(swarm: Swarm, liar: SimPeer, send: fx.Send, message: Message) -> bytes | None:
        places = sorted(swarm.peers)
        if not is_cut(message, liar) or places.index(send.to) % 2:
            return send.data
        assert isinstance(message, CutMessage)
        return reannounced(liar, message, msgspec.structs.replace(message.cut, items=message.cut.items[1:]))

    swarm, liar, honest = lying_swarm(swarm_of, two, 5)
    assert swarm.run_to_round(7, 10 * MINUTE_MS, [peer for peer in swarm.peers.values() if peer is not liar])
    assert sum(entry.kind is ItemKind.UPDATE for entry in honest.certificates[2].body.entries) == 5


def test_an_author_of_two_manifests_for_one_round_is_evicted(swarm_of: Make) -> None:
    def two(swarm: Swarm, liar: SimPeer, send: fx.Send, message: Message) -> bytes | None:
        places = sorted(swarm.peers)
        if not isinstance(message, Signed) or not isinstance(message.body, Manifest) or message.peer != liar.peer_id:
            return send.data
        if places.index(send.to) % 2:
            return send.data
        return encode(sign(liar.identity, msgspec.structs.replace(message.body, tokens=message.body.tokens + 1)))

    _, liar, honest = lying_swarm(swarm_of, two, 5)
    evicted = [c.body.round for c in honest.certificates if any(e.kind is ItemKind.EVIDENCE for e in c.body.entries)]
    assert evicted[0] in (3, 4)
    heads = {head.round: head.state.members for head in honest.heads}
    assert all(liar.peer_id not in heads[number] for number in evicted)


@pytest.mark.parametrize("num_founders", [4, 7])
def test_f_voters_that_vote_both_ways_fork_nothing_and_stop_nothing(swarm_of: Make, num_founders: int) -> None:
    swarm = swarm_of(num_founders)
    assert swarm.run_to_round(2, 5 * MINUTE_MS)
    num_liars = (num_founders - 1) // 3
    liars = list(swarm.peers.values())[:num_liars]
    places = sorted(swarm.peers)

    def both_ways(liar: SimPeer) -> Callable[[fx.Send], bytes | None]:
        def tamper(send: fx.Send) -> bytes | None:
            message = decode(send.data)
            if not isinstance(message, Signed) or not isinstance(message.body, Vote) or message.peer != liar.peer_id:
                return send.data
            if places.index(send.to) % 2:
                return send.data
            return encode(sign(liar.identity, msgspec.structs.replace(message.body, body=bytes(32), held=False)))

        return tamper

    for liar in liars:
        liar.tampers = both_ways(liar)
    honest = [peer for peer in swarm.peers.values() if peer not in liars]
    assert swarm.run_to_round(8, 20 * MINUTE_MS, honest)


def test_an_evicted_peer_that_comes_back_is_evicted_again(swarm_of: Make) -> None:
    swarm = swarm_of(5)
    liar = leader_after(swarm, 2)
    places = sorted(swarm.peers)

    def two(send: fx.Send) -> bytes | None:
        message = decode(send.data)
        if not isinstance(message, Signed) or not isinstance(message.body, Manifest) or places.index(send.to) % 2:
            return send.data
        if message.peer != liar.peer_id or message.body.round != 3:
            return send.data
        return encode(sign(liar.identity, msgspec.structs.replace(message.body, tokens=message.body.tokens + 1)))

    liar.tampers = two
    assert swarm.run_to_round(9, 10 * MINUTE_MS)
    honest = next(peer for peer in swarm.peers.values() if peer is not liar)
    in_roster = [liar.peer_id in head.state.members for head in honest.heads[3:10]]
    assert in_roster.count(False) >= 3
    assert all(not (now and then) for now, then in itertools.pairwise(in_roster[2:]))
