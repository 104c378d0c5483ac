"""Where trials run: in this process, in forked ones, or in Ray actors. `Trials` holds several of them."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any, Protocol

import torch

from rekindle.advice.candidates import Candidate
from rekindle.advice.stacked_layers import Unstackable
from rekindle.advice.together import TrialStack, kind_of
from rekindle.advice.trials import Trace
from rekindle.engine.cpu import cores, may_fork
from rekindle.extras import require


class RunningTrial(Protocol):
    """One candidate with one seed, that can pause and continue."""

    trace: Trace

    def advance(self, steps: int, horizon: float) -> Trace:
        """Train so many steps more; what it has shown so far."""
        ...

    def close(self) -> None:
        """It is not needed any more."""
        ...


class Triable(Protocol):
    """What is tried: a network that learns batches, or an agent that plays."""

    @property
    def device(self) -> str:
        """The type of device that it is on."""
        ...

    @property
    def first_steps(self) -> int:
        """Steps after which it is known how long one takes."""
        ...

    def call(self, candidate: Candidate) -> str:
        """What to write to apply this candidate."""
        ...

    def trial(self, candidate: Candidate, seed: int) -> RunningTrial:
        """A copy with this candidate's remedy."""
        ...


class Trials:
    """Several trials by number, made when first needed."""

    def __init__(self, question: Triable, candidates: Sequence[Candidate], seeds: Sequence[int]) -> None:
        self._question, self._candidates, self._seeds = question, candidates, seeds
        self._trials: dict[int, RunningTrial] = {}
        self._stacks: dict[tuple[int, ...], TrialStack] = {}

    @property
    def count(self) -> int:
        """How many there are: candidates × seeds, those of one seed one after the other."""
        return len(self._candidates) * len(self._seeds)

    def advance(self, numbers: Iterable[int], steps: int, horizon: float) -> dict[int, Trace]:
        """Advance these trials; what each has shown so far."""
        for number in numbers:
            if number not in self._trials:
                seed, candidate = divmod(number, len(self._candidates))
                self._trials[number] = self._question.trial(self._candidates[candidate], self._seeds[seed])
        alone = self._together(list(numbers), steps, horizon)
        for number in alone:
            began = perf_counter()
            self._trials[number].advance(steps, horizon)
            self._trials[number].trace.pace = (perf_counter() - began) / steps
        return {number: self._trials[number].trace for number in numbers}

    def _together(self, numbers: Sequence[int], steps: int, horizon: float) -> list[int]:
        """Advance in stacks those that can learn as one, of all seeds if possible, else of each; the others."""
        groups: dict[Any, list[int]] = {}
        # By candidate, then by seed: one optimizer step takes neighbors with equal settings.
        for number in sorted(numbers, key=lambda number: (number % len(self._candidates), number)):
            groups.setdefault(kind_of(self._trials[number]), []).append(number)
        alone, stacks = groups.pop(None, []), dict[tuple[int, ...], TrialStack]()
        waiting = [tuple(group) for group in groups.values()]
        while waiting:
            group = waiting.pop()
            try:
                if len(group) == 1:
                    raise Unstackable("nothing is like it")
                members: list[Any] = [self._trials[number] for number in group]
                stacks[group] = self._stacks.get(group) or TrialStack(members)
            except Unstackable:
                seeds = {number // len(self._candidates) for number in group}
                if len(seeds) == 1 or len(group) == 1:
                    alone += group
                else:
                    parts = [tuple(n for n in group if n // len(self._candidates) == seed) for seed in seeds]
                    waiting += [part for part in parts if part]
        self._stacks = stacks
        for stack in stacks.values():
            stack.advance(steps, horizon)
        return alone

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget trials: their copies are freed."""
        for number in numbers:
            if number in self._trials:
                self._trials.pop(number).close()
        self._stacks = {}

    def close(self) -> None:
        """Forget all."""
        self.drop(list(self._trials))


class TrialExecutor(Protocol):
    """Where trials run."""

    workers: int

    def advance(self, numbers: Sequence[int], steps: int, horizon: float) -> dict[int, Trace]:
        """Advance these trials; what each has shown so far."""
        ...

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget trials."""
        ...

    def close(self) -> None:
        """Stop the processes."""
        ...


class _Here:
    """In this process, one after the other."""

    workers = 1

    def __init__(self, trials: Trials) -> None:
        self._trials = trials

    def advance(self, numbers: Sequence[int], steps: int, horizon: float) -> dict[int, Trace]:
        return self._trials.advance(numbers, steps, horizon)

    def drop(self, numbers: Iterable[int]) -> None:
        self._trials.drop(numbers)

    def close(self) -> None:
        self._trials.close()


class _Forked:
    """In forked processes of one torch thread each; a trial stays in the process where it began."""

    def __init__(self, trials: Trials, workers: int) -> None:
        context = get_context("fork")
        self.workers, self._count = workers, trials.count
        self._pipes, self._processes = [], []
        for _ in range(workers):
            here, there = context.Pipe()
            self._pipes.append(here)
            process = context.Process(target=_serve, args=(trials, there, list(self._pipes)), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)

    def advance(self, numbers: Sequence[int], steps: int, horizon: float) -> dict[int, Trace]:
        for worker, pipe in enumerate(self._pipes):
            own = [n for n in numbers if n * self.workers // self._count == worker]
            pipe.send(("advance", own, steps, horizon))
        found: dict[int, Trace] = {}
        for pipe in self._pipes:
            try:
                answer = pipe.recv()
            except EOFError:
                raise RuntimeError(
                    "a process that tried candidates ended without an answer, most likely out of memory: "
                    "give workers=1, or fewer candidates or seeds"
                ) from None
            if isinstance(answer, BaseException):
                raise answer
            found.update(answer)
        return found

    def drop(self, numbers: Iterable[int]) -> None:
        numbers = list(numbers)
        for pipe in self._pipes:
            pipe.send(("drop", numbers, 0, 0))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(trials: Trials, pipe: Connection, inherited: Sequence[Connection]) -> None:
    torch.set_num_threads(1)  # after a fork more threads would wait for ones that do not exist here
    for each in inherited:
        each.close()  # else no end of file would come if the parent is killed
    with suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while True:
            verb, numbers, steps, horizon = pipe.recv()
            if verb == "drop":
                trials.drop(numbers)
                continue
            try:
                pipe.send(trials.advance(numbers, steps, horizon))
            except KeyboardInterrupt:
                raise
            except Exception as error:
                pipe.send(_sendable(error))


def _sendable(error: Exception) -> Exception:
    """The error itself, or one with its words where it cannot be rebuilt in another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class _OnRay:
    """In Ray actors, one per worker."""

    def __init__(self, question: Triable, candidates: Sequence[Candidate], seeds: Sequence[int], workers: int) -> None:
        self.workers = workers
        self._ray = require("ray", "ray", "advise(on='ray')")
        self._own = not self._ray.is_initialized()
        if self._own:
            self._ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
        actor = self._ray.remote(num_cpus=1)(Trials)
        self._actors = [actor.remote(question, candidates, seeds) for _ in range(workers)]
        self._count = len(candidates) * len(seeds)

    def advance(self, numbers: Sequence[int], steps: int, horizon: float) -> dict[int, Trace]:
        asked = [
            actor.advance.remote([n for n in numbers if n * self.workers // self._count == worker], steps, horizon)
            for worker, actor in enumerate(self._actors)
        ]
        return {number: trace for part in self._ray.get(asked) for number, trace in part.items()}

    def drop(self, numbers: Iterable[int]) -> None:
        for actor in self._actors:
            actor.drop.remote(list(numbers))

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        if self._own:
            self._ray.shutdown()


def executor(
    question: Triable, candidates: Sequence[Candidate], seeds: Sequence[int], *, on: str | None, workers: int | None
) -> TrialExecutor:
    """Where the trials run: Ray if asked for, else processes where cores allow and all is on the CPU."""
    count = workers or min(cores(), len(candidates))
    if on == "ray":
        return _OnRay(question, candidates, seeds, count)
    if on is not None:
        raise ValueError(f"on={on!r}: only 'ray' is known; leave it out for this machine")
    trials = Trials(question, candidates, seeds)
    if count < 2 or question.device != "cpu" or not may_fork():
        return _Here(trials)
    return _Forked(trials, count)
