"""Health while training: one sample in every N optimizer steps, cheap enough to leave on.

>>> import torch
>>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
>>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
>>> with Monitor(net, optimizer, every=2) as monitor:
...     for _ in range(4):
...         optimizer.zero_grad()
...         net(torch.ones(3, 4)).mean().backward()
...         optimizer.step()
>>> [sample.step for sample in monitor.history]
[2, 4]
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rekindle.blocks.finding import Found, find
from rekindle.blocks.names import cleaner
from rekindle.diagnosis.activity import Activity, Unmeasured, activity
from rekindle.diagnosis.examination import Health, HealthBuilder
from rekindle.diagnosis.verdict import Thresholds
from rekindle.isolation import Batch, Loss, Recorded, check_loss
from rekindle.measures.matrices import Mode
from rekindle.monitoring.sinks import Sink, send
from rekindle.optimizers.steps import Steps
from rekindle.sharding.norms import norms
from rekindle.sharding.passes import passes
from rekindle.sharding.team import distributed, refuse_hidden, settle


@dataclass(frozen=True)
class Sample:
    """The health after one optimizer step."""

    step: int
    health: Health

    def flat(self, prefix: str = "") -> dict[str, float]:
        """Its numbers for a logger."""
        return self.health.flat(prefix)


class Monitor:
    """Samples the health of a model every `every` steps of its optimizer, keeps it, and sends it to sinks.

    The data are `batches`, or else the input of the forward pass before the sampled step (of the model, or of its
    parts where only those are called, as in Lightning); padding is left out where an `attention_mask` says so.
    Gradient norms are those that the step used, and the effective learning rate is ‖update‖/‖w‖ of that step. With
    `loss` gradient dormancy is measured on `batches` too, at the cost of a backward pass. A sample that fails warns
    and is skipped: monitoring must not stop a training run.

    `reference` is an earlier Health; `set_reference()` takes the present state, for example at the end of a task.

    >>> layer = nn.Linear(2, 2)
    >>> monitor = Monitor(layer, torch.optim.SGD(layer.parameters()), every=10)
    >>> monitor.sample().health.verdict  # there was no forward pass yet, so no activity
    'unknown'
    >>> monitor.detach()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 100,
        batches: Iterable[Batch] | None = None,
        loss: Loss | None = None,
        reference: Health | None = None,
        sinks: Iterable[Sink] = (),
        prefix: str = "health/",
        mode: Mode = "cheap",
        weights_every: int = 1,
        history: int = 1000,
        thresholds: Thresholds | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"the order is (model, optimizer), got {type(model).__name__} as the model")
        if every < 1 or weights_every < 1:
            raise ValueError(f"every and weights_every are positive numbers, got {every} and {weights_every}")
        check_loss(loss)
        if loss is not None and batches is None:
            raise ValueError("loss is given but batches is not: it could not be applied to a recorded input alone")
        self.model, self.optimizer = model, optimizer
        self.every, self.weights_every, self.mode, self.prefix = every, weights_every, mode, prefix
        self.batches, self.loss, self.reference = batches, loss, reference
        self.sinks = list(sinks)
        self.thresholds = thresholds or Thresholds()
        self.steps = 0
        self.history: deque[Sample] = deque(maxlen=history)
        self._handles: list[RemovableHandle] = []
        self._stepping = Steps()
        self._seen: list[_Seen] = []  # inputs of the model, or else of its parts
        self._beginning = True  # until the first step shows whether the model itself is called
        self._before: list[Tensor] | None = None
        self._found: list[Found] | None = None
        self._samples = 0
        self._sampling = False
        self.attach()

    def attach(self) -> None:
        """Begin sampling; a second call does nothing."""
        if self._handles:
            return
        refuse_hidden(self.model, "rekindle.health(model.module)", writes=False)
        settle(self.model)  # modules that FSDP2 left whole hold other parameters than the optimizer
        clean = cleaner(self.model)
        names = {id(p): clean(name) for name, p in self.model.named_parameters()}
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._named = [(names[id(p)], p) for p in held if id(p) in names]
        if held and not self._named:
            raise ValueError("the optimizer holds none of this model's parameters: watch the model it trains")
        self._handles = [
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        ]
        self._beginning = True
        if self.batches is None:
            self._look_at(self.model)

    def detach(self) -> None:
        """Stop sampling; the history stays. May be called any number of times."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._seen = [], []
        self._forget()

    def __enter__(self) -> Monitor:
        self.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    @property
    def last(self) -> Sample | None:
        """The latest sample."""
        return self.history[-1] if self.history else None

    def set_reference(self, health: Health | None = None) -> Health:
        """Judge from now on against `health`, or against a sample taken now."""
        self.reference = self.sample().health if health is None else health
        return self.reference

    def sample(self) -> Sample:
        """Measure now, whatever the step; errors are raised."""
        began = time.perf_counter()
        settle(self.model)
        self._sampling = True
        try:
            reading = HealthBuilder(self.mode, self.thresholds.tau)
            if self._samples % self.weights_every == 0:
                if self._found is None:
                    self._found = find(self.model, sharded=True)
                reading.read_weights(self.model, self._found)
            found = self._activity()
            reading.add_activity(found)
            self._add_step(reading)
            health = reading.result(time.perf_counter() - began, self.thresholds).against(self.reference)
        finally:
            self._sampling = False
        self._samples += 1
        sample = Sample(self.steps, health)
        self.history.append(sample)
        if self.sinks:
            send(self.sinks, self.steps, sample.flat(self.prefix))
        return sample

    def _activity(self) -> Activity:
        seen = [batch for one in self._seen if (batch := one.recorded()) is not None]
        whole = [batch for batch in seen if batch.part is None]  # its parts are called inside it
        batches = (whole or seen) if self.batches is None else self.batches
        with passes(self.model, distributed(self.model, copies=False)[0]):
            if self.batches is None and not seen:
                reason = "no forward pass of this model was seen; give batches, or watch the module that is called"
                return Activity((), unmeasured=(Unmeasured("", "activity", reason),))
            return activity(self.model, batches, loss=self.loss, mode=self.mode, attention=self.mode == "full")

    def _add_step(self, reading: HealthBuilder) -> None:
        """What the step itself shows: gradients as they were used, and how far the weights moved."""
        held = [(name, p, p.grad) for name, p in self._named if p.grad is not None and not p.grad.is_sparse]
        if held and not reading.gradients:
            sizes = norms([grad for _, _, grad in held])
            reading.gradients = dict(zip([name for name, _, _ in held], sizes.tolist(), strict=True))
            reading.whole["gradient_norm"] = float(sizes.norm())
        if self._before is not None:
            weights = [p.detach() for _, p in self._named]
            moved = norms([now - then for now, then in zip(weights, self._before, strict=True)])
            sizes = norms(self._before)
            if float(sizes.norm()) > 0:
                reading.whole["effective_learning_rate"] = float(moved.norm() / sizes.norm())
            for (name, _), ratio, size in zip(self._named, (moved / sizes).tolist(), sizes.tolist(), strict=True):
                if size > 0:
                    reading.steps[name] = ratio
            self._before = None

    def _due(self) -> bool:
        return (self.steps + 1) % self.every == 0 and not self._sampling

    def _look_at(self, module: nn.Module) -> None:
        seen = _Seen(None if module is self.model else module)
        self._seen.append(seen)
        self._handles.append(module.register_forward_pre_hook(seen, with_kwargs=True))

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._stepping.begins(optimizer):
            return
        # Before the first step a call without gradients is a summary or a check, not the training.
        if self._beginning and self.batches is None and not any(seen.trained for seen in self._seen):
            for part in _parts(self.model):  # which are called instead of the model
                if next(part.parameters(), None) is not None:
                    self._look_at(part)
        self._beginning = False
        if self._due():
            self._before = [p.detach().clone() for _, p in self._named]

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._stepping.ends(optimizer):
            return
        due = self._due()
        self.steps += 1
        if not due:
            self._forget()
            return
        try:
            self.sample()
        except Exception as error:
            warnings.warn(f"no health sample at step {self.steps}: {error}", RuntimeWarning, stacklevel=2)
        self._forget()

    def _forget(self) -> None:
        """Keep nothing until the next sample: a batch takes GPU memory."""
        self._before = None
        for seen in self._seen:
            seen.last = None

    def state_dict(self) -> dict[str, Any]:
        """Steps, history and reference, as plain values."""
        return {
            "steps": self.steps,
            "samples": self._samples,
            "history": [{"step": sample.step, "health": sample.health.to_dict()} for sample in self.history],
            "reference": None if self.reference is None else self.reference.to_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state.

        >>> layer = nn.Linear(2, 2)
        >>> first = Monitor(layer, torch.optim.SGD(layer.parameters()))
        >>> second = Monitor(layer, torch.optim.SGD(layer.parameters()))
        >>> _ = first.sample(); second.load_state_dict(first.state_dict()); len(second.history)
        1
        """
        self.steps, self._samples = state["steps"], state["samples"]
        self.history.clear()
        for each in state["history"]:
            self.history.append(Sample(each["step"], Health.from_dict(each["health"])))
        self.reference = None if state["reference"] is None else Health.from_dict(state["reference"])


class _Seen:
    """A hook that keeps the last input of a module.

    It reads nothing that changes from step to step: torch.compile takes it into the graph, and would compile anew.
    """

    def __init__(self, part: nn.Module | None) -> None:
        self.part = part
        self.last: tuple[tuple[Any, ...], dict[str, Any], bool] | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.last = args, kwargs, torch.is_grad_enabled()

    @property
    def trained(self) -> bool:
        """Whether there was a pass with gradients."""
        return self.last is not None and self.last[2]

    def recorded(self) -> Recorded | None:
        """The input as a batch."""
        return None if self.last is None else Recorded(self.last[0], self.last[1], self.part)


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """What is called: children, and those in lists and dicts of modules, which are never called themselves."""
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _parts(child)
        else:
            yield child
