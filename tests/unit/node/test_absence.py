"""Who is named when a round went without an update."""

from __future__ import annotations

from spes_p2p.crypto import Identity
from spes_p2p.node.absence import Absence
from spes_p2p.protocol.head import Head, next_head
from spes_p2p.protocol.statements import Item
from spes_p2p.testing import protocol_cases as cases

FOUNDERS = cases.identities(3)
ME, SHE, HE = FOUNDERS


def update(head: Head, peer: Identity) -> Item:
    made = cases.update_of(head, peer)
    return cases.item_of(made, cases.receipt_of(made, FOUNDERS))


def alive(head: Head, peer: Identity) -> Item:
    return cases.item_of(cases.alive_of(head, peer))


class Story:
    def __init__(self) -> None:
        self.notes: list[tuple[str, str]] = []
        self.head = cases.owned_head(FOUNDERS)
        self.absence = Absence(ME.peer_id, lambda level, text: self.notes.append((level, text)))

    def certify(self, *items: Item) -> list[tuple[str, str]]:
        """What one more round tells."""
        told = len(self.notes)
        body = cases.body_of(self.head, cases.transition_of(self.head, list(items)), merge_lists=b"lists")
        after = next_head(self.head, body)
        self.absence.adopted(self.head, after, body)
        self.head = after
        return self.notes[told:]


def short(peer: Identity) -> str:
    return f"…{peer.text[-8:]}"


def test_member_that_promised_an_update_and_gave_none_is_named_once() -> None:
    story = Story()
    head = story.head
    assert story.certify(update(head, ME), update(head, SHE), alive(head, HE)) == [
        ("warning", f"round 2 went on without an update of {short(HE)}")
    ]
    head = story.head
    assert story.certify(update(head, ME), update(head, SHE), alive(head, HE)) == []
    head = story.head
    assert story.certify(update(head, ME), update(head, SHE), update(head, HE)) == [
        ("info", f"round 4 has an update again of {short(HE)}")
    ]


def test_silent_member_is_named_when_it_falls_silent_and_when_its_membership_ends() -> None:
    story = Story()
    for number, told in ((2, [("warning", f"round 2 went on without a sign of life of {short(HE)}")]), (3, None)):
        head = story.head
        notes = story.certify(update(head, ME), update(head, SHE))
        expected = told or [("warning", f"round {number} ended the membership of {short(HE)}")]
        assert notes == expected
    head = story.head
    assert story.certify(update(head, ME), update(head, SHE)) == []


def test_own_missing_update_is_not_this_ones_business() -> None:
    story = Story()
    head = story.head
    assert story.certify(alive(head, ME), update(head, SHE), update(head, HE)) == []
