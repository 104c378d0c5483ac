"""The moment between two tasks of a stream: the network there, what it will learn next, and how each arm continues.

boundary = reach(SETTINGS["random-labels"], seed=0)     # trains without any remedy up to the last boundary
print(rekindle.advise(boundary.model, boundary.batches, optimizer=boundary.optimizer, loss=boundary.loss))
row = boundary.follow(ARMS["fire"])                     # one more task with that arm, from the same state
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

from torch import nn

from rekindle.isolation import Loss, random_states_kept
from rekindle.lab.arms import ARMS, Arm
from rekindle.lab.evaluation import loss_of
from rekindle.lab.settings import Run, Setting, read_source
from rekindle.lab.sources import Source, derive, generator
from rekindle.lab.train import Learner, make_optimizers

_MOST = 256  # batches of the next task
_OLD = 4  # batches of every earlier task
_NOTHING = ARMS["nothing"]

Row = dict[str, Any]
Watch = Callable[[Row], object]


@dataclass
class Boundary:
    """Before task `index` of a stream, with the network that learned all tasks before it without a remedy.

    `rows` are those of the tasks so far. `batches` are of the next task, one pass at most; where the setting's
    headline is on test data, a quarter of them is `held_out`. For agents they are the regression of the returns that
    the agent has stored, for its next data do not exist yet.
    """

    setting: Setting
    seed: int
    index: int
    rows: list[Row]
    learner: Any = field(repr=False)

    @cached_property
    def model(self) -> nn.Module:
        """The network; of an agent all that are trained."""
        if not self.setting.agents:
            found: nn.Module = self.learner.model
            return found
        from rekindle.integrations import sb3

        return sb3.trained(self.learner.agent)[0]

    @cached_property
    def optimizer(self) -> Any:
        """What the next task is trained with."""
        if self.setting.agents or not self.setting.new_optimizer:
            return self.learner.optimizers
        return make_optimizers(self.model, self.setting, _NOTHING)

    @cached_property
    def fresh(self) -> Callable[[], nn.Module] | None:
        """How a fresh network is made where modules have no scheme."""
        if not self.setting.agents:
            return None
        from rekindle.integrations import sb3

        return sb3.fresh_networks(self.learner.agent)

    @property
    def steps(self) -> int:
        """How long the next task is; for agents in environment steps."""
        if self.setting.agents:
            return int(self.learner.stream.steps[self.index])
        return int(self._stream[self.index].length(self.setting.batch))

    @property
    def batches(self) -> list[Any]:
        """What is to be learned."""
        return self._next[0][len(self.held_out) :]

    @property
    def held_out(self) -> list[Any]:
        """What candidates are judged on where the headline is on test data."""
        return self._next[0][: len(self._next[0]) // 4] if self.setting.headline.startswith("test") else []

    @property
    def loss(self) -> Loss:
        """The loss of the batches."""
        return self._next[1]

    @cached_property
    def old_batches(self) -> list[Any]:
        """A few batches of the earlier tasks; none for agents."""
        if self.setting.agents:
            return []
        tasks = [self._stream[index] for index in range(self.index)][-2:]
        return [each for task in tasks for each in self._some(task.train, "old", _OLD)]

    @cached_property
    def _stream(self) -> Any:
        return self.setting.make_stream(self.seed)

    @cached_property
    def _next(self) -> tuple[list[Any], Loss]:
        if not self.setting.agents:
            return self._some(self._stream[self.index].train, "looking", _MOST), loss_of
        from rekindle.integrations import sb3

        found = sb3.value_regression(self.learner.agent, seed=derive(self.seed, "looking", self.index))
        if found is None:
            raise ValueError(f"setting {self.setting.name!r}: the agent has stored nothing that could be learned")
        return list(found[0]), found[1]

    def _some(self, source: Source, what: str, most: int) -> list[Any]:
        return list(islice(source.batches(self.setting.batch, generator(self.seed, what, self.index)), most))

    def on_to(self, index: int, watch: Watch | None = None) -> Boundary:
        """A later boundary: the same network continues without a remedy; this boundary can no longer be used."""
        told = (lambda row: None) if watch is None else watch
        rows = list(self.rows)
        with random_states_kept():
            for place in range(self.index, index):
                if self.setting.agents:
                    rows.append(self.learner.train_task(place))
                else:
                    rows.append(_finished(self.learner.train_task(place, self._stream[place]), told))
                told(rows[-1])
        return Boundary(self.setting, self.seed, index, rows, self.learner)

    def follow(self, arm: Arm) -> Row:
        """The row of the next task with this arm, from the state of the boundary, which stays as it is."""
        run = Run(self.setting, arm, self.seed)
        with random_states_kept():
            if self.setting.agents:
                return self._follow_agent(run)
            learner = Learner(run, self._stream)
            learner.model.load_state_dict(self.learner.model.state_dict())
            learner.earlier, learner.scores = list(self.learner.earlier), list(self.learner.scores)
            with learner:
                if not self.setting.new_optimizer:
                    for own, other in zip(learner.optimizers, self.learner.optimizers, strict=True):
                        own.load_state_dict(copy.deepcopy(other.state_dict()))  # else it shares the tensors
                return _finished(learner.train_task(self.index, self._stream[self.index]))

    def _follow_agent(self, run: Run) -> Row:
        from rekindle.lab.agents.learning import AgentLearner

        learner = AgentLearner(run, self.learner.stream)
        learner.restore({**copy.deepcopy(self.learner.state()), "method": None})
        row: Row = learner.train_task(self.index)
        return row


def reach(setting: Setting, seed: int, index: int | None = None, watch: Watch | None = None) -> Boundary:
    """Train a network of the setting without any remedy up to the boundary before task `index` (the last without it).

    `watch` is called with each row as it is known.

    >>> stream = {"data": "digits", "count": 64, "tasks": 3, "epochs": 1}
    >>> tiny = Setting("tiny", "random-labels", "mlp", stream, {"width": 8}, health=False)
    >>> boundary = reach(tiny, seed=0)
    >>> boundary.index, boundary.steps, len(boundary.batches)
    (2, 1, 1)
    >>> boundary.follow(ARMS["fire"])["task"]
    2
    """
    if setting.source is not None:
        read_source(setting.source)
    run = Run(setting, _NOTHING, seed)
    stream: Sequence[Any] = setting.make_agent_stream(seed) if setting.agents else setting.make_stream(seed)  # type: ignore[assignment]
    last = len(stream) - 1 if index is None else index
    if not 1 <= last < len(stream):
        raise ValueError(f"setting {setting.name!r} has boundaries 1 to {len(stream) - 1}, there is no {last}")
    with random_states_kept():
        if setting.agents:
            from rekindle.lab.agents.learning import AgentLearner

            learner: Any = AgentLearner(run, stream)  # type: ignore[arg-type]
        else:
            learner = Learner(run, stream)  # type: ignore[arg-type]
            learner.__enter__()  # nothing is observed without a remedy, so nothing has to be closed
    return Boundary(setting, seed, 0, [], learner).on_to(last, watch)


def quiet(setting: Setting) -> Setting:
    """The setting without health rows, which a boundary does not need."""
    return replace(setting, health=False)


def _finished(rows: Any, watch: Watch = lambda row: None) -> Row:
    """What a task's generator returns in the end; rows on the way are passed on."""
    while True:
        try:
            watch(next(rows))
        except StopIteration as end:
            found: Row = end.value
            return found
