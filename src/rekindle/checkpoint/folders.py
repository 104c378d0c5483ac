"""Which files of a folder are the checkpoint, and which are only copied along.

An index names its shards, and the index is not trusted: a name with a path in it, a tensor that is not where the
index says, or one that two shards have, is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rekindle.checkpoint.parts import CheckpointError, FilePart, clearly

LONGEST_JSON = 200_000_000
TORCH_ENDINGS = (".bin", ".pt", ".pth", ".ckpt")
# The same weights in another format: copied along they would be stale, and some loaders prefer them.
_OTHER_WEIGHTS = (".safetensors", ".bin", ".h5", ".msgpack", ".onnx", ".gguf", ".ot", ".tflite")
_NO_WEIGHTS = ("training_args.bin", "scheduler.bin", "scheduler.pt", "rng_state.pth", "scaler.pt", "optimizer.bin")
OPTIMIZER_FILES = ("optimizer.pt", "optimizer.bin")


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
        single = [path for path in files if path.suffix == ending and not _is_training_state(path)]
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


def companions(folder: Path, weights: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """(files to copy along, names of other weight files that stay behind), both relative to the folder."""
    own = {path.name for path in weights}
    keep, stale = [], []
    for path in _walk(folder):
        top = path.parent == folder
        if top and path.name in own:
            continue
        if top and not _is_training_state(path) and _holds_weights(path.name):
            stale.append(path.name)
        else:
            keep.append(path.relative_to(folder))
    return keep, stale


def _holds_weights(name: str) -> bool:
    bare = name.removesuffix(".index.json")
    return bare.endswith(_OTHER_WEIGHTS)


def _is_training_state(path: Path) -> bool:
    name = path.name
    return name in _NO_WEIGHTS or name in OPTIMIZER_FILES or name.startswith(("rng_state", "random_states"))


def _walk(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != ".git")
        for name in sorted(files):
            path = Path(root, name)
            if path.is_file() and ".rekindle-" not in name:
                yield path


def _shards(folder: Path, index: Path) -> Weights:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map")
    for name, shard in weight_map.items():
        plain = isinstance(shard, str) and shard not in ("", ".", "..") and not set(shard) & {"/", "\\", "\0", ":"}
        if not plain:
            raise CheckpointError(
                f"{index}: {name[:200]!r} is said to be in {shard!r:.200}, which is not a plain file name"
            )
    files = tuple(folder / shard for shard in sorted(set(weight_map.values())))
    missing = next((path for path in files if not path.is_file()), None)
    if missing is not None:
        raise CheckpointError(f"{index}: the shard {missing.name} is missing")
    return Weights(files, index, weight_map)
