"""One run: a network learns the tasks of a stream one after the other, with one remedy. The loop is `Learner.learn`.

    for row in execute(Run(SETTINGS["random-labels"], ARMS["fire"], seed=0)):
        print(row)

Fairness is built in: data, their order and the first weights depend on the seed alone; every arm gets the same new
optimizer, BatchNorm treatment and schedule at a boundary; what is measured is measured in the same way for all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from rekindle import Receipt
from rekindle.lab.arms import Arm
from rekindle.lab.evaluation import (
    Score,
    Track,
    average,
    drift_of,
    evaluate,
    health_numbers,
    log_probabilities,
    loss_of,
    score,
)
from rekindle.lab.settings import Run, Setting, read_source
from rekindle.lab.sources import Examples, Stream, Task, derive, generator, isolated
from rekindle.methods import muon
from rekindle.methods.remedy import Moment, moments
from rekindle.projection.recalibration import recalibrate

Row = dict[str, Any]
P = ParamSpec("P")
T = TypeVar("T")
_OLD = 5  # earlier tasks that retention looks at
CHECK = 200  # steps between two looks for a loss that is not finite
_BATCHES = 20  # that a method gets at a boundary
_DRIFT = 500  # rows that the drift of the function is measured on
_ADAMS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


class Refused(Exception):
    """A method cannot be applied to this network, or an optimizer cannot train it; the message says why."""


class Diverged(Exception):
    """A method met weights that are not finite."""


def execute(run: Run, *, starts: Path | None = None) -> Iterator[Row]:
    """Do the run; rows are yielded as they are known: a start, progress, one per task, an end.

    `starts` is a folder where the state after the first task is kept, for all runs that do the same until then.
    torch's global random state is not touched, nor is the number of threads.
    """
    return isolated(_rows(run, starts), derive(run.seed, "dropout"))


def _rows(run: Run, starts: Path | None) -> Iterator[Row]:
    begun = time.perf_counter()
    if run.setting.source is not None:
        read_source(run.setting.source)
    stream = run.setting.make_stream(run.seed)
    learner = Learner(run, stream)
    yield start_row(run, stream, learner)
    end: Row = {"kind": "end"}
    first = run.saved_first_task(starts) if starts is not None and learner.acts_at_boundaries else None
    try:
        with learner:
            for index in range(len(stream)):
                task = stream[index]
                kept = first.load() if first is not None and index == 0 else None
                if kept is not None:
                    row = learner.restore(task, kept)
                else:
                    row = yield from learner.train_task(index, task)
                    if first is not None and index == 0:
                        first.save(learner.state(row))
                yield row
    except Refused as reason:
        end["refused"] = str(reason)
    yield {**end, "seconds": time.perf_counter() - begun}


def start_row(run: Run, stream: Stream, learner: Learner) -> Row:
    """The first row of a run: what it is."""
    about = {"tasks": len(stream), "classes": stream.classes, "shape": list(stream.shape)}
    return run.start_row(about, sum(p.numel() for p in learner.model.parameters()))


class Learner:
    """One network that learns a stream: the model, its optimizers, its method, and its scores on earlier tasks."""

    def __init__(self, run: Run, stream: Stream) -> None:
        self.setting, self.seed = run.setting, run.seed
        self.arm = run.arm.within(run.setting)
        self.model = run.setting.make_network(stream, run.seed)
        self.method = self.arm.build()
        self.acts: dict[Moment, Any] = {} if self.method is None else moments(self.method)
        self.generator = generator(run.seed, "method")
        self.optimizers: list[torch.optim.Optimizer] = []
        self.watching = ExitStack()
        self.earlier: list[Examples] = []  # evaluation data of the last tasks
        self.scores: list[Score] = []  # of the network as it is now, on these data
        self.remedy_seconds = 0.0  # in this task
        norm = run.setting.norm
        self.level = None if norm is None else Arm("norm", "StartNorm", {"factor": norm}).build()
        for method in (self.method, self.level):
            if method is not None and hasattr(method, "remember"):
                method.remember(self.model)

    @property
    def acts_at_boundaries(self) -> bool:
        """Whether the first task is the same as if there were no remedy."""
        return not self.acts or (self.acts.keys() == {"event"} and self.arm.when == "boundary" and not self.watches)

    @property
    def watches(self) -> bool:
        """Whether the method must see every step."""
        return bool(getattr(self.method, "watches", hasattr(self.method, "observe")))

    def __enter__(self) -> Learner:
        if self.watches:
            self.watching.enter_context(self._call(self.method.observe, self.model))
        self.optimizers = self._call(make_optimizers, self.model, self.setting, self.arm)
        return self

    def __exit__(self, *exception: object) -> None:
        self.watching.close()

    def train_task(self, index: int, task: Task) -> Generator[Row, None, Row]:
        """One task: the boundary, the learning, and what is known afterwards."""
        remedy = self.enter(index, task)
        begun = time.perf_counter()
        track, diverged = yield from self.learn(index, task)
        return self.leave(index, task, remedy, track, diverged, time.perf_counter() - begun)

    def enter(self, index: int, task: Task) -> Row | None:
        """What comes before the learning of a task: the boundary, of all tasks but the first."""
        torch.manual_seed(derive(self.seed, "dropout", index))
        self.remedy_seconds = 0.0
        return self.boundary(index, task) if index else None

    def leave(self, index: int, task: Task, remedy: Row | None, track: Track, diverged: bool, seconds: float) -> Row:
        """The row of a task that was learned."""
        retained, looked_at = average(self.scores), task.train.some(self.setting.evaluate).some(256)
        return {
            "kind": "task",
            "task": index,
            "name": task.name,
            "steps": len(track),
            "online_accuracy": track.accuracy,
            "online_loss": track.loss,
            "curve": track.curve(),
            "peak_loss": track.peak(),
            **self.evaluated(task),
            "seconds": seconds,
            "remedy_seconds": self.remedy_seconds,
            "remedy": remedy,
            "old_accuracy_start": retained[0],
            "old_loss_start": retained[1],
            "health": health_numbers(self.model, looked_at.x) if self.setting.health else None,
            "diverged": diverged,
        }

    def learn(self, index: int, task: Task) -> Generator[Row, None, tuple[Track, bool]]:
        """The training loop. Numbers stay tensors; every `CHECK` steps one is read, to detect divergence."""
        setting, model, optimizers = self.setting, self.model, self.optimizers
        acting = bool(index) or not setting.spare_first
        steps, every = task.length(setting.batch), self.period(task) if acting else 0
        factor = self.rate(index, steps)
        trained = [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
        acts = self.acts if acting else {}
        term = acts["loss"].loss_term if "loss" in acts else None
        track, report = Track(), time.perf_counter() + 1.0
        model.train()
        try:
            for step, (x, y) in enumerate(task.batches(setting.batch, generator(self.seed, "order", index))):
                if every and step and step % every == 0:
                    self.treat("event", [(x, y)])
                if factor is not None:
                    set_rate(optimizers, factor(step))
                # Wiring is read off the first pass.
                _, loss, right = self._call(score, model, x, y) if self.watches else score(model, x, y)
                track.add(right, loss.detach(), y.numel())
                for optimizer in optimizers:
                    optimizer.zero_grad()
                (loss if term is None else loss + self.timed(term, model)).backward()
                if setting.clip is not None:
                    clip_grad_norm_(trained, setting.clip)
                if "backward" in acts:
                    self.treat("backward")
                for optimizer in optimizers:
                    optimizer.step()
                if "step" in acts:
                    self.treat("step")
                if step % CHECK == CHECK - 1 and track.diverged():
                    return track, True
                if time.perf_counter() > report:
                    yield {"kind": "progress", "task": index, "step": step + 1, "steps": steps}
                    report = time.perf_counter() + 1.0
        except Diverged:
            return track, True
        return track, track.diverged()

    def rate(self, index: int, steps: int) -> Callable[[int], float] | None:
        """The factor of the learning rate at each step of a task; None where it never changes."""
        factor, raised = rate(self.setting, steps), self.arm.raised
        if raised is None or not index:
            return factor
        high, falling = raised[0], raised[1] * steps

        def higher(step: int) -> float:
            left = max(0.0, 1.0 - step / falling) if falling else 1.0
            return (1.0 + (high - 1.0) * left) * (1.0 if factor is None else factor(step))

        return higher

    def boundary(self, index: int, task: Task) -> Row | None:
        """The boundary before a task: the remedy, equal norms, new statistics, a new optimizer; and what they did."""
        setting, model, treated = self.setting, self.model, "event" in self.acts
        found: Row | None = None
        if treated or setting.recalibrate:
            batches = list(islice(task.train.batches(setting.batch, generator(self.seed, "looking", index)), _BATCHES))
        if treated and getattr(self.acts["event"], "batches", "any") == "all":
            batches = [(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))]
        if treated:
            before, old, sample = self.scores[-1], average(self.scores), self.earlier[-1].some(_DRIFT)
            classes = not sample.y.is_floating_point()
            answers = log_probabilities(model, sample.x) if classes else None
            try:
                receipt, failed = self.treat("event", batches), None
            except Diverged as reason:
                receipt, failed = None, str(reason)
        if self.level is not None:
            with suppress(Diverged):  # which the rows of the task say
                self._call(self.level, model)
        if setting.recalibrate:
            recalibrate(model, batches)
        if treated or setting.recalibrate:
            self.scores = [evaluate(model, each) for each in self.earlier]
        if treated:
            after, new = self.scores[-1], average(self.scores)
            found = {
                "seconds": self.remedy_seconds,
                "changed": 0 if receipt is None else len(receipt.changed),
                "failed": failed,
                "accuracy_before": before.accuracy,
                "accuracy_after": after.accuracy,
                "loss_before": before.loss,
                "loss_after": after.loss,
                "old_accuracy_before": old[0],
                "old_accuracy_after": new[0],
                "old_loss_before": old[1],
                "old_loss_after": new[1],
                "function_drift": None if answers is None else drift_of(answers, log_probabilities(model, sample.x)),
            }
        if setting.new_optimizer:
            self.optimizers = make_optimizers(model, setting, self.arm)
        return found

    def evaluated(self, task: Task) -> Row:
        """What the network can do after a task, on this task and on earlier ones."""
        rows = self.setting.evaluate
        train = evaluate(self.model, task.train.some(rows))
        test = None if task.test is None else evaluate(self.model, task.test.some(rows))
        earlier = [evaluate(self.model, each) for each in self.earlier]
        self.earlier = [*self.earlier, task.judged_on(rows)][-_OLD:]
        self.scores = [*earlier, train if test is None else test][-_OLD:]
        old = average(earlier)
        return {
            "train_accuracy": train.accuracy,
            "train_loss": train.loss,
            "test_accuracy": None if test is None else test.accuracy,
            "test_loss": None if test is None else test.loss,
            "old_accuracy": old[0],
            "old_loss": old[1],
        }

    def state(self, row: Row) -> Row:
        """What another run of the same beginning needs instead of the first task."""
        optimizers = [] if self.setting.new_optimizer else [each.state_dict() for each in self.optimizers]
        return {"row": row, "model": self.model.state_dict(), "optimizers": optimizers}

    def restore(self, task: Task, kept: Row) -> Row:
        """Continue where `state` was taken; returns the first task's row."""
        self.model.load_state_dict(kept["model"])
        for optimizer, state in zip(self.optimizers, kept["optimizers"], strict=False):
            optimizer.load_state_dict(state)
        row: Row = kept["row"]
        known = "train" if task.test is None else "test"
        self.earlier = [task.judged_on(self.setting.evaluate)]
        self.scores = [Score(row[f"{known}_accuracy"], row[f"{known}_loss"])]
        return row

    def period(self, task: Task) -> int:
        """Every how many steps within a task the method is applied; 0 if only at its boundary."""
        if "event" not in self.acts or self.arm.when == "boundary":
            return 0
        if self.arm.when == "period":
            return int(self.acts["event"].period)
        if isinstance(self.arm.when, int):
            return self.arm.when
        # Text is read in steps and has no epochs: a tenth of the task stands for one.
        epoch = task.train.steps(self.setting.batch) if task.epochs is not None else max(1, (task.steps or 0) // 10)
        return self.arm.epochs * epoch

    def treat(self, moment: Moment, batches: object = None) -> Receipt:
        """Apply what the method does at this moment; batches only at an event."""
        receipt: Receipt = self.timed(
            self.acts[moment], self.model, self.optimizers, batches=batches, loss=loss_of, generator=self.generator
        )
        return receipt

    def timed(self, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Call it as a part of the remedy, whose time is counted."""
        begun = time.perf_counter()
        result = self._call(call, *args, **options)
        self.remedy_seconds += time.perf_counter() - begun
        return result

    def _call(self, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Call; a refusal ends the run with its reason, one because of NaN is a divergence."""
        try:
            return call(*args, **options)
        except (ValueError, NotImplementedError) as error:
            if all(bool(torch.isfinite(p).all()) for p in self.model.parameters()):
                raise Refused(str(error)) from error
            raise Diverged(str(error)) from error


def optimizer_of(setting: Setting, arm: Arm) -> tuple[str, dict[str, Any]]:
    """The kind of optimizer and its options: those of the setting hold for an arm's own too if both are Adams.

    AdamW decays nothing unless it is told to, so that changing Adam for AdamW changes nothing else.
    """
    kind = arm.optimizer or setting.optimizer
    related = kind == setting.optimizer or {kind, setting.optimizer} <= set(_ADAMS)
    options = {**(setting.optimizer_options if related else {}), **arm.optimizer_options}
    if "betas" in options:
        options["betas"] = tuple(options["betas"])  # JSON has lists only
    return kind, ({"weight_decay": 0.0} if kind in _ADAMS else {}) | options


def make_optimizers(model: nn.Module, setting: Setting, arm: Arm) -> list[Optimizer]:
    """New optimizers for everything in the model that is trained."""
    kind, options = optimizer_of(setting, arm)
    factor = 1.0 if arm.lr is None else arm.lr
    lr = factor * options.pop("lr", 1e-2 if kind == "muon" else setting.lr)
    trained = [p for p in model.parameters() if p.requires_grad]
    if kind == "muon":
        made = muon(model, **{**options, "lr": lr, "adam_lr": factor * options.get("adam_lr", setting.lr)})
    elif kind == "sgd":
        made = [torch.optim.SGD(trained, lr, **options)]
    else:
        made = [_ADAMS[kind](trained, lr, **{"fused": True, **options})]
    for group in (group for optimizer in made for group in optimizer.param_groups):
        group |= {"initial_lr": group["lr"], "raised": arm.raised}
    return made


def rate(setting: Setting, steps: int) -> Callable[[int], float] | None:
    """The factor of the learning rate at each step of a task; None where it never changes.

    Warm-up rises linearly over the first `warmup` of the steps and reaches the full rate with its last step; cosine
    then falls to a tenth.
    """
    rising = round(setting.warmup * steps)
    if setting.schedule == "constant" and not rising:
        return None

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        if setting.schedule == "constant":
            return 1.0
        passed = (step - rising) / max(1, steps - 1 - rising)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, passed)))

    return factor


def set_rate(optimizers: Sequence[Optimizer], factor: float) -> None:
    """Give every group its own learning rate times the factor."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group["initial_lr"]
