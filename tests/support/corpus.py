"""What is true of a hand-written net against its run, and its plan against both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import rekindle
from cases import Case, call
from oracle import Mistake, Truth, mistakes
from rekindle.recording import facts_of, record


def traced(example: Any) -> Any:
    """The example with every float tensor as a value that has a history, so that data differs from parameters."""
    if isinstance(example, Tensor):
        return example.clone().requires_grad_().clone() if example.is_floating_point() else example
    if isinstance(example, dict):
        return {name: traced(value) for name, value in example.items()}
    if isinstance(example, list | tuple):
        return type(example)(traced(value) for value in example)
    return example


def truth_of(case: Case) -> Truth:
    """What a run shows of the net."""
    model = case.build()
    return Truth.of(model, lambda: case.run(model, traced(case.example())))


def doubts(case: Case, truth: Truth) -> list[str]:
    """Where the oracle does not see what is true by construction; must be empty."""
    model = case.build()
    names = dict(model.named_parameters(remove_duplicate=False))
    first = {id(p): n for n, p in reversed(list(model.named_parameters(remove_duplicate=False)))}

    def full(name: str) -> str:
        return first[id(names[name if name in names else f"{name}.weight"])]

    wrong = []
    heads = {full(name) for name in case.heads}
    if truth.heads - heads or heads - truth.near:  # what is read again inside is near an output
        wrong.append(f"heads {sorted(truth.heads)}, not {sorted(heads)}")
    if {full(name) for name in case.routers} - truth.routers:
        wrong.append(f"routers {sorted(truth.routers)}, not {case.routers}")
    wanted = {full(name): sizes for name, sizes in case.cuts.items()}
    for name in {*truth.parts, *wanted} - heads:
        labels = truth.parts.get(name)
        elements = [] if labels is None else [int((labels == i).sum()) for i in labels.unique() if i]
        total, rows = sum(elements) or 1, sum(wanted.get(name, (1,)))
        sizes = sorted(round(rows * n / total) for n in elements)
        if sizes != sorted(wanted.get(name, ())):
            wrong.append(f"parts of {name}: {sizes}, not {wanted.get(name)}")
    return wrong


def judged(case: Case, **options: Any) -> tuple[list[Any], rekindle.Plan, Truth]:
    """Mistakes of the net's plan against the run and against its construction."""
    model, truth = case.build(), truth_of(case)
    wrong: list[Any] = [f"oracle: {text}" for text in doubts(case, truth)]
    names = dict(model.named_parameters(remove_duplicate=False))
    truth.heads |= {n for name in case.heads for n in (name, f"{name}.weight") if n in names}
    truth.routers |= {n for name in case.routers for n in (name, f"{name}.weight") if n in names}
    with torch.random.fork_rng():
        plan = rekindle.plan(model, targets="auto", measure="none", allow_empty=True, **options)
    wrong += mistakes(plan.entries, truth, example="example" in options)
    idle = {n for name in case.idle for n in (name, f"{name}.weight")}
    left = {n for name in case.skipped for n in (name, f"{name}.weight")}
    if "example" in options:
        wrong += [Mistake("idle", e.name, "never runs and is projected") for e in plan.selected if e.name in idle]
        named = {n for e in plan.selected for n in (e.name, *e.also)}
        wrong += [Mistake("skip", name, "is not projected") for name in case.sizes if name not in named]
    wrong += [
        Mistake("change", e.name, "is projected, but is not what is used") for e in plan.selected if e.name in left
    ]
    for entry in plan.selected:
        size = tuple((b.count, b.out, b.in_) for b in entry.blocks)
        if entry.name in case.sizes and size != (case.sizes[entry.name],):
            wrong.append(Mistake("layout", entry.name, f"{size}, not {case.sizes[entry.name]}"))
    return wrong, plan, truth


def shown(case: Case) -> Any:
    """What shows a plan how the net is used: its example, or the facts of a pass that its user would run."""
    return case.example() if case.run is call else facts_of(record(case.build(), case.example(), case.run))
