"""What an advisor tries: remedies that make sense for a model, each with the call that applies it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from rekindle.isolation import Batch
from rekindle.methods import DASH, FIRE, FullReset, HeadReset, ReDo, ShrinkPerturb, StartNorm
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
        """What to write to apply it."""
        return f"{self.written}(model, optimizer)" if self.method is not None else "pass  # do nothing"

    @property
    def written(self) -> str:
        """The method as it is written in Python."""
        inside = repr(self.method)
        return f"rekindle.methods.{inside}" if inside[0].isupper() and self.method is not None else inside


def to_try(
    model: nn.Module,
    batches: Sequence[Batch],
    given: Mapping[str, Method | None] | Iterable[Method] | None,
    layers: bool,
) -> list[Candidate]:
    """The candidates that were given, or those that make sense for the model; with `layers` also groups of layers."""
    found = candidates_for(model, batches) if given is None else given_candidates(given)
    names = {one.name for one in found}
    return found + [one for one in layer_groups(model) if one.name not in names] if layers else found


def candidates_for(model: nn.Module, batches: Sequence[Batch] = ()) -> list[Candidate]:
    """Nothing, FIRE at two scales and on the groups of layers that the model has, and the other remedies that fit it.

    With batches ReDo is among them only where neurons are dormant on these.

    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))
    >>> [candidate.name for candidate in candidates_for(net)]
    ['nothing', 'fire', 'fire-nearest', 'fire-half', 'shrink-perturb', 'head-reset', 'full-reset', 'redo']
    """
    found: list[tuple[str, Method | None]] = [(NOTHING, None)]
    try:
        projected = [entry for entry in plan(model, measure=False).entries if entry.reason is None]
    except ValueError:
        projected = []  # nothing that FIRE could project
    if projected:
        found += [
            ("fire", FIRE()),
            ("fire-nearest", FIRE(scale="nearest")),
            ("fire-half", FIRE(strength=0.5)),
        ]
        roles = {block.role for entry in projected for block in entry.blocks}
        for group, members in _GROUPS.items():
            if roles & members and roles - members:
                found += [(f"fire-{group}", FIRE(targets=group)), (f"fire-nearest-{group}", _nearest(group))]
    if any(isinstance(module, _NORMS) for module in model.modules()):
        found.append(("dash", DASH()))
    if scale_invariant(model):
        found.append(("start-norm", StartNorm()))
    found += [
        ("shrink-perturb", ShrinkPerturb(0.8, "fresh")),
        ("head-reset", HeadReset()),
        ("full-reset", FullReset()),
    ]
    if not batches or _dormant(model, batches[:_LOOKED_AT]):
        found.append(("redo", ReDo()))
    return [Candidate(*one) for one in found]


def layer_groups(model: nn.Module) -> list[Candidate]:
    """FIRE on each group of layers alone: by what they do, and by depth.

    Groups by kind are those that the model has beside others: convolutions, queries with keys, values with outputs of
    attention, MLPs, and what is none of these. Depth is the first, the middle and the last third of all.

    >>> convs = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten()]
    >>> [one.name for one in layer_groups(nn.Sequential(*convs, nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))]
    ['fire-conv', 'fire-others', 'fire-first-third', 'fire-middle-third', 'fire-last-third']
    """
    entries = [entry for entry in plan(model, measure=False).entries if entry.reason is None]
    held = {entry.name: {_kind(block.role) for block in entry.blocks} for entry in entries}
    named = []
    for kind in sorted({kind for kinds in held.values() for kind in kinds}):
        alone = [name for name, kinds in held.items() if kinds == {kind}]  # a fused weight has several kinds
        if len(alone) < len(entries) and (kind in _GROUPS or alone):
            named.append(Candidate(f"fire-{kind}", FIRE(targets=kind if kind in _GROUPS else alone)))
    names = [entry.name for entry in entries]
    third = -(-len(names) // 3)
    parts = {"first": names[:third], "middle": names[third : 2 * third], "last": names[2 * third :]}
    return named + [Candidate(f"fire-{part}-third", FIRE(targets=chosen)) for part, chosen in parts.items() if chosen]


def _kind(role: str) -> str:
    known = _GROUPS | {"attention.vo": {"value", "attention-output"}}
    return next((kind for kind, roles in known.items() if role in roles), "others")


def given_candidates(given: Mapping[str, Method | None] | Iterable[Method]) -> list[Candidate]:
    """The user's own, with doing nothing among them."""
    if isinstance(given, Mapping):
        named = [Candidate(name, method) for name, method in given.items()]
    else:
        named = []
        for method in given:
            name: Any = getattr(method, "name", type(method).__name__)
            taken = sum(one.name.rstrip("0123456789-") == name for one in named)
            named.append(Candidate(f"{name}-{taken + 1}" if taken else name, method))
    if all(one.method is not None for one in named):
        named.insert(0, Candidate(NOTHING))
    return named


def _dormant(model: nn.Module, batches: Sequence[Batch]) -> bool:
    """Whether any neuron is dormant by ReDo's score; False for a model that ReDo cannot read."""
    found = ReDo()
    try:
        found.look(model, batches)
        scores = found.scores(model)
    except (ValueError, TypeError, NotImplementedError):
        return False
    return any(bool((score <= found.tau).any()) for score in scores.values())


def _nearest(group: str) -> FIRE:
    return FIRE(targets=group, scale="nearest")
