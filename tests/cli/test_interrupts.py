"""Ctrl-C and pipes: a command that is stopped, or whose reader goes away, ends in one line or none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from command_line import as_user, checkpoint, own

__all__ = ["checkpoint", "own"]  # fixtures


def heeding_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def computed(process: subprocess.Popen[str]) -> float:
    """Seconds that a process has computed: a busy machine starts Python late, and no clock on the wall knows."""
    fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("after", [0.15, 0.5, 1.0])
def test_ctrl_c_is_one_line_at_any_moment(checkpoint: Path, after: float) -> None:
    # A file that never ends: whatever the moment, there is still work to do.
    os.mkfifo(checkpoint.with_name("endless.pt"))
    process = subprocess.Popen(
        [sys.executable, "-m", "rekindle", "inspect", checkpoint.with_name("endless.pt")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heeding_ctrl_c,
    )
    late = time.monotonic() + 20
    while computed(process) < after and time.monotonic() < late:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.strip()) == (130, "", "stopped")


def test_ctrl_c_while_text_is_executed_has_the_same_exit_code(own: Path) -> None:
    """Python takes a KeyboardInterrupt that left exec() for one that nobody caught."""
    (own / "slow.py").write_text(
        "exec('import os, signal; os.kill(os.getpid(), signal.SIGINT)')\nfrom mine import build\n", "utf-8"
    )
    done = as_user("fire", own / "net.pt", "-o", own / "new.pt", "--model", f"{own}/slow.py:build")
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "stopped")


def test_ctrl_c_that_a_library_catches_is_heard_all_the_same(own: Path) -> None:
    """As transformers does while it is being imported; a file that a user names stands for it."""
    caught = "import os, signal, time\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(5)\n"
    (own / "deaf.py").write_text(f"{caught}except KeyboardInterrupt:\n    pass\nfrom mine import build\n", "utf-8")
    (own / "asked.py").write_text("import deaf, mine\nmodel = deaf.build()\nbatches = list(mine.batches())\n", "utf-8")
    for command in (
        ("fire", own / "net.pt", "-o", own / "new.pt", "--model", f"{own}/deaf.py:build"),
        ("probe", own / "asked.py", "--steps", "9", "--seeds", "2"),
        ("advise", own / "asked.py", "--steps", "9", "--seeds", "2"),
    ):
        done = as_user(*command)
        assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "stopped"), command
    assert not (own / "new.pt").exists()


@pytest.mark.parametrize("command", ["inspect many.safetensors", "plan many.safetensors", "--help", "lab run --help"])
def test_a_reader_that_goes_away_is_no_error(tmp_path: Path, command: str) -> None:
    many = {f"layers.{i}.attn.q_proj.weight": torch.eye(4) for i in range(3000)}
    save_file(many, tmp_path / "many.safetensors")
    reader = "head -n 1" if "many" in command else "true"  # help fits into a pipe: its reader must be gone before
    line = f"cd {tmp_path} && {sys.executable} -m rekindle {command} | {reader}"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
