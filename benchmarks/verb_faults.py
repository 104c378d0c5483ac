"""Errors and Ctrl-C at random lines of `fire`, of every method and of every trainer's callback: what was left behind?

Each fault is one call that fails at one line of the package. Afterwards either everything is as it was, or the error is
a `MethodError` whose receipt names everything that differs; modes, gradients, hooks and random states are checked too.
Methods are tried plain and under a guard; attachments, schedules, keepers and the callbacks of real trainers while they
act. Besides random lines the last of each call are tried. The small versions of this are tests/methods/test_faults.py
and tests/integrations/test_interrupted.py.

    OMP_NUM_THREADS=1 python benchmarks/verb_faults.py --faults 2000
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "methods"), str(TESTS / "integrations")]

import test_faults as small  # noqa: E402
import test_interrupted as attached  # noqa: E402

import callbacks  # noqa: E402
import faults  # noqa: E402
import rekindle  # noqa: E402
from rekindle import methods  # noqa: E402
from rekindle.advice import keeping  # noqa: E402

LAST = 8
Outcome = tuple[BaseException | None, str | None]


def method_fault(name: str, guarded: bool, at: int, kind: type[BaseException]) -> Outcome:
    """One fault in a call of a method."""
    model, optimizer, method = small.ready(small.CASES[name])
    before = faults.Before(model, optimizer)
    error = faults.interrupted(small.called(model, optimizer, method, guarded), at, kind)
    whole = guarded or method.atomic or name == "fire atomic"
    return error, faults.judged(error, before, whole=whole)


def mirrored(model: Any, optimizer: Any, mirror: Any, atomic: bool) -> Callable[[], Any]:
    """A call of `fire` with everything that it can do beside the weights."""
    return lambda: rekindle.fire(
        model, optimizer, mirrors=mirror, biases="zero", recalibrate=small.DATA, drift=small.DATA, atomic=atomic
    )


def mirror_fault(atomic: bool, at: int, kind: type[BaseException]) -> Outcome:
    """One fault in a call of `fire` with a mirror, which is compared too."""
    model, optimizer, _ = small.ready(methods.FIRE)
    mirror = copy.deepcopy(model)
    before = faults.Before(model, optimizer, mirrors=[mirror])
    error = faults.interrupted(mirrored(model, optimizer, mirror, atomic), at, kind)
    return error, faults.judged(error, before, whole=atomic)


def cases() -> dict[str, tuple[int, Callable[[int, type[BaseException]], Outcome]]]:
    """What is tried: how many lines each call runs, and a function that fails it at one of them."""
    found: dict[str, tuple[int, Callable[[int, type[BaseException]], Outcome]]] = {}
    for name in small.CASES:
        for guarded in (False, True):
            total = faults.lines(small.called(*small.ready(small.CASES[name]), guarded))
            found[f"{name}{' guarded' * guarded}"] = (
                total,
                lambda at, kind, name=name, guarded=guarded: method_fault(name, guarded, at, kind),  # type: ignore[misc]
            )
    for atomic in (False, True):
        model, optimizer, _ = small.ready(methods.FIRE)
        total = faults.lines(mirrored(model, optimizer, copy.deepcopy(model), atomic))
        found[f"fire with a mirror{' atomic' * atomic}"] = (
            total,
            lambda at, kind, atomic=atomic: mirror_fault(atomic, at, kind),  # type: ignore[misc]
        )
    for name in attached.CASES:
        found[name] = faults.lines(attached.case(name)[3]), lambda at, kind, name=name: attached.fault(name, at, kind)  # type: ignore[misc]
    for trainer in callbacks.TRAINERS:
        for way in callbacks.WAYS:
            case = callbacks.CallbackCase(trainer, way)
            found[f"{trainer}: {way}"] = case.lines, case.failed
    return found


def run(count: int, seed: int, seconds: float = float("inf")) -> list[str]:
    """Try so many faults, or as many as fit into the time; what is wrong."""
    keeping.Inquiry.ask = callbacks.advice  # type: ignore[method-assign,assignment]
    logging.disable(logging.CRITICAL)  # trainers report each training that ends with an error
    begin, tried = time.monotonic(), cases()
    each = -(-count // len(tried))
    # One fault of every case in turn, so that a run that is cut short has tried them all.
    places = {
        name: [*faults.positions(total, each, seed), *range(max(1, total - LAST), total + 1)]
        for name, (total, _) in tried.items()
    }
    done = raised = 0
    wrong: list[str] = []
    for turn in range(each + LAST + 1):
        for name, (total, fail) in tried.items():
            if turn >= len(places[name]) or time.monotonic() - begin > seconds:
                continue
            kind = (faults.Fault, KeyboardInterrupt)[turn % 2]
            error, verdict = fail(places[name][turn], kind)
            done, raised = done + 1, raised + (error is not None)
            if verdict is not None:
                wrong.append(f"{name}, line {places[name][turn]} of {total}, {error}: {verdict}")
                print(wrong[-1], flush=True)
    print(f"verbs: {done} faults in {len(tried)} cases, {raised} raised, {len(wrong)} wrong")
    return wrong if raised else ["no fault was raised"]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many seconds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    return 1 if run(options.faults, options.seed, options.seconds) else 0


if __name__ == "__main__":
    raise SystemExit(main())
