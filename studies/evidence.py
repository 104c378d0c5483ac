"""Everything that docs/evidence rests on, part by part: `make evidence`, or one part, `make evidence STUDIES=norms`.

    python studies/evidence.py --list          # the parts, and how long each still takes
    python studies/evidence.py norms better    # these two

Before each part it says how long that takes on two cores and how much is left after it. Killed at any moment and
started again, it goes on: finished runs are found by their identity, and a script that has finished is not run again
until its file changes. How long a study takes as a whole stands in its own file ("Two cores: 50 min"), from the
measured speed of one core of an AMD EPYC (family 25, model 17); runs that are done, or that an earlier part does too,
are subtracted.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rekindle.lab.settings import Run
from rekindle.lab.study import Study

HOME = Path(__file__).resolve().parents[1]
RESULTS = Path("results")

STUDIES = (
    *("random-labels", "permuted-inputs", "warm-start", "class-incremental", "alphabet", "domains", "optimizer-state"),
    *("nearness", "replay", "tuned", "scales", "over-streams"),
    *("norms", "norms-continual", "norms-channel", "dash-parts", "start-norm", "tuned-warm-start", "better"),
    *("class-incremental-20", "warm-start-15"),
    *("random-labels-all", "mlp-streams", "tuned-domains", "widths", "widths-warm-start"),
    *("long", "long-biases", "long-scales"),
)
AGENTS = ("rl-observations", "rl-midpoint")  # their page, rl.md, is written by hand from several studies
JOINED = ("tuned", "scales", "over-streams")  # some or all of their runs are those of studies before them


@dataclass(frozen=True)
class Script:
    """A part that is not a study: a file of benchmarks/ with its arguments, once or several times."""

    minutes: float
    file: str
    calls: tuple[tuple[str, ...], ...]


SCRIPTS = {
    "verdict": Script(
        31,
        "verdict.py",
        (
            (
                *("--first-seed", "20", "--seeds", "10", "--runs", "results/evidence/verdict.jsonl"),
                *("--write", "docs/evidence/verdict.md"),
            ),
        ),
    ),
    "dawn": Script(20, "dawn.py", (("--controls", "--write", "docs/evidence/dawn.md"),)),
    "advice": Script(50, "advice.py", (("run", "results/evidence/advice"), ("show", "results/evidence/advice"))),
}
PARTS = (*STUDIES, *AGENTS, *SCRIPTS)


def minutes(name: str) -> float:
    """How long a part takes on two cores as a whole."""
    if name in SCRIPTS:
        return SCRIPTS[name].minutes
    found = re.search(r"Two cores: (\d+) min", (HOME / "studies" / f"{name}.yaml").read_text())
    if found is None:
        raise ValueError(f'studies/{name}.yaml does not say how long it takes: add "# Two cores: 50 min"')
    return float(found[1])


def left(names: Sequence[str]) -> list[float]:
    """The minutes that each of these parts still takes, in this order."""
    counted: set[str] = set()
    found = []
    for name in names:
        if name in SCRIPTS:
            found.append(0.0 if done(name) else minutes(name))
            continue
        study = loaded(name)
        known = {run.identity: run for run in [*study.runs(), *study.tuning_runs()]}
        waiting = {identity for identity, run in known.items() if not settled(study, run)}
        total, undone = len(known), len(waiting - counted if name in JOINED else waiting)
        if study.tune:  # the chosen configurations on the reported seeds, which are known once all of these are done
            total += len(study.runs())
            undone += len(study.runs()) if waiting else sum(not settled(study, run) for run in study.tuned_runs())
        counted |= set(known)
        found.append(minutes(name) * undone / total)
    return found


def loaded(name: str) -> Study:
    """The study of a part."""
    return Study.load(HOME / "studies" / f"{name}.yaml", folder=RESULTS / "lab" / name)


def settled(study: Study, run: Run) -> bool:
    """Whether this run need not be done again."""
    return study.store.read(run.identity).settles(run.code)


def done(name: str) -> bool:
    """Whether a script has finished since its file was changed."""
    mark = _mark(name)
    return mark.exists() and mark.read_text() == _hash(name)


def perform(name: str) -> None:
    """Do one part; what is done already is not repeated."""
    if name in SCRIPTS:
        _mark(name).parent.mkdir(parents=True, exist_ok=True)
        for arguments in () if done(name) else SCRIPTS[name].calls:
            _called(str(HOME / "benchmarks" / SCRIPTS[name].file), *arguments)
        _mark(name).write_text(_hash(name))
        return
    folder = RESULTS / "lab" / name
    _called("-m", "rekindle", "lab", "run", str(HOME / "studies" / f"{name}.yaml"), "--folder", str(folder))
    share(name)
    if name not in AGENTS:
        page = f"docs/evidence/{name}.md"
        _called("-m", "rekindle", "lab", "report", str(folder), "--markdown", page, "--force")


def share(name: str) -> None:
    """Give a study's runs to those that join several studies."""
    for joined in JOINED:
        study, own = loaded(joined), loaded(name).store
        for run in [*study.runs(), *study.tuning_runs()]:
            file, target = own.path(run.identity), study.store.path(run.identity)
            if file.exists() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, target)


def spoken(time: float) -> str:
    """Minutes in words.

    >>> spoken(0.2), spoken(50), spoken(200)
    ('a moment', '50 min', '3 h 20 min')
    """
    whole = round(time)
    return f"{whole // 60} h {whole % 60} min" if whole >= 60 else f"{whole} min" if whole else "a moment"


def _called(*arguments: str) -> None:
    print("+", " ".join(["python", *arguments]), flush=True)
    subprocess.run([sys.executable, *arguments], check=True)


def _mark(name: str) -> Path:
    return RESULTS / "evidence" / f"{name}.done"


def _hash(name: str) -> str:
    return hashlib.sha256((HOME / "benchmarks" / SCRIPTS[name].file).read_bytes()).hexdigest()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; all without it")
    parser.add_argument("--list", action="store_true", help="only say how long each part still takes")
    given = parser.parse_args()
    names = given.parts or list(PARTS)
    for name in names:
        if name not in PARTS:
            parser.error(f"there is no part {name!r}; there are {', '.join(PARTS)}")
    if given.list:
        for name, time in zip(names, times := left(names), strict=True):
            print(f"{name:22} {spoken(minutes(name)):>10} on two cores, {spoken(time)} of it left")
        print(f"{'together':22} {spoken(sum(map(minutes, names))):>10} on two cores, {spoken(sum(times))} of it left")
        return
    try:
        for place, name in enumerate(names):
            now, *later = left(names[place:])
            after = f"parts after it: {len(later)}, {spoken(sum(later))}" if later else "the last part"
            print(f"== {name}: {spoken(now)} on two cores; {after}", flush=True)
            perform(name)
    except (KeyboardInterrupt, subprocess.CalledProcessError) as error:
        print(f"stopped in {name!r}: the same command goes on from here", file=sys.stderr)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
