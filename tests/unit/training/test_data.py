import numpy as np
import pytest

from spes_p2p.errors import DataError
from spes_p2p.ids import PeerId
from spes_p2p.testing.training import tiny_documents
from spes_p2p.training.data import Position, TokenStream, data_key, load_corpus
from spes_p2p.training.documents import document_hash
from spes_p2p.training.tokenizer import ByteTokenizer

KEY = data_key(0, PeerId(b"p" * 32))


def stream(documents=None, key=KEY, position=None) -> TokenStream:
    return TokenStream(documents or tiny_documents(), ByteTokenizer(), key, position)


def read(tokens: TokenStream, count: int) -> bytes:
    """The next `count` tokens that become targets, with the one before them."""
    return bytes(tokens.next_batch(1, count)[0].astype(np.uint8))


def test_rows_overlap_by_one_token_and_follow_without_gaps():
    whole = read(stream(), 60)
    batch = stream().next_batch(6, 10)
    assert batch.shape == (6, 11)
    assert batch.dtype == np.int64
    assert [bytes(row.astype(np.uint8)) for row in batch] == [whole[10 * i : 10 * i + 11] for i in range(6)]


def test_a_pass_visits_every_document_once_behind_a_separator():
    documents = tiny_documents()
    total = sum(len(document) + 1 for document in documents)
    text = read(stream(), total - 1)
    assert text.startswith(b"\0")
    assert sorted(text[1:].split(b"\0")) == sorted(documents)


def test_every_pass_has_its_own_order():
    documents = tiny_documents()
    total = sum(len(document) + 1 for document in documents)
    tokens = stream()
    passes = [read(tokens, total)[:total].split(b"\0")[1:] for _ in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(documents)
    assert passes[0] != passes[1]
    assert tokens.position.pass_number == 2


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
    tokens = stream(documents=(b"ab",), position=Position(pass_number=4, place=9, offset=3))
    assert read(tokens, 2) == b"\0ab"
    assert tokens.position.pass_number == 5


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
