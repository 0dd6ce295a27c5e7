"""Broken certificates and promises, and what the invariants of the simulator (`sim/invariants.py`) say of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import pytest

from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.codec import encode, sign
from spes_p2p.protocol.head import Head, Run
from spes_p2p.protocol.messages import Vote
from spes_p2p.protocol.wire import NO_DIGEST, Step
from spes_p2p.testing.sim.finality import left_problem, link_problem, quorum_problem, tentative_problem, was_silent
from spes_p2p.testing.sim.invariants import InvariantError
from spes_p2p.testing.swarm import SimPeer, Swarm, verify_either

Make = Callable[..., Swarm]
MINUTE_MS = 60_000
Link = tuple[Head, Head, Certificate]


def healed(swarm_of: Make) -> tuple[Swarm, SimPeer]:
    """Two halves of four made tentative certificates, and have healed; a peer whose branch was chosen."""
    swarm = swarm_of(4)
    peers = list(swarm.peers.values())
    assert swarm.run_to_round(2, 5 * MINUTE_MS)
    half = {peer.peer_id for peer in peers[:2]}
    swarm.blocked = lambda sender, receiver: (sender in half) != (receiver in half)
    assert swarm.run_to_round(5, 5 * MINUTE_MS)
    swarm.blocked = lambda sender, receiver: False
    assert swarm.run(lambda: all(peer.machine.head.last_final.round > 5 for peer in peers), 2 * MINUTE_MS)
    return swarm, peers[0]


def links(peer: SimPeer) -> list[Link]:
    """(head before, head after, certificate) along a chain."""
    return list(zip(peer.heads, peer.heads[1:], peer.certificates, strict=False))


def final_link(peer: SimPeer) -> Link:
    """The final certificate after the tentative ones."""
    return next(link for link in links(peer) if link[2].body.via != NO_DIGEST)


def tentative_link(peer: SimPeer) -> Link:
    return next(link for link in links(peer) if not link[2].body.final)


def test_certificates_of_a_healed_swarm_are_in_order(swarm_of: Make) -> None:
    _, peer = healed(swarm_of)
    for place, (before, head, certificate) in enumerate(links(peer)):
        assert link_problem(before, head, certificate, peer.heads[: place + 1]) == ""
        assert quorum_problem(before, head, certificate, verify_either) == ""
        assert tentative_problem(head) == ""


def test_a_final_certificate_that_passes_over_a_final_one_is_named(swarm_of: Make) -> None:
    _, peer = healed(swarm_of)
    before, head, certificate = final_link(peer)
    assert link_problem(
        before, head, certificate, peer.heads
    ) == f"round {head.round} passes over the final round " + str(peer.heads[-1].round)


def test_a_final_certificate_must_name_the_last_final_one_and_its_tip(swarm_of: Make) -> None:
    _, peer = healed(swarm_of)
    before, head, certificate = final_link(peer)
    chain = peer.heads[: peer.heads.index(head)]
    other = msgspec.structs.replace(certificate, body=msgspec.structs.replace(certificate.body, prev=before.hash))
    assert link_problem(before, head, certificate, chain) == ""
    assert link_problem(before, head, other, chain) == f"round {head.round} is on top of another chain"


def test_nothing_final_is_left(swarm_of: Make) -> None:
    swarm, peer = healed(swarm_of)
    final, tentative = final_link(peer)[1], tentative_link(peer)[1]
    assert left_problem(peer.heads, [tentative.hash]) == ""
    assert left_problem(peer.heads, [final.hash]) == f"leaves the final round {final.round}"
    with pytest.raises(InvariantError, match="S3: p0 leaves the final round"):
        swarm.work.go_back(peer, fx.GoBack(head=peer.heads[1], holders=(), abandoned=(final.hash,)))


def signed_by_side(swarm: Swarm, link: Link, *, branch: bytes, number: int) -> Certificate:
    """The certificate with the precommits of another ballot."""
    before, head, certificate = link
    body = certificate.body
    vote = Vote(body.run, body.epoch, number, certificate.view, Step.PRECOMMIT, head.hash, False, branch)
    signers = [swarm.peers[peer].identity for peer in before.last_final.state.voters]
    signatures = tuple(sign(signer, vote).signature for signer in signers)
    return msgspec.structs.replace(certificate, voters=b"\x0f", signatures=signatures)


def test_no_tentative_signature_counts_for_a_final_certificate(swarm_of: Make) -> None:
    swarm, peer = healed(swarm_of)
    link = final_link(peer)
    right = signed_by_side(swarm, link, branch=b"", number=link[0].height)
    wrong = signed_by_side(swarm, link, branch=b"b" * 32, number=link[0].height)
    assert quorum_problem(*link[:2], right, verify_either) == ""
    assert quorum_problem(*link[:2], wrong, verify_either) == "0 of 3 precommits of its ballot"
    short = msgspec.structs.replace(right, voters=b"\x03", signatures=right.signatures[:2])
    assert quorum_problem(*link[:2], short, verify_either) == "2 of 3 precommits of its ballot"


def test_a_quorum_makes_no_tentative_certificate(swarm_of: Make) -> None:
    _, peer = healed(swarm_of)
    before, head, certificate = tentative_link(peer)
    body = msgspec.structs.replace(certificate.body, side=b"\x0f")
    many = msgspec.structs.replace(certificate, body=body)
    assert quorum_problem(before, head, many, verify_either) == "a tentative certificate of 4 of 4 voters"


def test_a_recovery_needs_the_key(swarm_of: Make) -> None:
    _, peer = healed(swarm_of)
    before, head, certificate = final_link(peer)
    body = msgspec.structs.replace(certificate.body, epoch=before.epoch + 1)
    forged = msgspec.structs.replace(certificate, body=body)
    assert quorum_problem(before, head, forged, verify_either) == "a recovery that the key did not sign"


def test_a_tentative_certificate_changes_no_roster_and_only_so_many_follow(swarm_of: Make) -> None:
    _, peer = healed(swarm_of)
    _, head, _ = tentative_link(peer)
    state = msgspec.structs.replace(head.state, roster=head.state.roster[1:])
    assert tentative_problem(dataclasses.replace(head, state=state)) == "a tentative certificate changes the roster"
    config = head.run.config
    fewer = config.model_copy(update={"protocol": config.protocol.model_copy(update={"max_tentative": 2})})
    run = Run(**{field.name: getattr(head.run, field.name) for field in dataclasses.fields(Run)} | {"config": fewer})
    last = dataclasses.replace(peer.heads[peer.heads.index(head) + 2], run=run)
    assert tentative_problem(last) == "3 tentative certificates of at most 2"


def test_two_votes_of_one_branch_are_a_broken_promise_and_those_of_two_branches_are_not(swarm_of: Make) -> None:
    swarm, peer = healed(swarm_of)
    before, head, _ = tentative_link(peer)

    def says(branch: bytes, body: bytes) -> None:
        vote = Vote(head.run.run_id, 0, before.round + 1, 60, Step.PREVOTE, body, False, branch)
        swarm.monitor.sent(peer, fx.Send(ticket=0, to=peer.peer_id, data=encode(sign(peer.identity, vote))))

    says(b"a" * 32, head.hash)
    says(b"b" * 32, NO_DIGEST)
    with pytest.raises(InvariantError, match="S2: p0 signed two values"):
        says(b"a" * 32, NO_DIGEST)


def test_silence_is_two_final_cuts_without_an_item() -> None:
    here, away = frozenset({b"a", b"b"}), frozenset({b"a"})
    assert not was_silent(b"b", [away], 2)
    assert not was_silent(b"b", [here, away], 2)
    assert not was_silent(b"b", [away, here], 2)
    assert was_silent(b"b", [here, away, away], 2)
