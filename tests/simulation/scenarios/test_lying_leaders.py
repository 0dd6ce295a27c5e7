"""Leaders whose bodies are valid and unfair: cut too early, without a known receipt, with parts kept without need."""

from __future__ import annotations

from msgspec import structs

from spes_p2p.protocol.codec import bits, cut_hash, sign
from spes_p2p.protocol.head import Terms
from spes_p2p.protocol.messages import Alive, CutAnnouncement, CutMessage
from spes_p2p.testing.adversary import inject, omit_update, rewrite_proposals
from spes_p2p.testing.directed import MINUTE_MS, hashes_of, head_after, swarm_in_round, updates_of, view_of
from spes_p2p.testing.protocol_cases import cut_of, item_of, kept_body
from spes_p2p.testing.swarm import Line, SimPeer, Swarm

SLOW_MS = 12_000
"""Training of the one slow peer; the others take 8 s, so that their receipts are held for a view before view 0."""


def one_slow(num_founders: int = 4) -> tuple[Swarm, SimPeer, list[SimPeer], SimPeer]:
    """The swarm in round 3, its leader, the other fast peers, and the slow one."""
    swarm, order = swarm_in_round(3, num_founders)
    order[-1].line = Line(train_ms=SLOW_MS)
    return swarm, order[0], order[1:-1], order[-1]


def check_all_went_on(swarm: Swarm, leader: SimPeer, others: list[SimPeer]) -> None:
    """Everybody agrees, nobody is out, and the updates of all but the liar are in every round."""
    everybody = [leader, *others]
    assert swarm.run_to_round(6, 5 * MINUTE_MS)
    assert len(hashes_of(everybody, 6)) == 1
    assert set(head_after(leader, 6).state.members) == {peer.peer_id for peer in everybody}
    for number in (3, 4, 5, 6):
        assert {peer.peer_id for peer in others} <= updates_of(leader, number)


def test_a_leader_that_omits_a_receipt_everybody_held_loses_its_view() -> None:
    swarm, leader, fast, slow = one_slow()
    omit_update(swarm, leader, fast[0].peer_id, 3)
    assert swarm.run_to_round(3, 2 * MINUTE_MS)
    assert view_of(leader, 3) == 1
    nil = [text for _, _, text in fast[0].notes if "prevote nil" in text]
    assert nil == ["view 0: prevote nil: the cut leaves out update of round 3"]
    check_all_went_on(swarm, leader, [*fast, slow])


def test_a_leader_that_keeps_parts_without_need_loses_its_view() -> None:
    swarm, leader, fast, slow = one_slow()
    rewrite_proposals(leader, 3, lambda body: kept_body(leader.machine.head, body))
    assert swarm.run_to_round(3, 2 * MINUTE_MS)
    body = leader.certificates[2].body
    assert (view_of(leader, 3), bits(body.kept, 4)) == (1, set())
    check_all_went_on(swarm, leader, [*fast, slow])


def cut_early(swarm: Swarm, leader: SimPeer, at_ms: int) -> None:
    """Soon after the round has opened the leader names a cut in which everybody is alive and nothing else."""

    def name() -> None:
        head, updates = leader.machine.head, leader.machine._round.updates
        alive = [item_of(held.signed) for held in updates.slots.values() if isinstance(held.signed.body, Alive)]
        cut, _ = cut_of(head, alive)
        body = CutAnnouncement(head.run.run_id, head.epoch, head.round + 1, 0, cut_hash(cut))
        message = CutMessage(sign(leader.identity, body), cut)
        for peer in swarm.peers:
            inject(swarm, leader, peer, message)

    swarm.at(at_ms, name)
    leader.tampers = lambda send: send.data  # it signs what its machine does not know


def test_a_leader_that_cuts_before_the_fast_peers_are_in_loses_its_view() -> None:
    swarm, leader, fast, slow = one_slow()
    cut_early(swarm, leader, 1_000)
    assert swarm.run(lambda: swarm.now_ms > 14_000, MINUTE_MS)
    assert [peer.machine._round.voting.view for peer in (leader, *fast)] == [-1] * 3
    assert swarm.run_to_round(3, 2 * MINUTE_MS)
    assert view_of(leader, 3) == 1
    check_all_went_on(swarm, leader, [*fast, slow])


def test_a_leader_that_cuts_at_once_among_equals_delays_nobodys_update() -> None:
    """Everybody trains equally long, so no receipt is held for a view when the first view begins."""
    swarm, order = swarm_in_round(3, 4)
    liar, honest = order[0], order[1:]
    for number in range(3, 9):
        if honest[0].machine.terms.leader(0) == liar.peer_id:
            cut_early(swarm, liar, 1_000)
        assert swarm.run_to_round(number, MINUTE_MS)
    views = [view_of(honest[0], number) for number in range(3, 9)]
    assert views == [int(Terms(head_after(honest[0], n - 1)).leader(0) == liar.peer_id) for n in range(3, 9)]
    for number in range(3, 9):
        assert {peer.peer_id for peer in honest} <= updates_of(honest[0], number)


def test_what_a_leader_may_not_change_in_a_body_is_everything() -> None:
    swarm, leader, fast, slow = one_slow()
    rewrite_proposals(leader, 3, lambda body: structs.replace(body, global_step=body.global_step + 10))
    assert swarm.run_to_round(3, 2 * MINUTE_MS)
    assert (view_of(leader, 3), leader.certificates[2].body.global_step) == (1, 20)
    check_all_went_on(swarm, leader, [*fast, slow])
