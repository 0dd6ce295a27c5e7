import msgspec
import pytest

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.protocol.body import LeaseDelta, RosterDelta, ShardDelta, Tenure
from spes_p2p.protocol.head import next_head
from spes_p2p.protocol.state import apply_deltas, roots, shard_row_hash
from spes_p2p.testing.protocol_cases import (
    body_of,
    follow,
    genesis_of,
    identities,
    item_of,
    join_of,
    owned_head,
    trained_items,
    transition_of,
)
from spes_p2p.testing.swarm import identity_of

PEERS = identities(4)
HEAD = owned_head(PEERS)
JOINER = identity_of("joiner")
TRANSITION = transition_of(HEAD, [*trained_items(HEAD, PEERS), item_of(join_of(HEAD, JOINER))])
BODY = body_of(HEAD, TRANSITION)


def test_the_deltas_lead_from_the_old_state_to_the_new_one() -> None:
    assert apply_deltas(HEAD.state, BODY) == TRANSITION.state
    assert roots(TRANSITION.state) == (BODY.roster_root, BODY.lease_root, BODY.shard_root)


def test_a_newcomer_is_named_by_the_place_after_the_roster() -> None:
    assert BODY.newcomers == (JOINER.peer_id,)
    assert [delta for delta in BODY.roster_delta if delta.who == 4] == [RosterDelta(4, False, 2, 0, 0, 2, None)]


def test_unchanged_rows_are_not_in_the_deltas() -> None:
    quiet = body_of(HEAD, transition_of(HEAD, []))
    assert quiet.shard_delta == quiet.lease_delta == quiet.roster_delta == ()


def test_deltas_that_do_not_lead_to_the_roots_are_refused() -> None:
    lost = msgspec.structs.replace(BODY, shard_delta=BODY.shard_delta[1:])
    with pytest.raises(RemoteProtocolError, match="roots"):
        apply_deltas(HEAD.state, lost)


@pytest.mark.parametrize(
    "change",
    [
        {"roster_delta": (RosterDelta(77, False, 0, 0, 0, 0, None),)},
        {"lease_delta": (LeaseDelta(0, (Tenure(77, 0, 0),)),)},
        {"lease_delta": (LeaseDelta(0, (Tenure(bytes(32), 0, 0),)),)},
        {"lease_delta": (LeaseDelta(99, ()),)},
        {"shard_delta": (ShardDelta(99, ()),)},
        {"roster_delta": (RosterDelta(4, True, 0, 0, 0, 0, None),)},
    ],
)
def test_deltas_that_name_what_does_not_exist_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(RemoteProtocolError):
        apply_deltas(HEAD.state, msgspec.structs.replace(BODY, **change))


def test_shard_values_name_their_blobs_and_tokens() -> None:
    row = TRANSITION.state.shards[0]
    assert [share.tokens for share in row.blobs] == [1000]
    assert shard_row_hash(row) != shard_row_hash(HEAD.state.shards[0])


def test_only_shards_with_an_update_in_the_certificate_receive_in_a_merge() -> None:
    two = follow(HEAD, trained_items(HEAD, PEERS[:2]))
    mine = {shard for peer in PEERS[:2] for shard in HEAD.state.shards_of(peer.peer_id)}
    assert two.receivers() == tuple(shard in mine for shard in range(8))
    assert genesis_of(PEERS).receivers() == (False,) * 8


def test_a_shard_that_was_delivered_and_given_up_in_one_cut_receives() -> None:
    newcomer = item_of(join_of(HEAD, JOINER))
    after = follow(HEAD, [*trained_items(HEAD, PEERS), newcomer])
    moved = after.state.shards_of(JOINER.peer_id)
    assert len(moved) == 1
    assert after.receivers()[moved[0]]


def test_a_body_extends_one_head_only() -> None:
    assert next_head(HEAD, BODY).round == 2
    for change in ({"prev": bytes(32)}, {"round": 3}, {"epoch": 2}, {"via": HEAD.hash}, {"run": bytes(32)}):
        with pytest.raises(RemoteProtocolError, match="does not extend"):
            next_head(HEAD, msgspec.structs.replace(BODY, **change))


def test_a_merge_alpha_of_another_length_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="float64"):
        next_head(HEAD, msgspec.structs.replace(BODY, merge_alpha=b"\0\0\0"))


def test_the_fencing_tokens_are_those_of_the_last_three_certificates() -> None:
    head = HEAD
    for _ in range(4):
        head = follow(head, trained_items(head, PEERS))
    assert [number for number, _ in head.recent] == [3, 4, 5]
    assert head.recent[-1] == (5, head.hash)
