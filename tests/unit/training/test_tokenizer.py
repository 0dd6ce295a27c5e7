import numpy as np
import pytest

from spes_p2p.training.tokenizer import ByteTokenizer


def test_a_token_is_a_byte():
    tokens = ByteTokenizer().encode("né\n".encode())
    assert tokens.tolist() == [110, 0xC3, 0xA9, 10]
    assert tokens.dtype == np.int32


def test_decoding_gives_the_document_back():
    document = bytes(range(1, 256))
    assert ByteTokenizer().decode(ByteTokenizer().encode(document)) == document


def test_a_document_with_the_separator_is_refused():
    with pytest.raises(ValueError, match="byte 0"):
        ByteTokenizer().encode(b"a\0b")
