"""Many networks trained as one: what comes out is what each run gives by itself, up to rounding."""

from __future__ import annotations

import copy
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import rekindle
from lab_fakes import Inline
from rekindle.advice.stacking import Stack, Unstackable
from rekindle.lab import networks, together, train
from rekindle.lab.arms import ARMS, Arm
from rekindle.lab.execution.workers import TARGET, Pool
from rekindle.lab.results import planned
from rekindle.lab.results.statistics import holm
from rekindle.lab.settings import Run, Setting
from rekindle.lab.study import Study

STREAM = {"data": "digits", "count": 60, "tasks": 3, "epochs": 2}
TINY = Setting("tiny", "random-labels", "mlp", STREAM, {"width": [12, 12]}, batch=25, health=False)
NETWORKS = {
    "mlp": {"width": [12, 12]},
    "cnn": {"width": 4, "depth": 2, "hidden": 8},
    "resnet18": {"width": 2},
    "vgg16": {"width": 2},
}


def rows_of(runs: list[Run], **options: Any) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {run.identity: [] for run in runs}
    for identity, row in together.execute(runs, **options):
        if row["kind"] != "progress":
            found[identity].append(row)
    return found


def same(many: list[dict[str, Any]], alone: list[dict[str, Any]], tolerance: float = 0.02) -> None:
    assert [row["kind"] for row in many] == [row["kind"] for row in alone]
    for one, other in zip(many, alone, strict=True):
        if one["kind"] == "task":
            assert one.keys() == other.keys() and one["steps"] == other["steps"]
            for name in ("online_loss", "train_loss", "old_loss", "old_loss_start"):
                assert (one[name] is None) == (other[name] is None), name
                if one[name] is not None:
                    assert one[name] == pytest.approx(other[name], abs=tolerance, rel=tolerance), (name, one["task"])
            assert (one["remedy"] is None) == (other["remedy"] is None)


@pytest.mark.parametrize("name", [*NETWORKS, "gpt"])
def test_a_stacked_step_is_each_networks_own_step(name: str) -> None:
    shape, classes = ((6,), 9) if name == "gpt" else ((1, 8, 8), 5)
    options = {"layers": 1, "width": 8, "heads": 2, "tied": True} if name == "gpt" else NETWORKS[name]
    models = [networks.network(name, shape=shape, classes=classes, seed=seed, **options) for seed in range(3)]
    singles = copy.deepcopy(models)
    rates = (1e-3, 1e-3, 3e-3)
    stack = Stack(
        models,
        [torch.optim.AdamW(m.parameters(), lr=lr, weight_decay=0.1) for m, lr in zip(models, rates, strict=True)],
    )
    own = [torch.optim.AdamW(m.parameters(), lr=lr, weight_decay=0.1) for m, lr in zip(singles, rates, strict=True)]
    stack.train()
    draws = torch.Generator().manual_seed(0)
    for _ in range(3):
        x = torch.randint(classes, (3, 7, *shape), generator=draws) if name == "gpt" else torch.randn(3, 7, *shape)
        y = torch.randint(classes, (3, 7, *shape) if name == "gpt" else (3, 7), generator=draws)
        losses, right = stack.pass_(x, y)
        stack.hide_gradients()
        losses.sum().backward()
        stack.clip(0.5)
        stack.step()
        for i, (single, optimizer) in enumerate(zip(singles, own, strict=True)):
            logits = single(x[i])
            loss = cross_entropy(logits.flatten(0, -2), y[i].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(single.parameters(), 0.5)
            optimizer.step()
            assert losses[i].item() == pytest.approx(loss.item(), rel=5e-3)
            assert abs(int(right[i]) - int((logits.argmax(-1) == y[i]).sum())) <= 1
    for model, single in zip(models, singles, strict=True):
        for (key, one), other in zip(model.state_dict().items(), single.state_dict().values(), strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=4e-3, msg=lambda text, key=key: f"{key}: {text}")


def test_what_changes_one_module_changes_the_stack() -> None:
    models = [networks.network("mlp", shape=(4,), classes=3, seed=seed, width=[5, 5]) for seed in range(3)]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    stack = Stack(models, optimizers)
    x, y = torch.randn(3, 6, 4), torch.zeros(3, 6, dtype=torch.long)
    for _ in range(2):
        stack.pass_(x, y)[0].sum().backward()
        stack.step()
    before = {name: each.detach().clone() for name, each in stack.parameters.items()}
    receipt = rekindle.fire(models[1], optimizers[1])
    stack.collect(1)
    assert receipt.changed
    for name, each in stack.parameters.items():
        moved = (each != before[name]).flatten(1).any(1).tolist()
        assert moved == [False, name in receipt.changed, False]
    # Its next step is that of a new Adam, in spite of the others' counts.
    twin = copy.deepcopy(models[1])
    fresh = torch.optim.Adam(twin.parameters())
    cross_entropy(twin(x[1]), y[1]).backward()
    for name, parameter in twin.named_parameters():
        if name not in receipt.changed:
            parameter.grad = None
    fresh.step()
    stack.hide_gradients()
    stack.pass_(x, y)[0].sum().backward()
    stack.step()
    for name in receipt.changed:
        torch.testing.assert_close(models[1].get_parameter(name), twin.get_parameter(name), rtol=1e-4, atol=1e-6)


def test_all_arms_give_what_they_give_alone() -> None:
    names = ("nothing", "full-reset", "shrink-perturb", "fire-body", "redo", "l2-init", "weight-decay", "weight-clip")
    arms = [*(ARMS[name] for name in names), replace(ARMS["fire"], lr=3.0), ARMS["upgd"], ARMS["continual-backprop"]]
    arms += [ARMS["rate-raised"], ARMS["rate-rewarm"], ARMS["he-reset"], ARMS["hyperball"]]
    arms += [ARMS["soft-rescaling"], ARMS["weight-reset"], ARMS["normalize-project"]]
    runs = [Run(TINY, arm, seed) for arm in arms for seed in (0, 1)]
    many = rows_of(runs)
    for run in runs:
        same(many[run.identity], [row for row in train.execute(run) if row["kind"] != "progress"])


@pytest.mark.parametrize("changed", [{"new_optimizer": False}, {"clip": 0.1, "warmup": 0.3, "schedule": "cosine"}])
def test_settings_hold_for_many(changed: dict[str, Any]) -> None:
    setting = replace(TINY, **changed)
    runs = [Run(setting, ARMS[name], 0) for name in ("nothing", "fire")]
    many = rows_of(runs)
    for run in runs:
        same(many[run.identity], [row for row in train.execute(run) if row["kind"] != "progress"])


def test_what_cannot_be_stacked_is_bit_for_bit_what_it_was() -> None:
    runs = [Run(TINY, ARMS[name], 0) for name in ("continual-backprop", "nothing")]
    rows = rows_of(runs)[runs[0].identity]
    alone = list(train.execute(runs[0]))
    assert [row.get("online_loss") for row in rows] == [row.get("online_loss") for row in alone]
    dropout = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    with pytest.raises(Unstackable, match="Dropout"):
        Stack([dropout], [torch.optim.Adam(dropout.parameters())])


def test_a_network_that_diverges_leaves_the_others_alone() -> None:
    runs = [Run(TINY, Arm("wild", lr=1e30), 0), Run(TINY, ARMS["nothing"], 0)]
    many = rows_of(runs)
    for run in runs:
        same(many[run.identity], [row for row in train.execute(run) if row["kind"] != "progress"])
    assert many[runs[0].identity][1]["diverged"] and not many[runs[1].identity][1]["diverged"]


def test_a_refusal_or_an_error_ends_one_run_only() -> None:
    runs = [Run(TINY, Arm("nope", "FIRE", {"targets": "attention.qk"}), 0), Run(TINY, ARMS["fire"], 0)]
    many = rows_of(runs)
    assert "refused" in many[runs[0].identity][-1]
    assert [row["kind"] for row in many[runs[1].identity]] == ["start", "task", "task", "task", "end"]


def test_the_first_task_is_learned_once_and_shared(tmp_path: Path) -> None:
    runs = [Run(TINY, ARMS[name], 0) for name in ("nothing", "fire", "full-reset")]
    first = rows_of(runs, starts=tmp_path)
    assert len(list(tmp_path.glob("*.pt"))) == 1
    again = rows_of(runs, starts=tmp_path)
    for run in runs:
        assert first[run.identity][1] == again[run.identity][1], "taken from the folder"


def test_a_study_is_batched_killed_and_resumed(tmp_path: Path) -> None:
    setting = replace(TINY, stream_options={**STREAM, "tasks": 20, "epochs": 20})
    made = Study("s", [setting], [ARMS["nothing"], ARMS["fire"]], [0, 1], tmp_path)
    pool = Pool(1)
    killed = []

    def watch(event: Any) -> None:
        if event.kind == "task" and not killed and event.row["task"] >= 1:
            killed.append(pool.processes()[0])
            os.kill(killed[0], signal.SIGKILL)

    begun = time.monotonic()
    results = made.run(on=pool, progress=watch)
    pool.close()
    assert killed and time.monotonic() - begun < 120
    assert [entry.record.state for entry in results.entries] == ["finished"] * 4
    assert all(len(entry.record.rows) == 22 for entry in results.entries)
    assert made.last is not None and made.last.counts["finished"] == 4


def test_rates_are_chosen_first_and_only_the_chosen_one_is_reported(tmp_path: Path) -> None:
    options = {"scale": "paper", "targets": "auto"}
    arms = [ARMS["nothing"], Arm("near", "FIRE", options), Arm("drawn", "RandomIsometry", options)]
    wanted = [{"arm": "near", "minus": "nothing"}, {"arm": "near", "minus": "drawn", "same": 2.0}]
    made = Study("s", [TINY], arms, [0, 1, 2], tmp_path, rates=[1e-3, 1.0], comparisons=wanted)
    results = made.run(Inline(TARGET))
    assert made.last is not None and made.last.counts == {"finished": 3 * 2 * 2 + 3 * 3}
    assert {entry.name: entry.arm.lr for entry in results.entries} == dict.fromkeys(("nothing", "near", "drawn"), 1.0)
    claims = planned(results)
    assert [(claim.arm, claim.minus) for claim in claims] == [("near", "nothing"), ("near", "drawn")]
    assert claims[1].verdict == "the same" and claims[1].holm is not None and claims[0].end is not None
    expected = holm({"0": claims[0].p, "1": claims[1].p})
    assert [claim.holm for claim in claims] == list(expected.values())
