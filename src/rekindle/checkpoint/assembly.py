"""The staged copy of a checkpoint: its parts, and what comes along in a folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from rekindle.checkpoint.folders import read_json
from rekindle.checkpoint.opening import Checkpoint
from rekindle.checkpoint.part import stored_as


def staged_size(source: Checkpoint, dtype: torch.dtype | None) -> int:
    """Bytes that `assemble` will write."""
    size = sum(part.staged_size(dtype) for part in source.parts)
    if source.folder is not None:
        size += sum((source.folder / path).stat().st_size for path in source.companions()[0])
    return size


def assemble(source: Checkpoint, target: Path, changed: frozenset[str], dtype: torch.dtype | None) -> None:
    """Write everything of a checkpoint but the tensors in `changed`, to a file or folder beside the output."""
    if source.folder is None or source.format == "dcp":
        source.parts[0].stage(target, changed, dtype)
        if source.folder is None:
            shutil.copymode(source.path, target)
        return
    target.mkdir()
    for part in source.parts:
        part.stage(target / part.path.name, changed, dtype)
        shutil.copymode(part.path, target / part.path.name)
    for path in source.companions()[0]:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source.folder / path, target / path)
    if source.weights is not None and source.weights.listing is not None:
        _copy_index(source, source.weights.listing, target, dtype)
    if dtype is not None:
        _tell_dtype(target / "config.json", dtype)


def _copy_index(source: Checkpoint, index: Path, target: Path, dtype: torch.dtype | None) -> None:
    copy = target / index.name
    shutil.copy2(index, copy)
    table = read_json(index)
    metadata = table.get("metadata")
    if dtype is None or not isinstance(metadata, dict) or "total_size" not in metadata:
        return
    metas = [source.meta(name) for name in source.names]
    metadata["total_size"] = sum(m.bytes // m.dtype.itemsize * stored_as(m.dtype, dtype).itemsize for m in metas)
    copy.write_text(json.dumps(table, indent=2))


def _tell_dtype(config: Path, dtype: torch.dtype) -> None:
    """transformers casts to the dtype that the config names, whatever the file holds."""
    if not config.is_file():
        return
    table = read_json(config)
    named = [key for key in ("dtype", "torch_dtype") if key in table]
    for key in named:
        table[key] = str(dtype).removeprefix("torch.")
    if named:
        config.write_text(json.dumps(table, indent=2))
