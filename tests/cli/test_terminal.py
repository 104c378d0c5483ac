"""How the command line behaves: one line for bad input, colors, progress, completion, Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from command_line import checkpoint, one_line, run
from rekindle import cli, files
from rekindle.cli import terminal

__all__ = ["checkpoint"]  # a fixture


# Bad input


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"\x00" * 64, b"\xff" * 8 + b"{}", b"PK\x03\x04broken", b"\x10\0\0\0\0\0\0\0{}", b"\x80\x04}."],
)
@pytest.mark.parametrize("command", ["inspect", "plan", "fire"])
def test_broken_files_give_one_line(tmp_path: Path, content: bytes, command: str) -> None:
    for name in ("model.safetensors", "model.pt"):
        (tmp_path / name).write_bytes(content)
        more = ("-o", tmp_path / "out.safetensors") if command == "fire" else ()
        one_line(run(command, tmp_path / name, *more))
        assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out")) == []


def test_a_truncated_file_gives_one_line(checkpoint: Path) -> None:
    whole = checkpoint.read_bytes()
    for cut in (4, 100, len(whole) - 5):
        checkpoint.write_bytes(whole[:cut])
        one_line(run("inspect", checkpoint))


@pytest.mark.parametrize(
    "arguments",
    [
        ("--scale", "nonsense"),
        ("--targets", "no.such.layer"),
        ("--strength", "2"),
        ("--plan", "missing.json"),
        ("--config", "missing.json"),
        ("--dtype", "int8"),
        ("--steps", "3"),
        ("--html", "/no/such/folder/x.html"),
    ],
)
def test_bad_options_give_one_line_and_no_output(checkpoint: Path, tmp_path: Path, arguments: tuple[str, str]) -> None:
    if arguments[0] == "--steps":
        arguments = (*arguments, "--plan", str(checkpoint))  # type: ignore[assignment]
    one_line(run("fire", checkpoint, "-o", tmp_path / "out.safetensors", *arguments))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_file_without_a_sure_matrix_says_what_helps(tmp_path: Path) -> None:
    torch.save({"0.weight": torch.randn(8, 1, 3, 3)}, tmp_path / "net.pt")
    line = one_line(run("inspect", tmp_path / "net.pt"))
    assert "groups of a convolution" in line
    assert "--plan" in line


def test_hostile_names_do_not_steer_the_terminal(tmp_path: Path) -> None:
    save_file({"a\x1b[2J\u202e.weight": torch.eye(4), "b.weight": torch.eye(4)}, tmp_path / "x.safetensors")
    for command in ("inspect", "plan"):
        result = run(command, tmp_path / "x.safetensors")
        assert result.exit_code == 0, result.output
        assert "\x1b" not in result.output
        assert "\u202e" not in result.output
    assert "[/]" in run("inspect", tmp_path / "[/] no such").stderr


# The terminal


def test_no_color_where_none_is_wanted(checkpoint: Path) -> None:
    worn = run("inspect", checkpoint, FORCE_COLOR="1")
    assert "\x1b[" in worn.stdout
    assert "\x1b[3" not in run("inspect", checkpoint, FORCE_COLOR="1", NO_COLOR="1").stdout
    assert "\x1b" not in run("inspect", checkpoint).stdout


class Terminal:
    """A stream that says it is a terminal and keeps what is written."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError


def test_progress_shows_the_time_left_on_slow_work_only(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with terminal.progress("measuring", 10) as advance:
        advance(5)
    assert "measuring" not in stream.text
    monkeypatch.setattr(terminal, "_PATIENCE", 0.0)
    with terminal.progress("measuring", 10) as advance:
        advance(5)
        time.sleep(0.3)
        advance(1)
    assert "measuring" in stream.text
    assert "60%" in stream.text
    assert ":" in stream.text.partition("60%")[2], "no time left"


def test_progress_is_quiet_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "_PATIENCE", 0.0)
    with terminal.progress("measuring", 10) as advance:
        advance(5)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old", "utf-8")

    def interrupted() -> None:
        with files.replacing(tmp_path / "a.txt") as handle:
            handle.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text("utf-8") == "old"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_libraries_it_says_how_to_get_them(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert 'pip install "torch-rekindle[cli]"' in capsys.readouterr().err


# As a user


def as_user(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rekindle", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        preexec_fn=heeding_ctrl_c,
    )


def heeding_ctrl_c() -> None:
    """What a shell starts in the background ignores SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_shell_completion() -> None:
    process = as_user(_REKINDLE_COMPLETE="complete_bash", COMP_WORDS="rekindle in", COMP_CWORD="1")
    assert process.communicate(timeout=60)[0].split() == ["inspect"]


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    large = {f"layers.{i}.q_proj.weight": torch.randn(1024, 1024, generator=generator) for i in range(24)}
    save_file(large, tmp_path / "large.safetensors")
    process = as_user("fire", tmp_path / "large.safetensors", "-o", tmp_path / "out.safetensors", "--yes")
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) == 1 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.poll() is None, "it was done before it could be interrupted"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["large.safetensors"]


@pytest.mark.parametrize("name", ["out[red].safetensors", "a[/b].safetensors", "[bold]x[/bold].safetensors"])
def test_names_with_brackets_are_shown_as_they_are(name: str, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "-".join(name.split("/"))
    result = run("fire", checkpoint, "-o", out)
    assert result.exit_code == 0, result.stderr
    assert f"written: {out}" in result.stderr
    missing = run("inspect", tmp_path / f"no{name}")
    assert missing.exit_code == 2
    assert name.rpartition("/")[2] in missing.stderr.replace("\n", "")


def test_a_slash_in_brackets_is_no_markup(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "a[").mkdir()
    out = tmp_path / "a[" / "b].safetensors"
    result = run("fire", checkpoint, "-o", out)
    assert result.exit_code == 0
    assert f"written: {out}" in result.stderr
