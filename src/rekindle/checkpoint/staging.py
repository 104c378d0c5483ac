"""Writing to a temporary name and renaming at the end, so that no crash leaves a partial checkpoint.

A job on `model.safetensors` writes `.model.safetensors.rekindle-partial` (a folder if the checkpoint is one) and
`.model.safetensors.rekindle-journal` next to it. The partial is renamed when everything in it is on the disk.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import torch

from rekindle.checkpoint.folders import read_json
from rekindle.checkpoint.opening import Checkpoint
from rekindle.checkpoint.parts import CheckpointError, stored_as

_SPARE = 1 << 20
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class Staging:
    """The paths of one job, and the lock that keeps out a second job for the same output.

    >>> Staging(Path("out/model.safetensors")).partial.name
    '.model.safetensors.rekindle-partial'
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.partial = target.with_name(f".{target.name}.rekindle-partial")
        self.journal = target.with_name(f".{target.name}.rekindle-journal")
        self.replaced = target.with_name(f".{target.name}.rekindle-replaced")
        self.locked = False  # whether the job is ours, and its leftover files too
        self._lock: IO[bytes] | None = None

    def lock(self) -> None:
        """Acquire the lock; it ends with its process, so that a killed job does not block the next."""
        try:
            import fcntl
        except ImportError:  # Windows
            self.locked = True
            return
        file = self.journal.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._lock, self.locked = file, True
        except OSError:
            file.close()
            raise CheckpointError(f"{self.target}: another rekindle is writing this output right now") from None

    def release(self) -> None:
        """Release the lock."""
        self.locked = False
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def discard(self) -> None:
        """Remove the files of a failed job, also if Ctrl-C came between creating and acquiring the lock."""
        if not self.locked:
            try:
                self.lock()
            except CheckpointError:
                return  # another job's, which is running
        self.clear()

    def clear(self, *, journal: bool = True) -> None:
        """Remove the files of this job, or of an earlier killed one."""
        remove(self.partial)
        if self.target.exists():  # otherwise it is the only copy: see `publish`
            remove(self.replaced)
        if journal:
            remove(self.journal)

    def recover(self) -> None:
        """Restore an old output that was moved away when `publish` was killed between its two renames."""
        if self.replaced.exists() and not self.target.exists():
            self.lock()  # another job may be between its two renames right now
            try:
                if self.replaced.exists() and not self.target.exists():
                    os.replace(self.replaced, self.target)
            finally:
                self.release()

    def publish(self) -> None:
        """Give the finished partial its final name; an old output stays until the new one is in its place."""
        sync_tree(self.partial)
        if not self.target.is_dir():
            os.replace(self.partial, self.target)
        elif not _exchange(self.partial, self.target):
            os.replace(self.target, self.replaced)
            os.replace(self.partial, self.target)
        sync_folder(self.target.parent)
        self.clear()


def check_target(source: Path, target: Path, *, force: bool, in_place: bool) -> None:
    """Refuse an output that would destroy something, before anything is written."""
    if not target.name or target.name in (".", ".."):
        raise CheckpointError(f"{target}: give the output a name")
    if in_place:
        if not target.exists() or not os.path.samefile(source, target):
            raise CheckpointError("in_place writes to the input itself: leave the output out, or leave in_place out")
        if target.is_symlink():
            raise CheckpointError(f"{target}: a symbolic link; in place would replace the link: give the real path")
        return
    if target.exists():
        if os.path.samefile(source, target):
            raise CheckpointError(f"{target}: output and input are the same; say --in-place (in_place=True) to mean it")
        if not force:
            raise CheckpointError(f"{target}: exists already; --force (force=True) replaces it")
        if target.is_dir() != source.is_dir():
            kind = "folder" if target.is_dir() else "file"
            raise CheckpointError(f"{target}: is a {kind} and the input is not: choose another output")
        if target.is_symlink():
            raise CheckpointError(f"{target}: is a symbolic link: give the real path")
    if not target.parent.is_dir():
        raise CheckpointError(f"{target.parent}: there is no such folder to write to")
    real_source, real_target = source.resolve(), target.resolve()
    if real_source.is_dir() and (real_source in real_target.parents or real_target in real_source.parents):
        raise CheckpointError(f"{target}: output and input folder lie inside each other")


def check_space(folder: Path, needed: int, already: int = 0) -> None:
    """Refuse a job that the disk cannot hold."""
    free = shutil.disk_usage(folder).free
    if needed + _SPARE > free + already:
        raise CheckpointError(f"{folder}: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free on this disk")


def allocated(path: Path) -> int:
    """Bytes on the disk that a file or folder takes, 0 if it is not there."""
    files: Iterable[Path] = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_blocks * 512 for file in files if file.is_file())


def remove(path: Path) -> None:
    """Delete a file or folder if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_tree(path: Path) -> None:
    """Flush a file, or a folder with all its files, to the disk."""
    if path.is_dir():
        for inner in path.iterdir():
            sync_tree(inner)
        sync_folder(path)
    else:
        with path.open("rb") as file:
            os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to the disk."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step, where the system can (Linux): a folder cannot be renamed over another."""
    try:
        swap = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    return bool(swap(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


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
