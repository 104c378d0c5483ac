"""A plan's names and a file's: the same weights, under the prefixes that wrappers and trainers add."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rekindle.checkpoint.opening import Checkpoint
from rekindle.checkpoint.refusal import CheckpointError
from rekindle.projection.planning import Entry, Plan

_COMPUTED = "parametrised: the file holds its originals only; project the live model with rekindle.fire, and save that"


def match_plan(plan: Plan, checkpoint: Checkpoint) -> Plan:
    """The plan with every selected entry's key being a tensor of the checkpoint of the planned shape.

    A plan of a live model says `encoder.0.weight` where a Lightning checkpoint says `model.encoder.0.weight`: one
    prefix for all, on either side, is seen through. Anything that does not fit is refused; a weight of
    which the file holds the originals of a parametrisation is skipped.
    """
    names = set(checkpoint.names)
    plain = [entry for entry in plan.selected if not entry.parametrized]
    wanted = plain or [entry for entry in plan.selected if entry.name in names]
    if not wanted:
        why = f": {_COMPUTED}" if plan.selected else ""
        raise CheckpointError(f"{checkpoint.path}: the plan projects nothing in this file{why}")
    way = next((way for way in _ways(wanted[0], checkpoint) if all(way(e) in names for e in wanted)), None)
    if way is None:
        missing = next(e.name for e in wanted if e.name not in names and e.key not in names)
        raise CheckpointError(f"{checkpoint.path}: the plan's {missing!r} is not in the checkpoint")
    entries = []
    for entry in plan.entries:
        key = way(entry)
        if entry.parametrized and entry.reason is None and key not in names:
            entry = replace(entry, reason=_COMPUTED)
        if entry.reason is None:
            shape = checkpoint.meta(key).shape
            if tuple(entry.shape) != shape:
                raise CheckpointError(f"{checkpoint.path}: {key!r} has shape {shape}, the plan says {entry.shape}")
            dtype = checkpoint.meta(key).dtype
            if not dtype.is_floating_point or dtype.itemsize == 1:
                raise CheckpointError(f"{checkpoint.path}: {key!r} is {dtype}, which cannot be projected")
        entries.append(replace(entry, key=key))
    _check_twice(entries, checkpoint)
    return replace(plan, entries=tuple(entries))


def _ways(first: Entry, checkpoint: Checkpoint) -> list[Callable[[Entry], str]]:
    ways: list[Callable[[Entry], str]] = [_key, lambda entry: entry.name]
    for name in checkpoint.names:
        if name.endswith(f".{first.name}"):
            ways.append(_with_prefix(name.removesuffix(first.name)))
        elif first.name.endswith(f".{name}"):
            ways.append(_without_prefix(first.name.removesuffix(name)))
    return ways


def _key(entry: Entry) -> str:
    # The key of a parametrised weight is one of its originals, which is another tensor, maybe of the same shape.
    return entry.name if entry.parametrized else entry.key


def _with_prefix(prefix: str) -> Callable[[Entry], str]:
    return lambda entry: prefix + entry.name


def _without_prefix(prefix: str) -> Callable[[Entry], str]:
    return lambda entry: entry.name.removeprefix(prefix)


def _check_twice(entries: list[Entry], checkpoint: Checkpoint) -> None:
    seen: dict[str, str] = {}
    for entry in entries:
        if entry.reason is not None:
            continue
        owner = checkpoint.tied.get(entry.key, entry.key)
        if owner in seen:
            raise CheckpointError(f"{checkpoint.path}: {entry.key!r} and {seen[owner]!r} are one weight: exclude one")
        seen[owner] = entry.key
