"""What an output consists of, what it may replace, and the staged copy into which the weights are written."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from rekindle import files
from rekindle.checkpoint.byte_files import copy_file
from rekindle.checkpoint.folders import is_replaceable, read_json
from rekindle.checkpoint.opening import Checkpoint, open_checkpoint
from rekindle.checkpoint.parts import CheckpointError, FilePart, stored_as
from rekindle.checkpoint.staging import Staging, same_content
from rekindle.files import kind_of, state_of


class OutputFiles:
    """The files of one output: all of a checkpoint, or in place only those in which something changes.

    Args:
        source: the checkpoint that is read.
        changed: the tensors that will be written.
        states: whether optimizer states will be.
        dtype: what floating tensors are stored in; None as they are.
        in_place: whether the output is the source itself.
    """

    def __init__(
        self, source: Checkpoint, changed: frozenset[str], states: bool, dtype: torch.dtype | None, in_place: bool
    ) -> None:
        self.source, self.dtype, self.in_place = source, dtype, in_place
        every = dtype is not None or not in_place
        self.parts: Sequence[FilePart] = [
            part for part in source.parts if every or changed & {*part.names} or (states and part.optimizers())
        ]
        self.companions = source.companions() if source.folder is not None and not in_place else None
        listing = source.weights.listing if source.weights is not None else None
        self.listing = listing if every else None

    def names(self) -> list[Path]:
        """The files of an output folder, relative to it."""
        folder = self.source.folder
        assert folder is not None
        own = [file.relative_to(folder) for part in self.parts for file in part.files()]
        others = [Path(self.listing.name)] if self.listing is not None else []
        if self.companions is not None:
            others += [*self.companions.files, *self.companions.links]
        elif self.dtype is not None and (folder / "config.json").is_file():
            others.append(Path("config.json"))
        return own + others

    def size(self) -> int:
        """Bytes that `stage` will write."""
        size = sum(part.staged_size(self.dtype) for part in self.parts)
        if self.companions is not None and self.source.folder is not None:
            size += sum((self.source.folder / path).stat().st_size for path in self.companions.files)
        return size

    def stage(self, target: Path, changed: frozenset[str]) -> None:
        """Write everything but the tensors in `changed`, to a file or folder beside the output."""
        folder = self.source.folder
        if folder is None:
            self.parts[0].stage(target, changed, self.dtype)
            return
        files.folder_like(target, folder)
        for part in self.parts:
            part.stage(target / part.path.name if part.path != folder else target, changed, self.dtype)
        if self.companions is not None:
            for path in self.companions.files:
                _folders_like(folder, target, path.parent)
                copy_file(folder / path, target / path)
            for path, leads_to in self.companions.links.items():
                _folders_like(folder, target, path.parent)
                (target / path).symlink_to(leads_to)
        if self.listing is not None:
            _copy_index(self.source, self.listing, target / self.listing.name, self.dtype)
        if self.dtype is not None:
            _set_dtype(folder / "config.json", target / "config.json", self.dtype)

    def opened(self, target: Path) -> Checkpoint:
        """The staged checkpoint, open for writing; what was not staged is read from the source."""
        if self.source.folder is None or not self.in_place:
            return open_checkpoint(target, writable=True)
        parts = [
            part.reopened(target if part.path == self.source.folder else target / part.path.name)
            if part in self.parts
            else part
            for part in self.source.parts
        ]
        staged = Checkpoint(target, self.source.format, parts, target, self.source.weights)
        staged.config = self.source.config
        return staged


def check_target(source: Checkpoint, staging: Staging, output_files: OutputFiles, *, force: bool) -> None:
    """Refuse an output that would destroy something, before anything is written; note what will be replaced."""
    target, kind = staging.target, kind_of(staging.target)
    if kind == "symbolic link":
        raise CheckpointError(f"{target}: is a symbolic link: give the real path")
    if kind not in ("", "file", "folder"):
        raise CheckpointError(f"{target}: is a {kind}, which is never replaced: choose another output")
    same = bool(kind) and os.path.samefile(source.path, target)
    if output_files.in_place and not same:
        raise CheckpointError("in_place writes to the input itself: leave the output out, or leave in_place out")
    if same and not output_files.in_place:
        raise CheckpointError(f"{target}: output and input are the same; say --in-place (in_place=True) to mean it")
    wanted = "file" if source.folder is None else "folder"
    if kind and not output_files.in_place:
        if not force:
            raise CheckpointError(f"{target}: exists already; --force (force=True) replaces it")
        if kind != wanted:
            raise CheckpointError(f"{target}: is a {kind} and the input is not: choose another output")
    inside = source.path.resolve(), target.resolve()
    if source.folder is not None and not same and (inside[0] in inside[1].parents or inside[1] in inside[0].parents):
        raise CheckpointError(f"{target}: output and input folder lie inside each other")
    if kind == "file":
        staging.replaceable = {"": state_of(target)}
    elif kind == "folder":
        if target.stat().st_dev != target.absolute().parent.stat().st_dev:
            raise CheckpointError(f"{target}: is a mount point; a folder in it can be written")
        old = [] if output_files.in_place else _checkpoint_files(target)
        names = output_files.names()
        _check_collisions(target, names, old, output_files)
        kept = {path.as_posix() for path in names}
        staging.removed = tuple(sorted({path.as_posix() for path in old} - kept))
        staging.replaceable = {name: state_of(target / name) for name in (*kept, *staging.removed)}


def _checkpoint_files(target: Path) -> list[Path]:
    """The files that make an existing folder a checkpoint; a folder of anything else is refused."""
    if not any(target.iterdir()):
        return []
    try:
        with open_checkpoint(target) as old:
            listing = old.weights.listing if old.weights is not None else None
            found = [*old.files(), *([listing] if listing is not None else [])]
    except CheckpointError as error:
        raise CheckpointError(
            f"{target}: is a folder that holds no checkpoint, which is never replaced: choose another output ({error})"
        ) from error
    return [path.relative_to(target) for path in found]


def _check_collisions(target: Path, names: Sequence[Path], old: Collection[Path], output_files: OutputFiles) -> None:
    """Every name to be written is free, or a plain file of the old checkpoint, or has the bytes already."""
    folder = output_files.source.folder
    assert folder is not None
    for name in names:
        place = target / name
        through = next((p for p in place.parents if target in p.parents and kind_of(p) not in ("", "folder")), None)
        if through is not None:
            raise CheckpointError(f"{through}: is a {kind_of(through)}: nothing is written through it")
        kind = kind_of(place)
        if kind == "symbolic link" and output_files.in_place:
            raise CheckpointError(f"{place}: a symbolic link; in place would replace the link: give the real path")
        ours = name in old or output_files.in_place or is_replaceable(name.as_posix())
        if kind and not (kind == "file" and ours) and not same_content(folder / name, place):
            raise CheckpointError(f"{place}: is there already and no part of a checkpoint: choose another output")


def _folders_like(source: Path, target: Path, inner: Path) -> None:
    for path in (*reversed(inner.parents), inner):
        if kind_of(target / path) != "folder":
            files.folder_like(target / path, source / path)


def _copy_index(source: Checkpoint, index: Path, copy: Path, dtype: torch.dtype | None) -> None:
    table = read_json(index)
    metadata = table.get("metadata")
    if dtype is None or not isinstance(metadata, dict) or "total_size" not in metadata:
        copy_file(index, copy)
        return
    metas = [source.meta(name) for name in source.names]
    metadata["total_size"] = sum(m.bytes // m.dtype.itemsize * stored_as(m.dtype, dtype).itemsize for m in metas)
    with files.create_like(copy, index) as file:
        file.write(json.dumps(table, indent=2).encode())


def _set_dtype(config: Path, copy: Path, dtype: torch.dtype) -> None:
    """transformers casts to the dtype that the config names, whatever the file holds."""
    if not config.is_file():
        return
    table = read_json(config)
    for key in ("dtype", "torch_dtype"):
        if key in table:
            table[key] = str(dtype).removeprefix("torch.")
    copy.unlink(missing_ok=True)
    with files.create_like(copy, config) as file:
        file.write(json.dumps(table, indent=2).encode())
