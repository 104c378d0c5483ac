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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rekindle.blocks.finding import Found
from rekindle.blocks.names import cleaner
from rekindle.diagnosis.activity import Activity, Unmeasured, activity
from rekindle.diagnosis.examination import Health, HealthBuilder, usage_on, weights_of
from rekindle.diagnosis.usage import Usage, Use
from rekindle.diagnosis.verdict import Thresholds
from rekindle.isolation import Batch, Loss, Recorded, check_loss
from rekindle.measures.matrices import Mode
from rekindle.monitoring.sinks import Sink, send
from rekindle.optimizers.steps import Steps, nests
from rekindle.recording.first_batch import knowing
from rekindle.recording.recorder import called_parts
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


_WINDOW = 10  # samples over which the use of experts, codes and latents is counted


class Monitor:
    """Samples the health of a model every `every` steps of its optimizer, keeps it, and sends it to sinks.

    The data are `batches`, or else the input of the forward pass before the sampled step (of the model, or of its
    parts where only those are called, as in Lightning); padding is left out where an `attention_mask` says so.
    Gradient norms are those that the step used, and the effective learning rate is ‖update‖/‖w‖ of that step. With
    `loss` gradient dormancy is measured on `batches` too, at the cost of a backward pass. Weights and the ranks of
    features change slowly and cost most: they are measured at one sample in `weights_every`, and where a sign comes or
    goes; the other samples have them as they were then. A sample that fails warns and is skipped: monitoring must not
    stop a training run.

    Experts, codes and latents are counted over the last ten samples together (`units` as in `health`).

    `reference` is an earlier Health; `set_reference()` takes the present state, for example at the end of a task.

    >>> layer = nn.Linear(2, 2)
    >>> monitor = Monitor(layer, torch.optim.SGD(layer.parameters()), every=10)
    >>> monitor.sample().health.verdict  # there was no forward pass yet, so no activity
    'unknown'
    >>> monitor.detach()

    Args:
        model: the model that trains.
        optimizer: its optimizer, whose steps are counted.
        every: steps between two samples.
        batches: data to measure on; without them the input of the pass before the sampled step.
        loss: `loss(model, batch)`, for gradient dormancy on `batches`.
        reference: an earlier Health to judge against.
        sinks: functions of (step, flat dict of numbers), see `rekindle.sinks`.
        prefix: of the names that sinks get.
        mode: "cheap" or "full", as in `rekindle.health`.
        weights_every: one in so many samples measures weights and ranks of features.
        history: how many samples are kept.
        thresholds: of the verdict.
        units: stacks by name, as in `rekindle.health`.
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
        weights_every: int = 10,
        history: int = 1000,
        thresholds: Thresholds | None = None,
        units: Mapping[str, str | None] | None = None,
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
        self._stepping = Steps() if nests(optimizer) else None
        self._armed: list[RemovableHandle] = []  # before the step that is sampled, not at every step
        self._seen: list[_Seen] = []  # inputs of the model, or else of its parts
        self._beginning = True  # until the first step shows whether the model itself is called
        self._before: list[Tensor] | None = None
        self._found: list[Found] | None = None
        self._units = units
        self._usage: Usage | None = None
        self._uses: deque[Mapping[str, Use]] = deque(maxlen=_WINDOW)
        self._samples = 0
        self._sampling = False
        self.attach()

    def attach(self) -> None:
        """Begin sampling; a second call does nothing."""
        if self._handles:
            return
        refuse_hidden(self.model, "rekindle.health(model.module)", writes=False)
        self._team, spread = distributed(self.model, copies=False)
        self._sharded = bool(spread)
        settle(self.model)  # modules that FSDP2 left whole hold other parameters than the optimizer
        clean = cleaner(self.model)
        names = {id(p): clean(name) for name, p in self.model.named_parameters()}
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._named = [(names[id(p)], p) for p in held if id(p) in names]
        if held and not self._named:
            raise ValueError("the optimizer holds none of this model's parameters: watch the model it trains")
        self._handles = [self.optimizer.register_step_post_hook(self._after_step)]
        if self._stepping is not None:
            self._handles.append(self.optimizer.register_step_pre_hook(self._before_step))
        self._beginning = True
        self._seen = [_Seen(self.model, None)] if self.batches is None else []
        self._arm()

    def detach(self) -> None:
        """Stop sampling; the history stays. May be called any number of times."""
        for handle in (*self._handles, *self._armed):
            handle.remove()
        self._handles, self._armed, self._seen, self._before = [], [], [], None

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
        if self._sharded:
            settle(self.model)
        self._sampling = True
        try:
            earlier = self.last.health if self.last is not None and self._samples % self.weights_every else None
            health = self._health(began, earlier)
            if earlier is not None and _signs(health) != _signs(earlier):
                health = self._health(began)  # a verdict that changes rests on numbers of one moment
        finally:
            self._sampling = False
        self._samples += 1
        sample = Sample(self.steps, health)
        self.history.append(sample)
        if self.sinks:
            send(self.sinks, self.steps, sample.flat(self.prefix))
        return sample

    def _health(self, began: float, earlier: Health | None = None) -> Health:
        """Everything as it is now; with an earlier Health, what changes slowly as it was then."""
        reading = HealthBuilder(self.mode, self.thresholds.tau)
        if earlier is None:
            if self._found is None:
                with knowing(self.model, self._batches(), self.loss):
                    self._found = weights_of(self.model)
            reading.read_weights(self.model, self._found)
        seen, usage = self._activity(ranks=earlier is None)
        reading.add_activity(seen, usage, pairs=earlier is None)
        if earlier is not None:
            reading.keep(earlier)
        self._add_step(reading)
        return reading.result(time.perf_counter() - began, self.thresholds).against(self.reference)

    def _batches(self) -> Iterable[Batch]:
        """The given batches, else what the model, or else its parts, were called with."""
        if self.batches is not None:
            return self.batches
        seen = [batch for one in self._seen if (batch := one.recorded()) is not None]
        return [batch for batch in seen if batch.part is None] or seen  # its parts are called inside it

    def _activity(self, ranks: bool) -> tuple[Activity, Usage | None]:
        batches = self._batches()
        with passes(self.model, self._team):
            if self.batches is None and not batches:
                reason = "no forward pass of this model was seen; give batches, or watch the module that is called"
                return Activity((), unmeasured=(Unmeasured("", "activity", reason),)), None
            if self._usage is None:
                self._usage = usage_on(self.model, batches, self._units)
            usage = self._usage.fresh() if self._usage is not None and self._usage.found else None
            rows, full = None if ranks else 0, self.mode == "full"
            found = activity(
                self.model, batches, loss=self.loss, mode=self.mode, attention=full, rows=rows, usage=usage
            )
            if usage is None:
                return found, None
            self._uses.append(usage.uses)
            return found, usage.joined(self._uses)

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

    def _due(self) -> bool:
        return (self.steps + 1) % self.every == 0

    def _arm(self) -> None:
        """See the coming step: its input, and the weights before it."""
        if self._armed:
            return
        if self._stepping is None:
            self._armed.append(self.optimizer.register_step_pre_hook(self._before_step))
        for seen in self._seen:
            self._armed.append(seen.attach())

    def _disarm(self) -> None:
        """Keep nothing until the next sample: a batch takes GPU memory, and hooks take time."""
        self._before = None
        for seen in self._seen:
            seen.last = None
        if any(seen.traced for seen in self._seen):
            return  # without its hook, a model that was compiled would be compiled anew
        for handle in self._armed:
            handle.remove()
        self._armed = []

    def _before_step(self, optimizer: object, args: object, kwargs: object) -> None:
        if self._stepping is not None and not self._stepping.begins(optimizer):
            return
        # Before the first step a call without gradients is a summary or a check, not the training.
        if self._beginning and self.batches is None and not any(seen.trained for seen in self._seen):
            for part in called_parts(self.model):  # which are called instead of the model
                if next(part.parameters(), None) is not None:
                    self._seen.append(_Seen(part, part))
                    self._armed.append(self._seen[-1].attach())
        self._beginning = False
        if self._due():
            self._before = [p.detach().clone() for _, p in self._named]

    def _after_step(self, optimizer: object, args: object, kwargs: object) -> None:
        if self._stepping is not None and not self._stepping.ends(optimizer):
            return
        due = self._due()
        self.steps += 1
        if due and not self._sampling:
            try:
                self.sample()
            except Exception as error:
                warnings.warn(f"no health sample at step {self.steps}: {error}", RuntimeWarning, stacklevel=2)
        if self._armed:
            self._disarm()
        if self._due():
            self._arm()

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

    def __init__(self, module: nn.Module, part: nn.Module | None) -> None:
        self.module, self.part = module, part  # part: None if it is the model itself
        self.last: tuple[tuple[Any, ...], dict[str, Any], bool] | None = None
        self.traced = False  # by torch.compile

    def attach(self) -> RemovableHandle:
        """See the module's passes from now on."""
        return self.module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            self.traced = True
        self.last = args, kwargs, torch.is_grad_enabled()

    @property
    def trained(self) -> bool:
        """Whether there was a pass with gradients."""
        return self.last is not None and self.last[2]

    def recorded(self) -> Recorded | None:
        """The input as a batch."""
        return None if self.last is None else Recorded(self.last[0], self.last[1], self.part)


def _signs(health: Health) -> set[tuple[str, str]]:
    return {(finding.layer, finding.sign) for finding in health.verdict.findings}
