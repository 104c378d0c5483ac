"""plan(): the dry run. For every parameter its blocks and scale, or the reason why it is skipped.

A plan knows names, shapes and index rules but no tensors, so the same plan drives a live model, a sharded one and
a checkpoint, and can be saved as JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, get_args

import torch
from torch import Tensor, nn

from rekindle import files
from rekindle.blocks.evidence import Facts, compared
from rekindle.blocks.finding import Conv, Found, find
from rekindle.blocks.layouts import Block, Recipe
from rekindle.blocks.names import is_sharded, unwrapped
from rekindle.blocks.state_dicts import find_in_state
from rekindle.engine.devices import full_precision, to_host
from rekindle.extras import install
from rekindle.projection import plan_text
from rekindle.projection.entries import PlanEntry
from rekindle.projection.keywords import Planning, PlanOptions
from rekindle.projection.measuring import Look, Reader, look, looks, references_of, too_many
from rekindle.projection.reading import by_name, reader_of, tried
from rekindle.projection.receipt import Measuring
from rekindle.projection.scales import Scale, settled
from rekindle.projection.targets import Targets, choose, describe, preset_layouts, terms
from rekindle.recording import facts_of, record
from rekindle.recording.invariance import norms_behind
from rekindle.report.showing import Page
from rekindle.sharding.spread import Spread
from rekindle.sharding.team import SOLO, opened
from rekindle.spelling import argument

if TYPE_CHECKING:
    import pandas

MIN_NORM = 1e-8
_VERSION = 1


@dataclass(frozen=True, repr=False)
class Plan(Page):
    """What will be done to each parameter; prints as a table, `fire` executes exactly it.

    >>> p = plan(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), measure="none")
    >>> [entry.name for entry in p.selected]
    ['0.weight', '2.weight']

    Attributes:
        entries: one per parameter, in the model's order.
        scale: the rule for all of them.
        targets: the request in words.
        min_norm: matrices with a smaller norm stay.
        conv: how a convolution is read, "taps" or "flat".
        why: the reason for a scale that the model settled.
    """

    page = "plan"
    entries: tuple[PlanEntry, ...]
    scale: Scale
    targets: str = "layers"
    min_norm: float = MIN_NORM
    conv: str = "taps"
    why: str = ""

    @cached_property
    def selected(self) -> tuple[PlanEntry, ...]:
        """The entries that will be projected."""
        return tuple(entry for entry in self.entries if entry.refusal is None)

    @property
    def skipped(self) -> tuple[PlanEntry, ...]:
        """The entries that are skipped."""
        return tuple(entry for entry in self.entries if entry.refusal is not None)

    def found(self, asked: Mapping[str, Any]) -> list[Found]:
        """The parameters as they were before a request chose among them: a file is planned by what a model showed.

        asked: the options of a plan that change what is found.
        """
        if asked.get("conv", "taps") != self.conv:
            raise ValueError(f"the saved plan has conv={self.conv!r}: ask for that, or save another one")
        if asked.get("layouts"):
            raise ValueError("layouts= goes with a model: the saved plan has those of its own")
        return [entry.before or entry for entry in self.entries]

    def reasons(self) -> dict[str, str]:
        """Why each parameter, or part of a fused weight, is skipped."""
        found = {}
        for entry in self.entries:
            if entry.refusal is not None:
                found[entry.name] = entry.refusal
            for part in entry.left:
                found[f"{entry.name}[{part}]"] = "a part of a fused weight that is not a target"
        return found

    def __str__(self) -> str:
        return self.table()

    __repr__ = __str__  # `rekindle.plan(model)` at a prompt shows the table

    def table(self, width: int | None = None) -> str:
        """One line per parameter, at most `width` columns wide."""
        why = f" ({self.why})" if self.why else ""
        return plan_text.table(self.entries, f"scale {self.scale}{why}, targets {self.targets}", width)

    def scale_values(
        self, entry: PlanEntry, block: Block, norm: Tensor | None = None, nuclear: Tensor | None = None
    ) -> Tensor:
        """The scale of each matrix of one of the entry's blocks, given what its rule looks at.

        >>> p = plan(nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 2)), scale="paper")
        >>> p.scale_values(p.selected[0], p.selected[0].blocks[0])
        tensor([2.])
        """
        place = entry.blocks.index(block)
        known = entry.scales[place] if entry.scales else None
        if known is not None:
            like = next((each for each in (norm, nuclear) if each is not None), torch.empty(0, device="cpu"))
            exact = torch.float64 if like.dtype == torch.float64 else torch.float32
            return torch.full((block.count,), known, dtype=exact, device=like.device)
        reference = entry.references[place] if entry.references else None
        return self.scale.values(block, norm=norm, nuclear=nuclear, reference=reference)

    def to_dict(self) -> dict[str, Any]:
        """Everything, in JSON types."""
        return {
            "rekindle_plan": _VERSION,
            "scale": str(self.scale),
            "why": self.why,
            "targets": self.targets,
            "min_norm": self.min_norm,
            "conv": self.conv,
            "entries": [entry.to_dict() for entry in self.entries],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The inverse of `to_dict`."""
        if data.get("rekindle_plan") != _VERSION:
            raise ValueError(f"not a rekindle plan of version {_VERSION}: {data.get('rekindle_plan')!r}")
        entries = tuple(PlanEntry.from_dict(e) for e in data["entries"])
        scale, targets, least = Scale.parse(data["scale"]), data["targets"], float(data["min_norm"])
        return cls(entries, scale, targets, least, data["conv"], data.get("why", ""))

    def to_frame(self) -> pandas.DataFrame:
        """A DataFrame with one row per block, or one per parameter that is skipped."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError(f"a DataFrame needs pandas: {install('report')}") from error
        return pandas.DataFrame(plan_text.rows(self.entries))

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, to be applied to a checkpoint or in another process."""
        # NaN is a measurement here (a matrix with NaN in it), and json's own spelling of it reads back.
        files.write(path, json.dumps(self.to_dict(), indent=1))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what `save` wrote.

        >>> import tempfile
        >>> p = plan(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     p.save(file.name)
        ...     Plan.load(file.name) == p
        True
        """
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))


@full_precision()
def plan(model: nn.Module | Mapping[str, Tensor], **options: Unpack[PlanOptions]) -> Plan:
    """Decide, without changing anything, what becomes of every parameter of a model or state dict.

    >>> print(plan(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), measure="none").table(width=80))
    parameter  role   shape  matrices  scale  DfI now  evidence  action
    0.weight   other  8×4    1 × 8×4   2      -        class     project
    0.bias     other  8      skipped: bias
    2.weight   head   2×8    1 × 2×8   1.41   -        class     project
    2.bias     other  2      skipped: bias
    2 of 4 parameters to project: 2 matrices, 48 of 58 numbers; scale init:kaiming
    (no activation is normalized), targets layers

    Args:
        model: a module, or a state dict. On a model with DTensor parameters every process must make the call.
        targets: presets ("layers": all that is no embedding or the like, the output layers included; "auto": the same
            without the output layers; "all", "attention", "attention.qk", "mlp", "conv", "paper-cnn", "paper-vit",
            "paper-gpt"), roles, names, globs, module types or a predicate on `Found`.
        include: what to add, also of what is skipped by default.
        exclude: what to remove.
        heads: the names of the output layers, where they are not those that would be taken.
        scale: what the isometry is multiplied by, see `rekindle.scales`. "auto" is He's norm, "init:kaiming", and
            "paper" in a model that normalizes its activations.
        split_heads: one matrix per attention head.
        conv: "taps", or "flat": one matrix (out, in·taps) of a convolution, at the scale √(out/(in·taps)).
        min_norm: matrices with a smaller norm stay (0 asks for them).
        reference: the initial weights, for `scale="reference"`.
        layouts: the layout of single weights.
        example: one batch. The model runs on it once, in isolation, and what is seen decides what is an output, how
            weights are cut and what selects, before anything that its source or names say.
        config: goes with a state dict: a transformers config, a model on the meta device, or the plan of a live model,
            whose recording then says how the file is planned.
        measure: "cheap" measures the DfI and looks for normalizations behind weights; the DfI of a model of a billion
            numbers is an estimate (≈) then, "full" measures it. "none" does neither.
        sharded: False skips DTensor parameters.
        allow_empty: a plan that projects nothing is no error.
    """
    for name in options.keys() - PlanOptions.__annotations__.keys():
        raise TypeError(f"plan() got an unexpected keyword argument {name!r}")
    return _plan(model, **options)


def draft(model: nn.Module, *, sharded: bool = True, **planning: Unpack[Planning]) -> Plan:
    """The plan without measures, for who executes it at once; parametrized weights are tried when that is done."""
    return _plan(model, measure="none", sharded=sharded, trial=False, **planning)


def _plan(
    model: nn.Module | Mapping[str, Tensor],
    *,
    targets: Targets = "layers",
    include: Targets = (),
    exclude: Targets = (),
    heads: Iterable[str] | str | None = None,
    scale: str | float | Scale = "auto",
    split_heads: bool = False,
    conv: Conv = "taps",
    min_norm: float = MIN_NORM,
    config: object = None,
    reference: nn.Module | Mapping[str, Tensor] | None = None,
    layouts: Mapping[str, Recipe] | None = None,
    example: object = None,
    measure: Measuring = "cheap",
    sharded: bool = True,
    allow_empty: bool = False,
    trial: bool = True,
) -> Plan:
    team, spreads = SOLO, dict[str, Spread]()
    if isinstance(model, nn.Module) and (sharded or trial):
        team, spreads = opened(model, "rekindle.plan(model.module)", writes=False, copies=False)
    if not sharded:
        team, spreads = SOLO, {}
    options: dict[str, Any] = {"conv": conv, "split_heads": split_heads, "heads": heads, "layouts": dict(layouts or {})}
    measures = measure != "none"
    with team.together():
        if example is not None:
            options["facts"] = _facts(model, example)
        if measure not in get_args(Measuring):
            raise ValueError(f"measure={measure!r} is not one of {', '.join(map(repr, get_args(Measuring)))}")
        rule = Scale.parse(scale)
        targets, include, exclude = (
            t if isinstance(t, str) or t == () else terms(t) for t in (targets, include, exclude)
        )
        if not math.isfinite(min_norm) or min_norm < 0:
            raise ValueError(f"min_norm={min_norm!r} must be 0 or a positive number")
        if rule.rule == "reference" and reference is None:
            raise ValueError('scale="reference" needs reference=, the initial weights as a model or state dict')
        found = _find(model, config, options, sharded)
        if example is not None and trial:  # the verb that is read, not the one that is executed at once
            found = compared(found, _find(model, config, {**options, "facts": None, "unaided": True}, sharded))
        stated = preset_layouts(found, targets)
        if stated:
            options["layouts"] = {**stated, **options["layouts"]}
            found = _find(model, config, options, sharded)
        asked = (targets,) if isinstance(targets, str) else targets
        preset = next((t for t in asked if isinstance(t, str) and t.startswith("paper-")), None)
        if isinstance(config, Plan) and config.why and rule.rule == "auto" and preset is None:
            rule, why = config.scale, config.why
        else:
            described = None if isinstance(config, Plan) else config
            rule, why = settled(rule, model, preset=preset, facts=options.get("facts"), config=described)
        chosen = choose(found, targets, include=include, exclude=exclude, allow_empty=allow_empty)
    read = reader_of(model)
    seen: dict[tuple[str, int], Look] = {}
    rough: set[str] = set()
    if measures or min_norm > 0:
        elsewhere = spreads.keys() if isinstance(model, nn.Module) else {k for k, t in model.items() if is_sharded(t)}
        local = [f for f in chosen if f.key not in elsewhere]
        rough = too_many(local) if measure == "cheap" else set()
        seen = _local_looks(local, read, rule, measures, min_norm, rough)
        if spreads:
            seen |= looks(team, spreads, chosen, read, rule, measures)
    initial = None if reference is None else by_name(reference)
    entries = tuple(_planned(f, rule, initial, min_norm, seen) for f in chosen)
    if rough:
        entries = tuple(replace(e, estimated=e.name in rough and e.dfi_now is not None) for e in entries)
    drafted = Plan(entries, rule, describe(targets, include, exclude), min_norm, conv, why)
    if isinstance(model, nn.Module) and trial:
        entries = tuple(tried(e, f, model, drafted.scale_values) for e, f in zip(entries, found, strict=True))
    if not allow_empty and all(e.refusal is not None for e in entries):
        reasons = "; ".join(f"{e.name}: {e.refusal}" for e in entries if e.blocks)
        raise ValueError(f"{argument('targets', targets)}: nothing is left to project. {reasons[:2000]}")
    if measures and isinstance(model, nn.Module):
        norms = norms_behind(unwrapped(model))
        entries = tuple(replace(e, norm=norms.get(e.name.removesuffix(".weight"), "")) for e in entries)
    return replace(drafted, entries=entries)


def _surely_larger(block: Block, weight: Tensor, least: float) -> bool:
    """Whether four rows already show that the only matrix of a weight has a norm of at least `least`.

    All norms of a model of a billion numbers in bfloat16 take seconds. Elsewhere than on the CPU one answer at a time
    would cost more than it saves.
    """
    if weight.device.type != "cpu" or block.count != 1 or block.out * block.in_ != weight.numel():
        return False
    return bool(torch.linalg.vector_norm(weight.detach()[:4], dtype=torch.float64) >= least)


def _local_looks(
    weights: Iterable[PlanEntry], read: Reader, rule: Scale, measure: bool, min_norm: float, rough: set[str]
) -> dict[tuple[str, int], Look]:
    """What `look` returns for every chosen block of a whole weight, by (name, place of the block).

    All norms come from their device together: one by one, the host would wait for each.
    """
    found: dict[tuple[str, int], Look] = {}
    for f in weights:
        weight = read(f) if f.refusal is None else None
        if weight is None or weight.is_meta:
            continue
        for place, block in enumerate(f.blocks):
            if measure:
                found[f.name, place] = look(block, weight, rule.known(block), f.name in rough)
            elif not _surely_larger(block, weight, min_norm):
                norms = block.layout.norms(weight, torch.promote_types(weight.dtype, torch.float32))
                found[f.name, place] = (norms, None, None)
    fetched = to_host([norms for norms, _, _ in found.values()])
    return {key: (norm, *seen[1:]) for norm, (key, seen) in zip(fetched, found.items(), strict=True)}


def _facts(model: object, example: object) -> Facts:
    if not isinstance(model, nn.Module):
        raise ValueError("example= goes with a model: a state dict cannot be run. Save the plan of the live model")
    return example if isinstance(example, Facts) else facts_of(record(model, example))


def _find(model: object, config: object, options: dict[str, Any], sharded: bool) -> list[Found]:
    if isinstance(model, nn.Module):
        if config is not None:
            raise ValueError("config= goes with a state dict; a live model shows its own layouts")
        # A model that is all on the meta device is planned for weights that are elsewhere; half of one is a mistake.
        meta = all(parameter.is_meta for parameter in model.parameters())
        return find(model, sharded=sharded, meta=meta, **options)
    if isinstance(config, Plan):
        config = config.found(options)
    if not isinstance(model, Mapping):
        raise TypeError(f"plan() takes a torch.nn.Module or a state dict, got {type(model).__name__}")
    wrong = next((k for k, t in model.items() if not isinstance(t, Tensor)), None)
    if wrong is not None:
        raise TypeError(f"the state dict holds {type(model[wrong]).__name__} under {wrong!r}; pass the tensors alone")
    return find_in_state(model, config, finding=options)


def _planned(
    f: PlanEntry, rule: Scale, initial: Reader | None, min_norm: float, looks: Mapping[tuple[str, int], Look]
) -> PlanEntry:
    """A chosen weight with what is planned for it, or the reason why it is skipped after all."""
    if f.refusal is not None:
        return f
    references = references_of(f, initial) if rule.rule == "reference" else ()
    left, kept = f.left, []
    for i, block in enumerate(f.blocks):
        norms, dfi, free = looks.get((f.name, i), (None, None, None))
        small = 0 if norms is None else int((norms < min_norm).sum())
        if small == block.count:
            left = (*left, block.part)
        else:
            kept.append((block, rule.known(block), dfi, free, small, references[i] if references else ()))
    if not kept:
        refusal = f"norm below min_norm ({min_norm:g}): a zero weight is taken as intended"
        return replace(f, refusal=refusal, left=())
    blocks, scales, dfis, frees, smalls, norms_then = zip(*kept, strict=True)
    return replace(
        f,
        blocks=blocks,
        scales=scales,
        dfi=dfis,
        dfi_free=frees,
        small=smalls,
        references=norms_then if references else (),
        left=left,
    )
