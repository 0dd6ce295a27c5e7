"""What a peer sends to one that says where it stands."""

import pytest

from spes_p2p.crypto import verify
from spes_p2p.protocol.body import Cut
from spes_p2p.protocol.codec import cut_hash
from spes_p2p.protocol.head import Head, Terms, next_head
from spes_p2p.protocol.messages import TipAsk
from spes_p2p.protocol.standing import TipAnswer, answer_tip
from spes_p2p.protocol.transition import advance, make_body
from spes_p2p.testing.protocol_cases import follow, identities, owned_head

PEERS = identities(4)
IDS = tuple(peer.peer_id for peer in PEERS)


def after(head: Head, *side: int) -> Head:
    """The next head, made by a side or by all."""
    terms = Terms(head, tuple(IDS[place] for place in side))
    cut = Cut(head.run.run_id, head.epoch, terms.round, ())
    return next_head(head, make_body(terms, advance(terms, cut_hash(cut), (), verify), (None,) * 4, b""))


FIRST = owned_head(PEERS)
ONE = after(FIRST, 0, 1)
TWO = after(ONE, 0, 1)
OTHER = after(FIRST, 2, 3)
FINAL = after(TWO)


def chain_of(head: Head) -> dict[int, bytes]:
    return dict(head.recent)


def ask_of(head: Head) -> TipAsk:
    return TipAsk(head.epoch, head.round + 1, head.last_final.round, head.hash)


@pytest.mark.parametrize(
    ("mine", "asker", "expected"),
    [
        (TWO, TWO, TipAnswer(everything=True)),
        (TWO, FIRST, TipAnswer(certificates=range(2, 4))),
        (TWO, ONE, TipAnswer(certificates=range(3, 4))),
        (TWO, OTHER, TipAnswer(certificates=range(2, 4), asks_back=True)),
        (OTHER, TWO, TipAnswer(certificates=range(2, 3), asks_back=True)),
        (FIRST, TWO, TipAnswer(certificates=range(2, 2), asks_back=True)),
        (FINAL, OTHER, TipAnswer(certificates=range(2, 5))),
        (FINAL, FIRST, TipAnswer(certificates=range(2, 5))),
        (FIRST, FINAL, TipAnswer(asks_back=True)),
    ],
)
def test_each_is_sent_what_it_lacks(mine: Head, asker: Head, expected: TipAnswer) -> None:
    assert answer_tip(mine, ask_of(asker), chain_of(mine)) == expected


def test_who_names_no_tip_is_answered_by_its_round() -> None:
    assert answer_tip(TWO, TipAsk(0, 2), {}) == TipAnswer(certificates=range(2, 3))
    assert answer_tip(TWO, TipAsk(0, 4), {}) == TipAnswer(everything=True)
    assert answer_tip(TWO, TipAsk(0, 5), {}) == TipAnswer(asks_back=True)


def test_a_newer_epoch_is_asked_and_an_older_one_gets_the_chain() -> None:
    assert answer_tip(TWO, TipAsk(1, 3, 2, bytes(31) + b"x"), {}) == TipAnswer(asks_back=True)
    head = follow(FIRST, [])
    assert answer_tip(head, TipAsk(0, 2, 0, b"x" * 32), chain_of(head)) == TipAnswer(certificates=range(1, 3))


def test_a_tip_that_is_too_old_to_be_looked_up_is_taken_for_one_of_the_chain() -> None:
    assert answer_tip(FINAL, ask_of(OTHER), {}) == TipAnswer(certificates=range(3, 5))
    assert answer_tip(FINAL, ask_of(TWO), chain_of(FINAL)) == TipAnswer(certificates=range(4, 5))
