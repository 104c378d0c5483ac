"""FIRE on a distributed model: the same plan, the same `execute`, on whole matrices at their owners.

Every process calls `rekindle.fire` on its own part of the model. What can be checked is checked and agreed on before
the first byte moves. Then each owner carries out the part of the plan that its boxes hold, with the store replaced by
those boxes; results are sent back to the shards, and records to every process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from rekindle.blocks.layouts import Block
from rekindle.blocks.names import partition_of
from rekindle.engine.solving import Solving
from rekindle.projection.entries import PlanEntry
from rekindle.projection.execution import (
    DEFAULTS,
    Numbers,
    PlanExecution,
    Solved,
    check_finite,
    check_options,
    execute,
    label,
    too_small,
)
from rekindle.projection.planning import Plan
from rekindle.projection.receipt import BlockRecord, Measuring, Meter, PendingRecord, Receipt, records
from rekindle.projection.stores import LiveStore
from rekindle.sharding.assembly import Assembly, Item, Work, inside
from rekindle.sharding.gram import factor
from rekindle.sharding.owners import Parcel
from rekindle.sharding.spread import Spread
from rekindle.sharding.team import LostRank, Team, local
from rekindle.sharding.units import interleaved

_Key = tuple[int, tuple[int, ...]]  # the block's place among all of the plan, and which of its matrices


def refuse_partitioned(options: Mapping[str, Any]) -> None:
    """Raise for options of `fire` that need the model itself, or all of it at once, under DeepSpeed ZeRO."""
    for name in ("drift", "guard", "recalibrate"):
        if options.get(name) is not None:
            raise ValueError(
                f"{name}= needs forward passes, which are not possible while weights are taken out of DeepSpeed "
                "ZeRO: measure before and after the call"
            )
    for name in ("mirrors", "atomic"):
        if options.get(name):
            raise ValueError(
                f"{name}= is not possible weight by weight under DeepSpeed ZeRO. Use `with rekindle.sharding."
                f"gathered(model, engine.optimizer) as whole: rekindle.fire(model, whole, {name}=...)` on every "
                "rank, where the whole model fits into its memory; nothing is put back there if anything fails"
            )


class BoxStore:
    """The weights of one lot: boxes of parameters, assembled on this rank. Keys are those of the lot's entries."""

    def __init__(self, boxes: dict[str, Tensor]) -> None:
        self._boxes = boxes

    def read(self, entry: PlanEntry) -> Tensor:
        """The box."""
        return self._boxes[entry.key]

    def write(self, entry: PlanEntry, block: Block, matrices: Tensor) -> None:
        """Put the matrices of one block into the box."""
        block.write(self._boxes[entry.key], matrices)


@dataclass
class _LotPlan:
    """The plan of one lot: entries are boxes, their blocks the matrices inside."""

    plan: Plan
    store: BoxStore
    numbers: dict[tuple[str, Block], Numbers]
    keys: list[_Key]


class ShardedExecution:
    """Carries out a plan on a team of processes; every process makes the same calls.

    `_first` has the place of each entry's first block among all of the plan, as `PlanExecution` numbers them.
    """

    def __init__(
        self,
        team: Team,
        plan: Plan,
        store: LiveStore,
        spreads: Mapping[str, Spread],
        *,
        strength: float,
        measure: Measuring,
        solved: Mapping[tuple[str, Block], Solved],
        meter: Meter,
        **solving: Unpack[Solving],
    ) -> None:
        check_options(strength, measure)
        self.team, self.plan, self.store = team, plan, store
        self.strength, self.measure, self._solved, self._solving = strength, measure, solved, solving
        self._first: dict[str, int] = {}
        position = 0
        for entry in plan.selected:
            self._first[entry.name] = position
            position += len(entry.blocks)
        self.entries = [entry for entry in plan.selected if entry.name in spreads and not entry.parametrized]
        names = {entry.name for entry in self.entries}
        self.here = [entry for entry in plan.selected if entry.name not in names]
        self._spreads, self._tensors = spreads, store.tensors()
        self._records: dict[_Key, BlockRecord] = {}
        self._again: dict[tuple[int, int], int] = {}
        self._notes: list[str] = []
        self._written: set[tuple[int, int]] = set()

    def check(self, settings: Mapping[str, Any]) -> None:
        """Everything that could go wrong, agreed on by all processes before any communication of weights."""
        with self.team.together():
            for entry in self.here:
                check_finite(entry.name, self.store.read(entry))
            for entry in self.entries:
                if partition_of(self._tensors[entry.name]) is None:
                    check_finite(entry.name, local(self._tensors[entry.name]))
                if self.store.mirrors and entry.left and interleaved([block.layout for block in entry.blocks]):
                    raise ValueError(f"{entry.name!r}: mirrors= cannot follow a part of an interleaved sharded weight")
        parted = [entry for entry in self.entries if partition_of(self._tensors[entry.name]) is not None]
        if parted:
            Assembly(self.team, self._items(parted)).measure(lambda i, _, box: check_finite(parted[i].name, box))
        call = {**self._solving, **settings, "strength": self.strength, "measure": self.measure}
        self.team.same("call", sorted((key, str(value)) for key, value in call.items()))
        self.team.same("scale", [(e.name, e.scales, e.references) for e in self.entries])

    def run(self) -> Receipt:
        """The receipt of the whole plan, on every process."""
        gram = self._solving.get("solver", "auto") == "auto" and self.measure != "full"
        assembly = Assembly(self.team, self._items(self.entries), gram=gram)
        for lot in assembly.run(self._treat):
            self._written |= {(item, block) for item, blocks in lot for block in blocks}
        refused = {key for each in self.team.gather(list(self._again)) for key in each}
        self._written -= refused
        if refused:
            for lot in assembly.run(self._treat, only=_only(refused, assembly), assembled=True):
                self._written |= {(item, block) for item, blocks in lot for block in blocks}
        mine = None
        with self.team.together():
            if self.here:
                rest = replace(self.plan, entries=tuple(self.here))
                numbers = {(e.key, b): self._numbers(e, b) for e in self.here for b in e.blocks}
                mine = execute(rest, self.store, solved=self._solved, numbers=numbers, **self._options())
        for number, entry in enumerate(self.entries):
            self.store.copy_to_mirrors(entry, [piece.local for piece in assembly.pieces(number)])
        return self._receipt(self._gathered(), mine)

    def so_far(self, error: BaseException) -> Receipt | None:
        """The receipt of what all processes had written before this error, None if nothing was."""
        if not self._written:
            return None
        alone = isinstance(error, LostRank) or not isinstance(error, Exception)  # the others may not answer
        return self._receipt([] if alone else self._gathered(), None, only=self._written)

    def _options(self) -> dict[str, Any]:
        return {"strength": self.strength, "measure": self.measure, **self._solving}

    def _treat(self, work: Work) -> None:
        for number, parcel, gram_matrix in (each for each in work if each[1].gram):
            made = self._by_gram(number, parcel, gram_matrix)
            if made is None:
                self._again[number, parcel.unit.parts[0].block] = 1
            else:
                self._records[made[0]] = made[1]
        lot = self._lot([each for each in work if not each[1].gram])
        if not lot.keys:
            return
        execution = PlanExecution(lot.plan, lot.store, numbers=lot.numbers, **self._options())
        done = execution.run()
        self._records.update(zip((lot.keys[place] for place in execution.places), done.records, strict=True))
        self._notes.extend(done.notes)

    def _items(self, entries: Sequence[PlanEntry]) -> list[Item]:
        return [
            Item(e.name, self._tensors[e.name], self._spreads[e.name], tuple(block.layout for block in e.blocks))
            for e in entries
        ]

    def _numbers(self, entry: PlanEntry, block: Block, matrices: Sequence[int] | None = None) -> Numbers:
        place = self._first[entry.name] + entry.blocks.index(block)
        return [(place, matrix) for matrix in (range(block.count) if matrices is None else matrices)]

    def _lot(self, work: Work) -> _LotPlan:
        boxes: dict[str, Tensor] = {}
        numbers: dict[tuple[str, Block], Numbers] = {}
        entries, keys = [], []
        for count, (number, parcel, tensor) in enumerate(work):
            entry = self.entries[number]
            key = f"{entry.key} {count}"
            boxes[key] = tensor
            blocks = tuple(inside(entry.blocks[part.block], part) for part in parcel.unit.parts)
            picked = [part.block for part in parcel.unit.parts]
            references = tuple(
                tuple(entry.references[part.block][i] for i in part.numbers) if entry.references else ()
                for part in parcel.unit.parts
            )
            entries.append(
                replace(
                    entry,
                    key=key,
                    shape=parcel.unit.shape,
                    blocks=blocks,
                    scales=tuple(entry.scales[i] for i in picked),
                    references=references if entry.references else (),
                )
            )
            for part, block in zip(parcel.unit.parts, blocks, strict=True):
                place = self._first[entry.name] + part.block
                numbers[key, block] = [(place, matrix) for matrix in part.numbers]
                keys.append((place, part.numbers))
        return _LotPlan(replace(self.plan, entries=tuple(entries)), BoxStore(boxes), numbers, keys)

    def _by_gram(self, number: int, parcel: Parcel, gram: Tensor) -> tuple[_Key, BlockRecord] | None:
        """Replace the Gram matrix by what the rows are to be multiplied with; NaN rejects the route."""
        entry = self.entries[number]
        part = parcel.unit.parts[0]
        block = entry.blocks[part.block]
        found = factor(gram, entry.dtype, **self._solving)
        if found is None or float(found[1].norm) < self.plan.min_norm:
            gram.fill_(math.nan)
            return None
        change, certificate = found[0], found[1].reshape((1,))
        scale = self.plan.scale_values(entry, block, norm=certificate.norm, nuclear=certificate.nuclear).double()
        if float(scale.max()) > torch.finfo(entry.dtype).max:
            raise ValueError(f"{entry.name!r} is {entry.dtype} and cannot hold a scale of {float(scale.max()):.3g}")
        gram.copy_(change).mul_(self.strength * float(scale))
        gram.diagonal().add_(1 - self.strength)
        written = PendingRecord(entry.name, block, certificate, scale)
        made = records([written], self.strength, self.measure)[0]
        return (self._first[entry.name] + part.block, part.numbers), made

    def _gathered(self) -> list[tuple[_Key, BlockRecord]]:
        """The records of all processes, one per block; a parameter that several meshes hold counts once."""
        both = self.team.gather((self._records, self._notes))
        self._notes[:] = dict.fromkeys(note for _, notes in both for note in notes)
        every: dict[_Key, BlockRecord] = {}
        for records_there, _ in both:
            for key, one in records_there.items():
                every.setdefault(key, one)
        return list(every.items())

    def _receipt(
        self,
        found: list[tuple[_Key, BlockRecord]],
        mine: Receipt | None,
        only: set[tuple[int, int]] | None = None,
    ) -> Receipt:
        parts: dict[int, list[tuple[int, BlockRecord]]] = {}
        for (place, numbers), one in found:
            parts.setdefault(place, []).append((numbers[0], one))
        if only is not None:
            kept = {self._first[self.entries[item].name] + block for item, block in only}
            parts = {place: each for place, each in parts.items() if place in kept}
        merged = {place: _merged([one for _, one in sorted(each, key=lambda p: p[0])]) for place, each in parts.items()}
        alone = mine.records if mine is not None else ()
        for entry in self.here:
            own = [one for one in alone if one.name == entry.name]
            merged |= {self._first[entry.name] + i: one for i, one in enumerate(own)}
        records = tuple(merged[place] for place in sorted(merged))
        skipped = self.plan.reasons() | (dict(mine.skipped) if mine is not None else {})
        if only is None:
            blocks = [(entry, place) for entry in self.entries for place in range(len(entry.blocks))]
            unchanged = [pair for pair in blocks if self._first[pair[0].name] + pair[1] not in merged]
            skipped |= {label(entry, entry.blocks[place]): too_small(self.plan) for entry, place in unchanged}
        notes = [*self._notes, *(mine.notes if mine is not None else ())]
        settings = {
            **{"targets": self.plan.targets, "scale": str(self.plan.scale), "strength": self.strength},
            **DEFAULTS,
            **self._solving,
            "processes": self.team.size,
        }
        return Receipt("fire", records, skipped, settings, notes=tuple(dict.fromkeys(notes)))


def _only(refused: set[tuple[int, int]], assembly: Assembly) -> Callable[[Parcel], bool]:
    return lambda parcel: (assembly.item(parcel), parcel.unit.parts[0].block) in refused


def _merged(records: Sequence[BlockRecord]) -> BlockRecord:
    """One record of a block whose matrices were solved in several places."""
    if len(records) == 1:
        return records[0]
    total = sum(one.count for one in records)

    def values(name: str) -> list[Any]:
        return [getattr(one, name) for one in records if getattr(one, name) is not None]

    def added(name: str) -> float | None:
        return math.fsum(values(name)) if values(name) else None

    def largest(name: str) -> Any:
        return max(values(name), default=None)

    def mean(name: str) -> float | None:
        known = [(getattr(one, name), one.count) for one in records if getattr(one, name) is not None]
        return math.fsum(v * n for v, n in known) / sum(n for _, n in known) if known else None

    def root(name: str) -> float | None:
        return math.sqrt(math.fsum(v * v for v in values(name))) if values(name) else None

    sfe, norm = added("sfe"), root("norm_before")
    return replace(
        records[0],
        count=total,
        scale=mean("scale"),
        dfi_before=added("dfi_before"),
        dfi_after=added("dfi_after"),
        dfi_free_before=mean("dfi_free_before"),
        dfi_free_after=mean("dfi_free_after"),
        sfe=sfe,
        sfe_relative=sfe / norm**2 if sfe is not None and norm else None,
        norm_before=norm,
        norm_after=root("norm_after"),
        spectral_before=largest("spectral_before"),
        spectral_after=largest("spectral_after"),
        residual=largest("residual"),
        residual_stored=largest("residual_stored"),
        steps=largest("steps"),
        completed=sum(values("completed")),
        converged=all(values("converged")),
        fallback=sum(one.fallback for one in records),
        values=_joined(records),
    )


def _joined(records: Sequence[BlockRecord]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in records[0].values:
        parts = [one.values.get(name) for one in records]
        if any(isinstance(part, list) for part in parts):
            found[name] = [row for part in parts if isinstance(part, list) for row in part]
        else:
            known = [(float(part), one.count) for part, one in zip(parts, records, strict=True) if part is not None]  # type: ignore[arg-type]
            found[name] = math.fsum(v * n for v, n in known) / sum(n for _, n in known) if known else None
    return found
