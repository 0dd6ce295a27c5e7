from __future__ import annotations

from spes_p2p.ids import PeerId
from spes_p2p.network.scores import MAX_OFFENCES, WINDOW_S, Offences

PEER = PeerId(b"p" * 32)


def test_a_peer_is_shunned_after_many_offences_and_heard_again_a_minute_later() -> None:
    now_s = 0.0
    offences = Offences(lambda: now_s)
    for number in range(MAX_OFFENCES):
        assert not offences.is_shunned(PEER)
        offences.add(PEER, f"offence {number}")
    assert offences.is_shunned(PEER)
    now_s = WINDOW_S + 1
    assert not offences.is_shunned(PEER)
    assert offences.count(PEER) == 0


def test_offences_are_counted_per_peer() -> None:
    offences = Offences(lambda: 0.0)
    offences.add(PEER, "wrong bytes")
    assert offences.count(PEER) == 1
    assert offences.count(PeerId(b"q" * 32)) == 0
