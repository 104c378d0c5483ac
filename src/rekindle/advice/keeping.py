"""Keeper: for long runs. Every so often a copy of the network is probed; if it has lost plasticity, remedies are tried
on copies, and what the advice names is applied. All of it within a share of the training time.

A keeper is a `Schedule`: call `keeper.step(model, optimizer, metrics)` once per optimizer step, or give it to a
trainer's callback as its method. Its trigger probes, and fires only where a remedy is to be applied.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import torch
from torch import nn

from rekindle.advice.advising import Advice, advise
from rekindle.advice.candidates import NOTHING, Candidate, acting_at_once, candidates_for, given_candidates
from rekindle.advice.probing import probe
from rekindle.advice.tasks import default_loss
from rekindle.advice.trials import shown
from rekindle.blocks.names import is_sharded, unwrapped
from rekindle.engine.cpu import cores, may_fork
from rekindle.isolation import Batch, Loss, check_loss, random_states_kept
from rekindle.methods.call import Call
from rekindle.methods.remedy import Remedy, moments
from rekindle.monitoring.guard import Guard
from rekindle.monitoring.monitor import Monitor
from rekindle.monitoring.schedules import Schedule
from rekindle.monitoring.sinks import Sink, send
from rekindle.monitoring.triggers import Metrics, Trigger, VerdictIs
from rekindle.projection.method import Method
from rekindle.projection.receipt import Receipt
from rekindle.sharding.replicas import replicas

SHARE = 0.02
_OVERRUN = 1.2  # probes and advice keep their time within a fifth
_LONGEST = 30.0  # seconds of one probe
_LEAST = 1.0  # seconds that the first probe needs
_WORTH = 4  # advice gets at least so many times what the probe took

Given = Iterable[Batch] | Callable[[], Iterable[Batch]]


@dataclass(frozen=True)
class Note:
    """One line of a keeper's log: what was started or found at a step, why, and the seconds that it took."""

    step: int
    what: str
    why: str
    seconds: float = 0.0
    score: float | None = None


@dataclass(frozen=True)
class Reply:
    """The result: the probe's score and verdict, and what the advice chose (None where there was no advice)."""

    score: float
    verdict: str
    said: str
    chosen: str | None
    seconds: float
    short: bool = False  # not enough time for a result


class Keeper(Schedule):
    """Probe, advise and apply automatically, within `share` of the training time.

    `log` says what was probed, found and applied, and why.

    >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> optimizer = torch.optim.Adam(net.parameters())
    >>> data = [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(4)]
    >>> keeper = Keeper(data, every=100)
    >>> keeper.step(net, optimizer, {}) is None
    True

    Args:
        batches: what is learned now, or a function that gives it and is called each time.
        loss: `loss(model, batch)`, as for `rekindle.advise`.
        every: steps between two probes; a monitor's verdict "act" probes earlier, after at least a tenth of them.
        share: the most of the training time that probes and advice may take; the full time of a background process
            counts. The first probe waits until a second is available; after one that was too short for a result, the
            next waits for twice its time.
        steps: how far ahead advice looks; without it as far as its time allows.
        candidates: the methods to choose from.
        old_batches: data that should not be forgotten.
        fresh: a fresh model, or a function that makes one.
        seeds: how many trials.
        advise: how a remedy is chosen: a function of the seconds that it may take, which returns an `Advice`. Without
            it `rekindle.advise` on the batches. For an agent copies should play instead:
            `lambda seconds: advise_agent(agent, make_env, steps=…, candidates=…, budget=seconds, workers=1)`.
        monitor: the `every` of a `Monitor` of its own; its numbers are then looked at too.
        background: whether copies are tried in a forked process while training goes on. By default where the network
            is on the CPU and there is more than one core.
        guard: as for `rekindle.Schedule`.
        sinks: as for `rekindle.Monitor`; they get keeper/score and keeper/seconds.
        clock: the optimizer whose updates are the steps.
    """

    trigger: Asking

    def __init__(
        self,
        batches: Given,
        loss: Loss | None = None,
        *,
        every: int = 1000,
        share: float = SHARE,
        steps: int | None = None,
        candidates: Mapping[str, Method | None] | Iterable[Method] | None = None,
        old_batches: Given = (),
        fresh: nn.Module | Callable[[], nn.Module] | None = None,
        seeds: int = 3,
        advise: Callable[[float], Advice] | None = None,
        monitor: int | None = None,
        background: bool | None = None,
        guard: Guard | None = None,
        sinks: Sequence[Sink] = (),
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        check_loss(loss)
        for name, given in (("batches", batches), ("old_batches", old_batches)):
            if not callable(given) and not isinstance(given, Iterable):
                raise TypeError(f"{name} is a list of batches, or a function that gives one, got {given!r}")
            if isinstance(given, Iterator):
                raise TypeError(f"{name} can be read only once, and a keeper reads them often: give a list")
        candidates = acting_at_once(candidates)
        asking = Asking(every, share, clock, sinks)
        asking.inquiry = Inquiry(batches, loss, steps, candidates, old_batches, fresh, seeds, advise)
        asking.background, asking.watching = background, monitor
        super().__init__(Chosen(asking), asking, guard=guard)

    @property
    def log(self) -> list[Note]:
        """What was probed, found and applied."""
        return self.trigger.log

    def bind(self, model: nn.Module, optimizer: object) -> None:
        """The model and optimizer that are trained: the keeper tries remedies on copies."""
        self.trigger.bind(model, optimizer)

    def applied(self, receipt: Receipt) -> None:
        """What the guard took back is in the log too."""
        self.trigger.applied(receipt)

    def close(self) -> None:
        """Stop what runs in the background, and the monitor."""
        self.trigger.close()


@dataclass
class Inquiry:
    """The arguments of a keeper's probes and advice."""

    batches: Given
    loss: Loss | None
    steps: int | None
    candidates: Any
    old_batches: Given
    fresh: Any
    seeds: int
    advise: Callable[[float], Advice] | None = None

    def read(self, *, old: bool = True) -> Inquiry:
        """With the batches of now as lists; the random states of training stay what they are."""
        with random_states_kept():  # a loader draws its order from the global states
            earlier = list(_now(self.old_batches)) if old else ()
            return replace(self, batches=list(_now(self.batches)), old_batches=earlier)

    def tried(self, model: nn.Module) -> list[Candidate]:
        """The candidates by name."""
        if self.candidates is not None:
            return given_candidates(self.candidates)
        # A keeper applies at once: what also acts at later steps is for `attach`.
        tried = candidates_for(model, list(_now(self.batches))[:4])
        return [one for one in tried if one.method is None or moments(one.method).keys() == {"event"}]

    def ask(self, model: nn.Module, optimizer: object, seconds: float, clock: Callable[[], float]) -> Reply:
        """Probe; if plasticity is lost and there is enough time, call `advise` too. The batches must have been read."""
        began = clock()
        batches = list(_now(self.batches))
        probed = probe(
            model,
            batches,
            loss=self.loss,
            optimizer=optimizer,
            fresh=self.fresh,
            budget=min(seconds / (_WORTH + 1), _LONGEST) / _OVERRUN,
            seeds=self.seeds,
            progress=False,
        )
        took = clock() - began
        said = str(probed).splitlines()[0]
        left = seconds - took
        if probed.verdict != "lost":
            return Reply(probed.score, probed.verdict, said, None, took, not probed.enough)
        advice = self._advice(model, batches, optimizer, max(left / _OVERRUN, 1e-3))
        both, short = f"{said}; {advice.sentence}", advice.answer == "cannot tell"
        return Reply(probed.score, probed.verdict, both, advice.chosen, clock() - began, short)

    def _advice(self, model: nn.Module, batches: list[Batch], optimizer: object, seconds: float) -> Advice:
        candidates = {one.name: one.method for one in self.tried(model)}
        if self.advise is None:
            return advise(
                model,
                batches,
                loss=self.loss,
                old_batches=list(_now(self.old_batches)),
                optimizer=optimizer,
                candidates=candidates,
                epochs=None,
                steps=self.steps,
                budget=seconds,
                seeds=self.seeds,
                workers=1,
                progress=False,
            )
        advice = self.advise(seconds)
        if advice.chosen not in candidates:
            raise ValueError(
                f"the keeper's advise= chose {advice.chosen!r}, which is none of its candidates "
                f"({', '.join(candidates)}): give both the same candidates="
            )
        return advice


class Asking(Trigger):
    """The trigger of a keeper: probes when due and within the time budget; fires where advice names a remedy."""

    _kept = ("elapsed", "spent", "asked", "chosen", "least")
    inquiry: Inquiry

    def __init__(self, every: int, share: float, clock: Callable[[], float], sinks: Sequence[Sink]) -> None:
        super().__init__()
        if every < 1:
            raise ValueError(f"every is a positive number of steps, got {every}")
        if not 0 < share < 1:
            raise ValueError(f"share={share} is the share of the training time that may be used, between 0 and 1")
        self.every, self.share, self.sinks = every, share, list(sinks)
        self.background: bool | None = None
        self.watching: int | None = None
        self.elapsed = self.spent = 0.0  # seconds of training, and of probes and advice
        self.least = _LEAST  # seconds that must be available for the next probe
        self.asked = 0  # the step of the last probe
        self.chosen: str | None = None
        self.log: list[Note] = []
        self._clock, self._last_look = clock, clock()
        self._alarm = VerdictIs("act")
        self._model: nn.Module | None = None
        self._optimizer: object = None
        self._monitor: Monitor | None = None
        self._running: _Running | None = None

    def bind(self, model: nn.Module, optimizer: Any) -> None:
        """The model and the optimizer that are trained."""
        if self._model is model:
            self._optimizer = optimizer
            return
        if replicas(model).size > 1:
            raise ValueError(
                "a Keeper probes on the first process alone, and the others must follow it: give it to "
                "rekindle.attach or to a trainer's callback, which keep the processes in step"
            )
        if any(is_sharded(parameter) for parameter in model.parameters()):
            raise ValueError(
                "a Keeper tries remedies on copies of the model, and one in shards cannot be copied: watch it with "
                "rekindle.Monitor and call rekindle.fire, which work on shards"
            )
        self.close()
        self._model, self._optimizer, self._last_look = model, optimizer, self._clock()
        if self.watching is not None:
            opened = optimizer[0] if isinstance(optimizer, list | tuple) else optimizer
            self._monitor = Monitor(model, opened, every=self.watching)

    def close(self) -> None:
        """Stop what runs in the background, and the monitor."""
        if self._running is not None:
            self.spent += self._clock() - self._running.began
            self._running.stop()
            self._running = None
        if self._monitor is not None:
            self._monitor.detach()
            self._monitor = None
        self._model = None

    @property
    def saved_up(self) -> float:
        """Seconds that may be spent now."""
        return self.share * self.elapsed - self.spent

    def look(self, metrics: Metrics) -> str | None:
        """Count the time, check the background process, probe if it is due."""
        self._count()
        if self._model is None or not _first_rank():
            return None
        if self._running is not None:
            return self._heard()
        reason = self._due(metrics)
        if reason is None or self.saved_up < self.least:
            return None
        self.asked = self.step
        seconds = self.saved_up
        self._note("ask", f"{reason}; {seconds:.3g} s of {self.elapsed:.3g} s are saved up")
        began = self._clock()
        try:
            inquiry = self.inquiry.read()  # here: a loader's own processes cannot be started in a forked one
            if self._may_fork():
                reading = self._clock() - began  # takes time off training, and counts
                self.spent, self._last_look = self.spent + reading, self._clock()
                self._running = _Running(inquiry, self._model, self._optimizer, seconds - reading, self._clock)
                return None
            finding = inquiry.ask(unwrapped(self._model), self._optimizer, seconds, self._clock)
        except KeyboardInterrupt:
            raise
        except Exception as error:
            self._failed(error, self._clock() - began)
            return None
        self._last_look = self._clock()  # probing is not training
        return self._answered(replace(finding, seconds=self._clock() - began))

    def commit(self) -> None:
        """What was chosen has been applied."""
        self.chosen = None

    def applied(self, receipt: Receipt) -> None:
        """Note where the guard took the remedy back."""
        if receipt.rolled_back:
            self._note("rolled back", receipt.notes[-1])

    def _count(self) -> None:
        now = self._clock()
        self.elapsed += now - self._last_look
        self._last_look = now

    def _due(self, metrics: Metrics) -> str | None:
        waited = self.step - self.asked
        if waited >= self.every:
            return f"{waited} steps since the last probe"
        sample = None if self._monitor is None or self._monitor.last is None else self._monitor.last.flat()
        alarm = self._alarm.look(sample if sample is not None else metrics)
        return alarm if alarm is not None and waited >= max(self.every // 10, 1) else None

    def _may_fork(self) -> bool:
        assert self._model is not None
        on_cpu = all(parameter.device.type == "cpu" for parameter in self._model.parameters())
        if self.background is not None:
            return self.background and on_cpu and may_fork()
        return on_cpu and cores() > 1 and may_fork()

    def _heard(self) -> str | None:
        assert self._running is not None
        answer = self._running.answer()
        if answer is None:
            return None
        began = self._running.began
        self._running.stop()
        self._running = None
        if isinstance(answer, Exception):
            self._failed(answer, self._clock() - began)
            return None
        return self._answered(answer)

    def _answered(self, finding: Reply) -> str | None:
        self.spent += finding.seconds
        if finding.short:
            self.least = 2 * max(finding.seconds, self.least)
        what = "keep" if finding.chosen in (None, NOTHING) else "act"
        self._note(what, finding.said, finding.seconds, finding.score)
        if self.sinks:
            send(self.sinks, self.step, {"keeper/score": finding.score, "keeper/seconds": self.spent})
        if what == "keep":
            return None
        self.chosen = finding.chosen
        return finding.said

    def _failed(self, error: Exception, seconds: float) -> None:
        """A failed probe does not stop training; the next one waits for twice its time."""
        self.spent += seconds
        self.least = max(self.least, 2 * seconds)
        self._last_look = self._clock()
        self._note("failed", f"{type(error).__name__}: {error}", seconds)
        warnings.warn(f"no probe at step {self.step}: {error}", RuntimeWarning, stacklevel=4)

    def _note(self, what: str, why: str, seconds: float = 0.0, score: float | None = None) -> None:
        self.log.append(Note(self.step, what, why, seconds, score))

    def state_dict(self) -> dict[str, Any]:
        """Times, the last probe, what was chosen and not applied yet, and the log."""
        return {**super().state_dict(), "log": [asdict(entry) for entry in self.log]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; what ran in the background is started again."""
        super().load_state_dict(state)
        self.log = [Note(**entry) for entry in state.get("log", ())]
        self._last_look = self._clock()


class Chosen(Remedy):
    """The method of a keeper: applies what its trigger has chosen."""

    name = "keeper"

    def __init__(self, asking: Asking) -> None:
        super().__init__()
        self._asking = asking

    def apply(self, call: Call) -> Receipt:
        """Apply the candidate that the advice named."""
        inquiry, name = self._asking.inquiry.read(old=False), self._asking.chosen
        method = next((one.method for one in inquiry.tried(call.inner) if one.name == name), None)
        if method is None:
            return Receipt(NOTHING)
        receipt = method(
            call.model,
            call.optimizer,
            batches=shown(method, list(_now(inquiry.batches))),
            loss=inquiry.loss or default_loss,
            generator=call.generator,
        )
        return replace(receipt, notes=(f"keeper: {self._asking.log[-1].why}", *receipt.notes))


class _Running:
    """A probe in a forked process; the fork is the copy of the model."""

    def __init__(
        self, question: Inquiry, model: nn.Module, optimizer: object, seconds: float, clock: Callable[[], float]
    ) -> None:
        self.began, self._clock = clock(), clock
        context = get_context("fork")
        self._pipe, there = context.Pipe(duplex=False)
        target = _answer_in_child
        self._process = context.Process(target=target, args=(question, model, optimizer, seconds, there), daemon=True)
        self._process.start()
        there.close()

    def answer(self) -> Reply | Exception | None:
        """The result, the error, or None while it is running."""
        if not self._pipe.poll():
            return None
        try:
            found: Reply | Exception = self._pipe.recv()
        except EOFError:
            return RuntimeError("the process that probed ended without an answer")
        return found

    def stop(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.kill()
        self._process.join()


def _answer_in_child(question: Inquiry, model: nn.Module, optimizer: object, seconds: float, pipe: Connection) -> None:
    torch.set_num_threads(1)  # after a fork more threads would wait for ones that do not exist here
    try:
        pipe.send(question.ask(unwrapped(model), optimizer, seconds, perf_counter))
    except KeyboardInterrupt:
        return
    except Exception as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


def _now(given: Given) -> Iterable[Batch]:
    return given() if callable(given) else given


def _first_rank() -> bool:
    """Replicas of a model are probed once; the first rank is the one that changes it."""
    spread = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not spread or torch.distributed.get_rank() == 0
