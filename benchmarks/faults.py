"""Nothing lost: damaged files, kills, concurrent commands, and errors inside the verbs. All four should count 0 wrong.

* files: checkpoints, configs, indices, plans and journals, damaged at random or by somebody clever. Each is refused in
  one line with nothing changed, or fired at; then torch, safetensors or torch.distributed.checkpoint must read the
  result, exactly the tensors of the receipt differ, and each is the nearest isometry by a float64 SVD. No code of a
  file runs (a file that a pickle would create is looked for), no process dies.
* kills: `rekindle fire` is killed with SIGKILL at random moments, up to three times, and resumed or started again. The
  source and an old output are whole after each kill; the result is that of an uninterrupted job, byte for byte.
* pairs: two commands at once on one output, one folder in place, or one reading what the other writes.
* verbs: an error or Ctrl-C at a random line of `fire` and of every method, see verb_faults.py.

The small version of the first three is tests/checkpoint/test_damage.py.

    OMP_NUM_THREADS=1 python benchmarks/faults.py                # about 15 minutes on one free core
    OMP_NUM_THREADS=1 python benchmarks/faults.py --files 500 --kills 20 --pairs 10 --verbs 100
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS / "support"), str(Path(__file__).parent)]

import damage  # noqa: E402
import kills  # noqa: E402
import verb_faults  # noqa: E402

BATCH = 130  # files per process: one that dies is noticed, and costs no more than these


def files(count: int, seed: int, work: Path) -> list[str]:
    """Damaged files, in forks that report line by line."""
    damage.make_templates(work / "templates")
    kinds = [kind for turn in range(10) for kind in damage.FORMATS if turn == 0 or kind != "config"]  # a slow one
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    jobs = [(kinds[number % len(kinds)], seed * 1_000_000 + number) for number in range(count)]
    for begin in range(0, count, BATCH):
        report = work / "report"
        child = os.fork()
        if child == 0:
            try:
                with report.open("w", encoding="utf-8") as file:
                    for kind, number in jobs[begin : begin + BATCH]:
                        print(json.dumps((kind, number, "died", "")), file=file, flush=True)
                        print(json.dumps((kind, number, *judged(kind, number, work))), file=file, flush=True)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        lines = [json.loads(line) for line in report.read_text("utf-8").split("\n") if line]
        last = {(kind, number): (outcome, verdict) for kind, number, outcome, verdict in lines}
        for (kind, number), (outcome, verdict) in last.items():
            outcomes[f"{kind} {outcome}"] += 1
            if outcome == "died" or verdict:
                wrong.append(f"{kind}, seed {number}: {outcome} {verdict!r}")
                print(wrong[-1], flush=True)
        if begin // BATCH % 20 == 0:
            print(f"  {begin + len(last)} files, {len(wrong)} wrong", flush=True)
    done = sum(n for name, n in outcomes.items() if name.endswith("done"))
    print(f"files: {outcomes.total()} damaged, {outcomes.total() - done} refused, {done} fired at, {len(wrong)} wrong")
    print("  " + ", ".join(f"{name} {n}" for name, n in sorted(outcomes.items())))
    return wrong


def judged(kind: str, number: int, work: Path) -> tuple[str, str]:
    folder, begin = work / "case", time.process_time()
    shutil.rmtree(folder, ignore_errors=True)
    (work / "executed").unlink(missing_ok=True)
    case = damage.Case(kind, number, folder, work / "templates")
    try:
        verdict = case.judged()
    except Exception as error:
        return "raised", f"{type(error).__name__}: {error}"[:300]
    seconds = time.process_time() - begin
    return case.outcome, verdict or (f"took {seconds:.0f} s" if seconds > 10 else "")


def killed(count: int, seed: int, work: Path) -> list[str]:
    """Kills, over all formats and ways in turn."""
    draw, wrong, done, jobs = random.Random(seed), [], 0, 0
    cases = [kills.KillCase(kind, way, work / f"{kind} {way}") for kind in kills.SOURCES for way in kills.KillCase.WAYS]
    while done < count:
        case = cases[jobs % len(cases)]
        more, verdict = case.tried(draw)
        done, jobs = done + more, jobs + 1
        if verdict:
            wrong.append(f"{case.kind}, {case.way}, job {jobs}: {verdict}")
            print(wrong[-1], flush=True)
        if jobs % 100 == 0:
            print(f"  {jobs} jobs, {done} kills, {len(wrong)} wrong", flush=True)
    unreadable = [f"{case.kind}: {why}" for case in cases if (why := kills.readable(case.expected, case.folder / "in"))]
    print(f"kills: {done} in {jobs} jobs, {len(wrong)} wrong, {len(unreadable)} unreadable")
    return wrong + unreadable


def paired(count: int, seed: int, work: Path) -> list[str]:
    """Pairs of commands, over all formats and ways in turn."""
    draw, wrong = random.Random(seed), []
    cases = [kills.PairCase(kind, work / kind) for kind in kills.SOURCES]
    for number in range(count):
        case, way = cases[number % len(cases)], kills.PairCase.WAYS[number // len(cases) % len(kills.PairCase.WAYS)]
        if verdict := case.tried(way, draw):
            wrong.append(f"{case.kind}, pair {number}: {verdict}")
            print(wrong[-1], flush=True)
    print(f"pairs: {count}, {len(wrong)} wrong")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=1_000)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--verbs", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None, help="where to work: in memory (/dev/shm) is fastest")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    work = Path(tempfile.mkdtemp(prefix="rekindle-faults-", dir=options.folder))
    wrong: list[str] = []
    try:
        for name, part in (("files", files), ("kills", killed), ("pairs", paired)):
            if getattr(options, name):
                wrong += part(getattr(options, name), options.seed, work / name)
    finally:
        shutil.rmtree(work)
    if options.verbs:
        wrong += verb_faults.run(options.verbs, options.seed)
    print(f"{len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
