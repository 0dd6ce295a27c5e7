"""A new epoch by the recovery key."""

import msgspec
import pytest

from spes_p2p.crypto import Identity, verify
from spes_p2p.errors import LocalProtocolError, RemoteProtocolError
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Body
from spes_p2p.protocol.chain import next_link
from spes_p2p.protocol.codec import body_hash, encode
from spes_p2p.protocol.head import Head, Terms, next_head
from spes_p2p.protocol.params import RECOVERY_MS
from spes_p2p.protocol.recovery import has_split, kept_members, recover, sign_recovery, verify_recovery
from spes_p2p.protocol.rescue import SPLIT
from spes_p2p.protocol.round import RoundMachine, Wishes
from spes_p2p.protocol.wire import NO_DIGEST
from spes_p2p.testing.protocol_cases import alive_of, follow, identities, item_of, owned_head, trained_items

PEERS = identities(4)
IDS = tuple(peer.peer_id for peer in PEERS)
HEAD = owned_head(PEERS, capacity=3)
KEY = next(peer for peer in PEERS if peer.peer_id == HEAD.run.manifest.recovery_key)
OTHERS = [peer for peer in PEERS if peer != KEY]


def recovered(head: Head = HEAD, keep: tuple[bytes, ...] = IDS[:2]) -> Body:
    return recover(Terms(head), frozenset(keep))


def test_a_recovery_keeps_the_named_members_and_everything_else() -> None:
    body = recovered()
    head = verify_recovery(HEAD, sign_recovery(body, KEY), verify)
    assert (head.epoch, head.round, head.is_final, head.height) == (1, 2, True, 3)
    assert (body.prev, body.via) == (HEAD.hash, NO_DIGEST)
    assert head.state.members == head.state.voters == IDS[:2]
    assert head.present == set(IDS[:2])
    assert (head.parts, head.state.shards, head.global_step) == (HEAD.parts, HEAD.state.shards, HEAD.global_step)
    assert head.state.shards_of(IDS[0]) >= HEAD.state.shards_of(IDS[0])
    assert all(owner in IDS[:2] for shard in range(8) for owner in head.state.owners(shard))


def test_on_a_tentative_tip_it_makes_the_branch_final() -> None:
    terms = Terms(HEAD, IDS[:2])
    from spes_p2p.protocol.body import Cut
    from spes_p2p.protocol.codec import cut_hash
    from spes_p2p.protocol.transition import advance, make_body

    cut = Cut(HEAD.run.run_id, 0, 2, ())
    tip = next_head(HEAD, make_body(terms, advance(terms, cut_hash(cut), (), verify), (None,) * 4, b""))
    body = recovered(tip)
    assert (body.round, body.prev, body.via) == (3, HEAD.hash, tip.hash)
    assert verify_recovery(tip, sign_recovery(body, KEY), verify).round == 3


def test_a_recovery_is_nothing_but_what_the_function_gives_and_the_key_signs() -> None:
    body = recovered()
    for wrong, why in (
        (sign_recovery(body, OTHERS[0]), "did not sign"),
        (sign_recovery(msgspec.structs.replace(body, tokens=9), KEY), "does not follow"),
        (sign_recovery(msgspec.structs.replace(body, epoch=2), KEY), "does not follow"),
        (msgspec.structs.replace(sign_recovery(body, KEY), view=1), "votes of a round"),
        (msgspec.structs.replace(sign_recovery(body, KEY), signatures=()), "without the one signature"),
    ):
        with pytest.raises(RemoteProtocolError, match=why):
            verify_recovery(HEAD, wrong, verify)
    places = tuple(msgspec.structs.replace(change, who=9, gone=True) for change in body.roster_delta)
    with pytest.raises(RemoteProtocolError, match="removes nobody"):
        kept_members(HEAD, msgspec.structs.replace(body, roster_delta=places))
    with pytest.raises(LocalProtocolError):
        recovered(keep=())


def test_a_recovery_that_passes_over_a_final_certificate_is_a_split() -> None:
    later = follow(HEAD, trained_items(HEAD, PEERS))
    certificate = sign_recovery(recovered(), KEY)
    assert has_split(later, certificate, verify)
    assert not has_split(HEAD, certificate, verify)
    assert not has_split(later, msgspec.structs.replace(certificate, signatures=()), verify)
    assert not has_split(later, sign_recovery(recovered(), OTHERS[0]), verify)
    assert not has_split(HEAD, sign_recovery(recovered(later), KEY), verify)  # this peer is behind


def test_a_chain_is_followed_over_a_recovery_and_its_signature_is_one_to_check() -> None:
    certificate = sign_recovery(recovered(), KEY)
    link = next_link(HEAD, encode(certificate))
    assert (link.after.epoch, link.after.hash) == (1, body_hash(certificate.body))
    assert link.checks == ((KEY.peer_id, "recover", body_hash(certificate.body), certificate.signatures[0]),)


def machine_of(peer: Identity, head: Head = HEAD, **wishes: object) -> RoundMachine:
    machine = RoundMachine(head, peer, verify, Wishes(capacity=2, private_seed=b"mine", **wishes), now_ms=0)
    machine.start(0)
    return machine


def notes(effects: list[fx.Effect]) -> list[str]:
    return [effect.text for effect in effects if isinstance(effect, fx.Notify)]


def test_who_has_seen_more_says_that_the_run_has_split_and_stays() -> None:
    later = follow(HEAD, trained_items(HEAD, PEERS))
    machine = machine_of(OTHERS[0], later)
    data = encode(sign_recovery(recovered(), KEY))
    assert notes(machine.handle(fx.Received(sender=KEY.peer_id, data=data), 1)) == [SPLIT]
    assert notes(machine.handle(fx.Received(sender=KEY.peer_id, data=data), 2)) == []
    assert machine.head == later


def test_who_has_its_last_final_certificate_in_it_follows_a_recovery() -> None:
    machine = machine_of(OTHERS[0])
    certificate = sign_recovery(recovered(keep=IDS), KEY)
    effects = machine.handle(fx.Received(sender=KEY.peer_id, data=encode(certificate)), 1)
    (adopt,) = [effect for effect in effects if isinstance(effect, fx.Adopt)]
    assert (adopt.head.epoch, machine.head.hash) == (1, body_hash(certificate.body))
    old = follow(HEAD, [item_of(alive_of(HEAD, peer)) for peer in PEERS])
    assert old.epoch == 0


def test_only_the_holder_of_the_key_recovers() -> None:
    effects = machine_of(OTHERS[0]).handle(fx.RecoverWanted(keep=()), 1)
    assert notes(effects) == ["this node does not hold the run's recovery key"]
    effects = machine_of(OTHERS[0], recovery=OTHERS[0]).handle(fx.RecoverWanted(keep=()), 1)
    assert notes(effects) == ["this node does not hold the run's recovery key"]
    effects = machine_of(KEY, recovery=KEY).handle(fx.RecoverWanted(keep=()), 1)
    assert notes(effects) == ["a recovery is for a run that cannot go on: this one can"]


def test_the_holder_recovers_by_itself_after_ten_minutes_alone() -> None:
    machine, now_ms, found = machine_of(KEY, recovery=KEY), 0, []
    machine.handle(fx.StateReady(round=2), 0)
    machine.handle(fx.nothing_trained(2), 1)
    begun_ms = None
    while not found and now_ms < 2 * RECOVERY_MS:
        now_ms = max(now_ms + 1, machine.deadline_ms() or 0)
        effects = machine.handle(fx.Tick(), now_ms)
        found = [effect for effect in effects if isinstance(effect, fx.Adopt)]
        if begun_ms is None and machine.progress(now_ms).waiting:
            begun_ms = now_ms
    assert begun_ms is not None
    assert now_ms - begun_ms == RECOVERY_MS
    assert machine.head.state.members == (KEY.peer_id,)
