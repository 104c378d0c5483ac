"""Which files of a folder are the checkpoint, and which are only copied along.

An index names its shards, and the index is not trusted: a name with a path in it, a tensor that is not where the
index says, or one that two shards have, is refused.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rekindle.checkpoint.parts import CheckpointError, FilePart, clearly

LONGEST_JSON = 200_000_000
TORCH_ENDINGS = (".bin", ".pt", ".pth", ".ckpt")
# The same weights in another format: copied along they would be stale, and some loaders prefer them.
_OTHER_WEIGHTS = (".safetensors", ".bin", ".h5", ".msgpack", ".onnx", ".gguf", ".ot", ".tflite")
_NO_WEIGHTS = ("training_args.bin", "scheduler.bin", "scheduler.pt", "rng_state.pth", "scaler.pt", "optimizer.bin")
OPTIMIZER_FILES = ("optimizer.pt", "optimizer.bin")


# What is written beside the weights and belongs to them: a new version of the checkpoint replaces it.
_BESIDE_WEIGHTS = re.compile(
    r"(config|configuration|generation_config|adapter_config|tokenizer|tokenizer_config|special_tokens_map|"
    r"added_tokens|vocab|preprocessor_config|processor_config|chat_template|trainer_state|modules|"
    r"quantize_config|model_index)\.(json|txt|jinja|model)|(merges|vocab)\.txt|spiece\.model|sentencepiece\.bpe\.model|"
    r"tokenizer\.model|.*\.index\.json"
)


def beside(target: Path, what: str) -> Path:
    """The name of a working file next to an output.

    >>> beside(Path("out/model.pt"), "journal").name
    '.model.pt.rekindle-journal'
    """
    return target.with_name(f".{target.name}.rekindle-{what}")


_WORKING = re.compile(r"\..*\.rekindle-(partial|journal|replaced)")


class Weights(NamedTuple):
    """The weight files of a folder, and the index that lists them (`listing`) if there is one."""

    files: tuple[Path, ...]
    listing: Path | None
    weight_map: dict[str, str]


def find_weights(folder: Path) -> Weights:
    """The weight files of a Hugging Face folder: those of its index, or the only file that holds weights.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Path(folder, "model.safetensors").touch(); Path(folder, "config.json").touch()
    ...     [file.name for file in find_weights(Path(folder)).files]
    ['model.safetensors']
    """
    with clearly(folder):
        files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    for ending in (".safetensors", *TORCH_ENDINGS):
        indices = [path for path in files if path.name.endswith(f"{ending}.index.json")]
        if len(indices) == 1:
            return _shards(folder, indices[0])
        single = [path for path in files if path.suffix == ending and not belongs_to_training(path.name)]
        if len(indices) > 1 or len(single) > 1:
            names = ", ".join(path.name for path in [*indices, *single][:6])
            raise CheckpointError(f"{folder}: which one is the model? {names}: give the path of one file")
        if single:
            return Weights((single[0],), None, {})
    raise CheckpointError(f"{folder}: no safetensors, torch or DCP checkpoint in this folder")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file that is not trusted."""
    with clearly(path, "reading JSON"):
        if path.stat().st_size > LONGEST_JSON:
            raise CheckpointError(f"{path}: too large for a JSON file of a checkpoint")
        table = json.loads(path.read_text("utf-8"))
    if not isinstance(table, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return table


def check_index(weights: Weights, parts: Sequence[FilePart]) -> None:
    """Every tensor is in the shard that the index names, in no other, and listed."""
    owner: dict[str, str] = {}
    for part in parts:
        for name in part.names:
            if name in owner:
                raise CheckpointError(f"{part.path}: {name!r} is in {owner[name]} too")
            owner[name] = part.path.name
    if weights.listing is None:
        return
    for name, shard in weights.weight_map.items():
        if owner.get(name) != shard:
            where = f"it is in {owner[name]}" if name in owner else "no shard has it"
            raise CheckpointError(f"{weights.listing}: {name!r} is said to be in {shard}, but {where}")
    stray = next((name for name in owner if name not in weights.weight_map), None)
    if stray is not None:
        raise CheckpointError(f"{weights.listing}: does not list {stray!r}, which {owner[stray]} holds")


class Companions(NamedTuple):
    """What else is in a folder, relative to it: files to copy, links with where they lead, weights left behind."""

    files: list[Path]
    links: dict[Path, str]
    stale: list[str]


def companions(folder: Path, own: Sequence[Path]) -> Companions:
    """What is copied along with the weight files `own`.

    A link stays a link if it leads to somewhere inside the folder. What the cache of Hugging Face links to, its own
    blobs, is copied as files. Any other link is refused: it could bring a file along that nobody meant to pass on.
    """
    names = {path.relative_to(folder) for path in own}
    found = Companions([], {}, [])
    real = folder.resolve()
    blobs = real.parents[1] / "blobs" if real.parent.name == "snapshots" else None
    for path in _walk(folder):
        name = path.relative_to(folder)
        if name in names:
            continue
        if name.parent == Path() and not belongs_to_training(name.name) and _holds_weights(name.name):
            found.stale.append(name.name)
        elif not path.is_symlink():
            if path.is_file():
                found.files.append(name)
        elif path.resolve().is_relative_to(real):
            found.links[name] = os.path.relpath(path.resolve(), real / name.parent)
        elif blobs is not None and path.resolve().parent == blobs and path.is_file():
            found.files.append(name)
        else:
            raise CheckpointError(f"{path}: a link that leads out of the folder: remove it, or copy the file")
    return found


def is_replaceable(name: str) -> bool:
    """Whether a file of this name in a checkpoint's folder is a part of the checkpoint.

    >>> is_replaceable("config.json"), is_replaceable("model.safetensors"), is_replaceable("docs/thesis.tex")
    (True, True, False)
    """
    return bool(_BESIDE_WEIGHTS.fullmatch(name)) or belongs_to_training(name) or _holds_weights(name)


def _holds_weights(name: str) -> bool:
    bare = name.removesuffix(".index.json")
    return bare.endswith(_OTHER_WEIGHTS)


def belongs_to_training(name: str) -> bool:
    """Whether a file of this name holds the state of a training run, not weights."""
    return name in _NO_WEIGHTS or name in OPTIMIZER_FILES or name.startswith(("rng_state", "random_states"))


def _walk(folder: Path) -> Iterator[Path]:
    """Files and links of a folder, at any depth; working files of our own and .git are left out."""
    for root, folders, names in os.walk(folder):
        linked = [name for name in folders if Path(root, name).is_symlink()]
        folders[:] = sorted(name for name in folders if name not in (".git", *linked))
        yield from (Path(root, name) for name in sorted([*names, *linked]) if not _WORKING.fullmatch(name))


def _shards(folder: Path, index: Path) -> Weights:
    table = read_json(index)
    files = tuple(folder / shard for shard in shards_of(index, table))
    missing = next((path for path in files if not path.is_file()), None)
    if missing is not None:
        raise CheckpointError(f"{index}: the shard {missing.name} is missing")
    return Weights(files, index, table["weight_map"])


def shards_of(index: Path | str, table: Mapping[str, Any]) -> list[str]:
    """The files that an index names: plain names, and at least one.

    >>> shards_of("index", {"weight_map": {"a": "2.safetensors", "b": "1.safetensors"}})
    ['1.safetensors', '2.safetensors']
    """
    weight_map = table.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map")
    for name, shard in weight_map.items():
        plain = isinstance(shard, str) and shard not in ("", ".", "..") and not set(shard) & {"/", "\\", "\0", ":"}
        if not plain:
            raise CheckpointError(
                f"{index}: {name[:200]!r} is said to be in {shard!r:.200}, which is not a plain file name"
            )
    return sorted(set(weight_map.values()))
