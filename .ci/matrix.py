"""The core tests in environments of their own: the lowest and the newest versions, and each Python that is here.

    python .ci/matrix.py                        # all
    python .ci/matrix.py lowest 3.13            # some
    python .ci/matrix.py newest --tests tests/engine

`lowest` has the lower bounds of pyproject.toml, `newest` what an installation without constraints gets today, `pinned`
the versions of constraints-newest.txt; a number is that Python with the newest versions. Environments are made by uv in
.matrix and kept. UV_TORCH_BACKEND=cpu avoids CUDA where its index can be reached.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / ".matrix"
EXTRAS = ("cli", "hub", "report", "transformers", "lightning", "ignite", "trl", "lab", "rl")
TESTING = ("pytest", "pytest-xdist", "hypothesis", "peft", "sb3-contrib")
ROOMS = "engine measures blocks recording optimizers projection monitoring methods diagnosis checkpoint report cli"
CORE = [f"tests/{room}" for room in ROOMS.split()] + ["tests/test_machines.py", "tests/test_accelerator.py"]
SHOWN = ("torch", "numpy", "transformers", "scipy", "typer", "stable-baselines3")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def pythons() -> list[str]:
    """Versions that uv finds on this machine."""
    return [version for version in PYTHONS if interpreter(version)]


def interpreter(version: str) -> str:
    """Its path, or an empty string."""
    if f"{sys.version_info[0]}.{sys.version_info[1]}" == version:
        return sys.executable
    found = subprocess.run([uv(), "python", "find", "--no-python-downloads", version], capture_output=True, text=True)
    named = next(iter(sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))), None)
    return found.stdout.strip() or str(named or "")


def uv() -> str:
    """uv, installed beside the environments if it is not here."""
    there = shutil.which("uv")
    if there:
        return there
    own = HERE / "uv" / ("Scripts" if os.name == "nt" else "bin")
    if not any(own.glob("uv*")):
        subprocess.run([sys.executable, "-m", "venv", str(HERE / "uv")], check=True)
        subprocess.run([str(own / "python"), "-m", "pip", "install", "-q", "uv"], check=True)
    return str(own / "uv")


def asked_for() -> list[str]:
    """The requirements of the package and of the extras whose tests are core, and of the tests themselves."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    found = [*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra])]
    names = {re.split(r"[\[<>=!~ ]", line)[0] for line in TESTING}
    found += [line for line in extras["dev"] if re.split(r"[\[<>=!~ ]", line)[0] in names]
    return [line for line in found if not line.startswith("torch-rekindle")]


def make(name: str) -> Path:
    """The environment's Python; it is made if it is not there, and made again if the requirements have changed."""
    version = name if name[0].isdigit() else "3.11" if name == "lowest" else pythons()[-1]
    folder = HERE / name
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    requirements = "\n".join(asked_for()) + "\n"
    stamp = folder / "requirements.txt"
    if stamp.is_file() and stamp.read_text("utf-8") == requirements:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([uv(), "venv", "-q", "--python", interpreter(version) or version, str(folder)], check=True)
    wanted = HERE / f"{name}.txt"
    wanted.write_text(requirements, "utf-8")
    how = ["--resolution", "lowest-direct"] if name == "lowest" else []
    how += ["-c", str(ROOT / "constraints-newest.txt")] if name == "pinned" else []
    line = [uv(), "pip", "install", "-q", "--python", str(python), *how, "-r", str(wanted)]
    subprocess.run(line, check=True)
    stamp.write_text(requirements, "utf-8")
    return python


def versions(python: Path) -> str:
    """The versions that matter."""
    code = (
        "import importlib.metadata as m, platform; print('Python', platform.python_version(), end='')\n"
        f"for name in {SHOWN!r}: print(f', {{name}} {{m.version(name)}}', end='')"
    )
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout


def run(name: str, tests: list[str]) -> tuple[bool, str]:
    """A row of the table: environment | passed | failed | skipped | minutes | versions."""
    began = time.monotonic()
    try:
        python = make(name)
    except (subprocess.CalledProcessError, IndexError) as error:
        return False, f"| {name} | could not be made: {error} |"
    known = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    line = [str(python), "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(line, cwd=ROOT, env=known, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    print(done.stdout[-6000:], flush=True)
    counts = {
        word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout[-300:])
    }
    failed = counts.get("failed", 0) + counts.get("error", 0)
    minutes = (time.monotonic() - began) / 60
    numbers = f"{counts.get('passed', 0)} | {failed} | {counts.get('skipped', 0)} | {minutes:.1f}"
    return done.returncode == 0, f"| {name} | {numbers} | {versions(python)} |"


def main() -> int:
    """Run them one after the other and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="lowest, newest, pinned, or versions of Python; all without it")
    parser.add_argument("--tests", nargs="+", default=CORE)
    parser.add_argument("--make", action="store_true", help="make the environments and run nothing")
    asked = parser.parse_args()
    HERE.mkdir(exist_ok=True)
    if asked.make:
        for name in asked.names:
            print(versions(make(name)))
        return 0
    rows = [run(name, asked.tests) for name in asked.names or ["lowest", "newest", *pythons()]]
    print("| environment | passed | failed | skipped | minutes | versions |\n|---|---|---|---|---|---|")
    print("\n".join(row for _, row in rows))
    return 0 if all(fine for fine, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
