"""Authors that cheat: updates nobody can fetch, from another certificate, two for one round, or once more."""

from __future__ import annotations

from msgspec import structs

from spes_p2p.digests import digest
from spes_p2p.ids import PeerId
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import CutItem
from spes_p2p.protocol.codec import receipt_hash, statement_hash
from spes_p2p.protocol.messages import Ack, Receipt, Signed
from spes_p2p.protocol.wire import NO_DIGEST, ItemKind
from spes_p2p.testing.adversary import inject, name_in_cut, rewrite_manifests, signed_in
from spes_p2p.testing.directed import MINUTE_MS, hashes_of, head_after, swarm_in_round, updates_of, view_of
from spes_p2p.testing.swarm import SimPeer, Swarm


def cheating(place: int = 1, num_founders: int = 4) -> tuple[Swarm, SimPeer, list[SimPeer]]:
    """The swarm in round 3, who cheats, and the honest peers. The leader of round 3 has place 0."""
    swarm, order = swarm_in_round(3, num_founders)
    cheat = order[place]
    return swarm, cheat, [peer for peer in order if peer is not cheat]


def everybody(honest: list[SimPeer]) -> set[bytes]:
    return {peer.peer_id for peer in honest}


def test_an_update_that_nobody_can_fetch_gets_no_receipt_and_is_not_in_the_mean() -> None:
    swarm, cheat, honest = cheating()
    cheat.withholds = True
    assert swarm.run_to_round(5, 5 * MINUTE_MS)
    assert [updates_of(honest[0], number) for number in (3, 4, 5)] == [everybody(honest)] * 3
    assert cheat.peer_id in head_after(honest[0], 5).state.voters


def test_an_update_with_one_ack_fewer_than_it_needs_is_alive_and_no_more() -> None:
    swarm, cheat, honest = cheating()
    assert cheat.machine.terms.psi_acks == cheat.machine.terms.expert_acks == 2
    friend = honest[0].peer_id

    def route(sender: SimPeer, send: fx.Send) -> PeerId | None:
        (signed,) = signed_in(send.data) or (None,)
        ack = signed is not None and isinstance(signed.body, Ack) and send.to == cheat.peer_id
        return None if ack and sender.peer_id != friend else send.to

    swarm.route = route
    assert swarm.run_to_round(4, 5 * MINUTE_MS)
    assert [updates_of(honest[0], number) for number in (3, 4)] == [everybody(honest)] * 2
    assert cheat.peer_id in head_after(honest[0], 4).state.voters


def test_an_update_from_another_certificate_is_in_no_cut() -> None:
    swarm, cheat, honest = cheating()
    rewrite_manifests(cheat, 3, lambda m: structs.replace(m, prev=digest("another branch")), lambda peer: True)
    assert swarm.run_to_round(5, 5 * MINUTE_MS)
    assert updates_of(honest[0], 3) == everybody(honest)
    assert any("based on another certificate" in problem for problem in swarm.problems)
    assert cheat.peer_id in updates_of(honest[0], 5)


def test_an_author_of_two_manifests_is_out_with_the_next_roster_and_its_vote_is_gone() -> None:
    swarm, cheat, honest = cheating(num_founders=5)
    half = {peer.peer_id for peer in honest[:2]}
    rewrite_manifests(cheat, 3, lambda m: structs.replace(m, tokens=m.tokens + 1), lambda peer: peer in half)
    assert swarm.run_to_round(5, 5 * MINUTE_MS, honest)
    without = [head for head in honest[0].heads if cheat.peer_id not in head.state.members]
    assert without
    out = without[0]
    assert out.round in (3, 4)
    assert set(out.state.voters) == everybody(honest)
    assert all(everybody(honest) <= updates_of(honest[0], number) for number in (3, 4, 5))
    assert [lease.owners for lease in out.state.leases if any(o.who == cheat.peer_id for o in lease.owners)] == []


def test_who_was_evicted_for_two_manifests_asks_in_vain_to_join_again() -> None:
    swarm, cheat, honest = cheating(num_founders=5)
    half = {peer.peer_id for peer in honest[:2]}
    rewrite_manifests(cheat, 3, lambda m: structs.replace(m, tokens=m.tokens + 1), lambda peer: peer in half)
    assert swarm.run_to_round(9, 5 * MINUTE_MS, honest)
    member = [cheat.peer_id in head_after(honest[0], number).state.members for number in range(2, 10)]
    assert (member[0], member[2:]) == (True, [False] * 6)
    bodies = [certificate.body for certificate in honest[0].certificates[5:9]]
    asked = [body.round for body in bodies if body.newcomers == (cheat.peer_id,)]
    assert asked == [body.round for body in bodies if ItemKind.EVIDENCE in {entry.kind for entry in body.entries}]
    assert len(asked) >= 2
    assert [updates_of(honest[0], number) for number in range(4, 10)] == [everybody(honest)] * 6


def last_update(peer: SimPeer) -> tuple[Signed, Receipt]:
    """The update of a peer in the open round, with its receipt."""
    held = peer.machine._round.updates.slots[ItemKind.UPDATE, peer.peer_id, peer.machine.terms.round]
    assert held.receipt is not None
    return held.signed, held.receipt


def test_a_replayed_receipt_brings_nothing_into_a_second_cut() -> None:
    swarm, cheat, honest = cheating()
    key = (ItemKind.UPDATE, cheat.peer_id, 3)

    def receipted() -> bool:
        slots = cheat.machine._round.updates.slots
        return key in slots and slots[key].receipt is not None

    assert swarm.run(receipted, MINUTE_MS)
    update, receipt = last_update(cheat)
    assert swarm.run_to_round(3, MINUTE_MS)
    for delay_ms in (100, 5_000):
        for peer in honest:
            for message in (update, receipt):
                swarm.at(delay_ms, lambda peer=peer, m=message: inject(swarm, cheat, peer.peer_id, m))  # type: ignore[misc]  # bound now
    assert swarm.run_to_round(6, 5 * MINUTE_MS)
    assert [len(updates_of(honest[0], number)) for number in (3, 4, 5, 6)] == [4] * 4
    row = head_after(honest[0], 6).state.row(cheat.peer_id)
    assert row is not None
    assert (row.accepted, row.base_round) == (5, 6)


def test_a_leader_that_names_an_update_once_more_loses_its_view() -> None:
    swarm, order = swarm_in_round(3, 4)
    rows = {}

    def receipted() -> bool:
        for peer in order:
            held = peer.machine._round.updates.slots.get((ItemKind.UPDATE, peer.peer_id, 3))
            if held is not None and held.receipt is not None:
                rows[peer.peer_id] = (held.signed, held.receipt)
        return len(rows) == 4

    assert swarm.run(receipted, MINUTE_MS)
    assert swarm.run_to_round(3, MINUTE_MS)
    leader = swarm.peers[order[0].machine.terms.leader(0)]
    honest = [peer for peer in order if peer is not leader]
    update, receipt = rows[leader.peer_id]
    entry = CutItem(ItemKind.UPDATE, leader.peer_id, statement_hash(update), receipt_hash(receipt))
    name_in_cut(swarm, leader, 4, entry, update, receipt)
    assert swarm.run_to_round(6, 5 * MINUTE_MS)
    assert view_of(honest[0], 4) == 1
    assert len(hashes_of(order, 6)) == 1
    row = head_after(honest[0], 4).state.row(leader.peer_id)
    assert row is not None
    assert row.base_round == 4


def test_a_leader_that_names_an_update_without_receipt_loses_its_view() -> None:
    """The update is the leader's own, whose blobs it serves to nobody: no receipt can exist."""
    swarm, order = swarm_in_round(3, 4)
    leader, honest = order[0], order[1:]
    leader.withholds = True

    def own() -> bool:
        return (ItemKind.UPDATE, leader.peer_id, 3) in leader.machine._round.updates.slots

    assert swarm.run(own, MINUTE_MS)
    update = leader.machine._round.updates.slots[ItemKind.UPDATE, leader.peer_id, 3].signed
    name_in_cut(
        swarm, leader, 3, CutItem(ItemKind.UPDATE, leader.peer_id, statement_hash(update), NO_DIGEST), update, None
    )
    assert swarm.run_to_round(3, MINUTE_MS)
    assert swarm.run_to_round(5, 5 * MINUTE_MS)
    assert view_of(honest[0], 3) == 1
    assert updates_of(honest[0], 3) == everybody(honest)
