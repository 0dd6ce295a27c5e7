from spes_p2p.crypto import verify
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.progress import progress_of
from spes_p2p.protocol.roster import invite_payload
from spes_p2p.protocol.round import RoundMachine, Wishes
from spes_p2p.testing.one_voter import OneVoter
from spes_p2p.testing.protocol_cases import alive_of, identities, item_of, owned_head, pieces_of
from spes_p2p.testing.swarm import identity_of

PEERS = identities(4)
HEAD = owned_head(PEERS)


def test_the_phases_follow_each_other_as_work_is_done() -> None:
    machine = RoundMachine(HEAD, PEERS[0], verify, Wishes(capacity=2, private_seed=b"x"), now_ms=0)
    machine.start(0)
    assert machine.progress(0).phase == "load"
    machine.handle(fx.StateReady(round=2), 1)
    assert machine.progress(1).phase == "train"
    pieces = pieces_of(HEAD, PEERS[0].peer_id)
    machine.handle(fx.Trained(round=2, tokens=1, steps=1, loss_micronats=1, pieces=pieces), 2)
    progress = machine.progress(12)
    assert (progress.phase, progress.round, progress.elapsed_ms) == ("publish", 2, 12)
    assert (progress.manifests, progress.receipts, progress.live) == (1, 0, 4)
    assert (progress.own_acks, progress.own_acks_needed) == (0, 2)
    assert progress.missing == ()


def test_members_whose_updates_are_waited_for_are_named() -> None:
    machine = RoundMachine(HEAD, PEERS[0], verify, Wishes(capacity=2, private_seed=b"x"), now_ms=0)
    machine.start(0)
    machine.handle(fx.StateReady(round=2), 1)
    machine.handle(fx.nothing_trained(2), 2)
    progress = machine.progress(3)
    assert progress.waiting_for == "updates of the other members"
    assert progress.missing == tuple(sorted(peer.peer_id for peer in PEERS[1:]))


def test_a_peer_outside_loads_and_then_waits_to_be_let_in_or_for_those_who_took_over() -> None:
    x, invite = identity_of("x"), identity_of("invite")
    signature = invite.sign("invite", invite_payload(HEAD.run.run_id, x.peer_id))
    machine = RoundMachine(HEAD, x, verify, Wishes(capacity=2, private_seed=b"x", invite_signature=signature), now_ms=0)
    machine.start(0)
    assert machine.progress(0).phase == "load"
    machine.handle(fx.StateReady(round=2), 1)
    assert (machine.progress(1).phase, machine.progress(1).waiting_for) == ("join", "the members to let this node in")

    machine.handle(fx.LeaveWanted(handover=None, handover_bytes=0), 2)
    assert machine.progress(2).waiting_for == "the new owners of its shards to fetch them"


def test_a_finished_peer_is_finished_in_every_phase() -> None:
    wishes = Wishes(capacity=2, private_seed=b"x", stop_after_round=1)
    machine = RoundMachine(HEAD, PEERS[0], verify, wishes, now_ms=0)
    machine.start(0)
    assert machine.progress(0).phase == "finished"


def test_cut_proposal_and_votes_show() -> None:
    voter = OneVoter(HEAD, PEERS)
    items = [alive_of(HEAD, peer) for peer in PEERS]
    voter.hear_all(*items)
    assert progress_of(voter.round, False, False, 0).phase == "acknowledge"
    body = voter.quiet_body([item_of(signed) for signed in items])
    assert progress_of(voter.round, False, False, 0).phase == "aggregate"
    voter.propose(body)
    progress = progress_of(voter.round, False, False, 0)
    assert (progress.phase, progress.votes, progress.votes_needed) == ("vote", 1, 3)
    assert progress.time_left_ms == voter.terms.transfer_budget_ms + 2_000
