"""What the laboratory and the callback cost an agent, as a share of plain SB3's speed.

    OMP_NUM_THREADS=1 python benchmarks/rl.py        # about 2 minutes

*study*: a run of a study (two tasks, with returns, chance, health and the states that a killed run goes on from) must
keep 0.95 of the speed of plain SB3 on the same agent; *idle*: an agent with a callback that never acts 0.99. Both are
accounted from inside one run, in processor time: what is spent in SB3's own `learn` and in building the agent is plain
SB3, the rest is ours; an idle callback costs what its methods take that SB3 calls, less what those of SB3's own empty
callback take, which is there without ours. So other processes hardly move the figure. What a study costs per task and
a callback per `learn` is fixed: shares are given for tasks as long as the preset's.

As a check, *plain* runs of the same agent are timed alternately with both, the order changing. The ratio should agree,
but two equal runs differ by several percent on a machine that is not quiet (the spread is printed), and a study's fixed
cost weighs more in these short tasks.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import stable_baselines3
import torch
from stable_baselines3.common.callbacks import ConvertCallback

from rekindle.integrations.sb3 import RekindleCallback
from rekindle.lab import ARMS, Run, execute
from rekindle.lab.agents import learning
from rekindle.lab.agents.building import AGENTS, build
from rekindle.lab.settings import Setting, setting

BARS = {"study": 0.95, "idle": 0.99}
STEPS = {"sac-pendulum": 400, "ppo-cartpole": 2_048, "dqn-cartpole": 1_000}
ONCE = ("on_training_start", "on_training_end")  # per call of `learn`
OFTEN = ("on_rollout_start", "on_step", "on_rollout_end", "update_locals")


class Clock:
    """Processor seconds spent inside the functions that it wraps, the outermost of them only."""

    def __init__(self) -> None:
        self.seconds, self._inside = 0.0, False

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with its time counted."""

        def timed(*given: Any, **named: Any) -> Any:
            if self._inside:
                return function(*given, **named)
            self._inside, begun = True, time.thread_time()
            try:
                return function(*given, **named)
            finally:
                self.seconds += time.thread_time() - begun
                self._inside = False

        return timed


def plain(made: Setting, callback: Any = None) -> tuple[float, float, float]:
    """The same agent on the same two environments by SB3; processor seconds besides the callback and in it.

    Without one it has SB3's own, which does nothing and is called as often.
    """
    callback, once, often = callback or ConvertCallback(None), Clock(), Clock()
    for clock, names in ((once, ONCE), (often, OFTEN)):
        for name in names:
            setattr(callback, name, clock.around(getattr(callback, name)))
    begun = time.thread_time()
    stream = made.make_agent_stream(0)
    agent = build(made, ARMS["nothing"], stream.environment(0), 0)
    for index, steps in enumerate(stream.steps):
        if index:
            agent.set_env(stream.environment(index))
        agent.learn(steps, callback=callback, log_interval=None)
    return time.thread_time() - begun - once.seconds - often.seconds, once.seconds, often.seconds


def study(made: Setting) -> tuple[float, float]:
    """Processor seconds of a study's run: in SB3, and besides; none of the latter grows with the steps."""
    clock, kind = Clock(), getattr(stable_baselines3, AGENTS[made.network])
    own, begun = (kind.learn, learning.build), time.thread_time()
    try:
        kind.learn, learning.build = map(clock.around, own)
        with tempfile.TemporaryDirectory() as folder:
            for _ in execute(Run(made, ARMS["nothing"], 0), starts=Path(folder)):
                pass
    finally:
        kind.learn, learning.build = own
    return clock.seconds, time.thread_time() - begun - clock.seconds


def measured(base: Setting, steps: int, rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """For study and idle: the shares accounted from inside, and those against plain runs as timed."""
    made = replace(base, stream_options={**base.stream_options, "tasks": 2, "steps": steps})
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in BARS}
    times = base.stream_options["steps"] / steps  # a preset's task is so much longer
    kinds: dict[str, Callable[[], Any]] = {
        "plain": lambda: plain(made),
        "study": lambda: study(made),
        "idle": lambda: plain(made, RekindleCallback("fire", at=2**62)),
    }
    for turn in range(rounds + 1):
        spent, parts = {}, {}
        for name in list(kinds)[:: 1 if turn % 2 else -1]:
            begun = time.process_time()
            parts[name] = kinds[name]()
            spent[name] = time.process_time() - begun
        if not turn:
            continue  # it warms up
        theirs, ours = parts["study"]
        found["study"][0].append(theirs * times / (theirs * times + ours))
        theirs, once, often = parts["idle"]
        once, often = once - parts["plain"][1], often - parts["plain"][2]
        found["idle"][0].append(theirs * times / ((theirs + often) * times + once))
        for name in BARS:
            found[name][1].append(spent["plain"] / spent[name])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settings", nargs="*", default=list(STEPS), choices=list(STEPS))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'setting':<15}{'against':<8}{'share of SB3 speed':<28}{'bar':<6}check: plain ÷ it, as timed")
    for name in asked.settings:
        for kind, (inside, timed) in measured(setting(name), STEPS[name], asked.rounds).items():
            shown = [f"{statistics.median(each):.3f} ({min(each):.3f} … {max(each):.3f})" for each in (inside, timed)]
            verdict = "" if statistics.median(inside) >= BARS[kind] else "  below the bar"
            print(f"{name:<15}{kind:<8}{shown[0]:<28}{BARS[kind]:<6}{shown[1]}{verdict}", flush=True)


if __name__ == "__main__":
    main()
