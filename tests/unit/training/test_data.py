import itertools

import numpy as np
import pytest

from spes_p2p.errors import DataError
from spes_p2p.ids import PeerId
from spes_p2p.testing.training import tiny_documents
from spes_p2p.training.data import Place, TokenStream, data_key, load_corpus
from spes_p2p.training.documents import document_hash
from spes_p2p.training.tokenizer import ByteTokenizer

KEY = data_key(0, PeerId(b"p" * 32))


def stream(documents=None, key=KEY, position=()) -> TokenStream:
    return TokenStream(documents or tiny_documents(), ByteTokenizer(), key, position)


def read(tokens: TokenStream, count: int) -> bytes:
    """The next `count` tokens that become targets, with the one before them, of a stream with one lane."""
    return text_of(tokens.next_batch(1, count)[0])


def text_of(row: np.ndarray) -> bytes:
    return bytes(row.astype(np.uint8))


def documents_of(batches: list[np.ndarray], row: int, num_lanes: int) -> list[bytes]:
    """Whole documents that one lane gave, from batches in which row b, b + lanes, ... are its own."""
    rows = [text_of(batch[at]) for batch in batches for at in range(row, len(batch), num_lanes)]
    assert all(before[-1:] == after[:1] for before, after in itertools.pairwise(rows))
    text = rows[0] + b"".join(later[1:] for later in rows[1:])
    return text[1:].split(b"\0")[:-1]


def test_each_row_of_a_batch_is_a_lane_that_goes_on_in_the_next_batch_without_gaps():
    tokens = stream()
    batches = [tokens.next_batch(4, 10) for _ in range(40)]
    assert batches[0].shape == (4, 11)
    assert batches[0].dtype == np.int64
    lanes = [documents_of(batches, row, 4) for row in range(4)]
    assert all(set(documents) <= set(tiny_documents()) for documents in lanes)
    begun = [lane[0] for lane in lanes]
    assert len(set(begun)) == 4


@pytest.mark.parametrize("num_lanes", [1, 3, 8])
def test_a_pass_visits_every_document_once_whatever_the_number_of_lanes(num_lanes):
    documents = tiny_documents()
    tokens = stream()
    share = -(-len(documents) // num_lanes)
    batches = [tokens.next_batch(num_lanes, 10) for _ in range(share * 14)]
    visited = [
        document
        for lane in range(num_lanes)
        for document in documents_of(batches, lane, num_lanes)[: len(range(lane, len(documents), num_lanes))]
    ]
    assert sorted(visited) == sorted(documents)


def test_fewer_documents_than_rows_take_turns():
    tokens = stream(documents=tiny_documents(2))
    batches = [tokens.next_batch(3, 10) for _ in range(30)]
    assert len(tokens.position) == 2
    rows = [text_of(row) for batch in batches for row in batch]
    assert rows[0][1:] in tiny_documents(2)[0] + tiny_documents(2)[1]
    whole = stream(documents=tiny_documents(2))
    whole_rows = [text_of(row) for row in whole.next_batch(4, 10)]
    assert rows[:2] == whole_rows[:2]
    assert rows[2] == whole_rows[2]


def test_another_number_of_lanes_begins_with_the_next_pass():
    tokens = stream()
    tokens.next_batch(3, 10)
    tokens.next_batch(4, 10)
    assert {place.pass_number for place in tokens.position} == {1}
    assert [place.place for place in tokens.position] == [0, 1, 2, 3]


def test_every_pass_has_its_own_order():
    documents = tiny_documents()
    total = sum(len(document) + 1 for document in documents)
    tokens = stream()
    passes = [read(tokens, total)[:total].split(b"\0")[1:] for _ in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(documents)
    assert passes[0] != passes[1]
    assert [place.pass_number for place in tokens.position] == [2]


def test_order_depends_on_seed_and_peer():
    texts = {read(stream(key=data_key(seed, PeerId(peer * 32))), 200) for seed in (0, 1) for peer in (b"a", b"b")}
    assert len(texts) == 4


def test_reading_goes_on_from_a_stored_position():
    tokens = stream()
    tokens.next_batch(3, 37)
    resumed = stream(position=tokens.position)
    assert np.array_equal(tokens.next_batch(4, 50), resumed.next_batch(4, 50))


def test_documents_shorter_than_a_sequence_are_packed():
    assert read(stream(documents=(b"ab",)), 7) == b"\0ab\0ab\0a"


def test_a_position_beyond_text_that_has_shrunk_goes_to_the_next_pass():
    tokens = stream(documents=(b"ab",), position=(Place(pass_number=4, place=9, offset=3),))
    assert read(tokens, 2) == b"\0ab"
    assert [place.pass_number for place in tokens.position] == [5]


def test_held_out_documents_are_skipped_and_counted(tmp_path):
    for number, document in enumerate(tiny_documents()):
        (tmp_path / f"{number}.txt").write_bytes(document)
    held_out = {document_hash(document) for document in tiny_documents()[2:5]}
    corpus = load_corpus([tmp_path], held_out)
    assert sorted(corpus.documents) == sorted(tiny_documents()[:2] + tiny_documents()[5:])
    assert corpus.num_held_out == 3


def test_a_bound_takes_a_sample_that_depends_on_the_key(tmp_path):
    for number, document in enumerate(tiny_documents()):
        (tmp_path / f"{number}.txt").write_bytes(document)
    samples = [load_corpus([tmp_path], max_bytes=350, key=data_key(0, PeerId(p * 32))) for p in (b"a", b"b", b"c")]
    assert all(sample.bounded and 0 < sample.num_bytes <= 350 for sample in samples)
    assert len({sample.documents for sample in samples}) > 1


def test_a_corpus_within_its_bound_is_whole(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc")
    corpus = load_corpus([tmp_path], max_bytes=3)
    assert (corpus.documents, corpus.num_bytes, corpus.bounded) == ((b"abc",), 3, False)


def test_text_that_is_all_held_out_is_an_error_that_says_so(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc")
    with pytest.raises(DataError, match="all 1 documents belong to the held-out set"):
        load_corpus([tmp_path], {document_hash(b"abc")})


def test_text_that_is_empty_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_bytes(b" \n")
    with pytest.raises(DataError, match="no UTF-8 text"):
        load_corpus([tmp_path])
