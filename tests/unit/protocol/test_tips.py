"""The highest claim is followed until it proves to be a lie."""

from __future__ import annotations

from spes_p2p.digests import digest
from spes_p2p.ids import PeerId
from spes_p2p.protocol.questions import Tip
from spes_p2p.protocol.tips import Tips

ADA, BEN, CLEO = (PeerId(bytes([number]) * 32) for number in (1, 2, 3))


def tip(number: int, note: str = "", first: int = 1) -> Tip:
    return Tip(0, number, digest("tip", number, note.encode()), first)


def test_the_highest_claim_comes_first() -> None:
    tips = Tips({ADA: tip(5), BEN: tip(9), CLEO: tip(7)})
    assert tips.best(0) == (BEN, tip(9))
    assert tips.highest() == 9


def test_equal_claims_go_by_peer_id() -> None:
    assert Tips({CLEO: tip(5), ADA: tip(5)}).best(0) == (ADA, tip(5))


def test_nobody_is_followed_back_or_to_where_one_is() -> None:
    tips = Tips({ADA: tip(5), BEN: tip(9)})
    assert tips.best(5) == (BEN, tip(9))
    assert tips.best(9) is None
    assert Tips({}).best(0) is None
    assert Tips({}).highest() == 0


def test_a_liar_is_dropped_with_the_reason_and_the_next_highest_follows() -> None:
    tips = Tips({ADA: tip(5), BEN: tip(10**15)})
    tips.drop(BEN, "it has no such round")
    assert tips.best(0) == (ADA, tip(5))
    assert tips.highest() == 5
    assert tips.dropped == {BEN: "it has no such round"}


def test_a_slow_peer_comes_last_but_is_not_forgotten() -> None:
    tips = Tips({ADA: tip(5), BEN: tip(9)})
    tips.postpone(BEN)
    assert tips.best(0) == (ADA, tip(5))
    assert tips.best(5) == (BEN, tip(9))


def test_who_claims_another_certificate_than_the_certified_one_is_found() -> None:
    tips = Tips({ADA: tip(5), BEN: tip(5, "fork"), CLEO: tip(6)})
    assert tips.contradicted({(0, 4): tip(4).hash, (0, 5): tip(5).hash}) == (BEN,)


def test_who_lacks_the_certificates_right_above_comes_after_those_who_have_them() -> None:
    tips = Tips({ADA: tip(9, first=7), BEN: tip(8)})
    assert tips.best(3) == (BEN, tip(8))
    assert tips.best(6) == (ADA, tip(9, first=7))
    assert tips.best(8) == (ADA, tip(9, first=7))


def test_a_round_is_asked_of_somebody_who_has_it_and_was_not_slow() -> None:
    tips = Tips({ADA: tip(9, first=7), BEN: tip(8), CLEO: tip(8)})
    assert [tips.with_round(number) for number in (3, 9, 10)] == [BEN, ADA, None]
    tips.postpone(BEN)
    assert tips.with_round(3) == CLEO
