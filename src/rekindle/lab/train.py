"""One run: a network learns the tasks of a stream one after the other, with one remedy. The loop is `Learner.learn`.

    for row in execute(Run(SETTINGS["random-labels"], ARMS["fire"], seed=0)):
        print(row)

Fairness is built in: data, their order and the first weights depend on the seed alone; every arm gets the same new
optimizer, BatchNorm treatment and schedule at a boundary; what is measured is measured in the same way for all.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

import rekindle
from rekindle.lab.arms import Arm
from rekindle.lab.evaluation import Score, average, drift_of, evaluate, log_probabilities, look, loss_of
from rekindle.lab.optimizing import make_optimizers, rate, set_rate
from rekindle.lab.randomness import derive, generator, sheltered
from rekindle.lab.settings import Setting, read_source, source_hash
from rekindle.lab.sources import Examples, Stream, Task
from rekindle.lab.starts import Start
from rekindle.lab.tracking import Track
from rekindle.methods import DASH, ReDo, ReGraMa
from rekindle.projection.recalibration import recalibrate

FORMAT = 1  # of the rows; results of another format are other results

Row = dict[str, Any]
_OLD = 5  # earlier tasks that retention looks at
_CHECK = 200  # steps between two looks for a loss that is not finite
_BATCHES = 20  # that a method gets at a boundary
_DRIFT = 500  # rows that the drift of the function is measured on


class Refused(Exception):
    """A method cannot treat this network, or an optimizer cannot train it; the message says why."""


class Diverged(Exception):
    """A method met weights that are not finite."""


@dataclass(frozen=True)
class Run:
    """One arm in one setting with one seed.

    >>> run = Run(Setting("tiny", "random-labels", "mlp"), Arm("fire", "FIRE"), seed=0)
    >>> Run.from_dict(run.to_dict()).identity == run.identity
    True
    """

    setting: Setting
    arm: Arm
    seed: int

    @cached_property
    def identity(self) -> str:
        """A hash of all that the results depend on, the content of the user's file included."""
        return _hash({**self.first_task(), "arm": _effective(self.arm.within(self.setting))})

    def first_task(self) -> dict[str, Any]:
        """What the first task depends on for an arm that acts at boundaries only."""
        setting = self.setting.to_dict()
        del setting["coefficients"], setting["about"]  # those of this arm are in its options
        if not setting["spare_first"]:
            del setting["spare_first"]  # came later: what was run before it is still the same
        source = setting.pop("source")
        return {
            "format": FORMAT,
            "setting": setting,
            "source": None if source is None else source_hash(source),
            "seed": self.seed,
            "optimizer": [self.arm.optimizer, dict(self.arm.optimizer_options), self.arm.lr],
        }

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON holds it."""
        return {"setting": self.setting.to_dict(), "arm": self.arm.to_dict(), "seed": self.seed}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Run:
        """A run from what `to_dict` gave."""
        return cls(Setting.from_dict(data["setting"]), Arm.from_dict(data["arm"]), int(data["seed"]))


def execute(run: Run, *, starts: Path | None = None) -> Iterator[Row]:
    """Do the run; rows come as they are known: a start, progress, one a task, an end.

    `starts` is a folder where the state after the first task is kept, for all runs that do the same until then.
    torch's global random state is left alone, and so is the number of threads.

    >>> stream = {"data": "digits", "count": 64, "tasks": 2, "epochs": 1}
    >>> setting = Setting("tiny", "random-labels", "mlp", stream, {"width": 8}, health=False)
    >>> [row["kind"] for row in execute(Run(setting, Arm("fire", "FIRE"), seed=0))]
    ['start', 'task', 'task', 'end']
    """
    return sheltered(_rows(run, starts), derive(run.seed, "dropout"))


def _rows(run: Run, starts: Path | None) -> Iterator[Row]:
    begun = time.perf_counter()
    if run.setting.source is not None:
        read_source(run.setting.source)
    stream = run.setting.make_stream(run.seed)
    learner = Learner(run, stream)
    yield {
        "kind": "start",
        "identity": run.identity,
        "run": run.to_dict(),
        "versions": _versions(),
        "stream": {"tasks": len(stream), "classes": stream.classes, "shape": list(stream.shape)},
        "parameters": sum(p.numel() for p in learner.model.parameters()),
    }
    end: Row = {"kind": "end"}
    start = Start(starts, run.first_task()) if starts is not None and learner.acts_at_boundaries else None
    try:
        with learner:
            for index in range(len(stream)):
                task = stream[index]
                kept = start.load() if start is not None and index == 0 else None
                if kept is not None:
                    row = learner.take_up(task, kept)
                else:
                    row = yield from learner.live(index, task)
                    if start is not None and index == 0:
                        start.save(learner.state(row))
                yield row
    except Refused as reason:
        end["refused"] = str(reason)
    yield {**end, "seconds": time.perf_counter() - begun}


class Learner:
    """A network on its way through a stream: what it is, what it remembers being asked, and the remedy it gets."""

    def __init__(self, run: Run, stream: Stream) -> None:
        self.setting, self.seed = run.setting, run.seed
        self.arm = run.arm.within(run.setting)
        self.model = run.setting.make_network(stream, run.seed)
        self.method = self.arm.build()
        self.moment: str = getattr(self.method, "moment", "event") if self.method is not None else "never"
        self.draws = generator(run.seed, "method")
        self.optimizers: list[torch.optim.Optimizer] = []
        self.watching = ExitStack()
        self.asked: list[Examples] = []  # what the last tasks were judged on
        self.scores: list[Score] = []  # how well the network does there now
        self.treating = 0.0  # seconds that the method took in this task
        if hasattr(self.method, "remember"):
            self.method.remember(self.model)

    @property
    def acts_at_boundaries(self) -> bool:
        """Whether the first task is the same as if there were no remedy."""
        return self.moment == "never" or (self.moment == "event" and self.arm.when == "boundary" and not self._observes)

    @property
    def _observes(self) -> bool:
        # ReDo and ReGraMa judge by a batch, as in the paper's protocol, so they need not watch every step.
        return hasattr(self.method, "observe") and not isinstance(self.method, ReDo | ReGraMa)

    def __enter__(self) -> Learner:
        if self._observes:
            self.watching.enter_context(self._ask(self.method.observe, self.model))
        self.optimizers = self._ask(make_optimizers, self.model, self.setting, self.arm)
        return self

    def __exit__(self, *exception: object) -> None:
        self.watching.close()

    def live(self, index: int, task: Task) -> Generator[Row, None, Row]:
        """One task: the boundary, the learning, and what is known afterwards."""
        torch.manual_seed(derive(self.seed, "dropout", index))
        self.treating = 0.0
        remedy = self.cross(index, task) if index else None
        retained = average(self.scores)
        begun = time.perf_counter()
        track, diverged = yield from self.learn(index, task)
        seconds = time.perf_counter() - begun
        return {
            "kind": "task",
            "task": index,
            "name": task.name,
            "steps": len(track),
            "online_accuracy": track.accuracy,
            "online_loss": track.loss,
            "curve": track.curve(),
            "peak_loss": track.peak(),
            **self.judge(task),
            "seconds": seconds,
            "remedy_seconds": self.treating,
            "remedy": remedy,
            "old_accuracy_start": retained[0],
            "old_loss_start": retained[1],
            "health": look(self.model, task.train.some(self.setting.evaluate)) if self.setting.health else None,
            "diverged": diverged,
        }

    def learn(self, index: int, task: Task) -> Generator[Row, None, tuple[Track, bool]]:
        """The training loop. Numbers stay tensors; every `_CHECK` steps one is waited for, to see a divergence."""
        setting, model, optimizers = self.setting, self.model, self.optimizers
        acting = bool(index) or not setting.spare_first
        steps, every = task.length(setting.batch), self._period(task) if acting else 0
        factor = rate(setting, steps)
        trained = [parameter for group in _groups(optimizers) for parameter in group["params"]]
        moment = self.moment if acting else "never"
        term = self.method.loss_term if moment == "loss" else None
        track, report = Track(), time.perf_counter() + 1.0
        model.train()
        try:
            for step, (x, y) in enumerate(task.batches(setting.batch, generator(self.seed, "order", index))):
                if every and step and step % every == 0:
                    self._treat([(x, y)])
                if factor is not None:
                    set_rate(optimizers, factor(step))
                logits = model(x)
                loss = cross_entropy(logits.flatten(0, -2), y.flatten())
                track.add((logits.detach().argmax(-1) == y).sum(), loss.detach(), y.numel())
                for optimizer in optimizers:
                    optimizer.zero_grad()
                (loss if term is None else loss + self._timed(term, model)).backward()
                if setting.clip is not None:
                    clip_grad_norm_(trained, setting.clip)
                if moment == "backward":
                    self._treat()
                for optimizer in optimizers:
                    optimizer.step()
                if moment == "step":
                    self._treat()
                if step % _CHECK == _CHECK - 1 and track.diverged():
                    return track, True
                if time.perf_counter() > report:
                    yield {"kind": "progress", "task": index, "step": step + 1, "steps": steps}
                    report = time.perf_counter() + 1.0
        except Diverged:
            return track, True
        return track, track.diverged()

    def cross(self, index: int, task: Task) -> Row | None:
        """The boundary before a task: the remedy, new BatchNorm statistics, a new optimizer; and what they did."""
        setting, model = self.setting, self.model
        treated = self.moment == "event"
        found: Row | None = None
        if treated or setting.recalibrate:
            batches = list(islice(task.train.batches(setting.batch, generator(self.seed, "looking", index)), _BATCHES))
        if isinstance(self.method, DASH):  # its authors take the gradient of a whole chunk
            batches = [(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))]
        if treated:
            before, old, sample = self.scores[-1], average(self.scores), self.asked[-1].some(_DRIFT).x
            answers = log_probabilities(model, sample)
            try:
                receipt, failed = self._treat(batches), None
            except Diverged as reason:
                receipt, failed = None, str(reason)
        if setting.recalibrate:
            recalibrate(model, batches)
        if treated or setting.recalibrate:
            self.scores = [evaluate(model, each) for each in self.asked]
        if treated:
            after, new = self.scores[-1], average(self.scores)
            found = {
                "seconds": self.treating,
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
                "function_drift": drift_of(answers, log_probabilities(model, sample)),
            }
        if setting.new_optimizer:
            self.optimizers = make_optimizers(model, setting, self.arm)
        return found

    def judge(self, task: Task) -> Row:
        """What the network can do after a task, on this task and on earlier ones."""
        rows = self.setting.evaluate
        train = evaluate(self.model, task.train.some(rows))
        test = None if task.test is None else evaluate(self.model, task.test.some(rows))
        earlier = [evaluate(self.model, each) for each in self.asked]
        self.asked = [*self.asked, task.judged_on(rows)][-_OLD:]
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

    def take_up(self, task: Task, kept: Row) -> Row:
        """Stand where `state` was taken; the first task's row."""
        self.model.load_state_dict(kept["model"])
        for optimizer, state in zip(self.optimizers, kept["optimizers"], strict=False):
            optimizer.load_state_dict(state)
        row: Row = kept["row"]
        known = "train" if task.test is None else "test"
        self.asked = [task.judged_on(self.setting.evaluate)]
        self.scores = [Score(row[f"{known}_accuracy"], row[f"{known}_loss"])]
        return row

    def _period(self, task: Task) -> int:
        """Every how many steps within a task the method is applied; 0 if only at its boundary."""
        if self.moment != "event" or self.arm.when == "boundary":
            return 0
        if isinstance(self.arm.when, int):
            return self.arm.when
        # Text is read in steps and has no epochs: a tenth of the task stands for one.
        epoch = task.train.steps(self.setting.batch) if task.epochs is not None else max(1, (task.steps or 0) // 10)
        return self.arm.epochs * epoch

    def _treat(self, batches: Any = None) -> Any:
        """Apply the method; batches only where it acts at an event."""
        return self._timed(
            self.method, self.model, self.optimizers, batches=batches, loss=loss_of, generator=self.draws
        )

    def _timed(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        result = self._ask(call, *args, **options)
        self.treating += time.perf_counter() - begun
        return result

    def _ask(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call; a refusal ends the run with its reason, one because of NaN is a divergence."""
        try:
            return call(*args, **options)
        except (ValueError, NotImplementedError) as error:
            if all(bool(torch.isfinite(p).all()) for p in self.model.parameters()):
                raise Refused(str(error)) from error
            raise Diverged(str(error)) from error


def _groups(optimizers: list[torch.optim.Optimizer]) -> Iterator[dict[str, Any]]:
    for optimizer in optimizers:
        yield from optimizer.param_groups


def _effective(arm: Arm) -> dict[str, Any]:
    """What of an arm decides results; targets that a setting fills in are among its options."""
    fields = arm.to_dict()
    del fields["tuning"], fields["about"]
    return fields


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _versions() -> dict[str, str]:
    return {"rekindle": rekindle.__version__, "torch": str(torch.__version__), "python": platform.python_version()}
