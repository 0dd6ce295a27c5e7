import importlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.errors import DataError
from spes_p2p.training.documents import MAX_DOCUMENT_BYTES, cut_document, default_files, find_files, read_documents


@given(st.text(st.sampled_from("ab\né€"), max_size=9000))
def test_pieces_are_the_text_again_without_blank_ones(text):
    data = text.encode()
    pieces = list(cut_document(data))
    assert all(0 < len(piece) <= MAX_DOCUMENT_BYTES and not piece.isspace() for piece in pieces)
    assert b"".join(pieces).replace(b"\n", b"") == data.replace(b"\n", b"")
    for piece in pieces:
        piece.decode()


def test_long_text_is_cut_after_line_ends():
    lines = [b"%04d" % number + b"x" * 95 + b"\n" for number in range(100)]
    pieces = list(cut_document(b"".join(lines)))
    assert [len(piece) for piece in pieces] == [4000, 4000, 2000]
    assert all(piece.endswith(b"\n") for piece in pieces)


def test_a_line_that_is_too_long_is_cut_between_characters():
    pieces = list(cut_document("€".encode() * 3000))
    assert [len(piece) for piece in pieces] == [4095, 4095, 810]


def test_folders_files_and_patterns_are_found_sorted_and_once(tmp_path):
    for name in ("b.txt", "a.md", "deep/c.py", "picture.png", "deep/d.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_files([tmp_path, tmp_path / "b.txt", tmp_path / "*.md"])
    assert found == [tmp_path / name for name in ("a.md", "b.txt", "deep/c.py", "deep/d.jsonl")]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nowhere", "no such file or folder"),
        ("nothing-*.txt", "no text file matches"),
        ("empty", "no text in this folder"),
        ("picture.png", "not a kind of text"),
    ],
)
def test_wrong_paths_are_named_with_the_reason(tmp_path, path, reason):
    (tmp_path / "empty").mkdir()
    (tmp_path / "picture.png").write_bytes(b"x")
    with pytest.raises(DataError, match=reason) as caught:
        find_files([tmp_path / path])
    assert str(tmp_path / path) in str(caught.value)


def test_each_line_of_json_lines_is_a_document(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in ("one", "zwei\n", "trois")) + "\n\n")
    assert list(read_documents(path)) == [b"one", b"zwei\n", b"trois"]


@pytest.mark.parametrize("line", ["{", "[1]", '{"txt": "a"}', '{"text": 5}'])
def test_a_bad_line_is_named_by_its_number(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(DataError, match="line 2"):
        list(read_documents(path))


def test_files_that_are_not_utf8_have_no_documents(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9")
    assert list(read_documents(path)) == []


def test_byte_zero_is_taken_out(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a\0b")
    assert list(read_documents(path)) == [b"ab"]


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.zst"])
def test_a_missing_library_is_named_by_the_extra_to_install(tmp_path, monkeypatch, name):
    def missing(library: str):
        raise ImportError(library)

    monkeypatch.setattr(importlib, "import_module", missing)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataError, match=r"pip install spes-p2p\[data\]"):
        list(read_documents(tmp_path / name))


def test_an_unreadable_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.txt: No such file"):
        list(read_documents(tmp_path / "gone.txt"))


def test_default_text_is_pythons_own_in_a_fixed_order():
    files = default_files()
    assert Path(json.__file__) in files
    assert files == sorted(files)
    assert not any("site-packages" in file.parts for file in files)
    assert len(files) > 500
