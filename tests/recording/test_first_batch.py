"""Verbs that are given batches rest on what the first one shows; saved plans carry that to files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from command_line import run
from rekindle.blocks.finding import find
from rekindle.methods import FIRE
from rekindle.monitoring.monitor import Monitor
from rekindle.recording.first_batch import knowing

SOURCE = '''
import torch
from torch import nn

class Gated(nn.Module):
    """Two parts of one layer that are multiplied, and an output whose name says nothing."""

    def __init__(self):
        super().__init__()
        self.value, self.mix, self.end = nn.Linear(6, 16), nn.Linear(8, 8), nn.Linear(8, 6)
        self.parts = lambda y: y.unflatten(-1, (2, 8)).unbind(-2)

    def forward(self, x):
        a, b = self.parts(self.value(x))
        return self.end(torch.relu(self.mix(a * b.sigmoid())))
'''


def made() -> nn.Module:
    """The net, of a class whose source nobody can read."""
    space: dict[str, Any] = {"__name__": "nowhere"}
    exec(SOURCE, space)
    net = space["Gated"]()
    assert isinstance(net, nn.Module)
    return net


def data(count: int = 2) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(0)
    return [(torch.randn(5, 6, generator=draws), torch.randn(5, 6, generator=draws)) for _ in range(count)]


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def test_without_batches_its_weights_are_skipped_with_the_way_out() -> None:
    plan = rekindle.plan(made(), allow_empty=True)
    assert not plan.selected
    assert all("example=batch" in str(e.refusal) for e in plan.entries if len(e.shape) > 1)


def test_a_method_with_batches_knows_what_the_first_one_shows() -> None:
    receipt = FIRE(targets="auto")(made(), batches=data(), loss=loss)
    assert {record.name for record in receipt.records} == {"value.weight", "mix.weight"}


def test_a_loss_shows_a_model_that_is_not_called_with_the_batch_itself() -> None:
    batches = [{"x": x, "y": y} for x, y in data()]
    receipt = FIRE(targets="auto")(
        made(), batches=batches, loss=lambda model, b: (model(b["x"]) - b["y"]).square().mean()
    )
    assert {record.name for record in receipt.records} == {"value.weight", "mix.weight"}


def test_health_measures_the_parts_that_the_pass_shows() -> None:
    rows = set(rekindle.health(made(), data(), loss=loss).weights)
    assert {name for name in rows if name.startswith("value")} == {"value.weight[up]", "value.weight[gate]"}


def test_a_weight_that_did_not_run_is_measured_all_the_same() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.end = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.end(torch.relu(self.used(x)))

    assert "unused.weight" in rekindle.health(Two(), data()).weights


def test_a_monitor_knows_what_its_first_sample_shows() -> None:
    net = made()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with Monitor(net, optimizer, every=1) as monitor:
        loss(net, data()[0]).backward()
        optimizer.step()
    assert monitor.last is not None
    assert "value.weight[gate]" in monitor.last.health.weights


def test_advice_is_about_the_plan_that_the_data_show() -> None:
    net = made()
    advice = rekindle.advise(
        net,
        data(4),
        loss=loss,
        candidates=[FIRE(targets="auto")],
        steps=20,
        seeds=3,
        budget="1m",
        workers=1,
        progress=False,
    )
    (row,) = [row for row in advice.rows if row.name == "fire"]
    assert row.error is None


def test_a_loader_that_shuffles_is_not_moved_on() -> None:
    class Shuffled:
        def __iter__(self) -> Iterator[Any]:
            order = torch.randperm(2).tolist()
            return iter([data()[i] for i in order])

    net, before = made(), torch.get_rng_state()
    with knowing(net, Shuffled(), loss):
        assert {f.evidence for f in find(net) if f.blocks} == {"recorded"}
    assert torch.equal(before, torch.get_rng_state())


class Weighed(nn.Module):
    """Its head is called like the middle of a block, and its middle like a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lm_head, self.up_proj = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.up_proj(self.lm_head(self.first(x).relu()).relu())


def test_where_the_recording_overrules_the_plan_says_so() -> None:
    plan = rekindle.plan(Weighed(), targets="auto", example=data()[0])
    assert {e.name: e.overruled for e in plan.entries if e.overruled} == {"lm_head.weight": "head"}


class TestOneModelInFourPlaces:
    """The same model in a file, by exec, and on the standard input."""

    ASK = """
import json, sys, torch, rekindle
torch.manual_seed(0)
net, x = Gated(), torch.zeros(3, 6)
plans = {}
for way, options in (("without", {}), ("with", {"example": x})):
    plan = rekindle.plan(net, targets="auto", allow_empty=True, **options)
    plans[way] = {e.name: [e.refusal or "", e.count, e.role, [b.part for b in e.blocks]] for e in plan.entries}
print(json.dumps(plans))
"""

    @pytest.fixture(scope="class")
    @classmethod
    def plans(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("places")
        (folder / "mine.py").write_text(SOURCE, "utf-8")
        ways = {
            "file": ([], f"from mine import Gated\n{cls.ASK}"),
            "exec": ([], f"exec({SOURCE!r})\n{cls.ASK}"),
            "input": (["-"], SOURCE + cls.ASK),
        }
        made = {}
        for name, (arguments, text) in ways.items():
            command = [sys.executable, *(arguments or ["-c", text])]
            done = subprocess.run(
                command, input=text if arguments else None, cwd=folder, capture_output=True, text=True, encoding="utf-8"
            )
            assert done.returncode == 0, done.stderr
            made[name] = json.loads(done.stdout)
        return made

    def test_with_an_example_the_plan_is_the_same(self, plans: dict[str, Any]) -> None:
        assert plans["file"]["with"] == plans["exec"]["with"] == plans["input"]["with"]
        assert plans["file"]["with"]["value.weight"] == ["", 2, "mlp-in", ["up", "gate"]]

    def test_without_one_it_is_a_subset(self, plans: dict[str, Any]) -> None:
        whole = {name: held for name, held in plans["file"]["with"].items() if not held[0]}
        for place in plans:
            projected = {name: held for name, held in plans[place]["without"].items() if not held[0]}
            assert projected.items() <= whole.items()
        assert plans["exec"]["without"] == plans["input"]["without"]


class TestASavedPlan:
    @pytest.fixture
    def saved(self, tmp_path: Path) -> tuple[Path, Path]:
        net = made()
        plan = rekindle.plan(net, targets="auto", example=data()[0])
        plan.save(tmp_path / "live.json")
        torch.save({f"module.{name}": tensor for name, tensor in net.state_dict().items()}, tmp_path / "net.pt")
        return tmp_path / "net.pt", tmp_path / "live.json"

    def test_reads_back_with_what_was_found(self, saved: tuple[Path, Path]) -> None:
        plan = rekindle.plan(made(), targets="auto", example=data()[0], measure="none")
        path = saved[1].with_name("again.json")
        plan.save(path)
        assert type(plan).load(path) == plan
        assert {e.evidence for e in plan.selected} == {"recorded"}

    def test_serves_a_file(self, saved: tuple[Path, Path]) -> None:
        file, live = saved
        shown = json.loads(run("plan", file, "--plan", live, "--json").stdout)
        held = {e["name"]: [b["part"] for b in e["blocks"]] for e in shown["entries"] if e["reason"] is None}
        assert held == {"value.weight": ["up", "gate"], "mix.weight": [""]}

    def test_answers_other_requests_for_a_file(self, saved: tuple[Path, Path]) -> None:
        file, live = saved
        shown = json.loads(run("plan", file, "--plan", live, "--targets", "head", "--json").stdout)
        assert [e["key"] for e in shown["entries"] if e["reason"] is None] == ["module.end.weight"]
        shown = json.loads(run("plan", file, "--plan", live, "--targets", "mlp-gate", "--json").stdout)
        (entry,) = [e for e in shown["entries"] if e["reason"] is None]
        assert (entry["key"], [b["part"] for b in entry["blocks"]]) == ("module.value.weight", ["gate"])

    def test_agrees_with_the_plan_of_the_live_model(self, saved: tuple[Path, Path]) -> None:
        net = made()
        live = rekindle.plan(net, targets="auto", example=data()[0], measure="none")
        of_file = rekindle.plan(net.state_dict(), targets="auto", config=live, measure="none")
        wanted = {e.name: (e.refusal, e.blocks, e.role, e.scales) for e in live.entries}
        assert {e.name: (e.refusal, e.blocks, e.role, e.scales) for e in of_file.entries} == wanted

    def test_of_another_convolution_rule_is_refused(self) -> None:
        net = made()
        live = rekindle.plan(net, targets="auto", example=data()[0], measure="none")
        with pytest.raises(ValueError, match="conv='taps'"):
            rekindle.plan(net.state_dict(), config=live, conv="flat")


def test_nothing_is_known_afterwards() -> None:
    net = made()
    FIRE(targets="auto")(net, batches=data(), loss=loss)
    assert all(f.evidence != "recorded" for f in find(net))
