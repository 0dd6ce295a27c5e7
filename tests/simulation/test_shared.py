"""What the machines of a large swarm share changes nothing that they do, nor does where a search ends early."""

from __future__ import annotations

import msgspec
import pytest

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.protocol.head import Terms
from spes_p2p.protocol.messages import Manifest
from spes_p2p.testing.protocol_cases import identities, owned_head, quick_config, receipt_of, update_of
from spes_p2p.testing.sim import shared
from spes_p2p.testing.sim.faults import parse_faults
from spes_p2p.testing.sim.play import play
from spes_p2p.testing.sim.scenario import draw
from spes_p2p.testing.swarm import Line, Swarm, verify_either

NAMES = ["p0", "p1", "p2", "p3"]


@pytest.mark.parametrize(("faults", "num_peers", "seed"), [("none", 7, 1), ("all", 5, 3)])
def test_a_swarm_that_shares_what_follows_from_certificates_plays_as_one_that_does_not(
    faults: str, num_peers: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = draw(seed, num_peers=num_peers, num_rounds=3, chosen=parse_faults(faults))
    alone, _ = play(scenario)
    monkeypatch.setattr(shared, "LARGE_SWARM", 1)
    together, _ = play(scenario)
    assert together == alone


def test_only_the_machines_of_a_large_swarm_share_their_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_heads() == 4
    monkeypatch.setattr(shared, "LARGE_SWARM", 4)
    assert num_heads() == 1


def num_heads() -> int:
    """How many objects are the heads of four machines that are on one certificate."""
    swarm = Swarm(quick_config(), NAMES, seed=1)
    assert swarm.run_to_round(2, 60_000)
    assert len({peer.machine.head.hash for peer in swarm.peers.values()}) == 1
    return len({id(peer.machine.head) for peer in swarm.peers.values()})


def test_a_receipt_that_is_none_is_refused_every_time_it_comes() -> None:
    peers = identities(4)
    head = owned_head(peers)
    update = update_of(head, peers[0])
    assert isinstance(update.body, Manifest)
    derive, terms, author = shared.SharedState(4), Terms(head), update.peer
    good = receipt_of(update, peers)
    bad = msgspec.structs.replace(good, acks=good.acks[:0])
    for _ in range(2):
        derive.check_receipt(terms, good, author, update.body, verify_either)
        with pytest.raises(RemoteProtocolError, match="lacks acks"):
            derive.check_receipt(terms, bad, author, update.body, verify_either)


def test_a_blob_comes_from_the_first_source_that_can_send_it_at_once_or_else_the_soonest() -> None:
    swarm = Swarm(quick_config(), NAMES, seed=1)
    busy, soon, free, other = swarm.peers.values()
    for peer, free_ms in ((busy, 500), (soon, 200)):
        peer.line, peer.uplink_free_ms = Line(rate_bytes_per_s=1_000_000), free_ms
    assert swarm.blobs._quickest(iter(()), 1_000) is None
    assert swarm.blobs._quickest(iter([busy, soon]), 1_000) is soon
    assert swarm.blobs._quickest(iter([soon, busy]), 1_000) is soon
    rest = iter([busy, free, soon, other])
    assert swarm.blobs._quickest(rest, 1_000) is free
    assert list(rest) == [soon, other]


def test_all_is_over_once_the_last_of_the_living_is_there() -> None:
    swarm = Swarm(quick_config(), NAMES, seed=1)
    assert swarm.run_to_round(1, 60_000)
    swarm.kill(swarm.named("p3"))
    assert swarm.run_to_round(2, 120_000)
    assert [swarm.named(name).machine.head.round >= 2 for name in NAMES] == [True, True, True, False]
    assert not swarm.run_to_round(2, 0, [swarm.named("p3")])
