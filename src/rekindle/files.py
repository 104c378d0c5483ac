"""The one way to create, lock and publish a file.

A new file is created exclusively, never through a link, with its final mode from the beginning. What exists is replaced
by renaming a whole file over it; a name that must be new is taken without replacing. Locks end with their process. The
standard library alone: checkpoints, pages, plans and the laboratory's store all come here.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL
_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
_LOCK_AT = 1 << 40  # a lock on Windows covers bytes, which nobody else could read then: one far beyond the end


class State(NamedTuple):
    """What tells one version of a file from another."""

    device: int
    inode: int
    size: int
    modified: int

    @classmethod
    def of(cls, state: os.stat_result) -> State:
        """From what the system says; the size and time of a folder are those of its list of names, which may change."""
        folder = stat.S_ISDIR(state.st_mode)
        return cls(state.st_dev, state.st_ino, 0 if folder else state.st_size, 0 if folder else state.st_mtime_ns)


def state_of(path: Path) -> State | None:
    """The state of what has this name, the link itself if it is one; None if nothing has it."""
    try:
        return State.of(path.lstat())
    except (FileNotFoundError, NotADirectoryError):
        return None


def kind_of(path: Path) -> str:
    """What has this name: "", "file", "folder", "symbolic link", "device", "pipe" or "socket".

    >>> kind_of(Path("/no/such/file")), kind_of(Path(os.sep))
    ('', 'folder')
    """
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "symbolic link"}
    kinds |= {stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device")


def create(path: Path, mode: int = 0o666) -> BinaryIO:
    """A new file, open for reading and writing; an error if anything has the name already, be it a dangling link.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, create(Path(folder, "a"), 0o600) as file:
    ...     file.write(b"text"), stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600 or os.name == "nt"
    (4, True)
    """
    return os.fdopen(os.open(path, _NEW | _SAFE, mode), "w+b")


def create_like(path: Path, model: Path) -> BinaryIO:
    """A new file that nobody may read who may not read `model`; its owner may write it."""
    return create(path, _mode_like(model, path.parent) | 0o600)


def _mode_like(model: Path, parent: Path) -> int:
    """The mode of a file, without that of its group where a new one in this folder belongs to another."""
    state, folder = model.stat(), parent.stat()
    mode = stat.S_IMODE(state.st_mode) & 0o777
    if not hasattr(os, "getegid"):
        return mode
    group = folder.st_gid if folder.st_mode & stat.S_ISGID else os.getegid()
    return mode if group == state.st_gid and not _has_list(model) else mode & ~0o070


def _has_list(path: Path) -> bool:
    """Whether a list says who may read it: then the mode of the group is the most that anybody in the list may."""
    try:
        return "system.posix_acl_access" in os.listxattr(path)
    except (OSError, AttributeError):
        return False


def take_over(path: Path, old: Path) -> None:
    """Give a file the mode of another that it is about to replace, and its owner where this user may."""
    found = old.stat()
    mode = stat.S_IMODE(found.st_mode)
    if hasattr(os, "chown"):
        with suppress(PermissionError):
            os.chown(path, found.st_uid, found.st_gid)
        if path.stat().st_gid != found.st_gid or _has_list(old):
            mode &= ~0o070
    path.chmod(mode)


def folder_like(path: Path, model: Path) -> None:
    """A new folder that nobody may enter who may not enter `model`."""
    path.mkdir(_mode_like(model, path.parent) | 0o700)


def lock(path: Path, mode: int = 0o666) -> BinaryIO | None:
    """The file, created if needed, with an exclusive lock that lasts until it is closed; None while another has it.

    A file that was removed or replaced before the lock was ours guards nothing: then the next one is taken. A link is
    refused.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, lock(Path(folder, "a")) as first:
    ...     lock(Path(folder, "a")) is None
    True
    """
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | _SAFE, mode)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise OSError(errno.ELOOP, "is a symbolic link: remove it", str(path)) from None
        file = os.fdopen(handle, "r+b")
        mine, named = os.fstat(handle), None
        if not stat.S_ISREG(mine.st_mode) or mine.st_nlink > 1:  # a second name may be a file of the user's
            file.close()
            raise OSError(errno.EINVAL, "is not a plain file with one name: remove it", str(path))
        try:
            _take(handle)
        except OSError:
            file.close()
            return None
        with suppress(FileNotFoundError):
            named = path.lstat()
        if named is not None and os.path.samestat(mine, named):
            return file
        file.close()


def _take(handle: int) -> None:
    try:
        import fcntl
    except ImportError:
        import msvcrt

        os.lseek(handle, _LOCK_AT, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
        os.lseek(handle, 0, os.SEEK_SET)
    else:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def rename_new(one: Path, other: Path) -> None:
    """Give a file or folder a name that nothing has; `FileExistsError` if something has it, also since just now."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):  # not Linux
        rename = None
    if rename is not None:
        if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_NOREPLACE) == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS):  # this file system cannot
            raise OSError(number, os.strerror(number), str(other))
    if kind_of(other):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(other))
    if kind_of(one) == "folder":
        one.rename(other)  # never replaces a file or a folder that holds anything
        return
    try:
        os.link(one, other, follow_symlinks=False)
    except FileExistsError:
        raise
    except (OSError, NotImplementedError):
        one.rename(other)  # no hard links here: what appeared since the check above is replaced
    else:
        one.unlink()


@contextmanager
def replacing(path: Path, *, overwrite: bool = True, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A binary file that gets the name `path` when all went well and is on the disk, and else leaves nothing behind.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(Path(folder, "a")) as file:
    ...         _ = file.write(b"whole")
    ...     [(entry.name, entry.read_bytes()) for entry in Path(folder).iterdir()]
    [('a', b'whole')]
    """
    check_replaceable(path, overwrite)
    beside = path.with_name(f".{path.name[:200]}.{os.urandom(6).hex()}.part")
    with create(beside, mode) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            file.close()
            if overwrite:
                check_replaceable(path, overwrite)
                os.replace(beside, path)
            else:
                rename_new(beside, path)
        except BaseException:
            file.close()
            beside.unlink(missing_ok=True)
            raise


def check_replaceable(path: Path, overwrite: bool) -> None:
    """Refuse what is not a plain file: a folder, a link, a device; and any file unless `overwrite`."""
    kind = kind_of(path)
    if kind not in ("", "file"):
        raise IsADirectoryError(errno.EISDIR, f"is a {kind}: give the name of a file", str(path))
    if kind and not overwrite:
        raise FileExistsError(errno.EEXIST, "is there already", str(path))


def write(path: Path | str, content: str | bytes, *, overwrite: bool = True) -> None:
    """Write a file whole or not at all; text as UTF-8."""
    with replacing(Path(path), overwrite=overwrite) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def sync_tree(path: Path) -> None:
    """Flush a file, or a folder with all its files, to the disk."""
    kind = kind_of(path)
    if kind == "folder":
        for inner in path.iterdir():
            sync_tree(inner)
        sync_folder(path)
    elif kind == "file":
        with path.open("r+b" if os.name == "nt" else "rb") as file:  # Windows flushes what may be written only
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
