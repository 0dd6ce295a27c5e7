import math

import msgspec
import pytest

from spes_p2p.config import MergeConfig, RunConfig, TrainingConfig
from spes_p2p.protocol.codec import bits, pack_float, sign, statement_hash, unpack_float
from spes_p2p.protocol.head import Head, Terms
from spes_p2p.protocol.messages import Manifest
from spes_p2p.protocol.state import shard_row_hash
from spes_p2p.protocol.transition import weight_tokens
from spes_p2p.protocol.wire import NO_DIGEST, PieceKind, RefusalReason
from spes_p2p.testing.protocol_cases import (
    QUICK,
    alive_of,
    body_of,
    follow,
    identities,
    item_of,
    owned_head,
    pieces_of,
    quick_config,
    receipt_of,
    trained_items,
    transition_of,
    update_of,
)

PEERS = identities(4)
FOUR = owned_head(PEERS)
BATCH = FOUR.run.config.training.batch_tokens


def scaled_update(head: Head, place: int, norm: float) -> Manifest:
    """A manifest whose psi delta has this norm."""
    num_parts = len(head.parts)
    pieces = tuple(
        msgspec.structs.replace(p, squared_norm=pack_float(norm * norm / num_parts)) if p.kind is PieceKind.PSI else p
        for p in pieces_of(head, PEERS[place].peer_id)
    )
    return Manifest(head.run.run_id, 0, head.round + 1, head.hash, 1000, 10, 0, pieces)


def test_the_shard_table_takes_the_blobs_of_the_owners() -> None:
    transition = transition_of(FOUR, trained_items(FOUR, PEERS))
    for peer in PEERS:
        pieces = {p.index: p.blob for p in pieces_of(FOUR, peer.peer_id) if p.kind is PieceKind.EXPERT}
        for shard, blob in pieces.items():
            assert [share.blob for share in transition.state.shards[shard].blobs] == [blob]
    assert transition.refused == ()


def test_tokens_and_loss_are_integers_over_the_accepted_updates() -> None:
    items = []
    for peer, tokens in zip(PEERS, (100, 200, 300, 400), strict=True):
        update = update_of(FOUR, peer, tokens=tokens)
        items.append(item_of(update, receipt_of(update, PEERS)))
    transition = transition_of(FOUR, items)
    assert (transition.tokens, transition.loss_micronats) == (1000, 2_000_000)
    assert [c.weight for c in transition.contributions] == [100.0, 200.0, 300.0, 400.0]


@pytest.mark.parametrize(("stated", "counted"), [(0, 1), (7, 7), (10 * BATCH, 10 * BATCH), (2**61, 10 * BATCH)])
def test_stated_tokens_count_up_to_what_a_round_can_hold(stated: int, counted: int) -> None:
    manifest = update_of(FOUR, PEERS[0], tokens=stated).body
    assert isinstance(manifest, Manifest)
    assert weight_tokens(Terms(FOUR), manifest) == counted


def test_equal_weights_ignore_tokens() -> None:
    head = owned_head(PEERS, quick_config(mean_weight="equal"))
    items = []
    for peer, tokens in zip(PEERS, (100, 200, 300, 400), strict=True):
        update = update_of(head, peer, tokens=tokens)
        items.append(item_of(update, receipt_of(update, PEERS)))
    assert [c.weight for c in transition_of(head, items).contributions] == [1.0] * 4


def test_global_step_and_cursor_advance_only_with_an_accepted_update() -> None:
    trained, idle = transition_of(FOUR, trained_items(FOUR, PEERS[:1])), transition_of(FOUR, [])
    assert (trained.global_step, trained.data_cursor) == (10, 4 * 10 * BATCH)
    assert (idle.global_step, idle.data_cursor, idle.tokens, idle.loss_micronats) == (0, 0, 0, 0)


def test_the_hash_of_the_updates_does_not_know_other_items() -> None:
    items = trained_items(FOUR, PEERS)
    more = [*items, item_of(alive_of(FOUR, PEERS[0]))]
    assert transition_of(FOUR, items).updates_hash == transition_of(FOUR, more).updates_hash
    assert transition_of(FOUR, items).updates_hash != transition_of(FOUR, items[1:]).updates_hash


# --- late updates ----------------------------------------------------------------------------------------------------


def head_after_missing(rounds: int) -> Head:
    """A head that is so many rounds after FOUR, in which PEERS[0] was only alive."""
    head = FOUR
    for _ in range(rounds):
        head = follow(head, [item_of(alive_of(head, PEERS[0])), *trained_items(head, PEERS[1:])])
    return head


@pytest.mark.parametrize(("rounds_late", "factor"), [(0, 1.0), (1, 0.5), (2, 0.25)])
def test_a_late_delta_weighs_half_per_round(rounds_late: int, factor: float) -> None:
    update, head = update_of(FOUR, PEERS[0]), head_after_missing(rounds_late)
    transition = transition_of(head, [item_of(update, receipt_of(update, PEERS))])
    assert [c.weight for c in transition.contributions] == [1000.0 * factor]
    row = transition.state.row(PEERS[0].peer_id)
    assert row is not None
    assert (row.base_round, row.accepted) == (2, 1)


def test_a_late_expert_enters_whole_while_row_and_lease_are_unchanged() -> None:
    update, head = update_of(FOUR, PEERS[0]), head_after_missing(1)
    transition = transition_of(head, [item_of(update, receipt_of(update, PEERS))])
    for shard in FOUR.state.shards_of(PEERS[0].peer_id):
        assert transition.state.shards[shard] != head.state.shards[shard]
    assert transition.refused == ()


def test_a_late_expert_whose_lease_was_granted_anew_is_refused_and_its_psi_counts() -> None:
    update, head = update_of(FOUR, PEERS[0]), head_after_missing(2)
    transition = transition_of(head, [item_of(update, receipt_of(update, PEERS))])
    assert [remark.reason for remark in transition.refused] == [RefusalReason.NOT_OWNER]
    assert len(transition.contributions) == 1
    assert transition.state.shards == head.state.shards


def test_an_expert_from_another_base_row_is_refused() -> None:
    mine = FOUR.state.shards_of(PEERS[0].peer_id)[0]
    pieces = tuple(
        msgspec.structs.replace(p, base_row=shard_row_hash(FOUR.state.shards[7 - mine]))
        if p.kind is PieceKind.EXPERT and p.index == mine
        else p
        for p in pieces_of(FOUR, PEERS[0].peer_id)
    )
    update = sign(PEERS[0], Manifest(FOUR.run.run_id, 0, 2, FOUR.hash, 1000, 10, 0, pieces))
    transition = transition_of(FOUR, [item_of(update, receipt_of(update, PEERS))])
    assert [remark.reason for remark in transition.refused] == [RefusalReason.BASE_ROW]
    assert transition.state.shards[mine] == FOUR.state.shards[mine]


def test_nobody_publishes_for_a_shard_of_another() -> None:
    foreign = FOUR.state.shards_of(PEERS[1].peer_id)
    update = update_of(FOUR, PEERS[0], shards=foreign)
    transition = transition_of(FOUR, [item_of(update, receipt_of(update, PEERS))])
    assert [remark.reason for remark in transition.refused] == [RefusalReason.NOT_OWNER]
    assert transition.state.shards == FOUR.state.shards


@pytest.mark.parametrize("newer_first", [False, True])
def test_of_two_updates_of_a_peer_the_newest_counts_and_the_other_is_superseded(newer_first: bool) -> None:
    old, head = update_of(FOUR, PEERS[0]), head_after_missing(1)
    several = [update_of(head, PEERS[0], note=str(number)) for number in range(32)]
    new = next(u for u in several if (statement_hash(u) < statement_hash(old)) is newer_first)
    transition = transition_of(head, [item_of(update, receipt_of(update, PEERS)) for update in (old, new)])
    ((place, reason),) = [(remark.entry, remark.reason) for remark in transition.refused]
    assert reason is RefusalReason.SUPERSEDED
    assert transition.entries[place].statement == item_of(old).entry.statement
    row = transition.state.row(PEERS[0].peer_id)
    assert row is not None
    assert (row.base_round, row.accepted) == (3, 1)


# --- clip and merge --------------------------------------------------------------------------------------------------


def test_clip_factors_follow_from_the_stated_norms() -> None:
    head = owned_head(PEERS, quick_config(robust="clipped", clip_ratio=2.0))
    items = []
    for place, norm in enumerate((1.0, 1.0, 1.0, 10.0)):
        update = sign(PEERS[place], scaled_update(head, place, norm))
        items.append(item_of(update, receipt_of(update, PEERS)))
    transition = transition_of(head, items)
    assert [round(c.clip, 12) for c in transition.contributions] == [1.0, 1.0, 1.0, 0.2]
    assert [unpack_float(clip) for clip in body_of(head, transition).clip] == [c.clip for c in transition.contributions]
    assert body_of(FOUR, transition_of(FOUR, trained_items(FOUR, PEERS))).clip == ()


def test_the_largest_norms_that_may_be_stated_break_nothing() -> None:
    head = owned_head(PEERS, quick_config(robust="clipped"))
    items = []
    for place, norm in enumerate((1e30, 1.0, 1.0, 0.0)):
        update = sign(PEERS[place], scaled_update(head, place, norm))
        items.append(item_of(update, receipt_of(update, PEERS)))
    assert all(math.isfinite(c.clip) for c in transition_of(head, items).contributions)


def test_a_delta_among_zeros_is_clipped_to_nothing() -> None:
    head = owned_head(PEERS, quick_config(robust="clipped"))
    items = []
    for place, norm in enumerate((10.0, 0.0, 0.0, 0.0)):
        update = sign(PEERS[place], scaled_update(head, place, norm))
        items.append(item_of(update, receipt_of(update, PEERS)))
    assert [c.clip for c in transition_of(head, items).contributions] == [0.0, 1.0, 1.0, 1.0]


def merging(steps: int, interval: int, warmup: int, alpha: float = 0.1) -> RunConfig:
    merge = MergeConfig(alpha=alpha, interval_steps=interval, warmup_steps=warmup)
    return RunConfig(protocol=QUICK, training=TrainingConfig(inner_steps=((0, steps),), merge=merge))


def test_a_merge_happens_when_the_step_crosses_a_multiple_during_the_warm_up() -> None:
    head, alphas = owned_head(PEERS, merging(10, 25, 60)), []
    for _ in range(7):
        alphas.append(round(head.run.config.merge_alpha(head.global_step, head.global_step + 10), 6))
        head = follow(head, trained_items(head, PEERS))
    assert alphas == [0.0, 0.0, 0.05, 0.0, round(0.1 / 6, 6), 0.0, 0.0]


def test_the_body_of_a_merge_names_alpha_and_the_root_of_the_lists() -> None:
    head = owned_head(PEERS, merging(10, 10, 100))
    body = body_of(head, transition_of(head, trained_items(head, PEERS)), merge_lists=b"lists")
    assert unpack_float(body.merge_alpha) == 0.1 * (1.0 - 10 / 100)
    assert body.merge_root != NO_DIGEST
    without = body_of(head, transition_of(head, []), merge_lists=b"")
    assert (without.merge_alpha, without.merge_root) == (b"", NO_DIGEST)


def test_kept_parts_keep_their_digest_and_are_marked() -> None:
    transition = transition_of(FOUR, trained_items(FOUR, PEERS))
    body = body_of(FOUR, transition, kept=[1])
    assert body.parts[1] == FOUR.parts[1]
    assert bits(body.kept, 4) == {1}
    assert bits(body_of(FOUR, transition_of(FOUR, [])).kept, 4) == {0, 1, 2, 3}
