"""Writing to temporary names, and publishing under the lock when all is on the disk: no crash leaves part of a result.

A job on `model.safetensors` writes `.model.safetensors.rekindle-partial` (a folder if the checkpoint is one) and
`.model.safetensors.rekindle-journal`, which is also the lock, next to it. A new name is taken without replacing
anything. In a folder that exists, single files are exchanged: each old one is kept in `….rekindle-replaced` until the
last new one is in its place, and a job that was killed in between is undone by the next, which may then resume it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from rekindle import files
from rekindle.checkpoint.folders import beside
from rekindle.checkpoint.journal import Journal, lines
from rekindle.checkpoint.parts import CheckpointError
from rekindle.files import State, kind_of, state_of

_SPARE = 1 << 20
_OVER = ".rekindle-over"


class Staging:
    """The paths of one job, the lock that keeps out a second job for the same output, and what it may replace.

    `replaceable` holds the states at the start of what the result replaces: under "" that of an output that is a file,
    else those of files in the output folder, None for a name that was free. It is None for a new output.

    >>> Staging(Path("out/model.safetensors")).partial.name
    '.model.safetensors.rekindle-partial'
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.partial, self.journal = beside(target, "partial"), beside(target, "journal")
        self.replaced = beside(target, "replaced")
        self.replaceable: dict[str, State | None] | None = None
        self.removed: tuple[str, ...] = ()
        self.file: BinaryIO | None = None

    @contextmanager
    def locked(self) -> Iterator[Staging]:
        """The lock, which ends with its process; an exchange that a killed job left unfinished is undone."""
        if not self.target.name or self.target.name == "..":
            raise CheckpointError(f"{self.target}: give the output a name")
        if not self.target.parent.is_dir():
            raise CheckpointError(f"{self.target.parent}: there is no such folder to write to")
        try:
            self.file = files.lock(self.journal, 0o600)
            if self.file is None:
                raise CheckpointError(f"{self.target}: another rekindle is writing this output right now")
            if hasattr(os, "geteuid") and os.fstat(self.file.fileno()).st_uid != os.geteuid():
                raise CheckpointError(f"{self.journal}: belongs to another user: remove it")
            self.undo()
            yield self
        finally:
            try:
                self._release()
            finally:
                self._release()  # what an interrupt has left over

    def _release(self) -> None:
        if self.file is None or self.file.closed:
            return
        over = not os.fstat(self.file.fileno()).st_size  # no job that could be resumed
        if over and os.name != "nt":
            self.journal.unlink(missing_ok=True)
        self.file.close()
        if over and os.name == "nt":  # where an open file cannot be removed, nor one that another has opened since
            with suppress(OSError):
                self.journal.unlink()

    def clear(self, *, journal: bool = True) -> None:
        """Remove the files of this job, or of an earlier killed one; the journal last, empty until the lock ends."""
        remove(self.partial)
        if journal and self.file is not None:
            self.file.truncate(0)

    def discard(self) -> None:
        """Put back what was exchanged, and remove the files of a failed job."""
        self.undo()
        self.clear()

    def staged_names(self) -> list[str]:
        """The files to put into an output folder: those that equal what is there are not touched."""
        found = [path for path in self.partial.rglob("*") if kind_of(path) in ("file", "symbolic link")]
        names = sorted(path.relative_to(self.partial).as_posix() for path in found)
        return [name for name in names if not same_content(self.partial / name, self.target / name)]

    def publish(self, journal: Journal, check: Callable[[], None]) -> None:
        """Give the result its name, after `check` and after the output was found to be what it was at the start."""
        exchanged = kind_of(self.target) == "folder" and self.replaceable is not None
        files.sync_tree(self.partial)
        names = self.staged_names() if exchanged else [""]
        journal.mark_finished(self.partial, names, [name for name in names if not kind_of(self.target / name)])
        check()
        self._check_output([*names, *self.removed])
        if exchanged:
            self._exchange(names)
        elif self.replaceable is None:
            _take_free(self.partial, self.target)
        else:
            files.take_over(self.partial, self.target)
            os.replace(self.partial, self.target)
        files.sync_folder(self.target.parent)
        self.clear()

    def _check_output(self, names: Iterable[str]) -> None:
        for name in names:
            place = self.target / name if name else self.target
            expected = self.replaceable.get(name) if self.replaceable is not None else None
            if state_of(place) != expected:
                raise CheckpointError(f"{place}: changed while the job ran; nothing was replaced")

    def _exchange(self, names: Iterable[str]) -> None:
        files.folder_like(self.replaced, self.target)
        for name in names:
            new, place = self.partial / name, self.target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if (self.replaceable or {}).get(name) is None:
                _take_free(new, place)
            else:
                files.take_over(new, place)
                _swap(new, place, self.replaced / name)
        for name in self.removed:
            (self.replaced / name).parent.mkdir(parents=True, exist_ok=True)
            os.rename(self.target / name, self.replaced / name)
        files.sync_tree(self.target)
        os.rename(self.replaced, self.partial / _OVER)  # the moment from which the new version counts

    def undo(self) -> None:
        """Put every exchanged file back, and the new ones where `resume` finds them."""
        if kind_of(self.replaced) != "folder":
            return
        assert self.file is not None
        finished = (line for line in lines(self.file) if "finished" in line)
        last: dict[str, Any] = next(finished, {"finished": {}, "new": []})
        for old in sorted(path for path in self.replaced.rglob("*") if kind_of(path) in ("file", "symbolic link")):
            name = old.relative_to(self.replaced).as_posix()
            now, place = state_of(self.target / name), self.target / name
            if now is None:
                files.rename_new(old, place)
            elif os.path.samestat(old.lstat(), place.lstat()):
                old.unlink()  # both names were there when the job was killed
            elif now.inode == last["finished"].get(name):
                _swap(old, place, self.partial / name)
            else:
                raise CheckpointError(
                    f"{place}: changed after a job that was interrupted; what it was before that job is {old}: move "
                    "one of them away"
                )
        for name in last["new"]:
            state = state_of(self.target / name)
            if state is not None and state.inode == last["finished"].get(name):
                files.rename_new(self.target / name, self.partial / name)
        remove(self.replaced)


def _take_free(new: Path, place: Path) -> None:
    """Give a result a name that was free when it was looked at."""
    try:
        files.rename_new(new, place)
    except FileExistsError:
        raise CheckpointError(f"{place}: appeared while the job ran; nothing was replaced") from None


def _swap(new: Path, place: Path, keep: Path) -> None:
    """Put a file into its place; the old one is kept under another name, and the place is never empty."""
    keep.parent.mkdir(parents=True, exist_ok=True)
    if not kind_of(keep):
        try:
            os.link(place, keep)
        except OSError:  # a file system without hard links
            os.rename(place, keep)
    os.replace(new, place)


def same_content(one: Path, other: Path) -> bool:
    """Whether two names are plain files with the same bytes, or links with the same text."""
    kinds = {kind_of(one), kind_of(other)}
    if kinds == {"symbolic link"}:
        return os.readlink(one) == os.readlink(other)
    if kinds != {"file"} or one.stat().st_size != other.stat().st_size:
        return False
    with one.open("rb") as first, other.open("rb") as second:
        while piece := first.read(1 << 22):
            if piece != second.read(1 << 22):
                return False
    return True


def check_space(folder: Path, needed: int, already: int = 0) -> None:
    """Refuse a job that the disk cannot hold."""
    free = shutil.disk_usage(folder).free
    if needed + _SPARE > free + already:
        raise CheckpointError(f"{folder}: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free on this disk")


def allocated(path: Path) -> int:
    """Bytes on the disk that a file or folder takes, 0 if it is not there."""
    inside = path.rglob("*") if path.is_dir() else [path]
    states = [file.stat() for file in inside if file.is_file()]
    return sum(state.st_blocks * 512 if hasattr(state, "st_blocks") else state.st_size for state in states)


def remove(path: Path) -> None:
    """Delete a file or folder if it is there."""
    if kind_of(path) == "folder":
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
