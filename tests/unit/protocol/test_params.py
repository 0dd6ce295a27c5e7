import pytest

from spes_p2p.config import ProtocolConfig
from spes_p2p.protocol.params import (
    PieceSizes,
    expert_acks,
    faults,
    psi_acks,
    quorum,
    replicas,
    transfer_budget_ms,
)


def test_quorums_of_one_to_eight() -> None:
    assert [quorum(n) for n in range(1, 9)] == [1, 2, 3, 3, 4, 5, 5, 6]
    assert [faults(n) for n in range(1, 9)] == [0, 0, 0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("n", range(1, 129))
def test_two_quorums_share_an_honest_voter_and_the_honest_are_a_quorum(n: int) -> None:
    assert 2 * quorum(n) - n > faults(n)
    assert quorum(n) <= n - faults(n)


def test_replicas_are_two_at_most_among_the_invited() -> None:
    invited, open_run = ProtocolConfig(), ProtocolConfig(admission="open")
    assert [replicas(invited, n, max(n, 3)) for n in (1, 3, 4, 7, 64)] == [1, 1, 2, 2, 2]
    assert [replicas(open_run, n, max(n, 3)) for n in (1, 4, 7, 64)] == [1, 2, 3, 22]
    assert replicas(ProtocolConfig(replicas=5), 4, 3) == 3
    assert replicas(invited, 0, 0) == 1


def test_acks_are_of_others_and_never_more_than_there_are() -> None:
    assert [expert_acks(n, n) for n in (1, 2, 3, 4, 7)] == [0, 1, 1, 2, 3]
    assert [psi_acks(2, n) for n in (0, 1, 2, 3, 4)] == [0, 0, 1, 2, 2]


def test_the_transfer_budget_is_the_time_of_a_rounds_blobs_and_three_resends() -> None:
    sizes = PieceSizes(
        expert_blob_bytes=1_000_000, psi_piece_bytes=10_000, part_result_bytes=40_000, num_parts=8, num_shards=8
    )
    config = ProtocolConfig(min_rate_bytes_per_s=1_000_000, resend_ms=1_000)
    # 8 MB of experts, 4 members x ceil(8 * 3 / 4) parts x 10 kB, 8 results of 40 kB
    assert transfer_budget_ms(config, sizes, num_members=4, num_eligible=4, num_replicas=2) == 8_560 + 3_000


def test_a_run_without_members_has_a_budget_all_the_same() -> None:
    sizes = PieceSizes(expert_blob_bytes=1, psi_piece_bytes=1, part_result_bytes=1, num_parts=1, num_shards=1)
    assert transfer_budget_ms(ProtocolConfig(), sizes, num_members=0, num_eligible=0, num_replicas=1) == 9_001


def test_view_timeouts_grow_to_their_bound() -> None:
    config = ProtocolConfig()
    assert [config.view_timeout(view) for view in (0, 1, 2, 22, 100)] == [5_000, 7_500, 10_000, 60_000, 60_000]
