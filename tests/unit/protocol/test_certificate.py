import msgspec
import pytest

from spes_p2p.crypto import verify
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.certificate import check_merge_lists, make_qc, verify_certificate, verify_qc
from spes_p2p.protocol.codec import bitmap, body_hash, encode, pack_float
from spes_p2p.protocol.head import Terms
from spes_p2p.protocol.messages import QuorumCertificate, Signed
from spes_p2p.protocol.transition import merge_root
from spes_p2p.protocol.wire import Step
from spes_p2p.testing.protocol_cases import (
    body_of,
    certificate_of,
    follow,
    identities,
    item_of,
    join_of,
    owned_head,
    quick_config,
    trained_items,
    transition_of,
    vote_of,
)
from spes_p2p.testing.swarm import identity_of

PEERS = identities(4)
HEAD = owned_head(PEERS)
TERMS = Terms(HEAD)
BODY = body_of(HEAD, transition_of(HEAD, trained_items(HEAD, PEERS)))
HASH = body_hash(BODY)
GOOD = certificate_of(HEAD, BODY, PEERS[:3])


def refuses(certificate: Certificate, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        verify_certificate(TERMS, certificate, verify)


def prevotes(held: tuple[bool, ...], view: int = 1) -> dict[PeerId, Signed]:
    return {
        peer.peer_id: vote_of(TERMS, peer, Step.PREVOTE, HASH, view=view, held=says)
        for peer, says in zip(PEERS, held, strict=False)
    }


def test_a_quorum_of_precommits_makes_the_head() -> None:
    head = verify_certificate(TERMS, GOOD, verify)
    assert (head.round, head.hash) == (2, HASH)
    assert verify_certificate(TERMS, certificate_of(HEAD, BODY, PEERS), verify) == head


def test_fewer_than_a_quorum_makes_nothing() -> None:
    refuses(certificate_of(HEAD, BODY, PEERS[:2]), "2 signatures where 3 make a quorum")


def test_every_signature_counts() -> None:
    for place in range(3):
        signatures = list(GOOD.signatures)
        signatures[place] = bytes(64)
        refuses(msgspec.structs.replace(GOOD, signatures=tuple(signatures)), "wrong signature")
    swapped = (GOOD.signatures[1], GOOD.signatures[0], GOOD.signatures[2])
    refuses(msgspec.structs.replace(GOOD, signatures=swapped), "wrong signature")
    refuses(msgspec.structs.replace(GOOD, signatures=(*GOOD.signatures, bytes(64))), "3 make a quorum")


def test_the_bitmap_names_this_rounds_voters_and_no_others() -> None:
    refuses(msgspec.structs.replace(GOOD, voters=bitmap({0, 1, 3}, 4)), "wrong signature")
    refuses(msgspec.structs.replace(GOOD, voters=bitmap({0, 1, 2, 7}, 8)), "beyond 4")
    refuses(msgspec.structs.replace(GOOD, voters=bytes(2)), "bitmap of 2 bytes")


def test_prevotes_and_votes_of_another_view_are_no_precommits() -> None:
    refuses(msgspec.structs.replace(GOOD, view=1), "wrong signature")
    votes = prevotes((False,) * 3, view=0)
    signatures = tuple(votes[peer.peer_id].signature for peer in PEERS[:3])
    refuses(msgspec.structs.replace(GOOD, signatures=signatures), "wrong signature")


def test_signatures_are_checked_before_the_state_is_derived() -> None:
    forged = msgspec.structs.replace(GOOD, body=msgspec.structs.replace(BODY, merge_alpha=b"\1\2\3"))
    refuses(forged, "wrong signature")


def test_a_certificate_of_another_round_or_seed_is_refused() -> None:
    after = follow(HEAD, trained_items(HEAD, PEERS))
    with pytest.raises(RemoteProtocolError, match="another run or round than 3"):
        verify_certificate(Terms(after), GOOD, verify)
    seed = certificate_of(HEAD, msgspec.structs.replace(BODY, seed=bytes(32)), PEERS)
    refuses(seed, "another seed")


def test_merge_lists_belong_to_a_merge_and_match_their_root() -> None:
    refuses(msgspec.structs.replace(GOOD, merge_lists=b"x"), "without a merge")
    merging = msgspec.structs.replace(BODY, merge_alpha=pack_float(0.5), merge_root=merge_root(b"lists"))
    check_merge_lists(msgspec.structs.replace(GOOD, body=merging, merge_lists=b"lists"))
    with pytest.raises(RemoteProtocolError, match="do not match their root"):
        check_merge_lists(msgspec.structs.replace(GOOD, body=merging, merge_lists=b"others"))


# --- quorum certificates ---------------------------------------------------------------------------------------------


def test_a_quorum_certificate_needs_a_quorum_of_which_f_plus_one_hold() -> None:
    verify_qc(TERMS, make_qc(TERMS, HASH, 1, prevotes((True, True, False))), verify)
    with pytest.raises(RemoteProtocolError, match="without enough holders"):
        verify_qc(TERMS, make_qc(TERMS, HASH, 1, prevotes((True, False, False, False))), verify)
    with pytest.raises(RemoteProtocolError, match="2 signatures"):
        verify_qc(TERMS, make_qc(TERMS, HASH, 1, prevotes((True, True))), verify)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"held": bitmap({0, 2}, 4)}, "wrong signature"),
        ({"held": bitmap({0, 1, 3}, 4)}, "did not vote"),
        ({"view": 2}, "wrong signature"),
        ({"body": bytes(32)}, "wrong signature"),
        ({"signatures": (bytes(64),) * 3}, "wrong signature"),
        ({"voters": bytes(0)}, "bitmap of 0 bytes"),
    ],
)
def test_a_changed_quorum_certificate_is_refused(change: dict[str, object], why: str) -> None:
    qc: QuorumCertificate = msgspec.structs.replace(make_qc(TERMS, HASH, 1, prevotes((True, True, False))), **change)
    with pytest.raises(RemoteProtocolError, match=why):
        verify_qc(TERMS, qc, verify)


# --- size ------------------------------------------------------------------------------------------------------------


def test_a_body_of_64_voters_and_256_shards_stays_under_32_kib() -> None:
    config = quick_config()
    config = config.model_copy(update={"model": config.model.model_copy(update={"num_experts": 256})})
    peers = identities(64)
    head = owned_head(peers, config, capacity=4)
    assert (len(Terms(head).voters), len(head.state.shards)) == (64, 256)
    items = [*trained_items(head, peers), item_of(join_of(head, identity_of("x")))]
    body = body_of(head, transition_of(head, items))
    assert len(body.shard_delta) == 256
    assert len(encode(body)) < 32 * 1024
