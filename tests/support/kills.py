"""Kills of `rekindle fire` at random moments, and pairs of commands at once: what is there afterwards?

A command runs in a fork of this process, which has torch loaded, so that a kill costs milliseconds instead of seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from checkpoints import leftovers, save_dcp, save_sharded, small_model
from damage import contents, not_projected, training_state

SOURCES: dict[str, Callable[[Path, int], Any]] = {
    "safetensors": lambda path, seed: save_file(small_model(seed, 24).state_dict(), path),
    "torch": lambda path, seed: torch.save(training_state(), path),
    "legacy": lambda path, seed: torch.save(small_model(seed).state_dict(), path, _use_new_zipfile_serialization=False),
    "sharded": lambda path, seed: save_sharded(small_model(seed).state_dict(), path, 3),
    "dcp": lambda path, seed: save_dcp({"model": small_model(seed).state_dict()}, path),
}


def digest(path: Path) -> str:
    """Every byte of a file, or every name and byte of a folder."""
    inside = {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}
    return hashlib.sha256(repr(inside).encode() if path.is_dir() else path.read_bytes()).hexdigest()


def numbers(path: Path) -> str:
    """The tensors of a checkpoint as other software reads them; in place, not every header tells of the job."""
    weights, states = contents(path)
    return hashlib.sha256(
        pickle.dumps(({name: value.tolist() for name, value in weights.items()}, str(states)))
    ).hexdigest()


def start(*arguments: object) -> int:
    """`rekindle ARGUMENTS` in a fork; its process number."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            torch.set_num_threads(1)
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            asked = ["--yes", "--scale", "paper"] if arguments[0] == "fire" else []  # `not_projected` knows that scale
            sys.argv = ["rekindle", *map(str, arguments), *asked]
            from rekindle.checkpoint import firing
            from rekindle.cli import main

            firing.BATCH, firing._SYNC_SECONDS = 1, 0.0  # every weight is noted: a resumed job has something to skip
            main()
            code = 0
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 1
        finally:
            os._exit(code)
    return child


def ended(child: int) -> int:
    """The exit code of a fork; minus the signal if it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(*arguments: object) -> int:
    return ended(start(*arguments))


class KillCase:
    """One job that is killed once or several times and then resumed, or started anew.

    `way`: "new" output, an old one replaced by "force", or "in place".
    """

    WAYS = ("new", "force", "in place")

    def __init__(self, kind: str, way: str, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.kind, self.way, self.folder = kind, way, folder
        self.source, self.out, self.expected = folder / "in", folder / "out", folder / "expected"
        SOURCES[kind](self.source, 0)
        if way == "in place":  # a copy: the name of a torch file is in it
            (shutil.copytree if self.source.is_dir() else shutil.copy2)(self.source, self.expected)
        begin = time.monotonic()
        assert (
            run("fire", *([self.expected, "--in-place"] if way == "in place" else [self.source, "-o", self.expected]))
            == 0
        )
        self.seconds = time.monotonic() - begin
        self.old = folder / "old"
        SOURCES[kind](self.old, 1)
        self.before, self.after = digest(self.source), digest(self.expected)
        self.target = self.source if way == "in place" else self.out

    def command(self, *more: str) -> list[object]:
        where = ["--in-place"] if self.way == "in place" else ["-o", self.out, *(["--force"] * (self.way == "force"))]
        return ["fire", self.source, *where, *more]

    def tried(self, draw: random.Random) -> tuple[int, str]:
        """(kills that met the job, what is wrong)."""
        work, resumed = self.folder / "work", draw.random() < 0.85
        shutil.copytree(self.folder, work, ignore=shutil.ignore_patterns("work", "expected"), symlinks=True)
        here = KillCase.__new__(KillCase)
        here.__dict__.update(self.__dict__)
        here.source, here.out, here.old = work / "in", work / "out", work / "old"
        if self.way == "force":
            here.old.rename(here.out)
        here.target = here.source if self.way == "in place" else here.out
        try:
            return here._killed(draw, ["--resume"] if resumed else [])
        finally:
            shutil.rmtree(work)

    def _killed(self, draw: random.Random, more: list[str]) -> tuple[int, str]:
        old = digest(self.target) if self.target.exists() else None
        kills = 0
        for _ in range(draw.choice((1, 1, 2, 3))):
            child = start(*self.command(*more))
            time.sleep(draw.uniform(0, 1.1 * self.seconds))
            os.kill(child, signal.SIGKILL)
            killed = ended(child) == -signal.SIGKILL
            kills += killed
            if self.way != "in place" and digest(self.source) != self.before:
                return kills, "the source was lost"
            if why := self._half_done(old):
                return kills, why
            applied = self.way == "in place" and digest(self.source) == self.after
            if not killed or self._done() or (applied and not more):  # started anew, it would be applied twice
                break
        if not self._done() and not (applied and not more) and (code := run(*self.command(*more))) != 0:
            return kills, f"the job could not be finished: exit code {code}"
        if digest(self.target) != self.after:
            return kills, "the result differs from that of an uninterrupted job"
        left = leftovers(self.target.parent)
        journal = self.target.with_name(f".{self.target.name}.rekindle-journal")
        if left and not (applied and not more) and not (left == [journal.name] and not journal.stat().st_size):
            return kills, f"left behind: {left}"
        return kills, ""

    def _done(self) -> bool:
        """The new version is there and no journal says that anything is left to do."""
        journal = self.target.with_name(f".{self.target.name}.rekindle-journal")
        over = not journal.exists() or not journal.stat().st_size
        return over and self.target.exists() and digest(self.target) == self.after

    def _half_done(self, old: str | None) -> str:
        """A result is whole, old or new; while single files are exchanged, the old ones are kept beside it."""
        if self.target.with_name(f".{self.target.name}.rekindle-replaced").exists():
            return "" if run("inspect", self.target) == 2 else "a folder in exchange was read"
        now = digest(self.target) if self.target.exists() else None
        return "" if now in (old, self.after) else "the output is neither the old nor the new one"


class PairCase:
    """Two commands at once on the same names."""

    WAYS = ("one output", "one output with force", "in place twice", "in place while read", "output read", "one plan")

    def __init__(self, kind: str, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.kind, self.folder = kind, folder
        self.results: dict[str, str] = {}
        for seed, name in enumerate("ab"):
            SOURCES[kind](folder / name, seed)
            assert run("fire", folder / name, "-o", folder / f"{name}1") == 0
            assert run("fire", folder / f"{name}1", "-o", folder / f"{name}2") == 0
            for number in "12":
                self.results[f"{name}{number}"] = numbers(folder / f"{name}{number}")
            self.results[name] = numbers(folder / name)

    def tried(self, way: str, draw: random.Random) -> str:
        """What is wrong."""
        work = self.folder / "work"
        work.mkdir()
        for name in "ab":
            copy = shutil.copytree if (self.folder / name).is_dir() else shutil.copy2
            copy(self.folder / name, work / name)
        try:
            return self._tried(way, work, draw)
        finally:
            shutil.rmtree(work)

    def _tried(self, way: str, work: Path, draw: random.Random) -> str:
        a, b, out = work / "a", work / "b", work / "out"
        commands: dict[str, tuple[list[object], list[object]]] = {
            "one output": (["fire", a, "-o", out], ["fire", b, "-o", out]),
            "one output with force": (["fire", a, "-o", out, "--force"], ["fire", b, "-o", out, "--force"]),
            "in place twice": (["fire", a, "--in-place"], ["fire", a, "--in-place"]),
            "in place while read": (["fire", a, "--in-place"], ["fire", a, "-o", out]),
            "output read": (["fire", a, "-o", out], ["fire", out, "-o", work / "more"]),
            "one plan": (["plan", a, "-o", out], ["plan", b, "-o", out]),
        }
        first = start(*commands[way][0])
        time.sleep(draw.choice((0, 0, 0.01, 0.03, 0.1)))
        second = start(*commands[way][1])
        codes = [ended(first), ended(second)]
        if not set(codes) <= {0, 2}:
            return f"exit codes {codes}"
        if leftovers(work):
            return f"left behind: {leftovers(work)}"
        files = [a, b, work / "more", *([] if way == "one plan" else [out])]
        now = {path.name: numbers(path) for path in files if path.exists()}
        known = self.results
        match way:
            case "one output":
                winner = [known["ab"[i] + "1"] for i in (0, 1) if codes[i] == 0]
                right = len(winner) == 1 and now.get("out") == winner[0]
            case "one output with force":
                right = 0 in codes and now["out"] in [known["ab"[i] + "1"] for i in (0, 1) if codes[i] == 0]
            case "in place twice":
                right = now["a"] == known["a" + "012"[codes.count(0)]] if 0 in codes else False
            case "in place while read":
                right = codes[0] == 0 and now["a"] == known["a1"]
                right &= codes[1] == 2 or now.get("out") in (known["a1"], known["a2"])
            case "output read":
                right = codes[0] == 0 and now["out"] == known["a1"]
                right &= codes[1] == 2 or now.get("more") == known["a2"]
            case _:
                right = codes.count(0) == 1 and "entries" in json.loads(out.read_text("utf-8"))
        untouched = now["b"] == known["b"] and (way.startswith("in place") or now["a"] == known["a"])
        return "" if right and untouched else f"{way}: exit codes {codes}, but the files are not theirs"


def readable(path: Path, old: Path) -> str:
    """Whether other software reads a result, and it is the projection of the old one."""
    new, before = contents(path)[0], contents(old)[0]
    moved = [name for name in new if not torch.equal(new[name], before[name])]
    if not moved:
        return "nothing was projected"
    return next((f"{name}: {why}" for name in moved if (why := not_projected(before[name], new[name]))), "")
