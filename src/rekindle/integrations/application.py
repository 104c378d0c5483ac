"""One method in one training run: when it acts, on what, under which guard, and what happened.

Every trainer is reduced to four calls: `bind` when training starts, `begin` before the first forward pass of each
optimizer step, `note` where metrics appear, and `finish`. What belongs between two steps is done in `begin`: there no
gradient is half accumulated, no averaged weights are swapped in, and the metrics and the checkpoint of the previous
step are written. Nothing is done after the last step, so training never ends on a model that was just changed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from numbers import Real
from typing import Any, Literal

from torch import Tensor, nn

from rekindle.advice.keeping import Keeper
from rekindle.blocks.names import unwrapped
from rekindle.integrations import arguments, gradients, ranks
from rekindle.integrations.mirroring import Mirror, Mirrors
from rekindle.integrations.rounds import Rounds
from rekindle.methods.call import Call, replicated
from rekindle.methods.remedy import Moment, Remedy
from rekindle.monitoring.guard import Guard
from rekindle.monitoring.monitor import Monitor
from rekindle.monitoring.schedules import Firing, Schedule
from rekindle.monitoring.sinks import receipt_numbers
from rekindle.monitoring.triggers import Trigger
from rekindle.optimizers import unwrap
from rekindle.projection.method import Batch, Loss, Method
from rekindle.projection.receipt import Receipt

Log = Callable[[int, dict[str, float]], object]


class Application:
    """A method and when it is applied; the callbacks of all trainers are this class with hooks around it.

    method: a method, a `Schedule` (a `Keeper` too), or the name of a method such as "fire".
    at: an optimizer step or several: the method acts when that many steps are done, before the next one begins.
    every: a number of optimizer steps, or "epoch" (at the start of each epoch but the first).
    when: a trigger; it is evaluated once per optimizer step, with the metrics logged since the previous step.
    monitor: a `Monitor`, or the `every` of one, or a dict with its options: health is measured and logged, and its
        numbers ("dormant", "verdict", …) are metrics for the trigger.
    guard: a `Guard`, which takes a remedy back if the loss rises too much.
    mirrors: EMA or target networks, or functions that return them; entries that the method changed are copied there.
    rewarm: after a remedy the learning rate rises linearly over so many steps; schedulers do not notice.
    batches, loss: given to the method where it measures something (ReDo, DASH, FIRE with `recalibrate=True`).
    name: distinguishes two applications in one trainer, in logs and checkpoints; the method's name by default.

    Without `at`, `every` and `when` an event method acts at `boundary()` only. With `when`, `boundary()` tells the
    trigger (`AtBoundary`), which decides. Methods that act in every step (weight clipping, UPGD, loss terms) do so.

    `receipts` are those of this process. A run that was resumed has the summaries of those before in `earlier`, as
    dicts: step, reason, the names that changed, and the flat numbers that went to the logger.

    >>> layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> application = Application("fire", at=[2, 3])
    >>> from torch.optim import SGD
    >>> application.bind(layer, SGD(layer.parameters(), lr=0.1))
    >>> [application.begin(step) is not None for step in (0, 1, 2, 2, 3)]
    [False, False, True, False, True]
    >>> application.firings[0]
    Firing(step=2, reason='at step 2')
    """

    def __init__(
        self,
        method: Method | Schedule | str,
        *,
        at: int | Iterable[int] | None = None,
        every: int | Literal["epoch"] | None = None,
        when: Trigger | None = None,
        monitor: Monitor | int | Mapping[str, Any] | None = None,
        guard: Guard | None = None,
        mirrors: Mirror | Sequence[Mirror] = (),
        rewarm: int = 0,
        batches: Iterable[Batch] | None = None,
        loss: Loss | None = None,
        name: str | None = None,
    ) -> None:
        self._schedule = method if isinstance(method, Schedule) else None
        self.method: Any = arguments.acting(method.method if isinstance(method, Schedule) else method)
        self._at = arguments.steps(at)
        if at is None and every is None and when is None and self._schedule is None:
            every = getattr(self.method, "period", None)
        self._every = arguments.period(every)
        arguments.check_kinds(when, guard)
        if self._schedule is not None and (self._at or every is not None or when is not None):
            raise ValueError("a Schedule brings its own trigger: give at=, every= and when= with a method instead")
        self._trigger = self._schedule.trigger if self._schedule is not None else when
        timed = bool(self._at) or every is not None or self._trigger is not None
        self.name = name or arguments.name_of(self.method)
        self._parts = arguments.parts(self.method, timed, guard is not None)
        guard = guard if self._schedule is None or guard is not None else self._schedule.guard
        self._guard, self._mirrors, self._rewarm = guard, Mirrors(mirrors), arguments.warming(rewarm)
        self._batches, self._loss = arguments.again(batches), loss
        self._watching = arguments.watching(monitor)
        self._monitor = monitor if isinstance(monitor, Monitor) else None
        self.receipts: list[Receipt] = []
        self.earlier: list[dict[str, Any]] = []
        self.firings: list[Firing] = []
        self._summaries: list[dict[str, Any]] = []
        self.last: Receipt | None = None
        self._considered: int | None = None
        self._due = 0.0  # before this step nothing can be due
        self._epoch: int | None = None
        self._boundary: str | None = None
        self._stateless = False  # an unknown optimizer, whose slots have not been seen yet
        self._added: set[int] = set()  # optimizers whose gradients hold the loss term already
        self._alternating = False
        self._metrics: dict[str, float] = {}
        self._unsent: list[tuple[int, dict[str, float]]] = []
        self._restored: Mapping[str, Any] | None = None
        self._rounds: Rounds | None = None
        self._ended: Mapping[str, int] | None = None
        self._observing: Any = None
        self._model: nn.Module | None = None
        self._sharded = False
        self._optimizer: Any = None
        self._log: Log | None = None

    # What a trainer's file calls

    def bind(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        step: int = 0,
        log: Log | None = None,
        closures: bool = False,
        alternating: bool = False,
        counting: bool = True,
    ) -> None:
        """Training starts: find everything that can be wrong before the first step.

        step: optimizer steps that were done before. log: where health and receipts go. closures: the trainer calls
        `before_step` itself, because it runs the backward pass inside `optimizer.step(closure)`, where torch's own
        hook would come too early. alternating: each optimizer has a backward pass of its own (actor and critic), so
        that only the gradients of the one that is about to step are new. counting: the number of steps comes from the
        optimizers (`_rounds.count`), not from the trainer.
        """
        self.finish()
        ranks.refuse(model, optimizer, self.method)
        self._sharded = ranks.sharded(model)
        opened = unwrap(optimizer)
        if step == 0 and self._restored is None:
            self._considered = self._epoch = None  # a new run, maybe after another one
        self._added.clear()
        self._due = 0.0
        self._stateless = any(type(each).__module__.partition(".")[0] != "torch" for each in opened)
        self._alternating = alternating
        self._model, self._optimizer, self._log = unwrapped(model), optimizer, log
        if isinstance(self._schedule, Keeper):
            self._schedule.bind(self._model, optimizer)
        self._check()
        self._mirrors.check(self._model)
        if self._guard is not None:
            self._guard.measure(self._model)  # for its errors
        if (
            hasattr(self.method, "remember")
            and step == 0
            and self._restored is None
            and not arguments.has_start(self.method)
        ):
            self.method.remember(self._model)
        watches = getattr(self.method, "watches", False)
        if hasattr(self.method, "observe") and (watches or self._batches is None):
            with replicated() if ranks.world() > 1 else nullcontext():
                self._observing = self.method.observe(self._model)
        self._rounds = Rounds(
            opened,
            before=self._before if self._parts.keys() & {"loss", "backward"} else None,
            after=self._after if "step" in self._parts else None,
            rewarm=self._rewarm,
            closures=closures,
            counting=counting or self._stateless,
        )
        self._watch(model, opened)
        if self._restored is not None:
            self._restore_parts(self._restored)

    def begin(self, step: int, epoch: int | None = None) -> Receipt | None:
        """Before the first forward pass of a step, `step` steps being done: act if it is time.

        Called again with the same number (gradient accumulation, a resumed run) it does nothing.
        """
        if step == self._considered:
            return None
        if step < self._due:
            self._considered, self._epoch = step, epoch if epoch is not None else self._epoch
            return None
        if self._considered is None:
            self._considered = step - 1
        return self._decide(step, epoch)

    def before_step(self, optimizer: Any) -> None:
        """Between backward pass and optimizer step, for trainers that run closures."""
        if self._rounds is not None:
            self._rounds.before_step(optimizer)

    def before_clipping(self, scale: float = 1.0) -> None:
        """The gradients of a step are complete and not clipped yet: add the gradient of a loss term now.

        Without this call it is added right before the optimizer steps, after clipping. A term in the loss would be
        clipped with the rest. Call it once per optimizer step, after the last backward pass. scale: what a gradient
        scaler multiplied the loss with, unless gradients are unscaled already. Methods without a loss term do nothing.
        """
        if "loss" in self._parts and self._rounds is not None and self._model is not None:
            for optimizer in self._rounds.optimizers:
                gradients.add_term(self._parts["loss"], self._model, optimizer, scale)
                self._added.add(id(optimizer))

    def note(self, metrics: Mapping[str, Any]) -> None:
        """Metrics just logged, under the trainer's names; what is not a number is ignored."""
        if self._trigger is None:
            return
        for key, value in metrics.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                value = value.item()
            if isinstance(value, Real):
                self._metrics[key] = float(value)

    def finish(self) -> None:
        """Training is over: hooks are removed, receipts stay. Safe to call twice."""
        if self._rounds is None:
            return
        self._rounds.close()
        self._rounds.remove()
        self._ended = self._rounds.state_dict()
        self._rounds = None
        if self._observing is not None:
            self._observing.remove()
            self._observing = None
        if self._monitor is not None:
            self._monitor.detach()
        if isinstance(self._schedule, Keeper):
            self._schedule.close()
        self._send()
        late = [step for step in self._at if self._considered is not None and step > self._considered]
        if late:
            text = ", ".join(map(str, late))
            warnings.warn(f"{self.name} at step {text} was not applied: training ended before", stacklevel=2)

    # What a user calls

    def boundary(self, reason: str = "task boundary") -> None:
        """A task or data set ends here: the method acts before the next optimizer step begins."""
        self._boundary = reason
        self._due = 0.0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs: position, trigger, the method's generator and statistics, health history."""
        if self._rounds is None and self._restored is not None:
            return dict(self._restored)  # not bound yet: what was loaded is still the state
        state: dict[str, Any] = {
            "considered": self._considered,
            "epoch": self._epoch,
            "boundary": self._boundary,
            "metrics": dict(self._metrics),
            "firings": [asdict(firing) for firing in self.firings],
            "receipts": [*self.earlier, *self._summaries],
            "rounds": self._ended if self._rounds is None else self._rounds.state_dict(),
        }
        parts: dict[str, Any] = {"trigger": self._trigger, "method": self.method, "monitor": self._monitor}
        for key, part in parts.items():
            state[key] = part.state_dict() if hasattr(part, "state_dict") else None
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`; before or after `bind`."""
        missing = {"considered", "firings", "rounds", "method"} - state.keys()
        if missing:
            raise ValueError(f"this is not the state of a {type(self).__name__}: {sorted(missing)} missing")
        self._considered, self._epoch = state["considered"], state["epoch"]
        self._boundary, self._metrics = state["boundary"], dict(state["metrics"])
        self.firings = [Firing(**each) for each in state["firings"]]
        self.receipts, self._summaries = [], []
        self.earlier = [dict(each) for each in state.get("receipts", ())]
        if self._schedule is not None:
            self._schedule.firings = list(self.firings)
        parts: dict[str, Any] = {"trigger": self._trigger, "method": self.method}
        for key, part in parts.items():
            if state.get(key) is not None and hasattr(part, "load_state_dict"):
                part.load_state_dict(state[key])
        self._restored = dict(state)
        self._due = 0.0
        if self._rounds is not None:
            self._restore_parts(state)

    # Inside

    def _decide(self, step: int, epoch: int | None) -> Receipt | None:
        assert self._rounds is not None, "begin() before bind()"
        self._rounds.close()
        if self._stateless and self._rounds.count:
            self._stateless = False
            self._check()
        reason = self._reason(step, epoch)
        self._considered = step
        self._epoch = epoch if epoch is not None else self._epoch
        self._boundary = None
        self._metrics.clear()
        receipt = None if reason is None else self._apply(step, reason)
        self._send()
        self._due = self._next(step)
        return receipt

    def _next(self, step: int) -> float:
        """The next step at which anything can be due, so that all steps before it cost one comparison."""
        if self._stateless or self._trigger is not None or self._watching is not None or self._every == "epoch":
            return step + 1
        multiple = math.inf if self._every is None else (step // self._every + 1) * self._every
        return min([multiple, *(wanted for wanted in self._at if wanted > step)])

    def _check(self) -> None:
        """Errors that would come when the method acts: when training starts, and when the optimizers have slots."""
        assert self._model is not None
        if isinstance(self.method, Remedy) and "event" in self._parts and not self._sharded:
            self.method.check(Call(self._model, self._optimizer, self._batches, self._loss))

    def _restore_parts(self, state: Mapping[str, Any]) -> None:
        """What exists only while bound."""
        assert self._rounds is not None and self._model is not None
        if isinstance(self.method, Remedy):
            self.method.resume(self._model)
        if state["rounds"] is not None:
            self._rounds.load_state_dict(state["rounds"])
        if state.get("monitor") is not None and self._monitor is not None:
            self._monitor.load_state_dict(state["monitor"])
        self._restored = None

    def _watch(self, model: nn.Module, opened: Sequence[Any]) -> None:
        if self._watching is None:
            return
        if isinstance(self._watching, Monitor):
            self._watching.attach()
        elif self._monitor is None or self._monitor.model is not model:
            options = {"every": self._watching} if isinstance(self._watching, int) else dict(self._watching)
            self._monitor = Monitor(model, opened[0], **options)
        else:
            self._monitor.attach()
        assert self._monitor is not None
        if self._sample not in self._monitor.sinks:
            self._monitor.sinks.append(self._sample)

    def _sample(self, step: int, numbers: dict[str, float]) -> None:
        assert self._monitor is not None and self._monitor.last is not None
        self.note(self._monitor.last.flat())
        if ranks.first():
            self._unsent.append((step, numbers))

    def _reason(self, step: int, epoch: int | None) -> str | None:
        done = -1 if self._considered is None else self._considered
        asked = self._triggered(step, epoch)  # in any case: a trigger counts the steps at which it is evaluated
        if any(done < wanted <= step for wanted in self._at):
            return f"at step {step}"
        if isinstance(self._every, int) and step // self._every > max(done, 0) // self._every:
            return f"every {self._every} steps"
        if self._every == "epoch" and epoch is not None and self._epoch is not None and epoch > self._epoch:
            return f"epoch {epoch}"
        return asked

    def _triggered(self, step: int, epoch: int | None) -> str | None:
        """The trigger's reason, or that of a boundary without one. Before the first step there is nothing to judge."""
        if "event" not in self._parts:
            return None
        if self._trigger is None:
            return self._boundary
        if step == 0 and self._boundary is None:
            return None
        given: dict[str, Any] = {"step": step, **({} if epoch is None else {"epoch": epoch}), **self._metrics}
        if self._boundary is not None:
            given["boundary"] = True
        return ranks.agreed(self._trigger.consider(given))

    def _apply(self, step: int, reason: str) -> Receipt:
        assert self._model is not None
        if ranks.world() > 1 and not self._sharded:
            if self._observing is not None:
                ranks.average_statistics(self.method)
            receipt = ranks.together(self._change, (self._model, *self._mirrors.found()), self._optimizer)
            if self._observing is not None:
                ranks.copy_statistics(self.method)
        else:
            receipt = self._change()
        if self._trigger is not None:
            self._trigger.fire()  # only now: a method that refused has not been applied
        self.receipts.append(receipt)
        self.firings.append(Firing(step, reason))
        if self._schedule is not None:
            self._schedule.firings.append(self.firings[-1])
        if isinstance(self._schedule, Keeper):
            self._schedule.trigger.applied(receipt)
        if self._rounds is not None and not receipt.rolled_back:
            self._rounds.rewarm()
        numbers = receipt_numbers(receipt, f"rekindle/{self.name}/")
        self._summaries.append({"step": step, "reason": reason, "changed": list(receipt.changed), **numbers})
        if ranks.first():
            self._unsent.append((step, numbers))
        return receipt

    def _change(self) -> Receipt:
        assert self._model is not None
        follow = self._mirrors.before(self._model, self._optimizer)
        if self._guard is None:
            receipt = self._call("event")
        else:
            with self._guard.watch(self._model, self._optimizer, method=self.method) as watch:
                receipt = watch.settle(self._call("event"))
        follow()
        return receipt

    def _after(self) -> None:
        """What acts after every step: on every rank; a foreign method that watches the data on rank 0."""
        assert self._model is not None
        together = ranks.world() > 1 and not self._sharded
        if self._observing is not None and together and not isinstance(self.method, Remedy):
            self.last = ranks.together(lambda: self._call("step"), (self._model,), self._optimizer, rarely=True)
        else:
            self.last = self._call("step")

    def _before(self, optimizer: Any, first: bool) -> None:
        """What acts between backward pass and step: terms of the loss, then once per round what looks at gradients.

        Each optimizer gets the term for its own parameters when it steps: another's `zero_grad` and backward pass may
        come between (GANs). Where optimizers alternate, so does what looks at gradients.
        """
        assert self._model is not None
        if "loss" in self._parts and id(optimizer) not in self._added:
            gradients.add_term(self._parts["loss"], self._model, optimizer)
        self._added.discard(id(optimizer))
        if "backward" not in self._parts or not (first or self._alternating):
            return
        with gradients.only_of(optimizer, self._model) if self._alternating else nullcontext():
            self.last = self._call("backward")

    def _call(self, moment: Moment) -> Receipt:
        method = self._parts[moment]
        # Events are applied on rank 0 alone; per-step remedies reduce statistics and random draws over the ranks.
        # Shards are not copies: there the method itself makes the ranks agree.
        copies = ranks.world() > 1 and not self._sharded
        everywhere = moment != "event" and copies and isinstance(method, Remedy)
        with replicated() if everywhere else nullcontext():
            receipt: Receipt = method(self._model, self._optimizer, batches=self._batches, loss=self._loss)
        return receipt

    def _send(self) -> None:
        if self._unsent and self._log is not None:
            for step, numbers in self._unsent:
                self._log(step, numbers)
        self._unsent.clear()
