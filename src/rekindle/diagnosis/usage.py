"""Which experts, codes, latents, ranks and rows a model uses: counted over tokens, as numbers and findings.

A unit that was never used may be dead or only rare. How many of the latter there are is estimated from those that were
used once and twice (Chao, 1984), and subtracted: so a few tokens raise no alarm. Neither do they show that all is well:
where the tokens cover less than nine tenths of what is used (Good's estimate), nothing is judged.

>>> counts = torch.tensor([90.0, 60.0, 50.0, 0.0])
>>> dead_share(counts), coverage(counts), round(perplexity(counts), 2)
(0.25, 1.0, 2.91)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.blocks.names import is_sharded
from rekindle.diagnosis.units import UnitActivity
from rekindle.diagnosis.verdict import Finding, Level, Thresholds
from rekindle.engine.devices import to_float64
from rekindle.isolation import Batch
from rekindle.measures.matrices import similar_pairs
from rekindle.measures.spectra import effective_rank, singular_values
from rekindle.recording.recorder import Recorder, RecordingError, record
from rekindle.recording.sights import Sightings
from rekindle.recording.stacks import Stacks, UnitStack, stacks_in

ALIKE = 0.9  # |cosine| above which two members count as similar
FAINT = 0.01  # an expert below this share of the even load, and a rank below this share of the largest, is dead
COVERED = 0.9
_GIVEN_BACK = 0.2  # cosine between what an autoencoder reads and makes
_MOST_PAIRS = 2048  # members whose pairs are compared
COLUMNS: dict[str, dict[str, str]] = {
    "experts": {"experts": "units", "tokens": "tokens", "dead": "dead", "perplexity": "perplexity",
                "largest load": "load", "saturation": "saturation", "similar": "similar_pairs"},
    "codes": {"codes": "units", "tokens": "tokens", "dead": "dead", "perplexity": "perplexity",
              "similar": "similar_pairs"},
    "latents": {"latents": "units", "tokens": "tokens", "dead": "dead", "active": "active", "γ": "gamma",
                "similar": "similar_pairs"},
    "ranks": {"ranks": "units", "dead": "dead", "eff. rank": "effective_rank"},
    "rows": {"rows": "units", "tokens": "tokens", "unused": "unused"},
}  # fmt: skip
REMEDIES = {
    "dead experts": "methods.Revive() copies the most loaded expert; a load-balancing loss keeps them alive",
    "collapsed router": "methods.Revive(), and a load-balancing loss",
    "dead codes": "methods.Revive() with batches: codes start again at examples",
    "dead latents": "methods.Revive() with batches: latents start again at examples that are badly reconstructed",
    "dead ranks": "methods.Revive() starts them again",
}


def dead_share(counts: Tensor) -> float:
    """The share of units that were never used, without those that are estimated to be only rare.

    >>> dead_share(torch.tensor([3.0, 1.0, 1.0, 0.0]))  # two were seen once: one more may be as rare
    0.0
    """
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    rare = once * (once - 1) / (2 * (twice + 1))  # bias-corrected: with few pairs the plain one is too high
    return max(0.0, float((counts == 0).sum()) - rare) / len(counts)


def coverage(counts: Tensor) -> float:
    """The share of all uses that go to units which were seen: 1 − (used once) ÷ uses (Good, 1953)."""
    total = float(counts.sum())
    return 1 - int((counts == 1).sum()) / total if total else 0.0


def perplexity(counts: Tensor) -> float:
    """exp of the entropy of the use: how many units do the work."""
    total = counts.sum()
    return float(torch.special.entr(counts / total).sum().exp()) if total > 0 else 0.0


@dataclass
class Use:
    """What was seen of one stack: sums over tokens, which add up over batches."""

    counts: Tensor
    tokens: int = 0
    certainty: float = 0.0  # Σ over tokens of 1 − entropy of the router ÷ its maximum
    scored: int = 0
    first: Tensor | float = 0.0  # Σ of the encoder's inputs, and of their squared lengths
    second: float = 0.0
    read: int = 0
    along: float = 0.0  # Σ of what the decoder made times what the encoder read, and of its squared lengths
    made: float = 0.0

    def __add__(self, other: Use) -> Use:
        return Use(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


class Usage:
    """Counts the use of a model's stacks in the passes inside `watching()`.

    mask: which tokens of the batch are real.
    """

    def __init__(self, model: nn.Module, found: Stacks) -> None:
        self.model, self.found = model, found
        self.mask: Tensor | None = None
        self.uses: dict[str, Use] = {}
        self._inputs: dict[str, Tensor] = {}

    @classmethod
    def of(cls, model: nn.Module, batches: Iterable[Batch], units: Mapping[str, str | None] | None = None) -> Usage:
        """With the stacks that one pass shows, of each part that is called by itself; else with the reason."""
        if any(is_sharded(parameter) for parameter in model.parameters()):
            return cls(model, Stacks((), {"(model)": "its parameters are in shards"} if units else {}))
        try:
            recorder = Recorder(model)
            firsts = {id(getattr(batch, "part", None)): batch for batch in reversed(list(batches))}
            for batch in firsts.values():
                record(model, batch, recorder=recorder)
            return cls(model, stacks_in(recorder.graph, units, model))
        except RecordingError as error:
            return cls(model, Stacks((), {"(model)": str(error)}))

    def watching(self) -> AbstractContextManager[object]:
        """Counts what runs inside."""
        looks: dict[Any, Any] = {}
        for stack in self.found.stacks:
            use = self.uses.setdefault(stack.name, Use(torch.zeros(stack.size, dtype=torch.float64)))
            for place, sight in enumerate(stack.chosen):
                looks[sight] = partial(self._chosen, stack, use, place == 0)
                if stack.kind == "experts" and sight.operation == "topk" and place == 0:
                    looks[type(sight)(sight.caller, sight.operation, sight.number, 0)] = partial(self._scored, use)
            for sight in stack.active:
                looks[sight] = partial(self._active, use)
            if stack.kind == "latents" and stack.inputs is not None and stack.outputs is not None:
                looks[stack.inputs] = partial(self._read, stack, use)
                looks[stack.outputs] = partial(self._reconstructed, stack, use)
        return Sightings(self.model, looks) if looks else nullcontext()

    def _rows(self, value: Tensor, width: int) -> Tensor:
        rows = value.detach().reshape(-1, width)
        if self.mask is not None and self.mask.numel() == len(rows):
            rows = rows[self.mask.flatten().to(rows.device)]
        return rows

    def _chosen(self, stack: UnitStack, use: Use, first: bool, indices: Tensor) -> None:
        size = stack.size // stack.books
        if stack.books > 1 and len(indices) == stack.books:
            offset = torch.arange(stack.books, device=indices.device).reshape(-1, *[1] * (indices.ndim - 1))
            rows = (indices + offset * size).movedim(0, -1).reshape(-1, stack.books)
        else:
            several = stack.chosen[0].operation in ("topk", "sort", "multinomial") and indices.ndim > 1
            rows = self._rows(indices, indices.shape[-1] if several else 1)
        use.counts += torch.bincount(rows.flatten(), minlength=stack.size)[: stack.size].cpu()
        use.tokens += len(rows) if first else 0

    def _active(self, use: Use, activity: Tensor) -> None:
        rows = self._rows(activity, activity.shape[-1])
        use.counts += (rows != 0).sum(0).cpu()
        use.tokens += len(rows)

    def _read(self, stack: UnitStack, use: Use, inputs: Tensor) -> None:
        rows = to_float64(self._rows(inputs, inputs.shape[-1]))
        self._inputs[stack.name] = rows
        use.first = use.first + rows.sum(0).cpu()
        use.second += float(rows.square().sum())
        use.read += len(rows)

    def _reconstructed(self, stack: UnitStack, use: Use, outputs: Tensor) -> None:
        rows, read = to_float64(self._rows(outputs, outputs.shape[-1])), self._inputs.pop(stack.name, None)
        if read is not None and read.shape == rows.shape:
            use.along += float((rows * read).sum())
            use.made += float(rows.square().sum())

    def _is(self, stack: UnitStack) -> bool:
        """Whether it is what it looks like: a wide rectified layer is one of latents if it gives back its inputs."""
        if stack.kind != "latents" or stack.sure:
            return True
        use = self.uses.get(stack.name)
        return use is None or not use.read or use.along > _GIVEN_BACK * math.sqrt(use.made * use.second)

    def _scored(self, use: Use, scores: Tensor) -> None:
        rows = self._rows(scores, scores.shape[-1]).float()
        if bool((rows >= 0).all()):
            shares = rows / rows.sum(-1, keepdim=True).clamp_min(1e-12)
        else:
            shares = rows.softmax(-1)
        use.certainty += float((1 - torch.special.entr(shares).sum(-1) / math.log(rows.shape[-1])).sum())
        use.scored += len(rows)

    def numbers(self, pairs: bool = True) -> dict[str, dict[str, float]]:
        """The numbers of each stack that was seen; `pairs` also compares its members with each other."""
        found = {}
        for stack in self.stacks():
            numbers = _of_ranks(self.model, stack) if stack.kind == "ranks" else _of_use(stack, self.uses[stack.name])
            if numbers:
                similar = _similar(self.model, stack) if pairs else None
                found[stack.name] = numbers | ({} if similar is None else {"similar_pairs": similar})
        return found

    def stacks(self) -> list[UnitStack]:
        """Those that are what they look like."""
        return [stack for stack in self.found.stacks if self._is(stack)]

    def neurons(self, layers: Iterable[UnitActivity]) -> list[UnitActivity]:
        """Without the layers whose units are the latents of a stack: those beside the encoder that are as many."""
        homes = []
        for stack in self.stacks():
            if stack.kind == "latents":
                homes.append((stack.holds["encoder"].tensor.rpartition(".")[0].rpartition(".")[0], stack.size))
        return [
            layer
            for layer in layers
            if not any(layer.units == size and f"{layer.name}.".startswith(home) for home, size in homes)
        ]

    def add_up(self, total: Callable[[list[Tensor]], list[Tensor]]) -> None:
        """The sums of all replicas of the model, as `total` gives them."""
        names = [name for name in Use.__dataclass_fields__ if name not in ("counts", "first")]
        for use in self.uses.values():
            rest = torch.tensor([float(getattr(use, name)) for name in names], dtype=torch.float64)
            use.counts, rest = total([use.counts, rest])
            for name, value in zip(names, rest.tolist(), strict=True):
                setattr(use, name, value)

    def fresh(self) -> Usage:
        """With the same stacks and nothing counted yet."""
        return Usage(self.model, self.found)

    def joined(self, several: Iterable[Mapping[str, Use]]) -> Usage:
        """With all of these counts."""
        whole = self.fresh()
        for uses in several:
            whole.uses = {name: whole.uses[name] + use if name in whole.uses else use for name, use in uses.items()}
        return whole

    def unmeasured(self) -> dict[str, str]:
        """What looks like a stack and could not be measured, with the reason."""
        silent = {
            stack.name: f"no {stack.kind} were chosen on these batches"
            for stack in self.stacks()
            if stack.kind != "ranks" and not self.uses[stack.name].tokens
        }
        return {**self.found.unmeasured, **silent}


def _of_use(stack: UnitStack, use: Use) -> dict[str, float]:
    if not use.tokens:
        return {}
    counts, total = use.counts, float(use.counts.sum())
    numbers = {"units": float(stack.size), "tokens": float(use.tokens)}
    if stack.kind == "rows":
        return numbers | {"unused": float((counts == 0).double().mean())}
    faint = counts * (counts >= FAINT * total / stack.size) if stack.kind == "experts" else counts
    numbers |= {"coverage": coverage(counts), "perplexity": perplexity(counts)}
    if judged(numbers):
        numbers["dead"] = dead_share(faint)
    numbers["active"] = total / use.tokens
    if stack.kind == "experts":
        numbers["load"] = float(counts.max()) / use.tokens
    if use.scored:
        numbers["saturation"] = use.certainty / use.scored
    if use.read and isinstance(use.first, Tensor):
        mean = use.first / use.read
        spread = use.second / use.read - float(mean.square().sum())
        numbers["gamma"] = float(mean.norm()) / math.sqrt(max(spread, 1e-300))
    return numbers


def pair(model: nn.Module, stack: UnitStack) -> tuple[Tensor, Tensor]:
    """The two factors of an adapter: (ranks, in) and (out, ranks)."""
    down, up = stack.holds["down"], stack.holds["up"]
    a, b = model.get_parameter(down.tensor).detach(), model.get_parameter(up.tensor).detach()
    return (a if down.axis == 0 else a.mT), (b if up.axis == 1 else b.mT)


def _of_ranks(model: nn.Module, stack: UnitStack) -> dict[str, float]:
    a, b = (to_float64(each) for each in pair(model, stack))
    size = a.norm(dim=1) * b.norm(dim=0)
    if not bool(size.isfinite().all()) or float(size.max()) == 0:
        return {}  # an adapter that was not trained yet
    spectrum = singular_values(torch.linalg.qr(b)[1] @ torch.linalg.qr(a.mT)[1].mT)
    dead = float((size <= FAINT * size.max()).double().mean())
    return {
        "units": float(stack.size),
        "dead": dead,
        "coverage": 1.0,
        "effective_rank": float(effective_rank(spectrum)),
    }


def tensor_of(model: nn.Module, name: str) -> Tensor:
    """A parameter or buffer by its name."""
    owner, _, last = name.rpartition(".")
    found = getattr(model.get_submodule(owner), last)
    assert isinstance(found, Tensor)
    return found


def _similar(model: nn.Module, stack: UnitStack) -> float | None:
    """The share of pairs of members that point the same way."""
    which = {"experts": None, "codes": "codes", "latents": "decoder"}.get(stack.kind, "")
    names = [r for r in stack.holds if r not in ("router", "modules")] if which is None else [which]
    held = [stack.holds[name] for name in names if name in stack.holds]
    parts = []
    for member in held:
        value = tensor_of(model, member.tensor).detach()
        if value.ndim > 1:
            parts.append(value.movedim(member.axis, -2 if which == "codes" else 0).reshape(stack.size, -1))
    if "modules" in stack.holds:
        modules = model.get_submodule(stack.holds["modules"].tensor).children()
        parts.append(torch.stack([torch.cat([p.detach().flatten() for p in each.parameters()]) for each in modules]))
    if not parts:
        return None
    rows = to_float64(torch.cat(parts, 1))[:: -(-stack.size // _MOST_PAIRS)]
    share = float(similar_pairs(rows, ALIKE))
    return None if math.isnan(share) else share


def findings(stacks: Mapping[str, Mapping[str, float]], kinds: Mapping[str, str], t: Thresholds) -> Iterator[Finding]:
    """The rules: how many units are dead, and whether few experts get everything.

    >>> numbers = {"moe": {"units": 8.0, "dead": 0.875, "coverage": 1.0, "perplexity": 1.0, "active": 1.0}}
    >>> [str(each) for each in findings(numbers, {"moe": "experts"}, Thresholds())][0]
    'moe: 88 % of 8 experts dead'
    """
    for name, numbers in stacks.items():
        kind, size = kinds.get(name, "units"), numbers["units"]
        if not judged(numbers):
            continue
        over = f" over {numbers['tokens']:,.0f} tokens" if "tokens" in numbers else ""
        dead = numbers["dead"]
        for level, bound in (("act", t.dead_units_act), ("watch", t.dead_units_watch)):
            if dead >= bound:
                text = f"{dead:.0%}".replace("%", " %") + f" of {size:.0f} {kind} dead{over}"
                yield _finding(name, f"dead {kind}", level, text, f"share of dead {kind} ≥ {bound:g}")
                break
        least, most = numbers.get("active", 1.0), size
        if kind != "experts" or most - least < 1:
            continue
        spread = (numbers["perplexity"] - least) / (most - least)  # 0: the same few for every token; 1: all alike
        for level, bound in (("act", t.load_act), ("watch", t.load_watch)):
            if spread <= bound:
                text = f"the router sends everything to {numbers['perplexity']:.2g} of {size:.0f} experts{over}"
                yield _finding(name, "collapsed router", level, text, f"evenness of the load ≤ {bound:g}")
                break


def judged(numbers: Mapping[str, float]) -> bool:
    """Whether there were tokens enough to say that a unit is dead."""
    return numbers.get("coverage", 0.0) >= COVERED


def unjudged(stacks: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """The stacks of which too few tokens were seen, with the reason."""
    return {
        name: f"{numbers['tokens']:,.0f} tokens are too few for {numbers['units']:.0f} units: give more batches"
        for name, numbers in stacks.items()
        if "coverage" in numbers and not judged(numbers)
    }


def _finding(name: str, sign: str, level: str, text: str, rule: str) -> Finding:
    known: Level = "act" if level == "act" else "watch"
    return Finding(name, sign, known, text, rule, REMEDIES[sign], absolute=True)
