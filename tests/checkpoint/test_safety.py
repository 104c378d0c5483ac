"""What a crash, a full disk or a careless command can not do."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import kills
from checkpoints import digest, in_child, leftovers, save_dcp, save_sharded, small_model, stepped
from rekindle.checkpoint import CheckpointError, assembling, fire_file, firing, open_checkpoint, staging, training_state
from rekindle.checkpoint.journal import Journal
from rekindle.checkpoint.staging import Staging

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")


def make(kind: str, folder: Path) -> Path:
    model = small_model()
    if kind == "file":
        save_file(model.state_dict(), folder / "in.safetensors")
        return folder / "in.safetensors"
    if kind == "torch":
        optimizer = stepped(model, torch.optim.Adam(model.parameters()))
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "in.pt")
        return folder / "in.pt"
    if kind == "dcp":
        save_dcp({"model": model.state_dict()}, folder / "in")
    else:
        save_sharded(model.state_dict(), folder / "in")
    return folder / "in"


def steps_hooked(monkeypatch: pytest.MonkeyPatch, deadly: int) -> list[str]:
    """Count the steps of a job, and be killed before one of them."""
    seen: list[str] = []

    def hook(owner: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def step(*args: Any, **options: Any) -> Any:
            seen.append(name)
            if len(seen) == deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        monkeypatch.setattr(owner, name, step)

    for owner, name in (
        (assembling.OutputFiles, "stage"),
        (firing, "execute"),
        (training_state, "reset"),
        (Journal, "_append"),
        (Journal, "mark_finished"),
        (firing.FileStore, "write"),
        (Staging, "publish"),
        (staging.files, "sync_tree"),
        (staging, "_swap"),
        (staging.files, "rename_new"),
        (staging.files, "sync_folder"),
        (staging.os, "rename"),
        (staging.os, "link"),
        (Staging, "clear"),
        (staging.os, "replace"),
        (staging, "remove"),
    ):
        hook(owner, name)
    return seen


@pytest.mark.parametrize("old_output", [False, True])
@pytest.mark.parametrize("kind", ["file", "torch", "folder", "dcp"])
def test_killed_before_any_step_nothing_is_lost_and_resume_gives_the_same_bytes(
    kind: str, old_output: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firing, "BATCH", 300)  # one weight a batch
    monkeypatch.setattr(firing, "_SYNC_SECONDS", 0.0)
    source, target = make(kind, tmp_path), tmp_path / "out"
    untouched = digest(source)
    fire_file(source, tmp_path / "expected")
    expected = digest_contents(tmp_path / "expected")
    if old_output:
        fire_file(source, target, scale="nearest")
    before = digest(target) if old_output else None
    with monkeypatch.context() as patch:
        count = steps_hooked(patch, 0)
        fire_file(source, tmp_path / "counted", resume=True)
    assert len(count) > 15
    for deadly in range(1, len(count) + 6):
        if deadly % 5 and not (kind == "folder" and old_output):
            continue  # every step where an old folder is exchanged, some for the others

        def killed(deadly: int = deadly) -> None:
            with monkeypatch.context() as patch:
                steps_hooked(patch, deadly)
                fire_file(source, target, resume=True, force=True)

        if in_child(killed) == 0:
            break
        assert digest(source) == untouched
        if not (tmp_path / ".out.rekindle-replaced").exists():  # else files were being exchanged, and all are kept
            assert target.exists() or not old_output
            if target.exists():  # the old output, or all of the new one
                assert digest(target) == before or digest_contents(target) == expected
        fire_file(source, target, resume=True, force=True)
        assert digest_contents(target) == expected
        assert leftovers(tmp_path) == []
        staging.remove(target)
        if old_output:
            fire_file(source, target, scale="nearest")


def digest_contents(path: Path) -> str:
    with open_checkpoint(path) as checkpoint:
        return repr([(name, checkpoint.read(name).numpy().tobytes()) for name in checkpoint.names])


def test_killed_at_random_moments_a_larger_job_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firing, "BATCH", 1)
    monkeypatch.setattr(firing, "_SYNC_SECONDS", 0.05)
    generator = torch.Generator().manual_seed(0)
    tensors = {f"l{i}.q_proj.weight": torch.randn(384, 384, generator=generator) for i in range(16)}
    tensors |= {f"l{i}.up.bias": torch.randn(384 * 2000, generator=generator) for i in range(15)}  # 60 MB in all
    save_sharded(tensors, tmp_path / "in", shards=3)
    start = time.monotonic()
    assert in_child(lambda: fire_file(tmp_path / "in", tmp_path / "expected")) == 0
    seconds = time.monotonic() - start
    untouched = digest(tmp_path / "in")
    moments, noted, kills = random.Random(0), [0], 0
    for _ in range(6):
        wait = 0.1 * seconds + moments.uniform(0, 0.4 * seconds)
        code = in_child(lambda: fire_file(tmp_path / "in", tmp_path / "out", resume=True), after=wait)
        if code == 0:
            break
        kills += 1
        assert code == -signal.SIGKILL
        assert digest(tmp_path / "in") == untouched
        if (tmp_path / "out").exists():  # killed after its last step: then all of it is there
            break
        journal = tmp_path / ".out.rekindle-journal"
        noted.append(journal.read_text("utf-8").count('"batch"') if journal.exists() else 0)
    assert kills >= 1
    assert noted == sorted(noted)  # nothing that was done is done again
    done: list[int] = []
    if not (tmp_path / "out").exists():
        fire_file(tmp_path / "in", tmp_path / "out", resume=True, progress=lambda d, t, n: done.append(d))
    assert digest_contents(tmp_path / "out") == digest_contents(tmp_path / "expected")
    if leftovers(tmp_path):  # killed between its last step and tidying up, which the next job does
        fire_file(tmp_path / "in", tmp_path / "out", resume=True, force=True)
    assert leftovers(tmp_path) == []


def test_resume_starts_anew_when_anything_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firing, "BATCH", 300)
    monkeypatch.setattr(firing, "_SYNC_SECONDS", 0.0)
    source, target = make("file", tmp_path), tmp_path / "out"

    def killed() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(training_state, "reset", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            fire_file(source, target, resume=True)

    assert in_child(killed) == -signal.SIGKILL
    receipt = fire_file(source, target, resume=True, scale="nearest")
    fire_file(source, tmp_path / "expected", scale="nearest")
    assert digest_contents(target) == digest_contents(tmp_path / "expected")
    assert receipt.settings["scale"] == "nearest"


def test_a_resumed_receipt_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firing, "BATCH", 300)
    monkeypatch.setattr(firing, "_SYNC_SECONDS", 0.0)
    source = make("torch", tmp_path)
    whole = fire_file(source, tmp_path / "expected")

    def killed() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(training_state, "reset", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            fire_file(source, tmp_path / "out", resume=True)

    assert in_child(killed) == -signal.SIGKILL
    resumed = fire_file(source, tmp_path / "out", resume=True)
    assert resumed.records == whole.records
    assert resumed.skipped == whole.skipped
    assert resumed.optimizer == whole.optimizer


@pytest.mark.parametrize("kind", ["file", "torch", "folder", "dcp"])
def test_in_place_replaces_and_an_error_or_interrupt_leaves_nothing_behind(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(kind, tmp_path)
    untouched = digest(source)

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training_state, "reset", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fire_file(source, in_place=True)
    assert digest(source) == untouched
    assert list(tmp_path.iterdir()) == [source]
    with open_checkpoint(source) as checkpoint:
        old = checkpoint.read("0.weight").clone()
    fire_file(source, in_place=True)
    with open_checkpoint(source) as checkpoint:
        assert not torch.equal(checkpoint.read("0.weight"), old)
    assert list(tmp_path.iterdir()) == [source]


def test_never_overwrites_unasked(tmp_path: Path) -> None:
    source = make("file", tmp_path)
    folder = make("folder", tmp_path)
    untouched = digest(source)
    (tmp_path / "old").write_text("precious", "utf-8")
    (tmp_path / "link").symlink_to(source)
    for out, options, message in (
        (source, {}, "in_place"),
        (source, {"force": True}, "in_place"),
        (tmp_path / "link", {"force": True}, "symbolic link"),
        (tmp_path / "old", {}, "force"),
        (folder, {"force": True}, "folder"),
        (tmp_path / "no" / "where", {}, "no such folder"),
        (None, {}, "no output"),
        (tmp_path / "new", {"in_place": True}, "in_place"),
    ):
        with pytest.raises(CheckpointError, match=message):
            fire_file(source, out, **options)
    for inside in (folder / "inner", tmp_path):
        with pytest.raises(CheckpointError, match=r"inside each other|exists"):
            fire_file(folder, inside)
    with pytest.raises(CheckpointError, match="symbolic link"):
        fire_file(tmp_path / "link", in_place=True)
    assert digest(source) == untouched
    assert (tmp_path / "old").read_text("utf-8") == "precious"
    fire_file(source, tmp_path / "old", force=True)
    assert open_checkpoint(tmp_path / "old").format == "safetensors"
    assert leftovers(tmp_path) == []


def test_a_full_disk_is_found_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make("file", tmp_path)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match="GB are free"):
        fire_file(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [source]


def test_a_second_job_for_the_same_output_is_turned_away(tmp_path: Path) -> None:
    source = make("file", tmp_path)
    with Staging(tmp_path / "out").locked(), pytest.raises(CheckpointError, match="another rekindle"):
        fire_file(source, tmp_path / "out")
    fire_file(source, tmp_path / "out")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_memory_stays_far_below_the_checkpoint(kind: str, tmp_path: Path) -> None:
    tensors = {f"l{i}.q_proj.weight": torch.randn(512, 512) for i in range(4)}
    tensors |= {f"l{i}.up.bias": torch.zeros(1 << 21) for i in range(20)}  # 170 MB in all, the largest 8 MB
    file = tmp_path / "in"
    if kind == "torch":
        torch.save(tensors, file)
    else:
        save_file(tensors, file)
    del tensors

    def measured() -> None:
        before = anonymous()
        peak = [0]
        fire_file(file, tmp_path / "out", progress=lambda *_: peak.append(anonymous()))
        growth = max(peak) - before
        os._exit(0 if growth < 60e6 else 3)

    assert in_child(measured) == 0


def anonymous() -> int:
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def test_a_job_that_is_killed_at_its_end_and_resumed_is_noted_once(tmp_path: Path) -> None:
    source = make("file", tmp_path)

    def killed() -> None:
        real = Staging.publish
        Staging.publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment]
        fire_file(source, in_place=True, resume=True)
        Staging.publish = real  # type: ignore[method-assign]

    assert in_child(killed) == -signal.SIGKILL
    fire_file(source, in_place=True, resume=True)
    assert open_checkpoint(source).metadata["rekindle"].count('"job"') == 1


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_checksums_of_what_was_written_before_a_kill_are_refreshed_too(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firing, "BATCH", 1)
    monkeypatch.setattr(firing, "_SYNC_SECONDS", 0.0)
    kills.SOURCES[kind](tmp_path / "in", 0)
    fire_file(tmp_path / "in", tmp_path / "expected")

    def stopped(done: int, total: int, name: str) -> None:
        if done > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fire_file(tmp_path / "in", tmp_path / "out", resume=True, progress=stopped)
    fire_file(tmp_path / "in", tmp_path / "out", resume=True)
    assert kills.digest(tmp_path / "out") == kills.digest(tmp_path / "expected")
