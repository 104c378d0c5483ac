"""Results of studies that never ran: rows with chosen values, in the form that the laboratory writes them."""

from collections.abc import Mapping, Sequence
from typing import Any

from rekindle.lab.arms import ARMS, Arm
from rekindle.lab.execution.store import RunRecord
from rekindle.lab.results import ArmComparison, Results, RunEntry
from rekindle.lab.settings import Setting

# Headline on the last task; every arm starts at FIRST, and seeds differ by a few thousandths.
FIRST = 0.46
ENDS = {"nothing": 0.16, "full-reset": 0.45, "shrink-perturb": 0.50, "redo": 0.30, "fire": 0.505}
LABELS = Setting("labels", "random-labels", "mlp", last=3, stream_options={"data": "digits"})


def task_row(setting: Setting, arm: str, task: int, value: float) -> dict[str, Any]:
    treated = task > 0 and arm not in ("nothing", "l2-init")
    remedy = {
        "seconds": 0.01,
        "changed": 8,
        "accuracy_before": 0.9,
        "accuracy_after": 0.3,
        "loss_before": 0.1,
        "loss_after": 2.0,
        "old_accuracy_before": 0.4,
        "old_accuracy_after": 0.2,
        "old_loss_before": 1.0,
        "old_loss_after": 2.0,
        "function_drift": 1.5,
    }
    health = {"dormant": 0.1 * task / 10, "effective_rank": 0.7, "dfi": 1.0 + task, "norm": 20.0 + task}
    row = {
        "kind": "task",
        "task": task,
        "name": f"labels {task + 1}",
        "steps": 100,
        "online_accuracy": value,
        "online_loss": 2 - value,
        "train_accuracy": value,
        "train_loss": 1 - value,
        "test_accuracy": value - 0.05,
        "test_loss": 1.5 - value,
        "old_accuracy": None if task == 0 else 0.2,
        "old_loss": None if task == 0 else 2.0,
        "old_accuracy_start": None if task == 0 else 0.25,
        "old_loss_start": None if task == 0 else 1.9,
        "curve": [[50, value / 2, 2.0], [100, value, 1.0]],
        "seconds": 1.0,
        "remedy_seconds": 0.01 if treated else 0.0,
        "remedy": remedy if treated else None,
        "health": health,
        "diverged": False,
    }
    if setting.headline == "online_loss":
        row["online_loss"] = 3.0 - 2 * value
    if setting.headline == "return":
        row |= {"return": 500 * value - 900, "online_return": 500 * value - 950, "chance_return": -1200.0}
    return row


def results(
    ends: Mapping[str, float] = ENDS,
    settings: Sequence[Setting] = (LABELS,),
    seeds: int = 5,
    tasks: int = 8,
    refused: Mapping[str, str] | None = None,
    failed: Mapping[str, str] | None = None,
    tuned: Sequence[str] = (),
) -> Results:
    entries = []
    names = [(name, False) for name in ends] + [(name, True) for name in tuned]
    for setting in settings:
        for name, tuning in names:
            arm = ARMS.get(name) or Arm(name, "FIRE")
            shown = f"{name} (tuned)" if tuning else name
            for seed in range(seeds):
                rows: list[dict[str, Any]] = [
                    {
                        "kind": "start",
                        "versions": {"rekindle": "0.1.0", "torch": "2.13.0"},
                        "stream": {"tasks": tasks, "classes": 10, "shape": [1, 8, 8]},
                        "parameters": 1000,
                    }
                ]
                for task in range(tasks):
                    share = min(1.0, task / (tasks - 3))
                    wobble = 0.003 * ((seed * seed * len(name) + seed * ord(name[0]) + task) % 5 - 2) * (seeds > 1)
                    value = FIRST + (ends[name] + 0.01 * tuning - FIRST) * share + wobble
                    rows.append(task_row(setting, name, task, value))
                rows.append({"kind": "end", "seconds": float(tasks)})
                entries.append(
                    RunEntry(
                        setting, shown, arm, tuning, seed, f"{name}{seed}{tuning}", RunRecord("finished", tuple(rows))
                    )
                )
        for name, why in (refused or {}).items():
            rows = [{"kind": "start"}, {"kind": "end", "refused": why}]
            entries.append(RunEntry(setting, name, Arm(name), False, 0, name, RunRecord("refused", tuple(rows))))
        for name, why in (failed or {}).items():
            rows = [{"kind": "start"}, {"kind": "failed", "error": why}]
            entries.append(RunEntry(setting, name, Arm(name), False, 0, name, RunRecord("failed", tuple(rows))))
    return Results({"name": "made-up", "seeds": list(range(seeds))}, tuple(entries))


def compared(**how: Any) -> list[ArmComparison]:
    return list(results(**how).comparisons.values())
