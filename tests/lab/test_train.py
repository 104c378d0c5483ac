"""The loop: against a plain one written out, pairing of arms, shared starts, every arm, refusals and divergence."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from rekindle import fire
from rekindle.engine import cpu
from rekindle.lab import networks, streams
from rekindle.lab.arms import ARMS, Arm
from rekindle.lab.evaluation import drift_of, evaluate, health_numbers
from rekindle.lab.settings import Setting
from rekindle.lab.sources import Examples, Stream, Task, Text, derive, generator
from rekindle.lab.train import Learner, Row, Run, execute

DIGITS: dict[str, Any] = {"data": "digits", "count": 96, "tasks": 3, "epochs": 2}
TINY = Setting("tiny", "random-labels", "mlp", DIGITS, {"width": [12, 12]}, batch=32, lr=1e-2, health=False)
FLAT = replace(TINY, stream="flat", stream_options={}, network="normed", network_options={})


@pytest.fixture(autouse=True)
def own_names() -> Iterator[None]:
    """Streams and networks for these tests only."""

    @streams.register("words")
    def words(seed: int, *, tasks: int = 2, steps: int = 4) -> Stream:
        tokens = torch.randint(9, (600,), generator=generator(seed, "words"))
        return streams.permuted_alphabet(tokens, vocabulary=9, context=6, tasks=tasks, steps=steps, seed=seed)

    @streams.register("flat")
    def flat(seed: int, *, count: int = 40, scale: float = 1.0) -> Stream:
        x = scale * torch.randn(count, 6, generator=generator(seed, "flat"))
        data = Examples(x, torch.arange(count) % 3)
        return Stream("flat", 3, (6,), 3, lambda index: Task(f"task {index}", data, data, epochs=2))

    @networks.register("normed")
    def normed(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(*shape, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, classes))

    yield
    for name in ("words", "flat"):
        del streams.STREAMS[name]


def rows(setting: Setting, arm: Arm | str, seed: int = 0, starts: Path | None = None) -> list[Row]:
    arm = ARMS[arm] if isinstance(arm, str) else arm
    return [row for row in execute(Run(setting, arm, seed), starts=starts) if row["kind"] != "progress"]


def tasks(found: list[Row]) -> list[Row]:
    return [row for row in found if row["kind"] == "task"]


def without_times(found: list[Row]) -> list[Row]:
    kept = []
    for row in tasks(found):
        row = {key: value for key, value in row.items() if "seconds" not in key}
        if row["remedy"]:
            row["remedy"] = {key: value for key, value in row["remedy"].items() if key != "seconds"}
        kept.append(row)
    return kept


def test_the_loop_is_a_plain_training_loop() -> None:
    """Bit for bit what one would write by hand, for FIRE at every boundary with a new Adam, clipping and warm-up."""
    setting = replace(TINY, clip=0.5, warmup=0.25)
    run = Run(setting, ARMS["fire"], 3)
    found = tasks(rows(setting, "fire", seed=3))

    stream = streams.stream("random-labels", derive(3, "stream"), **DIGITS)
    model = networks.network("mlp", shape=(1, 8, 8), classes=10, seed=derive(3, "network"), width=[12, 12])
    for index, task in enumerate(stream):
        assert isinstance(task.train, Examples)
        if index:
            fire(model)
        adam = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
        order = generator(3, "order", index)
        right, total, losses = 0, 0, []
        for epoch in range(2):
            for number, batch in enumerate(torch.randperm(96, generator=order).split(32)):
                step = 3 * epoch + number
                adam.param_groups[0]["lr"] = 1e-2 * min(1.0, (step + 1) / 2)
                answers = model(task.train.x[batch])
                loss = cross_entropy(answers, task.train.y[batch])
                adam.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                adam.step()
                right += int((answers.argmax(1) == task.train.y[batch]).sum())
                total += len(batch)
                losses.append(loss.item())
        row = found[index]
        assert row["steps"] == 6 and row["online_accuracy"] == right / total
        assert row["online_loss"] == pytest.approx(sum(losses) / 6, rel=1e-12)
        model.eval()
        assert row["train_accuracy"] == (model(task.train.x).argmax(1) == task.train.y).double().mean().item()
        model.train()
    assert run.setting == setting


def test_rows_can_be_written_as_json_and_say_what_was_run() -> None:
    found = rows(replace(TINY, health=True), "fire")
    assert [row["kind"] for row in found] == ["start", "task", "task", "task", "end"]
    json.dumps(found, allow_nan=False)
    start = found[0]
    assert Run.from_dict(start["run"]).identity == start["identity"]
    assert start["stream"] == {"tasks": 3, "classes": 10, "shape": [1, 8, 8]}
    assert set(found[2]["health"]) >= {"dormant", "effective_rank", "dfi", "norm"}
    assert 0 <= found[2]["health"]["dormant"] <= 1 and found[2]["health"]["norm"] > 0
    remedy = found[2]["remedy"]
    assert remedy["changed"] == 3 and remedy["seconds"] > 0 and remedy["function_drift"] > 0
    assert found[1]["remedy"] is None and found[1]["old_accuracy"] is None and found[2]["old_accuracy"] is not None
    assert remedy["accuracy_before"] == found[1]["train_accuracy"]
    assert found[2]["old_accuracy_start"] == remedy["old_accuracy_after"]


def test_a_run_repeats_itself_and_touches_no_global_randomness() -> None:
    setting = FLAT  # it has dropout
    before = torch.get_rng_state()
    one = without_times(rows(setting, "shrink-perturb-fresh"))
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(7)
    assert one == without_times(rows(setting, "shrink-perturb-fresh"))
    assert one != without_times(rows(setting, "shrink-perturb-fresh", seed=1))


@pytest.mark.parametrize("arm", ["full-reset", "fire", "dash", "injection", "random-isometry"])
def test_arms_are_paired(arm: str) -> None:
    """The first task is the same for every arm that acts at boundaries, and the data of all tasks are."""
    nothing, treated = without_times(rows(TINY, "nothing")), without_times(rows(TINY, arm))
    assert nothing[0] == treated[0]
    if arm == "injection":  # it changes how the network goes on, not what it computes: equal up to rounding at first
        assert nothing[1]["online_loss"] == pytest.approx(treated[1]["online_loss"], rel=0.05)
    else:
        assert nothing[1]["online_loss"] != treated[1]["online_loss"]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("arm", ["nothing", "fire", "shrink-perturb", "full-reset", "injection", "fresh-at-norm"])
def test_a_shared_start_changes_nothing(arm: str, keep: bool, tmp_path: Path) -> None:
    """Bit for bit the same rows, losses after the last step included, with the optimizer new at every task or kept."""
    setting = replace(
        TINY, stream="flat", stream_options={}, network="normed", network_options={}, new_optimizer=not keep
    )
    alone = rows(setting, arm)
    rows(setting, "head-reset", starts=tmp_path)  # another arm leaves its first task there
    files = list(tmp_path.iterdir())
    assert len(files) == 1
    shared = rows(setting, arm, starts=tmp_path)
    assert without_times(alone) == without_times(shared)
    assert list(tmp_path.iterdir()) == files
    # It was taken up, not done again: the row has the other run's time.
    kept = torch.load(files[0], weights_only=True)
    assert tasks(shared)[0]["seconds"] == kept["row"]["seconds"]


def test_arms_that_act_earlier_share_no_start(tmp_path: Path) -> None:
    for arm in ("redo", "l2-init", "continual-backprop", "hare-tortoise", "weight-clip", "upgd"):
        rows(TINY, arm, starts=tmp_path)
    assert not list(tmp_path.iterdir())
    for arm in (replace(ARMS["nothing"], lr=0.5), ARMS["nothing"], ARMS["weight-decay"]):
        rows(TINY, arm, starts=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_start_that_cannot_be_read_is_made_again(tmp_path: Path) -> None:
    first = rows(TINY, "fire", starts=tmp_path)
    file = next(tmp_path.iterdir())
    for content in (b"", file.read_bytes()[:500], b"no archive at all"):
        file.write_bytes(content)
        assert without_times(rows(TINY, "fire", starts=tmp_path)) == without_times(first)


@pytest.mark.parametrize("name", [name for name in ARMS if name not in ("fire-qk", "fire-attention", "fire-mlp")])
def test_every_arm_runs(name: str) -> None:
    quick = replace(TINY, stream_options={**DIGITS, "count": 64, "tasks": 3, "epochs": 1})
    found = rows(quick, name)
    lacking = {"layer-norm-reset": "no normalization layer", "fire-paper-cnn": "conv", "shrink-reset": "conv"}
    lacking |= dict.fromkeys(("effective-lr", "fire-effective-lr", "start-norm"), "no weight here is followed")
    if name in lacking:
        assert lacking[name] in found[-1]["refused"]
        return
    assert "refused" not in found[-1] and len(tasks(found)) == 3
    json.dumps(found, allow_nan=False)
    acts = ARMS[name].method is not None
    moment = getattr(ARMS[name].within(quick).build(), "moment", "never")
    assert [row["remedy"] is not None for row in tasks(found)] == [False, moment == "event", moment == "event"]
    assert (tasks(found)[2]["remedy_seconds"] > 0) == acts


@pytest.mark.parametrize("arm", ["fire-qk", "continual-backprop", "redo"])
def test_a_refusal_ends_the_run_with_its_reason(arm: str) -> None:
    @networks.register("untraceable")
    class Untraceable(nn.Module):
        def __init__(self, shape: tuple[int, ...], classes: int) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(math.prod(shape), 8), nn.Linear(8, classes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.relu(self.a(x.flatten(1)))
            if hidden.sum() > 1e9:
                hidden = hidden * 2
            out: torch.Tensor = self.b(torch.cat([hidden[:, :4] + hidden[:, 4:], hidden[:, 4:]], 1))
            return out

    found = rows(replace(TINY, network="untraceable", network_options={}), arm)
    assert found[-1]["kind"] == "end" and found[-1]["refused"]


def test_an_optimizer_that_cannot_train_the_network_is_a_refusal() -> None:
    found = rows(FLAT, "muon")
    assert "refused" not in found[-1]
    convolutions = replace(TINY, network="resnet18", network_options={"width": 4})
    assert "2-D weight" in rows(convolutions, "muon")[-1]["refused"]


def test_muon_is_refused_where_bfloat16_would_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_asked", lambda limit: "SIGILL")
    monkeypatch.setenv(cpu._ANSWER, "")
    assert "SIGILL" in rows(FLAT, "muon")[-1]["refused"]


@pytest.mark.parametrize("arm", ["nothing", "fire", "full-reset", "normalize-project", "l2-init"])
def test_divergence_is_marked_and_the_stream_goes_on(arm: str) -> None:
    @networks.register("fragile")
    class Fragile(nn.Module):
        """Becomes NaN at its fourth step."""

        def __init__(self, shape: tuple[int, ...], classes: int) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(math.prod(shape), 8), nn.Linear(8, classes)
            self.register_buffer("age", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training and torch.is_grad_enabled():
                self.age += 1
            out: torch.Tensor = self.b(torch.relu(self.a(x.flatten(1)))) * torch.where(self.age == 4, math.nan, 1.0)
            return out

    found = rows(replace(TINY, network="fragile", network_options={}, health=True), arm)
    json.dumps(found, allow_nan=False)
    assert len(tasks(found)) == 3 and "refused" not in found[-1]
    first, second = tasks(found)[:2]
    assert first["diverged"] and first["online_loss"] is None and 0 <= first["train_accuracy"] <= 0.5
    if arm == "full-reset":  # a fresh start cures even this
        assert second["remedy"]["failed"] is None and not second["diverged"] and second["online_loss"] < 4
    else:
        assert second["diverged"] and (arm != "fire" or "NaN" in second["remedy"]["failed"])


def test_doing_nothing_has_no_remedy_but_its_retention_is_known() -> None:
    found = tasks(rows(TINY, "nothing"))
    assert all(row["remedy"] is None and row["remedy_seconds"] == 0 for row in found)
    assert found[1]["old_accuracy_start"] == found[0]["train_accuracy"]


def test_injection_changes_no_answer_at_the_boundary() -> None:
    for keep in (True, False):
        for row in tasks(rows(replace(TINY, new_optimizer=not keep), "injection"))[1:]:
            remedy = row["remedy"]
            assert remedy["accuracy_before"] == remedy["accuracy_after"]
            assert remedy["function_drift"] == pytest.approx(0, abs=1e-6)


def test_methods_are_applied_as_often_as_they_should_be() -> None:
    calls: list[int] = []

    def counted(learner: Learner) -> int:
        calls.clear()
        inner = learner.acts["event"]

        def call(model: nn.Module, optimizer: Any = None, **options: Any) -> Any:
            calls.append(len(options["batches"]))
            return inner(model, optimizer, **options)

        learner.acts["event"] = call
        with learner:
            for index, task in enumerate(stream):
                list(learner.train_task(index, task))
        return len(calls)

    stream = TINY.make_stream(0)  # 3 tasks × 2 epochs × 3 steps
    for when, expected in (("boundary", 2), ("epoch", 5), (2, 8), (100, 2)):
        arm = Arm("redo", "ReDo", when=when)
        assert counted(Learner(Run(TINY, arm, 0), stream)) == expected
    assert calls == [3, 3]  # all batches of the new task at a boundary


def test_the_optimizer_lives_on_only_if_it_should() -> None:
    def steps_taken(setting: Setting, arm: str) -> float:
        learner = Learner(Run(setting, ARMS[arm], 0), setting.make_stream(0))
        with learner:
            for index, task in enumerate(setting.make_stream(0)):
                list(learner.train_task(index, task))
        state = learner.optimizers[0].state
        return float(state[next(learner.model.parameters())]["step"])

    kept = replace(TINY, new_optimizer=False)
    assert steps_taken(TINY, "nothing") == 6 and steps_taken(kept, "nothing") == 18
    assert steps_taken(kept, "optimizer-reset") == 6 and steps_taken(kept, "fire") == 6
    assert steps_taken(kept, "fire-state-none") == 18 and steps_taken(kept, "fire-state-step") == 6


def test_every_arm_gets_new_batchnorm_statistics_alike() -> None:
    setting = replace(FLAT, recalibrate=True)
    for arm in ("nothing", "rescale"):
        learner = Learner(Run(setting, ARMS[arm], 0), stream := setting.make_stream(0))
        with learner:
            list(learner.train_task(0, stream[0]))
            norm = learner.model[1]  # type: ignore[index]
            norm.running_mean.fill_(99.0)
            learner.boundary(1, stream[1])
            assert norm.running_mean.abs().max() < 10


def test_text_is_learned_token_by_token() -> None:
    gpt = {"layers": 1, "width": 8, "heads": 2, "tied": False}
    setting = Setting("words", "words", "gpt", {}, gpt, batch=4, headline="test_loss", evaluate=20, clip=1.0)
    for arm in ("nothing", "fire", "fire-qk", "full-reset", "redo"):
        found = rows(setting, arm)
        assert len(tasks(found)) == 2 and "refused" not in found[-1], found[-1]
        assert tasks(found)[1]["test_loss"] == pytest.approx(math.log(9), abs=0.5)
        json.dumps(found, allow_nan=False)


def test_images_go_through_every_network() -> None:
    digits = {**DIGITS, "size": 16, "count": 20, "tasks": 2, "epochs": 1}
    sizes = {"resnet18": {"width": 4}, "vit": {"layers": 1, "width": 8, "heads": 2}, "cnn": {"width": 4}}
    for name, options in sizes.items():
        found = rows(replace(TINY, stream_options=digits, network=name, network_options=options), "fire")
        assert len(tasks(found)) == 2 and tasks(found)[1]["remedy"]["changed"] > 2


def test_replay_is_part_of_the_setting() -> None:
    assert [row["steps"] for row in tasks(rows(replace(TINY, replay=0.5), "nothing"))] == [6, 10, 12]


def test_long_tasks_report_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(0.4 * tick for tick in range(10_000))
    monkeypatch.setattr("rekindle.lab.train.time.perf_counter", lambda: next(clock))
    found = [row for row in execute(Run(TINY, ARMS["nothing"], 0)) if row["kind"] == "progress"]
    assert found and all(0 < row["step"] <= row["steps"] == 6 for row in found)


def test_evaluation_against_plain_sums() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 4)).double()
    data = Examples(torch.randn(1203, 5).double(), torch.randint(4, (1203,)))
    score = evaluate(model, data)
    logits = model[2](model[0](data.x))
    assert score.accuracy == pytest.approx((logits.argmax(1) == data.y).double().mean().item())
    assert score.loss == pytest.approx(cross_entropy(logits, data.y).item())
    assert model.training
    text = Text(torch.randint(4, (50,)), context=3).some(9)
    embed = nn.Embedding(4, 4)
    assert evaluate(embed, text).loss == pytest.approx(
        cross_entropy(embed(text.x).flatten(0, 1), text.y.flatten()).item()
    )


def test_drift_is_the_divergence_of_answers() -> None:
    p, q = torch.rand(6, 3).softmax(-1), torch.rand(6, 3).softmax(-1)
    expected = sum(float(a * (a / b).log()) for a, b in zip(p.flatten(), q.flatten(), strict=True)) / 6
    assert drift_of(p.log(), q.log()) == pytest.approx(expected, rel=1e-4)
    assert drift_of(p.log(), torch.full_like(q, math.nan)) is None


def test_a_broken_network_has_no_health() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    nn.init.constant_(model[0].weight, math.nan)
    found = health_numbers(model, torch.randn(20, 4))
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("arm", ["l2-init", "continual-backprop", "weight-clip", "upgd", "redo", "hare-tortoise"])
def test_the_first_task_can_be_spared_and_is_then_the_same_for_all(arm: str) -> None:
    spared = replace(TINY, spare_first=True)
    strong = {
        "l2-init": {"coefficient": 1.0},
        "weight-clip": {"kappa": 0.1},
        "redo": {"tau": 1.0},
        "continual-backprop": {"replacement_rate": 0.5, "maturity_threshold": 1},
    }.get(arm, {})
    acting = replace(ARMS[arm], options=strong, when=1 if arm in ("redo", "hare-tortoise") else ARMS[arm].when)
    nothing, treated = tasks(rows(spared, "nothing")), tasks(rows(spared, acting))
    assert treated[0]["online_loss"] == nothing[0]["online_loss"]
    assert tasks(rows(TINY, acting))[0]["train_loss"] != nothing[0]["train_loss"]
    assert treated[1]["train_loss"] != nothing[1]["train_loss"]
