"""A voter that is killed right after any of its sends and restarted from its disk contradicts nothing that it said.

While it is down a peer asks to join, so that whoever forgot what it promised would now promise something else.
"""

from __future__ import annotations

import pytest

from spes_p2p.ids import PeerId
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.codec import encode
from spes_p2p.protocol.evidence import exclusive_slot
from spes_p2p.testing.adversary import crash_after_send, signed_in
from spes_p2p.testing.directed import MINUTE_MS, hashes_of, swarm_in_round, updates_of
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
