"""What an advisor tries: remedies that make sense for a model, each with the call that applies it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rekindle import methods
from rekindle.isolation import Batch
from rekindle.methods import DASH, FIRE, Compose, FullReset, LearningRate, ReDo, ShrinkPerturb, StartNorm
from rekindle.methods.caching import PerModel
from rekindle.methods.learning_rate import Rewarm
from rekindle.methods.naming import named
from rekindle.methods.remedy import moments
from rekindle.methods.start_norm import scale_invariant
from rekindle.projection.method import Method
from rekindle.projection.planning import plan

NOTHING = "nothing"
_LOOKED_AT = 4  # batches in which dormant neurons are looked for
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_GROUPS = {
    "mlp": {"mlp-in", "mlp-gate", "mlp-out"},
    "attention.qk": {"query", "key"},
    "conv": {"conv"},
}


@dataclass(frozen=True)
class Candidate:
    """A name, and the method behind it; no method is to do nothing."""

    name: str
    method: Method | None = None

    @property
    def call(self) -> str:
        """What to write to apply it.

        >>> Candidate("dash", DASH()).call.partition("(model")[2]
        ', optimizer, batches=batches, loss=loss)'
        """
        if self.method is None:
            return "pass  # do nothing"
        if isinstance(self.method, LearningRate):
            return f"for group in optimizer.param_groups: group['lr'] *= {self.method.factor:g}"
        if isinstance(self.method, Rewarm):
            return (
                f"rekindle.attach(model, optimizer, rekindle.methods.{self.method!r}, at=1), which acts while you train"
            )
        if type(self.method) is FIRE and not self.method.recalibrate and _expression(self.method):
            options = "".join(f", {name}={value!r}" for name, value in self.method.settings().items() if value)
            return f"rekindle.fire(model, optimizer{options})"
        return self._applied()

    @property
    def resets(self) -> bool:
        """Whether it is the model as its class makes it: what a new network would do. A He reset may be a better start.

        >>> Candidate("reset", FullReset()).resets, Candidate("he", FullReset("he")).resets
        (True, False)
        """
        return type(self.method) is FullReset and self.method.settings() == FullReset().settings()

    def _applied(self) -> str:
        parts = moments(self.method)
        event, kinds = parts.get("event"), [*parts]
        said = []
        if event is not None and not getattr(event, "watches", False):
            act = self.written if kinds == ["event"] else f'{self.written}.at("event")'
            needed = ", batches=batches, loss=loss" if getattr(event, "batches", "none") != "none" else ""
            said.append(f"{act}(model, optimizer{needed})")
        if kinds != ["event"] or not said:
            said.append(f"rekindle.attach(model, optimizer, {self.written}), which acts while you train")
        text = ", then ".join(said)
        return text if _expression(self.method) else f"{text}  # method: your candidate {self.name!r}"

    @property
    def written(self) -> str:
        """The method as it is written in Python; "method" where no text makes it again.

        >>> from rekindle.methods import HeadReset
        >>> Candidate("both", Compose([FIRE(scale="nearest"), HeadReset()])).written
        "rekindle.methods.Compose([rekindle.methods.FIRE(scale='nearest'), rekindle.methods.HeadReset()])"
        >>> Candidate("new", FullReset(fresh=lambda: nn.Linear(1, 1))).written
        'method'
        """
        return _expression(self.method) or "method"


def _expression(method: object) -> str | None:
    """Python that makes this method again; None where no text does: a function, tensors or another class inside."""
    if isinstance(method, Compose):
        parts = [_expression(part) for part in method.methods]
        return None if None in parts else f"rekindle.methods.Compose([{', '.join(map(str, parts))}])"
    if getattr(methods, type(method).__name__, None) is not type(method):
        return None
    try:
        same = _made_with(eval(repr(method), dict(vars(methods)))) == _made_with(method)
    except Exception:  # it takes other arguments, or holds tensors, which cannot be compared
        return None
    return f"rekindle.methods.{method!r}" if same else None


def _made_with(method: object) -> dict[str, Any]:
    """Its attributes but for generators, caches and buffers."""
    passing = (torch.Generator, PerModel, torch.Tensor)
    return {name: value for name, value in vars(method).items() if not isinstance(value, passing)}


def to_try(
    model: nn.Module,
    batches: Sequence[Batch],
    given: Mapping[str, Method | str | None] | Iterable[Method | str] | None,
    layers: bool,
) -> list[Candidate]:
    """The candidates that were given, or those that make sense for the model; with `layers` also groups of layers."""
    found = candidates_for(model, batches) if given is None else given_candidates(given)
    names = {one.name for one in found}
    return found + [one for one in layer_groups(model) if one.name not in names] if layers else found


def candidates_for(model: nn.Module, batches: Sequence[Batch] = ()) -> list[Candidate]:
    """What people choose among: nothing, the learning rate, FIRE, a reset, shrink-and-perturb, and what fits the model.

    With batches the remedies for dormant neurons are among them only where neurons are dormant on these.

    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))
    >>> " ".join(candidate.name for candidate in candidates_for(net))
    'nothing lr:0.33 lr:3 rewarm fire he-reset full-reset shrink-perturb fire-zero-biases redo'
    """
    names = ["lr:0.33", "lr:3", "rewarm"]
    try:
        projected = any(entry.reason is None for entry in plan(model, measure="none").entries)
    except ValueError:
        projected = False  # nothing that FIRE could project
    names += ["fire"] * projected + ["he-reset", "full-reset"]
    found = [Candidate(NOTHING), *(Candidate(name, named(name)) for name in names)]
    found.append(Candidate("shrink-perturb", ShrinkPerturb(0.8, "fresh")))
    if any(isinstance(module, _NORMS) for module in model.modules()):
        found.append(Candidate("dash", DASH()))
    if scale_invariant(model):
        found.append(Candidate("start-norm", StartNorm()))
    if not batches or _dormant(model, batches[:_LOOKED_AT]):
        found += [Candidate("fire-zero-biases", named("fire-zero-biases"))] * projected
        found.append(Candidate("redo", ReDo()))
    return found


def layer_groups(model: nn.Module) -> list[Candidate]:
    """FIRE on each group of layers alone: by what they do, and by depth.

    Groups by kind are those that the model has beside others: convolutions, queries with keys, values with outputs of
    attention, MLPs, and what is none of these. Depth is the first, the middle and the last third of all.

    >>> convs = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten()]
    >>> [one.name for one in layer_groups(nn.Sequential(*convs, nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))]
    ['fire-conv', 'fire-others', 'fire-first-third', 'fire-middle-third', 'fire-last-third']
    """
    entries = [entry for entry in plan(model, measure="none").entries if entry.reason is None]
    held = {entry.name: {_kind(block.role) for block in entry.blocks} for entry in entries}
    named = []
    for kind in sorted({kind for kinds in held.values() for kind in kinds}):
        alone = [name for name, kinds in held.items() if kinds == {kind}]  # a fused weight has several kinds
        if len(alone) < len(entries) and (kind in _GROUPS or alone):
            named.append(Candidate(f"fire-{kind}", FIRE(targets=kind if kind in _GROUPS else alone)))
    names = [entry.name for entry in entries]
    ends = [-(-len(names) * part // 3) for part in range(4)]
    parts = {part: names[ends[i] : ends[i + 1]] for i, part in enumerate(("first", "middle", "last"))}
    return named + [Candidate(f"fire-{part}-third", FIRE(targets=chosen)) for part, chosen in parts.items() if chosen]


def _kind(role: str) -> str:
    known = _GROUPS | {"attention.vo": {"value", "attention-output"}}
    return next((kind for kind, roles in known.items() if role in roles), "others")


def given_candidates(given: Mapping[str, Method | str | None] | Iterable[Method | str]) -> list[Candidate]:
    """The user's own, with doing nothing (whatever its name was) as the first. A list may hold names.

    >>> [one.name for one in given_candidates([FIRE(), FIRE(scale="nearest"), "lr:3"])]
    ['nothing', 'fire', 'fire-2', 'lr:3']
    """
    if callable(given) or isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(
            f"candidates is a list of methods or names, or a dict from names to methods, got {given!r}: put it in []"
        )
    if isinstance(given, Mapping):
        listed = [Candidate(name, named(m) if isinstance(m, str) else m) for name, m in given.items()]
    else:
        listed, taken = [], Counter[str]()
        for method in given:
            if method in (None, NOTHING):
                continue
            name: Any = method if isinstance(method, str) else getattr(method, "name", type(method).__name__)
            taken[name] += 1
            made = named(method) if isinstance(method, str) else method
            listed.append(Candidate(name if taken[name] == 1 else f"{name}-{taken[name]}", made))
    for one in listed:
        if isinstance(one.method, type) or (one.method is not None and not callable(one.method)):
            right = f"{one.method.__name__}()" if isinstance(one.method, type) else "rekindle.methods.FIRE()"
            raise TypeError(
                f"candidate {one.name!r} is {one.method!r}: give a method such as {right}, or None for nothing"
            )
    acting = [one for one in listed if one.method is not None]
    for name, count in Counter(one.name for one in acting).items():
        if name == NOTHING:
            raise ValueError(f"{name!r} is the name of doing nothing: call the method otherwise")
        if count > 1:
            raise ValueError(f"two candidates are called {name!r}: give a dict with names of your own")
    return [Candidate(NOTHING), *acting]


def acting_at_once(
    given: Mapping[str, Method | str | None] | Iterable[Method | str] | None,
) -> Mapping[str, Method | None] | None:
    """The same by name, for who applies a remedy at once: an error for one that acts at every step.

    >>> list(acting_at_once([FIRE()]))
    ['nothing', 'fire']
    """
    if given is None:
        return None
    listed = given_candidates(given)
    for one in listed:
        if one.method is not None and moments(one.method).keys() - {"event"}:
            raise ValueError(
                f"candidate {one.name!r} acts at every step: attach it instead, this applies remedies at once"
            )
    return {one.name: one.method for one in listed}


def _dormant(model: nn.Module, batches: Sequence[Batch]) -> bool:
    """Whether any neuron is dormant by ReDo's score; False for a model that ReDo cannot read."""
    found = ReDo()
    try:
        found.look(model, batches)
        scores = found.scores(model)
    except Exception:  # a loss may call the model otherwise than by its first input
        return False
    return any(bool((score <= found.tau).any()) for score in scores.values())
