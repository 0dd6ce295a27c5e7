from spes_p2p.digests import digest
from spes_p2p.ids import PeerId, RunId
from spes_p2p.protocol import election

PEERS = tuple(PeerId(bytes([number]) * 32) for number in range(7))
SEED = digest("a seed")


def test_the_order_does_not_depend_on_the_order_of_arrival() -> None:
    assert election.leaders(SEED, PEERS) == election.leaders(SEED, reversed(PEERS))
    assert sorted(election.leaders(SEED, PEERS)) == list(PEERS)


def test_each_purpose_part_and_seed_has_its_own_order() -> None:
    orders = {
        election.leaders(SEED, PEERS),
        election.leaders(digest("another seed"), PEERS),
        election.aggregators(SEED, 0, PEERS),
        election.aggregators(SEED, 1, PEERS),
        election.claim_order(SEED, 0, PEERS),
    }
    assert len(orders) == 5


def test_a_peer_that_goes_leaves_the_order_of_the_others() -> None:
    order = election.aggregators(SEED, 3, PEERS)
    without = [peer for peer in order if peer != order[2]]
    assert list(election.aggregators(SEED, 3, without)) == without


def test_the_lowest_claim_weight_comes_first() -> None:
    order = election.claim_order(SEED, 5, PEERS)
    assert min(PEERS, key=lambda peer: election.claim_weight(SEED, 5, peer)) == order[0]


def test_leading_is_spread_over_the_voters() -> None:
    first = [election.leaders(digest("seed", number), PEERS)[0] for number in range(700)]
    assert all(70 <= first.count(peer) <= 130 for peer in PEERS)


def test_voters_are_filled_up_to_three_eligible_with_members() -> None:
    assert len(election.eligible(SEED, PEERS[:1], PEERS)) == 3
    assert election.eligible(SEED, PEERS[:1], PEERS[:2]) == PEERS[:2]
    assert election.eligible(SEED, PEERS[:4], PEERS) == PEERS[:4]
    assert PEERS[6] in election.eligible(SEED, PEERS[6:], PEERS)


def test_the_seed_follows_from_run_round_seed_and_certificate() -> None:
    run, certificate = RunId(bytes(32)), digest("certificate")
    seed = election.next_seed(run, 1, SEED, certificate)
    assert seed == election.next_seed(run, 1, SEED, certificate)
    others = {
        election.next_seed(RunId(b"\1" * 32), 1, SEED, certificate),
        election.next_seed(run, 2, SEED, certificate),
        election.next_seed(run, 1, digest("x"), certificate),
        election.next_seed(run, 1, SEED, digest("other")),
        election.first_seed(run),
    }
    assert len(others) == 5
    assert seed not in others
