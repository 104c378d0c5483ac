"""A tour of the commands and verbs in a process that lacks what some machines lack.

    python tour.py windows|macos|container|plain FOLDER

What is missing is taken away before anything of rekindle is imported. torch itself is loaded before: its own ways of
doing without are not at issue.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import types
import warnings
from pathlib import Path
from typing import Any


def take_away(kind: str) -> None:
    """Make this machine one of the kind, as far as a Python program can tell."""
    import subprocess  # noqa: F401  # the standard library chooses its own way when it is loaded
    import tempfile

    import torch

    tempfile.gettempdir()
    if kind == "windows":
        import fcntl

        locking = lambda handle, mode, count: fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # noqa: E731
        sys.modules["msvcrt"] = types.SimpleNamespace(LK_NBLCK=2, locking=locking)  # type: ignore[assignment]
        for module in ("fcntl", "pwd", "grp", "resource", "termios", "pty"):
            sys.modules[module] = None  # type: ignore[assignment]
        for name in ("fork", "geteuid", "getuid", "chown", "mkfifo", "pread", "sched_getaffinity", "O_NOFOLLOW"):
            delattr(os, name)
        del os.O_CLOEXEC
    if kind == "macos":
        sys.platform = "darwin"
        del os.sched_getaffinity
        torch.set_num_threads(1)
        sys.addaudithook(refuse_on_macos)
    if kind == "container":
        import pwd

        os.environ.pop("HOME", None)

        def unknown(key: Any) -> Any:
            raise KeyError(f"getpwuid(): uid not found: {key}")

        pwd.getpwuid = pwd.getpwnam = unknown  # type: ignore[assignment]


def refuse_on_macos(event: str, arguments: tuple[Any, ...]) -> None:
    """There is no /proc, and a fork after torch is loaded may end the process in Apple's libraries."""
    if event == "open" and str(arguments[0]).startswith("/proc"):
        raise FileNotFoundError(arguments[0])
    if event == "os.fork":
        raise AssertionError("os.fork() after torch was loaded")


def import_all() -> None:
    """Every module whose optional parts are installed."""
    import rekindle

    for found in pkgutil.walk_packages(rekindle.__path__, "rekindle."):
        if not found.name.endswith("__main__"):
            try:
                importlib.import_module(found.name)
            except ImportError as error:
                if "pip install" not in str(error) and "rekindle" in str(error.name or ""):
                    raise


def verbs() -> None:
    import torch
    from torch import nn

    import rekindle

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    data = [(torch.randn(16, 6), torch.randint(3, (16,))) for _ in range(4)]
    rekindle.fire(net, torch.optim.Adam(net.parameters()))
    print(rekindle.plan(net), rekindle.health(net, data), sep="\n")
    rekindle.probe(net, data, steps=4, seeds=2)
    print(rekindle.advise(net, data, candidates=["fire"], steps=20, seeds=2, workers=2))
    keeper, optimizer = rekindle.Keeper(data, every=1, steps=4, seeds=2), torch.optim.Adam(net.parameters())
    for _ in range(3):
        keeper.step(net, optimizer, {})
    print(keeper.log)


def command(*arguments: object) -> int:
    """One command of ours in this process, and its exit code."""
    from rekindle.cli import main

    sys.argv = ["rekindle", *map(str, arguments)]
    print("$", *sys.argv)
    try:
        main()
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def commands(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    state = {f"layers.{i}.mlp.up_proj.weight": torch.randn(48, 24, generator=generator) for i in range(2)}
    safe, pickled = folder / "model.safetensors", folder / "model.pt"
    save_file(state, safe)
    torch.save(state, pickled)
    for path in (safe, pickled):
        done = path.with_name(f"done{path.suffix}")
        assert command("inspect", path, "--html", folder / f"{path.suffix[1:]}.html") == 0
        assert command("plan", path, "-o", folder / f"{path.suffix[1:]}.json") == 0
        assert command("fire", path, "-o", done, "--yes", "--html", folder / f"fired-{path.suffix[1:]}.html") == 0
        assert command("compare", path, done, "--html", folder / f"compared-{path.suffix[1:]}.html") == 0
        assert command("fire", done, "--in-place", "--yes") == 0
        assert command("inspect", folder / "no such file") == 2
    assert command("doctor") == 0


def laboratory(folder: Path) -> None:
    """The demo, made short."""
    from rekindle.cli import demo

    demo.SHORTER = {"count": 64, "tasks": 2, "epochs": 1}  # type: ignore[dict-item]
    page = folder / "demo.html"
    arguments = ("--methods", "nothing,fire", "--seeds", 1, "--workers", 1, "--picture", folder / "demo.svg")
    assert command("demo", *arguments, "--html", page) == 0
    assert "σ" in page.read_text("utf-8") or "→" in page.read_text("utf-8")
    assert command("lab", "list") == 0


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # what a script prints is its own affair
    warnings.filterwarnings("error", category=EncodingWarning, module="rekindle")
    os.chdir(folder)
    take_away(kind)
    if kind in ("windows", "macos"):
        import_all()
        verbs()
    if kind != "container":
        commands(folder)
    if kind != "windows":
        laboratory(folder)
    else:
        from rekindle.lab.execution.workers import Pool

        os.name = "nt"
        try:
            Pool(1)
        except RuntimeError as error:
            print(error)


if __name__ == "__main__":
    main()
