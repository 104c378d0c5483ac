"""fire_file(): FIRE from one checkpoint to another, without ever holding the model.

In order: open and check the source, plan, match the plan to the file, stage a copy, carry the plan out batch by batch
from the source into the staged copy, reset the optimizer states inside, publish. The source is never written; a batch
that a crash interrupted is repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rekindle.blocks.finding import Block
from rekindle.checkpoint import training_state
from rekindle.checkpoint.assembling import OutputFiles, check_target
from rekindle.checkpoint.hub import place_on_hub
from rekindle.checkpoint.journal import Journal, check_unchanged, identify, states_below
from rekindle.checkpoint.opening import Checkpoint, match_plan, open_checkpoint, place_of
from rekindle.checkpoint.parts import CheckpointError, clearly, stored_as
from rekindle.checkpoint.staging import Staging, allocated, check_space
from rekindle.engine.solving import Solver, solve
from rekindle.files import State, kind_of
from rekindle.optimizers import StateReset
from rekindle.projection.biases import bias_entries, bias_names
from rekindle.projection.entries import PlanEntry
from rekindle.projection.execution import check_finite, execute, too_small
from rekindle.projection.planning import Plan
from rekindle.projection.receipt import Meter, Receipt
from rekindle.spelling import argument

Progress = Callable[[int, int, str], None]
Biases = dict[str, tuple[str, Any]]

# Numbers solved before the journal may note them. Batches are fixed by the plan alone, so that a resumed job computes
# what an uninterrupted one does, bit for bit.
BATCH = 1 << 22
_SYNC_SECONDS = 5.0
_LARGEST_SEED = 1 << 31


def fire_file(
    source: str | Path,
    target: str | Path | None = None,
    *,
    plan: Plan | str | Path | None = None,
    targets: Any = "layers",
    scale: str | float = "auto",
    strength: float = 1.0,
    solver: Solver = "auto",
    tol: float = 1e-6,
    steps: int | None = None,
    dtype: str | torch.dtype | None = None,
    heads: Iterable[str] | str | None = None,
    include: object = (),
    exclude: object = (),
    conv: Literal["taps", "flat"] = "taps",
    split_heads: bool = False,
    config: object = None,
    biases: Literal["keep", "zero"] = "keep",
    optimizer_state: str = "fresh",
    force: bool = False,
    in_place: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
) -> Receipt:
    """Project the weights of the checkpoint `source` and write the result to `target`, in the same format.

    The keywords up to `split_heads` are those of `rekindle.fire` and `rekindle.plan`; `plan` (or the path of a saved
    one) is executed exactly instead.

    dtype: store every floating tensor of the model in this dtype instead of its own.
    config: a transformers config (or a model on the meta device); without it, the config.json beside the weights.
    biases: "zero" also zeroes the biases beside the projected weights (a ReLU that is dead by its bias survives FIRE).
    optimizer_state: what becomes of the states inside, see `rekindle.optimizers.reset`; "none" leaves them.
    force: replace an existing output. in_place: replace the input.
    resume: continue where a killed job with the same input and settings stopped, and keep what is done if this one is
        interrupted. Without it an interrupted job leaves nothing behind.
    progress: called with (parameters done, parameters in all, name).

    Any failure is a `CheckpointError`, and leaves the input and an old output as they were.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "model.pt")
    ...     torch.save({f"layers.{i}.weight": torch.randn(4, 4) for i in range(3)}, file)
    ...     fire_file(file, in_place=True).changed
    ('layers.0.weight', 'layers.1.weight', 'layers.2.weight')
    """
    meter = Meter()
    job = _Job(
        strength=strength,
        solving={"solver": solver, "tol": tol, "steps": steps},
        dtype=_dtype(dtype),
        biases=biases,
        policy=optimizer_state,
        resume=resume,
        force=force,
        in_place=in_place,
        progress=progress,
    )
    planning = {"targets": targets, "scale": scale, "heads": heads, "include": include, "exclude": exclude}
    planning |= {"conv": conv, "split_heads": split_heads}
    with clearly(source, "fire"):
        if not 0 < strength <= 1:
            raise CheckpointError(
                f"strength={strength} is outside (0, 1]: 1 is the isometry, smaller keeps a share of W"
            )
        if biases not in ("keep", "zero"):
            raise CheckpointError(f"{argument('biases', biases)} is neither 'keep' nor 'zero'")
        if place_on_hub(source) is not None:
            raise CheckpointError(f"{place_on_hub(source)}: download it first (`hf download`), and give its folder")
        solve([], **job.solving)  # raises on options that do not go together
        if target is None and not in_place:
            raise CheckpointError("no output: give one, or say in_place")
        if not place_of(source).exists():
            raise CheckpointError(f"{source}: there is no such file or folder")
        goal = Path(target) if target is not None else place_of(source)
        with Staging(goal).locked() as staging:
            before = states_below(place_of(source))
            checkpoint = open_checkpoint(source)
            drafted = _planned(checkpoint, plan, config, planning)
            matched = match_plan(drafted, checkpoint)
            receipt = job.run(checkpoint, matched, staging, before)
    notes = (*receipt.notes, checkpoint.config_note) if checkpoint.config_note else receipt.notes
    return replace(receipt, seconds=meter.seconds, memory=meter.memory, notes=notes)


class FileStore:
    """A store that reads a source checkpoint and writes a staged one.

    Every block is solved from the source, also the second one of a fused weight whose first has been written: the
    staged copy may have less precision. What was stored is read back from the staged copy, for the certificate.
    """

    def __init__(self, source: Checkpoint, output: Checkpoint) -> None:
        self._source, self._output = source, output
        self._begun: set[str] = set()

    def read(self, entry: PlanEntry) -> Tensor:
        """The weight as it is in the source."""
        return self._source.read(entry.key)

    def write(self, entry: PlanEntry, block: Block, matrices: Tensor) -> Tensor | None:
        """Write one block to the staged file; the first write of a weight brings the rest of it along."""
        shape, dtype = self._output.meta(entry.key)[:2]
        if entry.key in self._begun:
            value = self._output.read(entry.key)
        elif block.count * block.out * block.in_ < torch.Size(shape).numel():
            value = self._source.read(entry.key).to(dtype)
        else:
            value = torch.empty(shape, dtype=dtype)
        block.write(value, matrices)
        self._output.write(entry.key, value)
        self._begun.add(entry.key)
        return self._output.read(entry.key)


@dataclass(frozen=True)
class _Job:
    strength: float
    solving: dict[str, Any]
    dtype: torch.dtype | None
    biases: str
    policy: str
    resume: bool
    force: bool
    in_place: bool
    progress: Progress | None

    def run(self, source: Checkpoint, plan: Plan, staging: Staging, before: Mapping[Path, State | None]) -> Receipt:
        planned = frozenset(entry.key for entry in plan.selected)
        biases = _biases(source, plan.selected) if self.biases == "zero" else {}
        touched = planned | {key for key, _ in biases.values()}
        output_files = OutputFiles(source, touched, self.policy != "none", self.dtype, self.in_place)
        settings = self._settings()
        work = identify([], plan.to_dict(), settings, _version(), torch.get_num_threads())
        origin, goal = identify(source.files()), staging.target
        assert staging.file is not None
        # Killed after the renaming, only the clean-up is left.
        journal = Journal.resume(staging.file, work, None if self.in_place else origin) if self.resume else None
        published = journal is not None and journal.published(goal)
        if not published:
            check_target(source, staging, output_files, force=self.force)
        training_state.check_policy(self.policy)
        plan = _checked(source, plan)
        weights = frozenset(entry.key for entry in plan.selected)
        biases = {entry.name: biases[entry.name] for entry in plan.selected if entry.name in biases}
        changed = weights | {key for key, _ in biases.values()}
        state = None if published and self.in_place else training_state.prepare(source, changed, self.policy)
        if published and journal is not None:
            staging.clear()
            return self._receipt(plan, journal, source, state, biases)
        _check_range(source, self.dtype)
        journal = Journal.resume(staging.file, work, origin) if self.resume else None
        try:
            if journal is None or not (journal.staged and kind_of(staging.partial) in ("file", "folder")):
                staging.clear(journal=False)
                check_space(goal.parent, output_files.size())
                journal = Journal.start(staging.file, work, origin)
                output_files.stage(staging.partial, weights)
                journal.mark_staged()
            else:
                check_space(goal.parent, output_files.size(), allocated(staging.partial))
            with output_files.opened(staging.partial) as output:
                self._carry_out(source, output, plan, journal)
                for key, outputs in _zeroed(journal, biases).values():
                    value = output.read(key)
                    value[outputs] = 0
                    output.write(key, value)
                training_state.reset(output, changed, self.policy)
                receipt = self._receipt(plan, journal, source, state, biases)
                provenance = _provenance(plan, receipt, work, settings)
                for old, part in zip(source.parts, output.parts, strict=True):
                    if part is not old:
                        part.finish(provenance, old.metadata, changed & {*part.names})
                        part.sync()
            staging.publish(journal, lambda: check_unchanged(source, before, origin))
        except BaseException:
            if not self.resume:
                staging.discard()
            else:
                staging.undo()
            raise
        return receipt

    def _carry_out(self, source: Checkpoint, output: Checkpoint, plan: Plan, journal: Journal) -> None:
        store = FileStore(source, output)
        total, done = len(plan.selected), 0
        if self.progress is not None:
            self.progress(0, total, "")
        pending: dict[int, Receipt] = {}
        synced = time.monotonic()
        for number, entries in enumerate(batches(plan.selected)):
            if number not in journal.done:
                seed = number % _LARGEST_SEED
                stored = tuple(replace(e, dtype=stored_as(e.dtype, self.dtype)) for e in entries)
                pending[number] = execute(
                    replace(plan, entries=stored), store, strength=self.strength, seed=seed, **self.solving
                )
            done += len(entries)
            if self.progress is not None:
                self.progress(done, total, entries[-1].name)
            if pending and (done == total or time.monotonic() - synced > _SYNC_SECONDS):
                for part in output.parts:
                    part.sync()
                for index, receipt in pending.items():
                    journal.add(index, receipt)
                pending, synced = {}, time.monotonic()

    def _settings(self) -> dict[str, Any]:
        own = {"dtype": _name(self.dtype), "biases": self.biases, "optimizer_state": self.policy}
        return {"strength": self.strength, **self.solving, **own}

    def _receipt(
        self, plan: Plan, journal: Journal, source: Checkpoint, state: StateReset | None, biases: Biases
    ) -> Receipt:
        parts = [journal.done[number] for number in sorted(journal.done)]
        skipped = {entry.name: entry.reason for entry in plan.skipped if entry.reason is not None}
        for part in parts:
            skipped |= part.skipped
        zeroed = {key for key, _ in _zeroed(journal, biases).values()}
        keys = {entry.name: entry.key for entry in plan.entries}
        skipped = {name: why for name, why in skipped.items() if keys.get(name) not in zeroed}
        notes = [note for part in parts for note in part.notes]
        notes += [source.config_note] if source.config_note else []
        others = [place for part in source.parts for place in part.others()]
        if others:
            named = ", ".join(others[:8]) + (", …" if len(others) > 8 else "")
            notes.append(f"left as it was: {named}, neither this model's weights nor a torch optimizer's state")
        left = source.companions().stale if not self.in_place else []
        if left:
            notes.append(f"other weight files were not copied, they would be stale: {', '.join(left)}")
        settings = {"targets": plan.targets, "scale": str(plan.scale), **self._settings()}
        records = tuple(record for part in parts for record in part.records)
        told = tuple(dict.fromkeys(notes))
        return Receipt("fire", records, skipped, settings, optimizer=state, biases_zeroed=len(zeroed), notes=told)


def _biases(source: Checkpoint, entries: Iterable[PlanEntry]) -> Biases:
    """The biases of these weights that the file has beside them, by the weights' names: key and entries."""
    found: Biases = {}
    names = set(source.names)
    for entry in entries:
        prefix, dot, tensor = entry.key.rpartition(".")
        keys = (f"{prefix}{dot}{name}" for name in bias_names(tensor))
        key = next((key for key in keys if key in names), None)
        if key is not None:
            size = torch.Size(source.meta(key).shape).numel()
            found[entry.name] = key, bias_entries(tensor, entry.blocks, source.read(entry.key), size)
    return found


def _zeroed(journal: Journal, biases: Biases) -> Biases:
    """Those of the biases whose weights were changed."""
    changed = {name for receipt in journal.done.values() for name in receipt.changed}
    return {name: bias for name, bias in biases.items() if name in changed}


def batches(entries: Iterable[PlanEntry]) -> list[tuple[PlanEntry, ...]]:
    """Neighboring entries in groups of about `BATCH` numbers."""
    groups: list[list[PlanEntry]] = [[]]
    size = 0
    for entry in entries:
        count = torch.Size(entry.shape).numel()
        if groups[-1] and size + count > BATCH:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += count
    return [tuple(group) for group in groups if group]


def _planned(checkpoint: Checkpoint, plan: Plan | str | Path | None, config: object, options: dict[str, Any]) -> Plan:
    if plan is None:
        return checkpoint.plan(config=config, **options)
    if options["targets"] != "layers" or options["scale"] != "auto" or options["include"] or options["exclude"]:
        raise CheckpointError("a plan already holds targets, scale and the like: give either the plan or those")
    if isinstance(plan, Plan):
        return plan
    with clearly(plan, "reading the plan"):
        return Plan.load(plan)


def _checked(source: Checkpoint, plan: Plan) -> Plan:
    """The plan without weights that are zero, which stay with their optimizer states; NaN and Inf are refused."""
    # A job of hours should not fail at its end because of the last tensor; the check costs one per cent of it.
    entries = []
    for entry in plan.entries:
        if entry.reason is None:
            weight = source.read(entry.key)
            try:
                check_finite(entry.key, weight)
            except ValueError as error:
                raise CheckpointError(f"{source.path}: {str(error).partition(':')[0]}; exclude it") from error
            norms = (torch.linalg.matrix_norm(block.read(weight).double()) for block in entry.blocks)
            if all(bool((norm < plan.min_norm).all()) for norm in norms):
                entry = replace(entry, refusal=too_small(plan))
        entries.append(entry)
    return replace(plan, entries=tuple(entries))


def _check_range(source: Checkpoint, dtype: torch.dtype | None) -> None:
    """Refuse a dtype in which a finite number of any tensor would be stored as infinity."""
    lost = []
    for name in source.names if dtype is not None else ():
        new = stored_as(source.meta(name).dtype, dtype)
        if new != source.meta(name).dtype and torch.finfo(new).max < torch.finfo(source.meta(name).dtype).max:
            flat = source.read(name).reshape(-1)
            pieces = (flat[start : start + BATCH] for start in range(0, flat.numel(), BATCH))
            if any(bool((piece.to(new).isinf() & piece.isfinite()).any()) for piece in pieces):
                lost.append(name)
    if lost:
        raise CheckpointError(
            f"{source.path}: {argument('dtype', _name(dtype))} cannot hold {', '.join(map(repr, lost[:5]))}"
            f"{f' and {len(lost) - 5} more' if len(lost) > 5 else ''}: their numbers are too large and would become "
            "infinite; choose bfloat16 or float32"
        )


def _provenance(plan: Plan, receipt: Receipt, job: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    totals = receipt.totals()
    records = receipt.records
    return {
        "rekindle": _version(),
        "method": "fire",
        "job": job[:16],
        "plan": {"targets": plan.targets[:500], "scale": str(plan.scale), "conv": plan.conv},
        "settings": {**settings},
        "parameters": totals["parameters"],
        "matrices": totals["matrices"],
        "residual": totals["residual"],
        "residual_stored": totals["residual_stored"],
        "converged": all(record.converged for record in records),
        "completed": totals["completed"],
        "fallback": totals["fallback"],
    }


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if isinstance(dtype, str):
        names = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}
        dtype = getattr(torch, names.get(dtype, dtype), dtype)
    if dtype is None or dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return dtype
    raise CheckpointError(f"{argument('dtype', dtype)} is not one of float16, bfloat16, float32, float64")


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _version() -> str:
    import rekindle

    return str(rekindle.__version__)
