"""Terminal output: results on stdout, messages and progress on stderr, exit codes 0, 1, 2 and 130.

Colors follow rich: off where there is no terminal and under NO_COLOR. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from rekindle import files, spelling
from rekindle.cli.interrupt import pressed
from rekindle.report.words import printable

FINDINGS, BAD_INPUT, INTERRUPTED = 1, 2, 130
_COLORS = {"healthy": "green", "watch": "yellow", "act": "red", "unknown": "bright_black"}
_PATIENCE = 2.0  # seconds without a progress bar
_WIDE = 220  # columns where no terminal limits them: full layer names fit

# What the library's messages call something else where a command runs.
_ADVICE = {
    "layout": "give --config, --model or --plan",
    "layout tells": "--config, --model or --plan tells",
    "earlier": "give --reference, an earlier checkpoint",
    "meta model": "give --model instead",
    "remedy for dormancy": "recycle the dormant neurons (ReDo, continual backprop), or rekindle fire --biases zero",
}

P = ParamSpec("P")
R = TypeVar("R")


def reported(command: Callable[P, R]) -> Callable[P, R]:
    """A command that turns what goes wrong into one line on stderr: exit code 2 for bad input, 130 for Ctrl-C."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        _told.clear()
        try:
            # torch's warnings about an unusual pickle are hidden: the file is read, or refused with our own error.
            with warnings.catch_warnings(), spelling.options(_ADVICE):
                warnings.filterwarnings("ignore", category=UserWarning, module="torch")
                done = command(*args, **kwargs)
                heed()
                sys.stdout.flush()
                return done
        except BrokenPipeError:
            closed_pipe()
            raise typer.Exit(0) from None
        except KeyboardInterrupt:
            raise stopped() from None
        except Exception as error:
            if isinstance(error, typer.Exit | typer.Abort | typer.BadParameter) or "REKINDLE_TRACEBACK" in os.environ:
                raise
            if pressed:  # wrapped by a library
                raise stopped() from None
            say(_line(error), "error:", "bold red")
            raise typer.Exit(BAD_INPUT) from None

    return run


_told: list[str] = []  # whether Ctrl-C was reported, so that it is reported once


def stopped(message: str = "stopped") -> typer.Exit:
    """Report Ctrl-C once; the exit to raise."""
    if not _told:
        say(message)
        _told.append(message)
    return typer.Exit(INTERRUPTED)


def heed() -> None:
    """Stop if Ctrl-C was pressed and some library caught it."""
    if pressed:
        raise KeyboardInterrupt


def closed_pipe() -> None:
    """The reader of our output has closed the pipe (`… | head`): not an error, and nothing more is written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Pipe(Console):
    """A console whose reader may close the pipe: rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise BrokenPipeError


def _line(error: Exception) -> str:
    """The error in one line; an unexpected one says where to look."""
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    else:
        text = " ".join(str(error).split()) or type(error).__name__
    if "weights_only" in text:
        from rekindle.checkpoint.parts import without_unsafe_advice

        text = without_unsafe_advice(text) or "the file needs code to be read, which could be harmful"
    known = isinstance(error, ValueError | OSError | ImportError | TypeError) or type(error).__name__ == "MethodError"
    if not known:
        text = f"{type(error).__name__}: {text} (REKINDLE_TRACEBACK=1 shows where)"
    return printable(text)


def say(text: str, label: str = "", style: str = "") -> None:
    """A message on stderr, after a label in a style of rich.

    Brackets and control characters in it are shown as they are: names and paths of files may contain any.
    """
    console = _Pipe(stderr=True, highlight=False)
    words = Text(label, style)
    words.append(" " * bool(label) + "\n".join(map(printable, text.split("\n"))), "default")
    console.print(words, soft_wrap=not console.is_terminal)  # a log keeps one line per message


def note(text: str) -> None:
    """A remark on stderr that is no error."""
    say(text, "note:", "yellow")


def show(text: str) -> None:
    """A result as text on stdout; a line that holds a verdict is colored by it."""
    heed()
    console = _Pipe(soft_wrap=True, highlight=False)
    for line in text.splitlines():
        word = re.match(r"(?:! |.*?verdict: )?(healthy|watch|act|unknown)?", line)
        level = word[1] if word else None
        style = _COLORS[level] if level and "verdict" in line else "yellow" if line.startswith("! ") else None
        console.print(printable(line), style=style, markup=False)


def show_unchanged(text: str) -> None:
    """A result as text on stdout that rich does not touch: code, Markdown, columns."""
    heed()
    # typer.echo would write UTF-8 where the terminal's encoding is ASCII.
    sys.stdout.write("\n".join(map(printable, text.splitlines())) + "\n")


def show_rich(drawn: object) -> None:
    """Anything that rich draws, on stdout."""
    _Pipe(width=width(), highlight=False).print(drawn)


def show_json(data: Mapping[str, Any]) -> None:
    """JSON on stdout and nothing else."""
    heed()
    sys.stdout.write(as_json(data) + "\n")


def as_json(data: Mapping[str, Any], indent: int | None = 1) -> str:
    """Strict JSON: numbers that are not finite become null.

    >>> as_json({"a": float("inf")}, indent=None)
    '{"a": null}'
    """
    return json.dumps(_finite(data), indent=indent, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def width() -> int:
    """Columns to fill: the terminal's, or plenty."""
    return shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else _WIDE


@contextmanager
def progress(what: str, total: float, quiet: bool = False) -> Iterator[Callable[[float], None]]:
    """A bar with the time left on stderr, once the work has taken two seconds and only on a terminal.

    Yields a function that takes how much more was done.

    >>> with progress("measuring", 10) as advance:
    ...     advance(5)
    """
    heed()
    if quiet or not sys.stderr.isatty():
        yield lambda more: heed()
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn  # slow

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=max(total, 1e-9))
    start = time.monotonic()

    def advance(more: float) -> None:
        heed()
        bar.advance(task, more)
        if not bar.live.is_started and time.monotonic() - start > _PATIENCE:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()


@contextmanager
def share(what: str) -> Iterator[Callable[..., None]]:
    """A bar for work that says how much is done, and of how much.

    >>> with share("measuring") as tell:
    ...     tell(5, 10)
    """
    with progress(what, 1.0) as advance:
        seen = 0.0

        def tell(done: float, total: float, *_: object) -> None:
            nonlocal seen
            now = done / total if total else 1.0
            advance(now - seen)
            seen = now

        yield tell


def refuse_existing(path: Path, force: bool, *inputs: Path | None) -> None:
    """Before any work: refuse an output that exists, or whose folder does not, and always one that is an input.

    >>> refuse_existing(Path("/no/such/folder/x.html"), force=False)
    Traceback (most recent call last):
    ValueError: /no/such/folder is not a folder: cannot write x.html there
    """
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path.absolute().parent} is not a folder: cannot write {path.name} there")
    kind = files.kind_of(path)
    if kind not in ("", "file"):
        raise ValueError(f"{path} is a {kind}: give the name of a file")
    if kind and not force:
        raise ValueError(f"{path} is there already; --force overwrites it")
    for source in inputs if kind else ():
        if source is not None and source.exists() and (path.samefile(source) or _belongs_to(path, source)):
            raise ValueError(f"{path} is the input or a part of it: choose another name")


def _belongs_to(path: Path, folder: Path) -> bool:
    """Whether a file is one of those that make a folder a checkpoint."""
    if not folder.is_dir() or folder.resolve() not in path.resolve().parents:
        return False
    from rekindle.checkpoint.folders import is_replaceable

    return is_replaceable(path.name)
