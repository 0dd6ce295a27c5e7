"""Rules of one voter and of the state, each the judge of a wrong variant of the code."""

from __future__ import annotations

import msgspec

from spes_p2p.config import MergeConfig, ModelConfig, ProtocolConfig, RunConfig, TrainingConfig
from spes_p2p.crypto import verify
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Digest
from spes_p2p.node.settle import start_spec
from spes_p2p.protocol import certificate
from spes_p2p.protocol.codec import body_hash, pack_float, sign
from spes_p2p.protocol.head import Head, Terms, next_head
from spes_p2p.protocol.messages import Manifest, PartDigest
from spes_p2p.protocol.receipts import check_receipt
from spes_p2p.protocol.transition import merge_root
from spes_p2p.protocol.wire import Step
from spes_p2p.testing import protocol_cases as cases
from spes_p2p.testing.blobs import MemoryBlobs
from spes_p2p.testing.directed import MINUTE_MS, head_after, swarm_of
from spes_p2p.testing.one_voter import OneVoter
from spes_p2p.testing.swarm import Line, identity_of
from spes_p2p.training.genesis import genesis_start, make_genesis
from spes_p2p.training.similarity import encode_lists, merge_lists
from spes_p2p.training.start import StartReader, StartSpec

PEERS = cases.identities(4)
HEAD = cases.owned_head(PEERS)

MERGING = RunConfig(
    model=ModelConfig(width=8, num_layers=2, num_heads=2, num_kv_heads=2, num_experts=6, expert_width=6, vocab_size=32),
    experts_per_shard=2,
    training=TrainingConfig(merge=MergeConfig(top_k=2)),
    protocol=ProtocolConfig(parts=3),
)


# --- quorums and acks ------------------------------------------------------------------------------------------------


def test_a_quorum_certificate_of_too_few_holders_is_refused() -> None:
    terms, body = Terms(HEAD), Digest(bytes(32))

    def qc_of(num_holders: int) -> certificate.QuorumCertificate:
        votes = {
            peer.peer_id: cases.vote_of(terms, peer, Step.PREVOTE, body, held=place < num_holders)
            for place, peer in enumerate(PEERS)
        }
        return certificate.make_qc(terms, body, 0, votes)

    certificate.verify_qc(terms, qc_of(2), verify)
    refused = []
    for num_holders in (0, 1):
        try:
            certificate.verify_qc(terms, qc_of(num_holders), verify)
        except RemoteProtocolError as error:
            refused.append(error.reason)
    assert refused == ["a quorum certificate without enough holders"] * 2


def test_acks_of_members_that_are_not_eligible_make_no_receipt() -> None:
    newcomers = [identity_of(f"newcomer {place}") for place in range(3)]
    joined = [cases.item_of(cases.join_of(HEAD, peer)) for peer in newcomers]
    head = cases.follow(HEAD, [*cases.trained_items(HEAD, PEERS), *joined])
    terms = Terms(head)
    assert [peer.peer_id in terms.members for peer in newcomers] == [True] * 3
    assert [peer.peer_id in terms.eligible for peer in newcomers] == [False] * 3
    update = cases.update_of(head, PEERS[0])
    assert isinstance(update.body, Manifest)
    check_receipt(terms, cases.receipt_of(update, PEERS), update.peer, update.body, verify)
    refused = ""
    try:
        check_receipt(terms, cases.receipt_of(update, newcomers), update.peer, update.body, verify)
    except RemoteProtocolError as error:
        refused = error.reason
    assert refused == "the receipt lacks acks"


def test_a_part_that_one_aggregator_vouches_for_is_not_prevoted() -> None:
    items = cases.trained_items(HEAD, PEERS)
    voter = OneVoter(HEAD, PEERS)
    voter.hear_all(*(item.signed for item in items))
    for item in items:
        voter.round.updates.add_receipt(cases.receipt_of(item.signed, PEERS))
    transition = voter.cut(items)
    body = cases.body_of(HEAD, transition)
    identity = voter.propose(body)
    voter.context.held.update(body.parts)
    voter.context.held.update(share.blob for delta in body.shard_delta for share in delta.blobs)
    voter.digests_come(transition, body, range(3))
    by_id = {peer.peer_id: peer for peer in PEERS}
    run, last = HEAD.run.run_id, 3
    for place in range(voter.terms.replicas):
        assert voter.votes(Step.PREVOTE) == []
        aggregator = by_id[voter.terms.aggregators[last][place]]
        said = PartDigest(run, 0, voter.terms.round, last, transition.updates_hash, body.parts[last])
        voter.hear_digest(sign(aggregator, said))
        voter.wait(1_100)
    assert voter.votes(Step.PREVOTE) == [(identity, True)]


# --- leases ----------------------------------------------------------------------------------------------------------


def test_leases_are_the_same_in_whatever_order_the_claims_arrive() -> None:
    """Every founder wants three of eight shards: who gets two of them depends on the order, if the order counts."""
    owners = set()
    for seed in range(3):
        swarm = swarm_of(4, seed=seed, line=Line(latency_ms=(1, 200)))
        for peer in swarm.peers.values():
            swarm.restart(peer, capacity=3)
        assert swarm.run_to_round(1, MINUTE_MS)
        first = next(iter(swarm.peers.values()))
        assert first.certificates[0].view == 0
        owners.add(tuple(head_after(first, 1).state.owners(shard) for shard in range(8)))
    assert len(owners) == 1


# --- the end of a merge ----------------------------------------------------------------------------------------------


def merged_and_next(store: MemoryBlobs) -> tuple[StartSpec, StartSpec]:
    """The start after a certificate with a merge of shards 0 and 1, and after the next, which has none."""
    rows = genesis_start(make_genesis(MERGING, store))
    lists = encode_lists(merge_lists(MERGING, StartReader(MERGING, store, rows).row_tensor))
    plan = msgspec.structs.replace(rows, merge_alpha=0.1, merge_lists=lists, receivers=(True, True, False))
    return plan, rows


def test_merged_values_last_for_one_round_only() -> None:
    store = MemoryBlobs()
    plan, after = merged_and_next(store)
    before = dict(StartReader(MERGING, store, after).starts())
    merged = dict(StartReader(MERGING, store, plan).starts())
    again = dict(StartReader(MERGING, store, after).starts())
    moved = [any(merged[s][name].tobytes() != before[s][name].tobytes() for name in merged[s]) for s in range(3)]
    assert moved == [True, True, False]
    for shard, tensors in again.items():
        assert {name: value.tobytes() for name, value in tensors.items()} == {
            name: value.tobytes() for name, value in before[shard].items()
        }


def test_a_certificate_without_a_merge_ends_the_merge_of_the_last_one() -> None:
    items = cases.trained_items(HEAD, PEERS)
    plain = cases.body_of(HEAD, cases.transition_of(HEAD, items))
    merging = msgspec.structs.replace(plain, merge_alpha=pack_float(0.25), merge_root=merge_root(b"lists"))
    merged = next_head(HEAD, merging)
    assert (start_spec(merged, b"lists").merge_alpha, start_spec(merged, b"lists").receivers) == (0.25, (True,) * 8)
    quiet = cases.body_of(merged, cases.transition_of(merged, [cases.item_of(cases.alive_of(merged, PEERS[0]))]))
    after: Head = next_head(merged, quiet)
    spec = start_spec(after, b"")
    assert (spec.merge_alpha, spec.receivers, after.merge_root) == (0.0, (), bytes(32))
    assert spec.shards == start_spec(merged, b"lists").shards
    assert body_hash(quiet) == after.hash
