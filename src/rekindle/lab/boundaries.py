"""The moment between two tasks of a stream: the network there, what it will learn next, and how each arm continues.

boundary = reach(SETTINGS["random-labels"], seed=0)     # trains without any remedy up to the last boundary
print(rekindle.advise(boundary.model, boundary.batches, optimizer=boundary.optimizer, loss=boundary.loss))
row = boundary.follow(ARMS["fire"])                     # one more task with that arm, from the same state
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from types import ModuleType
from typing import Any

import torch
from torch import nn

from rekindle import Advice, advise
from rekindle.isolation import Loss, random_states_kept
from rekindle.lab.arms import ARMS, Arm
from rekindle.lab.evaluation import loss_of
from rekindle.lab.settings import Run, Setting, read_source
from rekindle.lab.sources import Examples, Source, Stream, Text, derive, generator
from rekindle.lab.train import Learner, make_optimizers, rate

_MOST = 256  # batches of the next task
_JUDGED = 256  # rows of a batch that is held out
_FINE = 10_000  # steps that stand for a whole task where only the share counts
_OLD = 4  # batches of every earlier task
_NOTHING = ARMS["nothing"]

Row = dict[str, Any]
Watch = Callable[[Row], object]


@dataclass
class Boundary:
    """Before task `index` of a stream, with the network that learned all tasks before it without a remedy.

    `rows` are those of the tasks so far. For agents the batches are the regression of the returns that the agent has
    stored, for its next data do not exist yet: that is what a probe learns; `advise` lets copies play.
    """

    setting: Setting
    seed: int
    index: int
    rows: list[Row]
    learner: Any = field(repr=False)

    @cached_property
    def model(self) -> nn.Module:
        """The network; of an agent all that are trained."""
        found: nn.Module = _sb3().trained(self.learner.agent)[0] if self.setting.agents else self.learner.model
        return found

    @cached_property
    def optimizer(self) -> object:
        """What the next task is trained with."""
        if self.setting.agents or not self.setting.new_optimizer:
            return self.learner.optimizers
        return make_optimizers(self.model, self.setting, _NOTHING)

    @cached_property
    def fresh(self) -> Callable[[], nn.Module] | None:
        """How a fresh network is made where modules have no scheme."""
        made: Callable[[], nn.Module] | None = None
        if self.setting.agents:
            made = _sb3().fresh_networks(self.learner.agent)
        return made

    @cached_property
    def first(self) -> nn.Module | None:
        """The network with its first weights; None for agents."""
        with random_states_kept():
            found: nn.Module | None = None if self.setting.agents else self._learner(_NOTHING).model
            return found

    @property
    def steps(self) -> int:
        """How long the next task is; for agents in environment steps."""
        if self.setting.agents:
            return int(self.learner.stream.steps[self.index])
        return int(self._stream[self.index].length(self.setting.batch))

    @property
    def schedule(self) -> Callable[[float], float] | None:
        """The factor of the learning rate by the share of the task that has passed; None where it is constant."""
        factor = None if self.setting.agents else rate(self.setting, _FINE)
        return None if factor is None else lambda share: factor(min(int(share * _FINE), _FINE - 1))

    @property
    def judge(self) -> Callable[[nn.Module, Any], Any] | None:
        """What held-out batches are judged by where that is not the loss: the share of wrong answers."""
        return wrong if self.setting.headline == "test_accuracy" else None

    @property
    def batches(self) -> list[Any]:
        """What is to be learned: the next task as its passes bring it, 256 batches at most."""
        return self._next[0]

    @property
    def held_out(self) -> list[Any]:
        """What candidates are judged on where the headline is on test data: examples that no earlier task had."""
        return self._next[1]

    @property
    def loss(self) -> Loss:
        """The loss of the batches."""
        return self._next[2]

    @cached_property
    def old_batches(self) -> list[Any]:
        """A few batches of the last two tasks; none for agents."""
        if self.setting.agents:
            return []
        tasks = [self._stream[index] for index in range(self.index)][-2:]
        draws = [task.train.batches(self.setting.batch, generator(self.seed, "old", self.index)) for task in tasks]
        return [each for batches in draws for each in islice(batches, _OLD)]

    @cached_property
    def _stream(self) -> Stream:
        return self.setting.make_stream(self.seed)

    @cached_property
    def _next(self) -> tuple[list[Any], list[Any], Loss]:
        if not self.setting.agents:
            task, judged = self._stream[self.index], None
            if self.setting.headline.startswith("test"):
                learned, judged = self._split(task.train)
                task = replace(task, train=learned)
            held_out = [] if judged is None else list(judged.batches(_JUDGED, generator(self.seed, "judging")))
            batches = task.batches(self.setting.batch, generator(self.seed, "looking", self.index))
            return list(islice(batches, _MOST)), held_out, loss_of
        found = _sb3().value_regression(self.learner.agent, seed=derive(self.seed, "looking", self.index))
        if found is None:
            raise ValueError(f"setting {self.setting.name!r}: the agent has stored nothing that could be learned")
        return list(found[0]), [], found[1]

    def _split(self, source: Source) -> tuple[Source, Source | None]:
        """What is learned, and what is held out: the last quarter of a text, half of the examples never seen before."""
        if isinstance(source, Text):
            edge = len(source.tokens) * 3 // 4
            return Text(source.tokens[:edge], source.context), Text(source.tokens[edge:], source.context)
        seen = {key for task in range(self.index) for key in _example_keys(self._stream[task].train)}
        keys = _example_keys(source)
        new = sorted(set(keys) - seen)
        order = torch.randperm(len(new), generator=generator(self.seed, "held out", self.index)).tolist()
        chosen = {new[place] for place in order[: min(len(new) // 2, len(keys) // 4)]}
        if not chosen:
            return source, None
        out = torch.tensor([key in chosen for key in keys])
        return Examples(source.x[~out], source.y[~out]), Examples(source.x[out], source.y[out])

    def on_to(self, index: int, watch: Watch | None = None) -> Boundary:
        """A later boundary: the same network continues without a remedy; this boundary can no longer be used."""
        told = watch or (lambda row: None)
        rows = list(self.rows)
        with random_states_kept():
            for place in range(self.index, index):
                rows.append(self._learn(self.learner, place, told))
                told(rows[-1])
        return Boundary(self.setting, self.seed, index, rows, self.learner)

    def _learn(self, learner: Any, index: int, watch: Watch = lambda row: None) -> Row:
        """The row of a task that this learner learns."""
        if self.setting.agents:
            row: Row = learner.train_task(index)
            return row
        rows = learner.train_task(index, self._stream[index])
        while True:
            try:
                watch(next(rows))
            except StopIteration as end:
                found: Row = end.value
                return found

    def advise(self, **options: object) -> Advice:
        """What `rekindle.advise` says here; trials train as the next task will. `options` are its own."""
        if not self.setting.agents:
            about: dict[str, Any] = {
                "loss": self.loss,
                "optimizer": self.optimizer,
                "steps": self.steps,
                "held_out": self.held_out,
            }
            about |= {"judge": self.judge, "schedule": self.schedule, "clip": self.setting.clip}
            return advise(self.model, self.batches, **{**about, **options})
        from rekindle.integrations.agent_advice import advise_agent

        stream = self.learner.stream
        made = {"copies": self._agent, "prepare": self.learner.settle, "restart": not stream.continuing}
        made |= {"steps": self.steps}
        return advise_agent(self.learner.agent, lambda: stream.environment(self.index), **{**made, **options})

    def _agent(self) -> object:
        """A copy of the agent."""
        learner = self._learner(_NOTHING)
        learner.restore(copy.deepcopy(self.learner.state()))
        return learner.agent

    def method(self, arm: Arm) -> object:
        """The arm's method as its run has it here: with the first weights of the network, where it needs them."""
        with random_states_kept():
            return self._learner(arm).method

    def follow(self, arm: Arm, again: int = 0) -> Row:
        """The row of the next task with this arm, from the state of the boundary, which stays as it is.

        `again` is for more than one continuation: the same task in another order, with other draws of the method.
        """
        with random_states_kept():
            learner = self._learner(arm)
            if self.setting.agents:
                learner.restore({**copy.deepcopy(self.learner.state()), "method": None})
            else:
                learner.model.load_state_dict(self.learner.model.state_dict())
                learner.earlier, learner.scores = list(self.learner.earlier), list(self.learner.scores)
            if again:
                learner.seed = derive(self.seed, "again", again)
                learner.generator = generator(learner.seed, "method")
            if self.setting.agents:
                return self._learn(learner, self.index)
            with learner:
                if not self.setting.new_optimizer:
                    for own, other in zip(learner.optimizers, self.learner.optimizers, strict=True):
                        own.load_state_dict(copy.deepcopy(other.state_dict()))  # else it shares the tensors
                return self._learn(learner, self.index)

    def _learner(self, arm: Arm) -> Any:
        return _learner(Run(self.setting, arm, self.seed))


def reach(setting: Setting, seed: int, index: int | None = None, watch: Watch | None = None) -> Boundary:
    """Train a network of the setting without any remedy up to the boundary before task `index` (the last without it).

    `watch` is called with each row as it is known.
    """
    if setting.source is not None:
        read_source(setting.source)
    length = len(setting.make_agent_stream(seed) if setting.agents else setting.make_stream(seed))
    last = length - 1 if index is None else index
    if not 1 <= last < length:
        raise ValueError(f"setting {setting.name!r} has boundaries 1 to {length - 1}, there is no {last}")
    with random_states_kept():
        learner = _learner(Run(setting, _NOTHING, seed))
        if not setting.agents:
            learner.__enter__()  # nothing is observed without a remedy, so nothing has to be closed
    return Boundary(setting, seed, 0, [], learner).on_to(last, watch)


def _learner(run: Run) -> Any:
    """A learner that has learned nothing yet."""
    if not run.setting.agents:
        return Learner(run, run.setting.make_stream(run.seed))
    from rekindle.lab.agents.learning import AgentLearner

    return AgentLearner(run, run.setting.make_agent_stream(run.seed))


def wrong(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The share of wrong answers."""
    x, y = batch
    missed: torch.Tensor = model(x).argmax(-1) != y
    return missed.float().mean()


def quiet(setting: Setting) -> Setting:
    """The setting without health rows, which a boundary does not need."""
    return replace(setting, health=False)


def _example_keys(source: Source) -> list[bytes]:
    """One key per example: equal where input and label are."""
    assert isinstance(source, Examples)
    rows = zip(source.x.numpy(), source.y.numpy(), strict=True)
    return [hashlib.blake2b(x.tobytes() + y.tobytes(), digest_size=16).digest() for x, y in rows]


def _sb3() -> ModuleType:
    from rekindle.integrations import sb3

    return sb3
