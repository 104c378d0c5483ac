"""Many runs of one setting at once: their networks are trained as one (`stacking`), all else is each run's own.

    for identity, row in execute([Run(setting, arm, seed) for arm in arms for seed in range(10)]):
        print(identity, row["kind"])

Every run has its `Learner`, whose boundary, evaluation and rows are those of a run by itself; only the steps are taken
together. Data are those of a run by itself, step for step, so results differ by rounding alone (which a long stream
magnifies). What cannot be stacked learns by itself, in the same place and bit for bit as before.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rekindle.advice.stacking import Stack, Unstackable, hooks_of, signature
from rekindle.lab.evaluation import Track
from rekindle.lab.settings import Run, read_source
from rekindle.lab.sources import Task, derive, generator, isolated
from rekindle.lab.train import CHECK, Diverged, Learner, Refused, Row, set_rate, start_row
from rekindle.methods.remedy import Moment

MOST = 64
"""Networks in one stack: more are no faster (measured at 32 to 128)."""


@dataclass
class Member:
    """One run among many: its learner, and what is known of the task that it is in."""

    run: Run
    learner: Learner
    remedy: Row | None = None
    over: bool = False
    diverged_at: int | None = None
    rows: list[Row] = field(default_factory=list)


def stackable(run: Run) -> bool:
    """Whether the run may be among many; its network and optimizer are looked at when it begins."""
    kind = run.arm.optimizer or run.setting.optimizer
    return kind in ("adam", "adamw") and not run.setting.agents


def execute(runs: Sequence[Run], *, starts: Path | None = None) -> Iterator[tuple[str, Row]]:
    """Do the runs, all of one setting; rows come with the identity of their run, as from `train.execute`."""
    return isolated(_rows_of_all(list(runs), starts), derive(runs[0].seed, "dropout"))


def _rows_of_all(runs: list[Run], starts: Path | None) -> Iterator[tuple[str, Row]]:
    begun = time.perf_counter()
    setting = runs[0].setting
    if setting.source is not None:
        read_source(setting.source)
    streams = {seed: setting.make_stream(seed) for seed in {run.seed for run in runs}}
    members = []
    for run in sorted(runs, key=lambda run: (run.arm.lr or 1.0, str(run.arm.raised), run.arm.name, run.seed)):
        member = Member(run, Learner(run, streams[run.seed]))
        members.append(member)
        yield run.identity, start_row(run, streams[run.seed], member.learner)
        with _OneRun(member, begun):
            member.learner.__enter__()
        yield from _rows_so_far(member)
    try:
        for index in range(len(streams[runs[0].seed])):
            tasks = {seed: stream[index] for seed, stream in streams.items()}
            present = [member for member in members if not member.over]
            if not present:
                return
            if index == 0:
                yield from _learn_first(present, tasks, starts, begun)
            else:
                yield from _learn_task(index, present, tasks, begun)
            for member in present:
                yield from _rows_so_far(member)
        for member in members:
            if not member.over:
                yield member.run.identity, {"kind": "end", "seconds": (time.perf_counter() - begun) / len(members)}
    finally:
        for member in members:
            member.learner.__exit__()


def _rows_so_far(member: Member) -> Iterator[tuple[str, Row]]:
    rows, member.rows = member.rows, []
    yield from ((member.run.identity, row) for row in rows)


def _learn_first(
    members: list[Member], tasks: dict[int, Task], starts: Path | None, begun: float
) -> Iterator[tuple[str, Row]]:
    """The first task: of runs that do the same until their first boundary one learns it for all."""
    leaders: dict[Any, Member] = {}
    followers: list[tuple[Member, Member]] = []
    for member in members:
        key = member.run.first_task_key if member.learner.acts_at_boundaries else member.run.identity
        if key in leaders:
            followers.append((member, leaders[key]))
            continue
        leaders[key] = member
    learning, states = [], {}
    for member in leaders.values():
        saved = member.run.saved_first_task(starts) if starts and member.learner.acts_at_boundaries else None
        kept = None if saved is None else saved.load()
        if kept is None:
            learning.append((member, saved))
        else:
            member.rows.append(member.learner.restore(tasks[member.run.seed], kept))
            states[id(member)] = kept
    yield from _learn_task(0, [member for member, _ in learning], tasks, begun)
    for member, saved in learning:
        if member.rows and not member.over:
            states[id(member)] = member.learner.state(member.rows[-1])
            if saved is not None:
                saved.save(states[id(member)])
    for member, leader in followers:
        if id(leader) in states:
            member.rows.append(member.learner.restore(tasks[member.run.seed], states[id(leader)]))
        else:  # what it would have followed failed in the first task
            yield from _learn_task(0, [member], tasks, begun)


def _learn_task(
    index: int, members: Iterable[Member], tasks: dict[int, Task], begun: float
) -> Iterator[tuple[str, Row]]:
    """One task of all members: their boundaries, then the learning in stacks, then what is known afterwards."""
    ready = []
    for member in members:
        with _OneRun(member, begun):
            member.remedy = member.learner.enter(index, tasks[member.run.seed])
            ready.append(member)
    for stack in _stacks(ready, tasks):
        if len(stack) > 1:
            try:
                yield from _learn_stack(index, stack, tasks)
                continue
            except Unstackable:
                pass
        for member in stack:
            begun_here = time.perf_counter()
            task = tasks[member.run.seed]
            with _OneRun(member, begun):
                learning = member.learner.learn(index, task)
                while True:
                    try:
                        yield member.run.identity, next(learning)
                    except StopIteration as end:
                        track, diverged = end.value
                        break
                seconds = time.perf_counter() - begun_here
                member.rows.append(member.learner.leave(index, task, member.remedy, track, diverged, seconds))


def _stacks(members: list[Member], tasks: dict[int, Task]) -> list[list[Member]]:
    """Members that can learn together; those that cannot are by themselves."""
    groups: dict[Any, list[Member]] = {}
    for member in members:
        learner, task = member.learner, tasks[member.run.seed]
        try:
            if learner.watches or len(learner.optimizers) != 1:
                raise Unstackable("it watches every step")
            if hasattr(learner.model, "loss"):
                raise Unstackable("it has a loss of its own")
            sizes = (task.length(learner.setting.batch), len(task.train), task.epochs is None)
            key: object = (signature(learner.model, learner.optimizers[0]), sizes)
        except Unstackable:
            key = id(member)
        groups.setdefault(key, []).append(member)
    return [group[first : first + MOST] for group in groups.values() for first in range(0, len(group), MOST)]


def _learn_stack(index: int, members: list[Member], tasks: dict[int, Task]) -> Iterator[tuple[str, Row]]:
    """The training loop of `Learner.learn` for a stack."""
    setting, learners = members[0].learner.setting, [member.learner for member in members]
    stack = Stack([learner.model for learner in learners], [learner.optimizers[0] for learner in learners])
    stack.train()
    seeds = sorted({member.run.seed for member in members})
    which = torch.tensor([seeds.index(member.run.seed) for member in members])
    sources = [tasks[seed].batches(setting.batch, generator(seed, "order", index)) for seed in seeds]
    first = tasks[seeds[0]]
    steps = first.length(setting.batch)
    factors = {i: factor for i, each in enumerate(learners) if (factor := each.rate(index, steps)) is not None}
    acting = bool(index) or not setting.spare_first
    active = {i: learner.acts for i, learner in enumerate(learners) if acting and set(learner.acts) - {"event"}}
    periods = {i: every for i, each in enumerate(learners) if acting and (every := each.period(first))}
    right: list[Tensor] = []
    loss: list[Tensor] = []
    counts: list[int] = []
    for member in members:
        member.diverged_at = None
    begun = report = time.perf_counter()

    def treat(i: int, moment: Moment, batches: object = None) -> None:
        if members[i].diverged_at is None:
            try:
                learners[i].treat(moment, batches)
            except Diverged:
                members[i].diverged_at = len(counts)

    for step, batches in enumerate(zip(*sources, strict=True)):
        x, y = (torch.stack(part).index_select(0, which) for part in zip(*batches, strict=True))
        for i, every in periods.items():
            if step and step % every == 0:
                treat(i, "event", [(x[i], y[i])])
                stack.collect(i)
        for i, factor in factors.items():
            set_rate(learners[i].optimizers, factor(step))
        losses, answers = stack.pass_(x, y)
        right.append(answers)
        loss.append(losses.detach())
        counts.append(y[0].numel())
        stack.hide_gradients()
        losses.sum().backward()  # type: ignore[no-untyped-call]
        for i, acts in active.items():
            stack.show_gradients(i)
            if "loss" in acts:
                term: Tensor = learners[i].timed(acts["loss"].loss_term, learners[i].model)
                term.backward()  # type: ignore[no-untyped-call]
        if setting.clip is not None:
            stack.clip(setting.clip)
        for i, acts in active.items():
            if "backward" in acts:
                treat(i, "backward")
        for i in active:
            _call_hooks(learners[i], "pre")
        stack.step()
        for i, acts in active.items():
            hooked = _call_hooks(learners[i], "post")
            if "step" in acts:
                treat(i, "step")
            if hooked or "step" in acts:
                stack.collect(i)
        if step % CHECK == CHECK - 1:
            _note_divergence(members, loss[-CHECK:], len(counts))
            if all(member.diverged_at is not None for member in members):
                break
        if time.perf_counter() > report + 1.0:
            report = time.perf_counter()
            for member in members:
                yield member.run.identity, {"kind": "progress", "task": index, "step": step + 1, "steps": steps}
    _note_divergence(members, loss[len(loss) // CHECK * CHECK :], len(counts))
    seconds = (time.perf_counter() - begun) / len(members)
    columns = zip(torch.stack(right).unbind(1), torch.stack(loss).unbind(1), members, strict=True)
    for rights, losses, member in columns:
        end = member.diverged_at or len(counts)
        track = Track.filled(rights[:end], losses[:end], counts[:end])
        task, diverged = tasks[member.run.seed], member.diverged_at is not None
        member.rows.append(member.learner.leave(index, task, member.remedy, track, diverged, seconds))


def _call_hooks(learner: Learner, when: str) -> bool:
    """Call what a method has hung on the learner's optimizer, whose step the stack takes; whether there was any."""
    hooks = hooks_of(learner.optimizers[0], when)
    for hook in hooks:
        hook(learner.optimizers[0], (), {})
    return bool(hooks)


def _note_divergence(members: list[Member], losses: list[Tensor], steps: int) -> None:
    if losses:
        finite = torch.stack(losses).isfinite().all(0).tolist()
        for member, fine in zip(members, finite, strict=True):
            if not fine and member.diverged_at is None:
                member.diverged_at = steps


class _OneRun:
    """Inside, what a run's own method raises ends that run and no other."""

    def __init__(self, member: Member, begun: float) -> None:
        self.member, self.begun = member, begun

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.member.over = True
        seconds = time.perf_counter() - self.begun
        if isinstance(error, Refused):
            self.member.rows.append({"kind": "end", "refused": str(error), "seconds": seconds})
            return True
        text = "".join(traceback.format_exception(error))[-4000:]
        self.member.rows.append({"kind": "failed", "error": f"{type(error).__name__}: {error}", "traceback": text})
        return True
