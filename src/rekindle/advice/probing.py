"""probe(): plasticity measured, not guessed. Copies of a model and of fresh networks learn the same thing.

The score is how much the model learns, divided by how much a fresh network learns with the same batches, budget and
optimizer. Learning is the area between the untrained level (the loss of the fresh network before its first step) and
the loss curve below it. A young network often scores above 1; one that has lost its plasticity scores near 0.

>>> import torch
>>> from torch import nn
>>> _ = torch.manual_seed(0)
>>> net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
>>> data = [(torch.randn(32, 8), torch.randint(4, (32,))) for _ in range(4)]
>>> found = probe(net, data, optimizer=torch.optim.Adam(net.parameters(), lr=1e-2), steps=100, seeds=2)
>>> found.enough, 0.5 < found.score < 2.0
(True, True)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rekindle import initial
from rekindle.advice.copies import optimizers_like
from rekindle.advice.intervals import Interval, another_interval
from rekindle.advice.progress import Progress, seconds_of
from rekindle.advice.stacking import WithLoss
from rekindle.advice.tasks import Prepared, Task, prepare, same_words
from rekindle.blocks.names import cleaner, unwrapped
from rekindle.diagnosis.agreement import STANDING
from rekindle.engine.devices import callers_device, learning, to_float64
from rekindle.isolation import Batch, Loss, attributes_kept, check_asked, check_loss, forked_rng, isolated
from rekindle.report.showing import Page
from rekindle.sharding.team import refuse_shards

GAIN = 0.2
_CHUNK = 25
_MOST_STEPS = 20_000


@dataclass(frozen=True)
class ProbeResult(Page):
    """What a probe measured.

    Attributes:
        task: what was learned.
        score: the mean over seeds of learned(model) / learned(fresh).
        interval: around the score: where one more fresh network would lie in 95% of all cases.
        difference: learned(model) − learned(fresh), in units of the loss.
        difference_interval: of the difference.
        speed: how many steps the fresh network needs for each step of the model, to the loss halfway between the
            untrained level and the fresh network's last. A model that never reaches it counts as reaching it at its
            last step. A geometric mean over seeds.
        speed_interval: of the speed.
        enough: False where even the fresh network did not learn the wanted amount: then the score is meaningless.
        gained: how much it did learn, as a share of the untrained loss.
        gain: the wanted amount.
        steps: how many were trained.
        seeds: how many trials.
        level: the untrained loss.
        model: the model's losses, a row per seed.
        fresh: those of the fresh networks.
        seconds: what it took.
    """

    page = "probe"
    task: str
    score: float
    interval: Interval
    difference: float
    difference_interval: Interval
    speed: float
    speed_interval: Interval
    enough: bool
    gained: float
    gain: float
    steps: int
    seeds: int
    level: float
    model: tuple[tuple[float, ...], ...]
    fresh: tuple[tuple[float, ...], ...]
    seconds: float

    @property
    def verdict(self) -> str:
        """ "lost", "as fresh", "better than fresh", or "unknown"."""
        if not self.enough or not all(map(math.isfinite, self.interval)):
            return "unknown"
        if self.interval[1] < 1:
            return "lost"
        return "better than fresh" if self.interval[0] > 1 else "as fresh"

    @property
    def reached(self) -> tuple[int | None, int | None]:
        """Steps in which the fresh network reached the model's end level, and the model the fresh network's."""
        model, fresh = _mean_curve(self.model), _mean_curve(self.fresh)
        return _first_below(fresh, model[-1]), _first_below(model, fresh[-1])

    def __str__(self) -> str:
        low, high = self.interval
        budget = f"{self.steps} steps, {self.seeds} seeds, {self.seconds:.1f} s, task {self.task!r}"
        if not self.enough:
            return (
                f"too short to say: in {self.steps} steps a fresh network lowered its loss by {self.gained:.0%}, and "
                f"{self.gain:.0%} are needed for a comparison; give more steps= or budget= ({budget})"
            )
        words = {
            "lost": "the model learns less than a fresh network: plasticity is lost",
            "as fresh": "not distinguishable from a fresh network",
            "better than fresh": "the model learns better than a fresh network: nothing is lost",
            "unknown": "one seed gives no interval, so nothing can be said: give seeds=3 or more",
        }
        lines = [
            f"plasticity score {self.score:.2f} [{low:.2f}, {high:.2f}]: {words[self.verdict]}",
            f"learned below the untrained loss of {self.level:.3g}: {self.difference:+.3g} against fresh "
            f"[{self.difference_interval[0]:+.2g}, {self.difference_interval[1]:+.2g}] ({budget})",
            f"a step of the model is worth {self.speed:.2f} steps of a fresh network "
            f"[{self.speed_interval[0]:.2f}, {self.speed_interval[1]:.2f}]",
        ]
        by_fresh, by_model = self.reached
        if by_fresh is not None:
            lines.append(f"a fresh network reaches the model's last loss after {by_fresh} of {self.steps} steps")
        elif by_model is not None:
            lines.append(f"the model reaches the fresh network's last loss after {by_model} of {self.steps} steps")
        return "\n".join([*lines, STANDING["probe"]])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for the page."""
        return {**asdict(self), "verdict": self.verdict, "reached": self.reached}


@same_words
@learning()
def probe(
    model: nn.Module,
    new_batches: Iterable[Batch],
    *,
    loss: Loss | None = None,
    task: Task = "next",
    fresh: nn.Module | Callable[[], nn.Module] | None = None,
    optimizer: object = None,
    steps: int | None = None,
    budget: float | str | None = None,
    seeds: int | Sequence[int] = 3,
    gain: float = GAIN,
    progress: bool | None = None,
) -> ProbeResult:
    """How well does the model learn, against a fresh network? The model itself is not changed.

    Args:
        model: The network; its copies learn.
        new_batches: What is learned, in the order of training; repeated as needed.
        loss: `loss(model, batch)`; without it cross entropy of (inputs, labels), or the model's own `.loss`.
        task: "next" learns the batches as they are; "random-labels" their inputs with labels drawn anew; "regression"
            the outputs of another fresh network on their inputs; "next-token" the next token of each.
        fresh: A fresh model, or a factory of one; without it each module's own scheme is drawn again.
        optimizer: Its class and settings are used for the copies; Adam with lr 1e-3 without one.
        steps: How long, as a fixed number of steps.
        budget: How long, as seconds or a text such as "30s", "2m". With neither, 30 seconds: the number of steps grows
            within the budget until the fresh network has lowered its loss by `gain`.
        seeds: How many, or which: each draws a fresh network, an order of batches and the noise of dropout.
        gain: The share of its loss that the fresh network must have lost.
        progress: Whether to report progress on stderr; None does after five seconds.
    """
    began = perf_counter()
    check_asked("probe", model, new_batches)
    refuse_shards(model, "probe()", "batches")
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not chosen:
        raise ValueError("probe needs at least one seed")
    if steps is not None and steps < 1:
        raise ValueError(f"steps={steps}: a probe needs at least one step")
    check_loss(loss)
    allowed = (30.0 if steps is None else math.inf) if budget is None else seconds_of(budget)
    model = unwrapped(model)
    bar = Progress(progress)
    # A module that is kept in evaluation mode (a frozen BatchNorm) stays so; a model that is in it as a whole trains.
    trained = [module for module in model.modules() if module.training] if model.training else True
    with attributes_kept(model), isolated(model, training=trained):
        with callers_device():
            batches = list(new_batches)
        learned: dict[str, list[list[float]]] = {"fresh": [], "model": []}
        taken, levels = steps, list[float]()
        for number, seed in enumerate(chosen):
            generator = torch.Generator().manual_seed(seed)
            starts = {"fresh": _fresh(model, fresh, generator), "model": _state(model)}
            with forked_rng(torch.Generator().manual_seed(seed), model):
                todo = prepare(task, model, batches, loss, partial(_fresh, model, fresh, generator), generator)
                for start in starts.values():
                    _refit(model, start, todo)
                levels.append(_level(model, starts["fresh"], todo, perf_counter() + allowed / 8 / len(chosen)))
            order_seed = int(torch.randint(2**31 - 1, (), generator=generator))
            for who in ("fresh", "model"):
                learner = _Learner(model, starts[who], todo, optimizer, order_seed)
                now = perf_counter()
                share = (began + allowed - now) / (2 * len(chosen) - sum(map(len, learned.values())))
                if taken is None:
                    taken = learner.until(levels[0] - gain * abs(levels[0]), share)
                else:
                    learner.run(taken, now + share)
                learned[who].append(learner.losses)
                done = sum(map(len, learned.values())) / (2 * len(chosen))
                bar.show(f"probe: seed {number + 1} of {len(chosen)}, {who}", done)
    bar.close()
    taken = min(len(curve) for curves in learned.values() for curve in curves)
    return _result(str(task), learned, taken, levels, gain, perf_counter() - began)


def _result(
    task: str,
    learned: Mapping[str, list[list[float]]],
    steps: int,
    levels: Sequence[float],
    gain: float,
    seconds: float,
) -> ProbeResult:
    curves = {who: [curve[:steps] for curve in kept] for who, kept in learned.items()}
    level = sum(levels) / len(levels)
    below = {who: [_below(curve, level) for curve in kept] for who, kept in curves.items()}
    ratios = [m / f if f > 0 else float("nan") for m, f in zip(below["model"], below["fresh"], strict=True)]
    differences = [m - f for m, f in zip(below["model"], below["fresh"], strict=True)]
    gained = sum((level - _end(curve)) / abs(level) for curve in curves["fresh"]) / len(ratios) if level else 0.0
    score, interval = another_interval(ratios)
    difference, around = another_interval(differences)
    speeds = [math.log(_speed(m, f, level)) for m, f in zip(curves["model"], curves["fresh"], strict=True)]
    speed, (slow, fast) = another_interval(speeds)
    enough = gained >= gain and score == score
    both = {who: tuple(tuple(curve) for curve in kept) for who, kept in curves.items()}
    return ProbeResult(
        *(
            task,
            score,
            interval,
            difference,
            around,
            math.exp(speed),
            (_exp(slow), _exp(fast)),
            enough,
            gained,
            gain,
            steps,
            len(ratios),
            level,
        ),
        *(both["model"], both["fresh"], seconds),
    )


class _Learner:
    """One copy that learns: its tensors are its own, the module is borrowed for each step."""

    def __init__(
        self, model: nn.Module, start: dict[str, Tensor], todo: Prepared, optimizer: object, seed: int
    ) -> None:
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        self._tensors = {
            f"model.{name}": tensor.requires_grad_() if name in trained else tensor for name, tensor in start.items()
        }
        twins: dict[Tensor, Tensor] = {
            p: self._tensors[f"model.{n}"] for n, p in model.named_parameters() if n in trained
        }
        self._optimizers = optimizers_like(optimizer, twins)
        self._module = WithLoss(model, todo.loss)
        self._batches, self._order = todo.batches, torch.Generator().manual_seed(seed)
        self._noise = torch.Generator().manual_seed(seed + 1)
        self._queue: list[int] = []
        self.losses: list[float] = []

    def run(self, steps: int, until: float = float("inf")) -> None:
        """Take `steps` more steps, or fewer if the clock passes `until`; at least one."""
        pending: list[Tensor] = []
        with forked_rng(self._noise, self._module):
            for _ in range(steps):
                if not self._queue:
                    self._queue = torch.randperm(len(self._batches), generator=self._order).tolist()
                loss = functional_call(self._module, self._tensors, (self._batches[self._queue.pop()],))
                for optimizer in self._optimizers:
                    optimizer.zero_grad()
                loss.backward()
                for optimizer in self._optimizers:
                    optimizer.step()
                pending.append(loss.detach())
                if perf_counter() > until:
                    break
        self.losses += torch.stack(pending).nan_to_num(nan=float("inf")).tolist()

    def until(self, level: float, seconds: float) -> int:
        """Learn until the loss has come down to `level`, then as long again; the steps taken."""
        end = perf_counter() + max(seconds, 0.0)
        while len(self.losses) < _MOST_STEPS and perf_counter() < end:
            self.run(_CHUNK, end)
            if _end(self.losses) <= level:
                self.run(len(self.losses), end)
                break
        if not self.losses:
            self.run(1)
        return len(self.losses)


def _refit(model: nn.Module, start: Mapping[str, Tensor], todo: Prepared) -> None:
    """Let a loss that knows how begin at the same scale in each network: a critic's values (`ValueLoss`)."""
    refit = getattr(todo.loss, "refit", None)
    if refit is not None:
        frozen = {name: p.detach().clone() for name, p in model.named_parameters() if name not in start}
        lent = {f"model.{name}": tensor for name, tensor in {**start, **frozen}.items()}
        functional_call(WithLoss(model, refit), lent, (todo.batches,))


def _level(model: nn.Module, start: Mapping[str, Tensor], todo: Prepared, until: float) -> float:
    """The loss of an untrained network, over the first batches; over fewer if the clock passes `until`."""
    module = WithLoss(model, todo.loss)
    lent = {f"model.{name}": tensor.clone() for name, tensor in start.items()}
    losses: list[Tensor] = []
    with torch.no_grad():
        for batch in todo.batches[:8]:
            losses.append(to_float64(functional_call(module, lent, (batch,))))
            if perf_counter() > until:
                break
    return float(torch.stack(losses).mean())


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of what training changes: trainable parameters and buffers."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError("the model has no trainable parameter: there is nothing to learn with")
    return {name: tensor.detach().clone() for name, tensor in [*named, *model.named_buffers()]}


def _fresh(
    model: nn.Module, fresh: nn.Module | Callable[[], nn.Module] | None, generator: torch.Generator
) -> dict[str, Tensor]:
    """The same tensors of a fresh network."""
    own, clean = _state(model), cleaner(model)
    names = [clean(name) for name in own]
    if isinstance(fresh, nn.Module):
        start = initial.snapshot(fresh)
        initial.check_start(model, start, names)
    else:
        start = initial.draw(model, generator=generator, fresh=fresh, names=names)
    return {name: start[clean(name)].to(tensor).clone() for name, tensor in own.items()}


def _speed(model: Sequence[float], fresh: Sequence[float], untrained: float) -> float:
    """Steps of the fresh network ÷ steps of the model, to half of what the fresh network learned."""
    own, other = _mean_curve([model]), _mean_curve([fresh])
    level = (untrained + other[-1]) / 2
    first = [_first_below(curve, level) or len(curve) for curve in (other, own)]
    return first[0] / first[1]


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _below(curve: Sequence[float], level: float) -> float:
    """The mean distance of the loss below the untrained level, where it is below."""
    return sum(max(level - loss, 0.0) for loss in curve) / len(curve)


def _end(curve: Sequence[float]) -> float:
    """The loss at the end: the mean of the last tenth, of ten steps at least."""
    last = curve[-max(len(curve) // 10, 10) :]
    return sum(last) / len(last)


def _mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    """The mean over seeds, smoothed over a twentieth of the steps."""
    mean = [sum(losses) / len(losses) for losses in zip(*curves, strict=True)]
    width = max(len(mean) // 20, 1)
    return [sum(part) / len(part) for part in (mean[max(0, i + 1 - width) : i + 1] for i in range(len(mean)))]


def _first_below(curve: Sequence[float], level: float) -> int | None:
    return next((step + 1 for step, loss in enumerate(curve) if loss <= level), None)
