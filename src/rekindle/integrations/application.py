"""One method in one training run: `When` decides, `What` acts, and this class keeps what happened.

Every trainer is reduced to four calls: `bind` when training starts, `begin` before the first forward pass of each
optimizer step, `note` where metrics appear, and `finish`. What belongs between two steps is done in `begin`: there no
gradient is half accumulated, no averaged weights are swapped in, and the metrics and the checkpoint of the previous
step are written. Nothing is done after the last step, so training never ends on a model that was just changed.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import nn

from rekindle.blocks.names import is_sharded, unwrapped
from rekindle.integrations import arguments
from rekindle.integrations.clock import Clock
from rekindle.integrations.mirroring import Copy, Mirror, Mirrors
from rekindle.integrations.tally import Tally
from rekindle.integrations.what import Given, Run, What
from rekindle.integrations.when import When
from rekindle.methods.remedy import Moment, Remedy
from rekindle.monitoring.guard import Guard
from rekindle.monitoring.monitor import Monitor
from rekindle.monitoring.schedules import Firing, Schedule
from rekindle.monitoring.sinks import receipt_numbers
from rekindle.monitoring.triggers import Trigger
from rekindle.optimizers import unwrap
from rekindle.projection.method import Loss, Method
from rekindle.projection.receipt import Receipt
from rekindle.projection.transaction import Transaction
from rekindle.sharding.replicas import everyone

Log = Callable[[int, dict[str, float]], object]
_STATE = ("progress", "trigger", "method", "monitor")


class Application:
    """A method and when it is applied; the callbacks of all trainers are this class with hooks around it.

    method: a method, a `Schedule` (a `Keeper` too), or the name of a method such as "fire".
    at: an optimizer step or several: the method acts when that many steps are done, before the next one begins.
    every: a number of optimizer steps, or "epoch" (at the start of each epoch but the first).
    when: a trigger; it is evaluated once per optimizer step, with the metrics logged since the previous step.
    clock: the optimizer whose updates are the steps, or its position among several; the first by default.
    monitor: a `Monitor`, or the `every` of one, or a dict with its options: health is measured and logged, and its
        numbers ("dormant", "verdict", …) are metrics for the trigger.
    guard: a `Guard`, which takes a remedy back if the loss rises too much.
    mirrors: EMA or target networks, or functions that return them; a dict names the part of the model that each
        follows: `{"qf1": qf1_target}`.
    mirrors_copy: "changed" copies the entries that the method changed, "everything" the whole part.
    rewarm: after a remedy the learning rate rises linearly over so many steps; schedulers do not notice.
    batches, loss: given to the method where it measures something (ReDo, DASH, FIRE with `recalibrate=True`); batches
        may be a function, which is called each time.
    run: `run(model, batch)`, for a model that is not called as `model(batch)`.
    name: distinguishes two applications in one trainer, in logs and checkpoints; the method's name by default.

    Without `at`, `every` and `when` an event method acts at `boundary()` only. With `when`, `boundary()` tells the
    trigger (`AtBoundary`), which decides. Methods that act in every step (weight clipping, UPGD, loss terms) do so;
    their receipts are added up over 100 steps.

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
        clock: object = None,
        monitor: Monitor | int | Mapping[str, Any] | None = None,
        guard: Guard | None = None,
        mirrors: Mirror | Sequence[Mirror] | Mapping[str, Mirror] = (),
        mirrors_copy: Copy = "changed",
        rewarm: int = 0,
        batches: Given | None = None,
        loss: Loss | None = None,
        run: Run | None = None,
        name: str | None = None,
    ) -> None:
        schedule = method if isinstance(method, Schedule) else None
        self.method: Any = arguments.acting(method.method if isinstance(method, Schedule) else method)
        arguments.check_kinds(when, guard)
        if schedule is not None and (at is not None or every is not None or when is not None):
            raise ValueError("a Schedule brings its own trigger: give at=, every= and when= with a method instead")
        if at is None and every is None and when is None and schedule is None:
            every = getattr(self.method, "period", None)
        self.schedule = schedule
        self.when = When(at, every, when if schedule is None else schedule.trigger)
        parts = arguments.parts(self.method, self.when.timed, guard is not None)
        self.what = What(
            self.method,
            parts,
            guard=guard if schedule is None or guard is not None else schedule.guard,
            mirrors=Mirrors(mirrors, mirrors_copy),
            batches=arguments.again(batches),
            loss=loss,
            run=run,
        )
        self.name = name or arguments.name_of(self.method)
        self.clock: Clock | None = None  # while training
        self.monitor = monitor if isinstance(monitor, Monitor) else None
        self.receipts: list[Receipt] = []
        self.earlier: list[dict[str, Any]] = []
        self.firings: list[Firing] = []
        self.last: Receipt | None = None
        self._clock_given, self._rewarm, self._watching = clock, arguments.warming(rewarm), arguments.watching(monitor)
        self._tally = Tally()
        self.pending: Firing | None = None  # decided, and not done yet
        self._summaries: list[dict[str, Any]] = []
        self._stateless = False  # an unknown optimizer, whose slots have not been seen yet
        self._alternating = False
        self._unsent: list[tuple[int, dict[str, float]]] = []
        self._loaded: dict[str, Any] | None = None
        self._ended: dict[str, int] | None = None
        self._log: Log | None = None

    # What a trainer's file calls

    def bind(
        self,
        model: nn.Module,
        optimizer: object,
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
        optimizers (`clock.count`), not from the trainer.
        """
        self.finish()
        arguments.refuse_shards_of(model, optimizer, self.method)
        opened = unwrap(optimizer)
        fresh = step == 0 and self._loaded is None
        self.when.start(fresh)
        self._stateless = any(type(each).__module__.partition(".")[0] != "torch" for each in opened)
        self.when.every_step = self._stateless
        self._alternating, self._log = alternating, log
        inner = unwrapped(model)
        if self.schedule is not None:
            self.schedule.bind(inner, optimizer)
        self.what.called = model
        self.what.bind(inner, optimizer, any(map(is_sharded, model.parameters())))
        self.when.check(self.monitored)
        if fresh and hasattr(self.method, "remember") and not arguments.has_start(self.method):
            self.method.remember(inner)
        self.what.watch()
        parts = self.what.parts.keys()
        self.clock = Clock(
            opened,
            self._clock_given,
            before=self._before if parts & {"loss", "backward"} else None,
            after=self._after if "step" in parts else None,
            rewarm=self._rewarm,
            closures=closures,
            counting=counting or self._stateless,
        )
        self._watch(model, opened)
        if self._loaded is not None:
            self._restore_bound(self._loaded)

    @property
    def monitored(self) -> bool:
        """Whether health is measured while training."""
        return self._watching is not None

    @property
    def steps_before(self) -> int:
        """Steps that the last training on this object took; 0 for a new one, or where a checkpoint says it."""
        return self._ended["count"] if self._ended is not None and self._loaded is None else 0

    def continue_clock(self) -> None:
        """Go on counting where the last training on this object ended."""
        if self._ended is not None and self.clock is not None:
            self.clock.load_state_dict(self._ended)

    def begin(self, step: int, epoch: int | None = None) -> Receipt | None:
        """Before the first forward pass of a step, `step` steps being done: act if it is time.

        Called again with the same number (gradient accumulation, a resumed run) it does nothing.
        """
        if self.pending is None and self.when.idle(step, epoch):
            return None
        self.decide(step, epoch)
        return self.act()

    def decide(self, step: int, epoch: int | None = None, *, again: bool = False) -> None:
        """Whether the method acts when `step` steps are done; `act` does it."""
        if self.pending is not None or (not again and self.when.idle(step, epoch)):
            return
        assert self.clock is not None, "begin() before bind()"
        self.clock.close()
        if self._stateless and self.clock.count:
            self._stateless = False
            self.when.every_step = False
            self.what.check()
        reason = self.when.decide(step, epoch, again=again)
        if reason is not None and "event" in self.what.parts:
            self.pending = Firing(step, reason)
        self.send()

    def act(self) -> Receipt | None:
        """Do what was decided, if anything was."""
        if self.pending is None:
            return None
        firing, self.pending = self.pending, None
        # Out of a rollout's inference mode: a method may need gradients.
        with torch.inference_mode(False), self._transaction("event"):
            receipt = self.change()
            self.when.applied()
            self._keep(firing, receipt)
            if self.schedule is not None:
                self.schedule.firings.append(firing)
                self.schedule.applied(receipt)
            if self.clock is not None and not receipt.rolled_back:
                self.clock.rewarm()
            self.send()
            return receipt

    def trainer_step(self, step: int) -> int:
        """The number under which the trainer knows an optimizer step."""
        return step

    def change(self) -> Receipt:
        """Apply the method to the model; a trainer's callback adds what else follows."""
        return self.what.event()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Between backward pass and optimizer step, for trainers that run closures."""
        if self.clock is not None:
            self.clock.before_step(optimizer)

    def before_clipping(self, scale: float = 1.0) -> None:
        """The gradients of a step are complete and not clipped yet: add the gradient of a loss term now.

        Without this call it is added right before the optimizer steps, after clipping. A term in the loss would be
        clipped with the rest. Call it once per optimizer step, after the last backward pass. scale: what a gradient
        scaler multiplied the loss with, unless gradients are unscaled already. Methods without a loss term do nothing.
        """
        if self.clock is not None:
            self.what.add_terms(self.clock.optimizers, scale)

    def note(self, metrics: Mapping[str, Any]) -> None:
        """Metrics just logged, under the trainer's names; what is not a number is ignored."""
        self.when.note(metrics)

    def send(self) -> None:
        """Give the log what has not been sent yet."""
        if self._unsent and self._log is not None:
            for step, numbers in self._unsent:
                self._log(step, numbers)
        self._unsent.clear()

    def finish(self) -> None:
        """Training is over: hooks are removed, receipts stay, and what never came is reported. Safe to call twice."""
        if self.clock is None:
            return
        self.clock.close()
        self.clock.remove()
        self._ended = self.clock.state_dict()
        self.clock = None
        self._add_up()
        self.what.release()
        if self.monitor is not None:
            self.monitor.detach()
        if self.schedule is not None:
            self.schedule.close()
        self.send()
        self.report_silence()

    # What a user calls

    def boundary(self, reason: str = "task boundary") -> Any:
        """A task or data set ends here: the method acts before the next optimizer step begins."""
        self.when.mark(reason)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs: position, trigger, the method's generator and statistics, health history.

        The keys are always the same and the values are bytes, as `torch.distributed.checkpoint` wants it: what is
        inside grows with the run.
        """
        if self.clock is None and self._loaded is not None:
            return {key: _pack(self._loaded[key]) for key in _STATE}  # not bound yet: what was loaded is the state
        progress = {
            **self.when.state_dict(),
            "pending": None if self.pending is None else asdict(self.pending),
            "firings": [asdict(firing) for firing in self.firings],
            "receipts": [*self.earlier, *self._summaries],
            "tally": self._tally.state_dict(),
            "clock": self._ended if self.clock is None else self.clock.state_dict(),
        }
        parts: dict[str, Any] = {"trigger": self.when.trigger, "method": self.method, "monitor": self.monitor}
        states = {key: part.state_dict() if hasattr(part, "state_dict") else None for key, part in parts.items()}
        return {key: _pack(value) for key, value in {"progress": progress, **states}.items()}

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Go back to an earlier state of this object, for another model: what waits for `bind` is dropped."""
        self.load_state_dict(state)
        self._loaded = self._ended = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`; before or after `bind`."""
        missing = {*_STATE} - state.keys()
        if missing:
            raise ValueError(f"this is not the state of a {type(self).__name__}: {sorted(missing)} missing")
        loaded = {key: _unpack(state[key]) for key in _STATE}
        progress = loaded["progress"]
        self.when.load_state_dict(progress)
        self._tally.load_state_dict(progress["tally"])
        self.pending = None if progress["pending"] is None else Firing(**progress["pending"])
        self.firings = [Firing(**firing) for firing in progress["firings"]]
        self.receipts, self._summaries = [], []
        self.earlier = [dict(summary) for summary in progress["receipts"]]
        if self.schedule is not None:
            self.schedule.firings = list(self.firings)
        parts: dict[str, Any] = {"trigger": self.when.trigger, "method": self.method}
        for key, part in parts.items():
            if loaded[key] is not None and hasattr(part, "load_state_dict"):
                part.load_state_dict(loaded[key])
        self._loaded = loaded
        if self.clock is not None:
            self._restore_bound(loaded)

    # Inside

    def _restore_bound(self, loaded: Mapping[str, Any]) -> None:
        """What exists only while bound."""
        assert self.clock is not None and self.what.model is not None
        if isinstance(self.method, Remedy):
            self.method.resume(self.what.model)
        if loaded["progress"]["clock"] is not None:
            self.clock.load_state_dict(loaded["progress"]["clock"])
        if loaded["monitor"] is not None and self.monitor is not None:
            self.monitor.load_state_dict(loaded["monitor"])
        self._loaded = None

    def _watch(self, model: nn.Module, opened: Sequence[Any]) -> None:
        """The monitor of this run: another model or optimizer needs another one."""
        if self._watching is None:
            return
        if isinstance(self._watching, Monitor):
            if not any(self._watching.optimizer is optimizer for optimizer in opened):
                raise ValueError("monitor= watches another optimizer than the one that trains: make it with this one")
        elif self.monitor is None or self.monitor.model is not model or self.monitor.optimizer is not opened[0]:
            options = {"every": self._watching} if isinstance(self._watching, int) else dict(self._watching)
            self.monitor = Monitor(model, opened[0], **options)
        assert self.monitor is not None
        self.monitor.attach()
        wanted = self._log is not None or self.when.trigger is not None
        if wanted and self._sample not in self.monitor.sinks:
            self.monitor.sinks.append(self._sample)

    def _sample(self, step: int, numbers: dict[str, float]) -> None:
        assert self.monitor is not None and self.monitor.last is not None
        if self.when.trigger is not None:
            self.when.wake()
            self.note(self.monitor.last.flat())
        if everyone().leads:
            self._unsent.append((step, numbers))

    def _before(self, optimizer: Any, first: bool) -> None:
        if "backward" not in self.what.parts:
            self.what.before_step(optimizer, first, self._alternating)
            return
        with self._transaction("backward"):
            receipt = self.what.before_step(optimizer, first, self._alternating)
            if receipt is not None:
                self._count(receipt, 1)

    def _after(self) -> None:
        with self._transaction("step"):
            self._count(self.what.after_step(), 0)

    def _transaction(self, moment: Moment) -> Transaction:
        waits = moment != "event" and isinstance(self.what.parts[moment], Remedy)  # it has its own around each write
        return Transaction(self.name, self.what.written, self.what.optimizer, waits=waits)

    def _count(self, receipt: Receipt, ahead: int) -> None:
        """A method of every step has acted; ahead: before the step is counted."""
        self.last = receipt
        assert self.clock is not None
        if self._tally.add(self.clock.count + ahead, receipt):
            self._add_up()

    def _add_up(self) -> None:
        step, total = self._tally.last, self._tally.take()
        if total is not None:
            self._keep(Firing(self.trainer_step(step), total[1]), total[0])

    def _keep(self, firing: Firing, receipt: Receipt) -> None:
        """Receipts, firings, summaries for checkpoints, and the log."""
        self.receipts.append(receipt)
        self.firings.append(firing)
        numbers = receipt_numbers(receipt, f"rekindle/{self.name}/")
        self._summaries.append({**asdict(firing), "changed": list(receipt.changed), **numbers})
        if everyone().leads:
            self._unsent.append((firing.step, numbers))

    def report_silence(self) -> None:
        """Warn of what was asked for and never came."""
        self.when.finish(self.name, bool(self.firings))
        silent = not self.when.timed and not self.when.bounded and not self.firings
        clock = self._ended if self.clock is None else self.clock.state_dict()
        if silent and list(self.what.parts) == ["event"] and clock is not None and clock["count"]:
            warnings.warn(
                f"{self.name} was never applied: there is no at=, every= or when=, and boundary() was not called",
                stacklevel=3,
            )


def _pack(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(data: object) -> Any:
    if not isinstance(data, bytes):
        raise ValueError(f"this is not the state of rekindle: bytes are expected, got {type(data).__name__}")
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
