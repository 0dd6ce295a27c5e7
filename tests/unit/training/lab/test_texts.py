import pytest

from spes_p2p.training.lab.texts import KINDS, deal, in_pieces

TEXT_BYTES, HELD_OUT_BYTES = 60_000, 16_000


def dealt(text, num_peers=4, seed=0):
    return deal(text, num_peers, seed, TEXT_BYTES, HELD_OUT_BYTES)


def test_alike_or_by_kind_all_peers_together_have_the_same_documents():
    alike, by_kind = dealt("iid"), dealt("kinds")
    together = [sorted(document for peer in texts.peers for document in peer) for texts in (alike, by_kind)]
    assert together[0] == together[1]
    assert len(together[0]) == len(set(together[0]))
    assert alike.held_out == by_kind.held_out
    assert [len(peer) for peer in alike.peers] != [len(peer) for peer in by_kind.peers]


@pytest.mark.parametrize("text", ["iid", "kinds"])
def test_nothing_that_is_held_out_is_trained_on(text):
    texts = dealt(text)
    assert not set(texts.held_out) & {document for peer in texts.peers for document in peer}
    assert 0.5 * HELD_OUT_BYTES < sum(map(len, texts.held_out)) <= HELD_OUT_BYTES


def test_by_kind_each_peer_has_text_of_one_kind():
    python, header, manual, readme = (b"\n".join(peer) for peer in dealt("kinds").peers)
    assert len(KINDS) == 4
    assert python.count(b"\ndef ") > 10 > readme.count(b"\ndef ")
    assert header.count(b"#include") > 10 > python.count(b"#include")
    assert readme.count(b"\nMetadata-Version:") + readme.count(b"\nName:") > 0
    assert b"********" in manual


def test_more_peers_than_kinds_share_a_kind_without_overlap():
    shared = dealt("kinds", num_peers=8).peers
    assert not set(shared[0]) & set(shared[4])
    assert set(shared[0]) | set(shared[4]) == set(dealt("kinds").peers[0])


def test_the_seed_changes_who_gets_what_but_not_what_is_held_out():
    first, second = dealt("iid", seed=0), dealt("iid", seed=1)
    assert first.held_out == second.held_out
    assert set(first.peers[0]) != set(second.peers[0])
    assert dealt("iid", seed=0) == first


def test_pieces_of_documents_are_short_and_leave_nothing_out():
    whole = dealt("iid")
    cut = in_pieces(whole, 100)
    assert [b"".join(peer) for peer in cut.peers] == [b"".join(peer) for peer in whole.peers]
    assert max(len(piece) for peer in cut.peers for piece in peer) == 100
    assert cut.held_out == whole.held_out
