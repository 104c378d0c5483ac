"""What the laboratory and the callback cost an agent: environment steps per second, timed alternately in one run.

    OMP_NUM_THREADS=1 python benchmarks/rl.py

A run of a study (with its receipts, returns and health) is compared with plain SB3 on the same agent, which must keep
0.95 of its speed; and an agent with a callback that never acts with one without, at most 1 % apart. The order of the
two changes from round to round. On a machine that is not quiet two runs of one agent differ by more than 1 %: `hooks`
is what remains of an agent's speed if the processor time inside the callback's own hooks is all that it costs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rekindle.integrations.sb3 import RekindleCallback
from rekindle.lab import ARMS, Run, execute
from rekindle.lab.agents.building import build
from rekindle.lab.settings import Setting, setting

BARS = {"study": 0.95, "idle": 0.99, "hooks": 0.99}
HOOKS = ("_on_training_start", "_on_rollout_start", "_on_step", "_on_rollout_end", "_on_training_end")


def plain(made: Setting, callback: Callable[[], Any] | None = None) -> None:
    stream = made.make_agent_stream(0)
    agent = build(made, ARMS["nothing"], stream.environment(0), 0)
    agent.learn(stream.steps[0], callback=None if callback is None else callback(), log_interval=None)


def study(made: Setting) -> None:
    for _ in execute(Run(made, ARMS["nothing"], 0)):
        pass


def paired(first: Callable[[], object], second: Callable[[], object], rounds: int) -> list[float]:
    """Process time of the first ÷ that of the second in each round, the order changing, after one to warm up."""
    found = []
    for turn in range(rounds + 1):
        spent = {}
        for each in (first, second) if turn % 2 else (second, first):
            start = time.process_time()
            each()
            spent[each] = time.process_time() - start
        if turn:
            found.append(spent[first] / spent[second])
    return found


def outside_hooks(made: Setting) -> float:
    """The share of a run's processor time that is not spent in the hooks of an idle callback."""
    callback, spent = RekindleCallback("fire", at=2**62), [0.0]

    def timed(hook: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            start = time.thread_time()
            found = hook()
            spent[0] += time.thread_time() - start
            return found

        return run

    for name in HOOKS:
        setattr(callback, name, timed(getattr(callback, name)))
    start = time.thread_time()
    plain(made, lambda: callback)
    return 1 - spent[0] / (time.thread_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4_096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settings", nargs="*", default=["sac-pendulum", "ppo-cartpole", "dqn-cartpole"])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'setting':<16}{'against plain SB3':<20}{'share of its speed':<20}bar")
    for name in asked.settings:
        base = setting(name)
        options = {**base.stream_options, "tasks": 1, "steps": asked.steps}
        made = replace(base, stream_options=options)
        rivals: dict[str, Callable[[], object]] = {
            "study": lambda made=made: study(made),
            "idle": lambda made=made: plain(made, lambda: RekindleCallback("fire", at=2**62)),
        }
        for kind in BARS:
            if kind == "hooks":
                shares = [outside_hooks(made) for _ in range(asked.rounds)]
            else:
                shares = paired(lambda made=made: plain(made), rivals[kind], asked.rounds)
            middle, spread = statistics.median(shares), f"{min(shares):.3f} … {max(shares):.3f}"
            verdict = "" if middle >= BARS[kind] else "  below the bar"
            print(f"{name:<16}{kind:<20}{middle:.3f} ({spread})".ljust(60) + f"{BARS[kind]}{verdict}", flush=True)


if __name__ == "__main__":
    main()
