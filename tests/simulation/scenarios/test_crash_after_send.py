"""A voter that is killed right after any of its sends and restarted from its disk contradicts nothing that it said.

While it is down a peer asks to join, so that whoever forgot what it promised would now promise something else.
"""

from __future__ import annotations

import pytest

from spes_p2p.ids import PeerId
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.codec import encode
from spes_p2p.protocol.evidence import exclusive_slot
from spes_p2p.protocol.wire import Step
from spes_p2p.testing.adversary import crash_after_send, signed_in
from spes_p2p.testing.directed import MINUTE_MS, hashes_of, swarm_in_round, updates_of, view_of
from spes_p2p.testing.one_voter import OneVoter
from spes_p2p.testing.protocol_cases import alive_of, identities, item_of, owned_head
from spes_p2p.testing.swarm import SimPeer, Swarm

DOWN_MS = 1_500
FIRST, LAST_OF_LEADER, LAST_OF_VOTER = 4, 30, 22
"""Sends of a round of four, counted from 1: from the manifest on, and until the certificate, which ends the round."""


def watch(swarm: Swarm, victim: SimPeer) -> dict[tuple[str, int, int, int, int], set[bytes]]:
    """Slot -> the different bytes that a peer sent for it, from now on."""
    seen: dict[tuple[str, int, int, int, int], set[bytes]] = {}
    route = swarm.route

    def watching(sender: SimPeer, send: fx.Send) -> PeerId | None:
        for signed in signed_in(send.data):
            slot = exclusive_slot(signed)
            if sender is victim and signed.peer == victim.peer_id and slot is not None:
                seen.setdefault(slot, set()).add(encode(signed))
        return route(sender, send)

    swarm.route = watching
    return seen


def crash(place: int, number: int) -> None:
    """The voter that leads in `place` dies after its `number`-th send of round 3."""
    swarm, order = swarm_in_round(3, 4)
    victim = order[place]
    crash_after_send(swarm, victim, number, down_ms=DOWN_MS)
    seen = watch(swarm, victim)
    assert swarm.run(lambda: not victim.alive, 5 * MINUTE_MS)
    assert victim.heads[-1].round == 2
    swarm.add("joiner", knows=[peer.peer_id for peer in order if peer is not victim])
    assert swarm.run_to_round(5, 10 * MINUTE_MS, order)
    assert {slot: len(sent) for slot, sent in seen.items() if len(sent) > 1} == {}
    assert len(hashes_of(order, 5)) == 1
    assert victim.peer_id in updates_of(order[0], 5)


@pytest.mark.parametrize("number", range(FIRST, LAST_OF_LEADER + 1))
def test_a_leader_that_dies_after_any_of_its_sends_contradicts_nothing(number: int) -> None:
    crash(0, number)


@pytest.mark.parametrize("number", range(FIRST, LAST_OF_VOTER + 1))
def test_a_voter_that_dies_after_any_of_its_sends_contradicts_nothing(number: int) -> None:
    crash(3, number)


def test_a_leader_that_dies_after_its_first_cut_names_no_other() -> None:
    crash(0, 13)


def test_a_voter_that_dies_after_its_first_manifest_publishes_no_other() -> None:
    crash(3, 5)


# --- views after the first, and torn writes --------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(FIRST, 34, 2))
def test_a_voter_that_dies_after_a_send_while_the_leader_is_dead_contradicts_nothing(number: int) -> None:
    """All three that live are needed: they wait for the victim, whose view, lock and votes come from its journal."""
    swarm, order = swarm_in_round(3, 4)
    dead, victim, *rest = order
    swarm.kill(dead)
    crash_after_send(swarm, victim, number, down_ms=DOWN_MS)
    seen = watch(swarm, victim)
    assert swarm.run(lambda: not victim.alive, 5 * MINUTE_MS)
    assert swarm.run_to_round(4, 10 * MINUTE_MS, [victim, *rest])
    assert {slot: len(sent) for slot, sent in seen.items() if len(sent) > 1} == {}
    assert len(hashes_of([victim, *rest], 4)) == 1
    assert view_of(victim, 3) >= 1


def test_whatever_part_of_a_write_survives_a_lock_comes_with_its_certificate_and_body() -> None:
    peers = identities(4)
    head = owned_head(peers)
    alive = [item_of(alive_of(head, peer)) for peer in peers]
    voter = OneVoter(head, peers)
    voter.hear_all(*(item.signed for item in alive))
    identity = voter.propose(voter.quiet_body(alive))
    before, begun = dict(voter.journal), len(voter.effects)
    voter.others_vote(Step.PREVOTE, identity, held=(True, True))
    writes = [effect.entries for effect in voter.effects[begun:] if isinstance(effect, fx.Persist)]
    locked = []
    for length in range(len(writes) + 1):
        journal = dict(before)
        for entries in writes[:length]:
            journal.update(entries)
        voting = OneVoter(head, peers, journal).round.voting
        locked.append(voting.lock is not None)
        if voting.lock is not None:
            assert voting.lock.body == identity
            assert voting.qc is not None
            assert (voting.qc.view, voting.qc.body) == (0, identity)
            assert voting._bodies.known[identity].hash == identity
    assert (locked[0], locked[-1]) == (False, True)
