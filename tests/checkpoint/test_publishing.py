"""What a job may replace, and what has to be as it was before anything is replaced."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkpoints import digest, leftovers, save_dcp, save_sharded, small_model
from rekindle import files
from rekindle.checkpoint import CheckpointError, fire_file, open_checkpoint, training_state


def make_folder(path: Path, shards: int = 1) -> Path:
    save_sharded(small_model().state_dict(), path, shards, config={"hidden": 16})
    return path


def everything(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Bytes, mode and time of all that a folder holds."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in sorted(folder.rglob("*")):
        state = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = content, state.st_mode, state.st_mtime_ns if content else 0
    return found


def during(monkeypatch: pytest.MonkeyPatch, action: Callable[[], Any]) -> None:
    """Something else happens while a job is at work."""
    after(monkeypatch, training_state, "reset", action)


def after(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, action: Callable[[], Any]) -> None:
    """Something else happens right after this function."""
    real = getattr(owner, name)

    def both(*args: Any) -> None:
        real(*args)
        action()

    monkeypatch.setattr(owner, name, both)


def refused(source: Path, folder: Path, place: Path, why: str) -> None:
    """The job ends with this error, and what somebody else has written stays."""
    with pytest.raises(CheckpointError, match=why):
        fire_file(source, folder / "out", force=True)
    assert place.read_bytes() == b"somebody else's"
    assert leftovers(folder) == []


def test_in_place_touches_only_the_files_in_which_a_weight_changes(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file(small_model().state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text("{}", "utf-8")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("ref", "utf-8")
    (folder / "model-q4.gguf").write_bytes(b"GGUF")
    (folder / "pytorch_model.bin").write_bytes(b"old")
    (folder / "empty").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "my.rekindle-notes.txt").write_text("mine", "utf-8")
    (folder / "model.safetensors").chmod(0o640)
    before = everything(folder)
    fire_file(folder, in_place=True)
    after = everything(folder)
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} == {"model.safetensors"}
    assert stat.S_IMODE((folder / "model.safetensors").stat().st_mode) == 0o640
    assert leftovers(tmp_path) == []


def test_in_place_leaves_shards_without_changes_as_they_are(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hf", shards=3)
    before = everything(folder)
    receipt = fire_file(folder, in_place=True, targets=["0.weight"])
    after = everything(folder)
    changed = {name for name in before if before[name] != after[name]}
    assert receipt.changed == ("0.weight",)
    assert changed == {"model-00001-of-00003.safetensors"}


def test_force_replaces_the_files_of_a_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    source, target = make_folder(tmp_path / "in", shards=2), make_folder(tmp_path / "out", shards=3)
    (target / "docs").mkdir()
    (target / "docs" / "thesis.tex").write_text("years of work", "utf-8")
    fire_file(source, target, force=True)
    assert (target / "docs" / "thesis.tex").read_text("utf-8") == "years of work"
    shards = sorted(path.name for path in target.glob("*.safetensors"))
    assert shards == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    with open_checkpoint(target) as checkpoint:
        assert len(checkpoint.names) == 6


def test_a_file_that_has_the_bytes_already_is_not_touched(tmp_path: Path) -> None:
    source, target = make_folder(tmp_path / "in"), make_folder(tmp_path / "out")
    before = everything(target)
    fire_file(source, target, force=True)
    after = everything(target)
    assert {name for name in before if before[name] != after[name]} == {"model-00001-of-00001.safetensors"}


def test_force_refuses_what_is_no_checkpoint(tmp_path: Path) -> None:
    source, file = make_folder(tmp_path / "in"), tmp_path / "in.safetensors"
    save_file(small_model().state_dict(), file)
    home = tmp_path / "home"
    (home / "docs").mkdir(parents=True)
    (home / "docs" / "thesis.tex").write_text("years of work", "utf-8")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        fire_file(source, home, force=True)
    assert (home / "docs" / "thesis.tex").read_text("utf-8") == "years of work"
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    for name in ("pipe", "socket"):
        with pytest.raises(CheckpointError, match=f"is a {name}"):
            fire_file(file, tmp_path / name, force=True)
    with pytest.raises(CheckpointError, match="is a device"):
        fire_file(file, Path("/dev/null"), force=True)
    notes = make_folder(tmp_path / "notes")
    (source / "NOTES.md").write_text("of the source", "utf-8")
    (notes / "NOTES.md").write_text("of the user", "utf-8")
    with pytest.raises(CheckpointError, match="no part of a checkpoint"):
        fire_file(source, notes, force=True)
    assert (notes / "NOTES.md").read_text("utf-8") == "of the user"
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("what", ["journal", "partial", "replaced"])
def test_a_link_with_a_working_name_is_never_written_through(what: str, tmp_path: Path) -> None:
    file, precious = tmp_path / "in.safetensors", tmp_path / "precious"
    save_file(small_model().state_dict(), file)
    precious.write_text("precious", "utf-8")
    (tmp_path / f".out.rekindle-{what}").symlink_to(precious)
    if what == "journal":
        with pytest.raises(CheckpointError, match="symbolic link"):
            fire_file(file, tmp_path / "out")
    else:
        fire_file(file, tmp_path / "out")
    assert precious.read_text("utf-8") == "precious"


FORMATS: dict[str, Callable[[Path], Any]] = {
    "safetensors": lambda path: save_file(small_model().state_dict(), path),
    "torch": lambda path: torch.save(small_model().state_dict(), path),
    "legacy": lambda path: torch.save(small_model().state_dict(), path, _use_new_zipfile_serialization=False),
    "sharded": make_folder,
    "dcp": lambda path: save_dcp({"model": small_model().state_dict()}, path),
}
DATA = {"sharded": "model-00001-of-00001.safetensors", "dcp": "__0_0.distcp"}


@pytest.mark.parametrize("when", ["at first", "at last"])
@pytest.mark.parametrize("how", ["replaced", "rewritten", "longer", "truncated"])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_source_that_changes_while_it_is_read_gives_no_output(
    kind: str, how: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "in"
    FORMATS[kind](source)
    file = source / DATA.get(kind, "")
    content = file.read_bytes()

    def change(*_: Any) -> None:
        os.utime(file, ns=(0, 0))  # so that the time differs even where clocks are coarse
        if how == "replaced":
            (tmp_path / "new").write_bytes(content)
            os.replace(tmp_path / "new", file)
        elif how == "truncated":
            os.truncate(file, 16)  # of a mapped file, reading further would end the process with SIGBUS
        else:
            file.write_bytes(content[:-4] + bytes(4) if how == "rewritten" else content + bytes(8))

    if when == "at last":
        during(monkeypatch, change)
    for options in ({"target": tmp_path / "out"}, {"in_place": True}):
        progress = {"progress": change} if when == "at first" else {}
        with pytest.raises(CheckpointError, match="changed while"):
            fire_file(source, **options, **progress)  # type: ignore[arg-type]
        assert not (tmp_path / "out").exists()
        file.write_bytes(content)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("how", ["another inode", "other bytes"])
def test_a_source_of_the_same_size_and_time_is_not_taken_for_the_same(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "in.safetensors"
    save_file(small_model().state_dict(), file)
    before, content = file.stat(), file.read_bytes()

    def change() -> None:
        if how == "another inode":
            (tmp_path / "new").write_bytes(content)
            os.replace(tmp_path / "new", file)
        else:
            file.write_bytes(content[:-4] + bytes(4))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    during(monkeypatch, change)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        fire_file(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_what_describes_the_weights_may_not_change_either(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "in", shards=2)
    during(monkeypatch, lambda: (folder / name).write_bytes((folder / name).read_bytes() + b" "))
    with pytest.raises(CheckpointError, match=f"{name}: changed while it was read"):
        fire_file(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["out", "out/model-00001-of-00002.safetensors", "out/config.json"])
def test_an_old_output_that_changes_while_a_job_runs_is_not_replaced(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, place = tmp_path / "in", tmp_path / name
    if name == "out":
        FORMATS["safetensors"](source)
        FORMATS["safetensors"](place)
    else:
        make_folder(source, shards=2)
        make_folder(tmp_path / "out", shards=2)
        (source / "config.json").write_bytes(b'{"hidden": 17}')
    during(monkeypatch, lambda: place.write_bytes(b"somebody else's"))
    refused(source, tmp_path, place, "changed while the job ran")


@pytest.mark.parametrize("folder", [False, True])
def test_a_name_that_is_taken_at_the_last_moment_is_not_replaced(
    folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rekindle.checkpoint.staging import Staging

    source, place = tmp_path / "in", tmp_path / "out"
    FORMATS["sharded" if folder else "safetensors"](source)
    if folder:  # one that is there, and has no such file yet
        place.mkdir()
        place = place / "config.json"
    after(monkeypatch, Staging, "_check_output", lambda: place.write_bytes(b"somebody else's"))
    refused(source, tmp_path, place, "appeared while the job ran")


@pytest.mark.parametrize("force", [False, True])
def test_a_target_that_appears_while_a_job_runs_stays(
    force: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, target = tmp_path / "in.safetensors", tmp_path / "out"
    save_file(small_model().state_dict(), file)
    during(monkeypatch, lambda: target.write_text("somebody else's", "utf-8"))
    with pytest.raises(CheckpointError, match="while the job ran"):
        fire_file(file, target, force=force)
    assert target.read_text("utf-8") == "somebody else's"
    assert leftovers(tmp_path) == []


def test_nobody_may_read_what_the_source_hides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "in", shards=2)
    folder.chmod(0o700)
    for path in folder.iterdir():
        path.chmod(0o600)
    seen: set[int] = set()

    def look() -> None:
        partial = tmp_path / ".out.rekindle-partial"
        seen.update(stat.S_IMODE(path.stat().st_mode) & 0o077 for path in (partial, *partial.rglob("*")))

    during(monkeypatch, look)
    fire_file(folder, tmp_path / "out")
    assert seen == {0}
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()} == {0o600}


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may give a file to a group")
@pytest.mark.parametrize("listed", [False, True], ids=["group", "access list"])
def test_another_group_may_not_read_what_only_its_own_could(listed: bool, tmp_path: Path) -> None:
    source = tmp_path / "in.pt"
    torch.save(small_model().state_dict(), source)
    source.chmod(0o640)
    if listed:  # user::rw-, user:12345:r--, group::---, mask::r--, other::---
        rights = ((0x01, 6, -1), (0x02, 4, 12345), (0x04, 0, -1), (0x10, 4, -1), (0x20, 0, -1))
        packed = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *one) for one in rights)
        try:
            os.setxattr(source, "system.posix_acl_access", packed)
        except OSError:
            pytest.skip("this file system has no access lists")
    else:
        os.chown(source, 0, 12345)
    fire_file(source, tmp_path / "out.pt")
    assert stat.S_IMODE((tmp_path / "out.pt").stat().st_mode) == 0o600
    fire_file(source, in_place=True)
    after = source.stat()
    assert (stat.S_IMODE(after.st_mode), after.st_gid) == ((0o600, 0) if listed else (0o640, 12345))


def test_links_stay_inside_or_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in")
    (folder / "latest.json").symlink_to("config.json")
    fire_file(folder, tmp_path / "out")
    assert os.readlink(tmp_path / "out" / "latest.json") == "config.json"
    (tmp_path / "secret").write_text("secret", "utf-8")
    (folder / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        fire_file(folder, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_snapshot_of_the_hub_cache_is_copied_as_files(tmp_path: Path) -> None:
    made = make_folder(tmp_path / "made")
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(made.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    fire_file(snapshot, tmp_path / "out")
    assert all(path.is_file() and not path.is_symlink() for path in (tmp_path / "out").iterdir())
    with pytest.raises(CheckpointError, match="symbolic link"):
        fire_file(snapshot, in_place=True)


def test_a_journal_that_is_another_name_of_a_file_is_refused(tmp_path: Path) -> None:
    save_file(small_model().state_dict(), tmp_path / "in")
    (tmp_path / "precious").write_text("precious", "utf-8")
    os.link(tmp_path / "precious", tmp_path / ".out.rekindle-journal")
    with pytest.raises(CheckpointError, match="one name"):
        fire_file(tmp_path / "in", tmp_path / "out")
    assert (tmp_path / "precious").read_text("utf-8") == "precious"


def test_a_journal_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(small_model().state_dict(), tmp_path / "in")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(CheckpointError, match="belongs to another user"):
        fire_file(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_lock_on_a_file_that_was_removed_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real, taken = tmp_path / "lock", files._take, []

    def take(handle: int) -> None:
        if not taken:
            path.unlink()  # the one who held it has finished, just before it is ours
        taken.append(handle)
        real(handle)

    monkeypatch.setattr(files, "_take", take)
    with files.lock(path) as mine:  # type: ignore[union-attr]
        assert os.path.samestat(os.fstat(mine.fileno()), path.stat())
    assert len(taken) == 2


@pytest.mark.parametrize("system", ["Linux", "no renameat2", "no links"])
def test_a_new_name_is_never_taken_from_another(system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if system != "Linux":
        monkeypatch.setattr(files.ctypes, "CDLL", lambda *_, **__: object())
    if system == "no links":
        monkeypatch.delattr(files.os, "link")
        monkeypatch.setattr(files.os, "link", lambda *_, **__: (_ for _ in ()).throw(OSError("none")), raising=False)
    (tmp_path / "a").write_text("new", "utf-8")
    (tmp_path / "b").write_text("old", "utf-8")
    with pytest.raises(FileExistsError):
        files.rename_new(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text("utf-8") == "old"
    files.rename_new(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c").read_text("utf-8") == "new"
    assert not (tmp_path / "a").exists()


def test_an_interrupt_between_two_exchanged_files_puts_the_first_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rekindle.checkpoint import staging

    folder, real, calls = make_folder(tmp_path / "in", shards=3), staging._swap, []
    before = digest(folder)

    def swap(*paths: Path) -> None:
        calls.append(paths)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(*paths)

    monkeypatch.setattr(staging, "_swap", swap)
    with pytest.raises(KeyboardInterrupt):
        fire_file(folder, in_place=True, include=["4.weight"])
    assert len(calls) > 2  # putting back is a swap too
    assert digest(folder) == before
    assert leftovers(tmp_path) == []
    assert torch.isfinite(open_checkpoint(folder).read("0.weight")).all()
