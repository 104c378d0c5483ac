"""Arms: each can be built and applied, is written down in full, and takes what its setting says."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rekindle.lab.arms import ARMS, GROUPS, Arm, arms, factory, register
from rekindle.lab.protocols import coefficients
from rekindle.lab.settings import SETTINGS, Setting, read_source, setting
from rekindle.lab.train import Run, execute, make_optimizers, rate
from rekindle.methods import FIRE, OptimizerReset

PLAIN = Setting("plain", "random-labels", "mlp")


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_can_be_built_and_written_down(name: str) -> None:
    arm = ARMS[name]
    assert arm.name == name
    for variant in arm.variants():
        assert (variant.within(PLAIN).build() is None) == (arm.method is None)
    assert Arm.from_dict(json.loads(json.dumps(arm.to_dict()))).variants() == arm.variants()


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_has_the_same_tuning_budget(name: str) -> None:
    variants = ARMS[name].variants()
    assert len(variants) <= 4
    assert all(a != b for i, a in enumerate(variants) for b in variants[:i])


def test_the_arms_that_are_tuned_try_as_many_configurations() -> None:
    for group in ("main", "continuous"):
        assert {len(arm.variants()) for arm in arms(group)} == {4}


@pytest.mark.parametrize("group", GROUPS)
def test_groups_hold_arms(group: str) -> None:
    assert [arm.name for arm in arms(group)] == GROUPS[group]


def test_names_groups_and_own_arms_mix_without_repetition() -> None:
    own = Arm("mine", "FIRE", {"strength": 0.3})
    found = arms(["solvers", "fire", own, "nothing"])
    assert [arm.name for arm in found] == ["fire", "fire-10", "fire-5", "mine", "nothing"]
    assert len(arms("all")) == len(ARMS)
    with pytest.raises(ValueError, match="did you mean 'fire'"):
        arms("fir")


def test_fire_is_the_librarys_fire_and_a_body_keeps_its_output_layer() -> None:
    for name in ("fire", "random-isometry", "rescale", "fresh-at-norm"):
        assert "targets" not in ARMS[name].within(PLAIN).options
        (body,) = arms(f"{name}-body")
        assert body.within(PLAIN).options["targets"] == "auto"
    assert ARMS["fire"].build().settings() == FIRE().settings()
    with pytest.raises(ValueError, match="has no fire-qk-body"):
        arms("fire-qk-body")


def test_an_own_arm_that_returns_fire_is_the_built_in_one() -> None:
    @register("my-fire")
    def mine() -> FIRE:
        return FIRE()

    setting = Setting(
        "tiny", "random-labels", "mlp", {"data": "digits", "count": 64, "tasks": 2, "epochs": 1}, batch=32
    )
    timed = {"seconds", "remedy_seconds", "remedy"}
    found = []
    for name in ("fire", "my-fire"):
        rows = [row for row in execute(Run(setting, ARMS[name], 0)) if row["kind"] == "task"]
        found.append([{k: v for k, v in row.items() if k not in timed} for row in rows])
    del ARMS["my-fire"]
    assert found[0] == found[1]


def test_an_arms_own_options_win_over_the_settings() -> None:
    tuned = replace(PLAIN, coefficients={"redo": {"tau": 0.5, "period": 7}})
    assert ARMS["redo"].within(tuned).options == {"tau": 0.5, "period": 7}
    assert replace(ARMS["redo"], options={"tau": 0.1}).within(tuned).options == {"tau": 0.1, "period": 7}


def test_unknown_methods_and_options_are_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'FIRE'"):
        factory("FIRRE")
    with pytest.raises(ValueError, match="there is no method 'muon'"):
        factory("muon")
    with pytest.raises(ValueError, match="arm 'x': ShrinkPerturb does not take"):
        Arm("x", "ShrinkPerturb", {"share": 1}).build()
    with pytest.raises(ValueError, match="when="):
        Arm("x", "FIRE", when="sometimes")
    with pytest.raises(ValueError, match="no field 'methods'"):
        Arm.from_dict({"name": "x", "methods": 1})


def test_the_identity_follows_everything_that_decides_results(tmp_path: Path) -> None:
    run = Run(PLAIN, ARMS["redo"], 0)
    same = Run(replace(PLAIN, coefficients={"dash": {"lam": 0.3}}, about="x"), replace(ARMS["redo"], tuning=()), 0)
    assert run.identity == same.identity == Run.from_dict(json.loads(json.dumps(run.to_dict()))).identity
    others = [
        Run(PLAIN, ARMS["redo"], 1),
        Run(PLAIN, ARMS["fire"], 0),
        Run(replace(PLAIN, lr=2e-3), ARMS["redo"], 0),
        Run(replace(PLAIN, coefficients={"redo": {"tau": 0.3}}), ARMS["redo"], 0),
        Run(PLAIN, replace(ARMS["redo"], when=10), 0),
    ]
    assert len({run.identity, *(other.identity for other in others)}) == 6
    file = tmp_path / "mine.py"
    file.write_text("x = 1\n", "utf-8")
    before = Run(replace(PLAIN, source=str(file)), ARMS["redo"], 0).identity
    file.write_text("x = 2\n", "utf-8")
    assert before != Run(replace(PLAIN, source=str(file)), ARMS["redo"], 0).identity
    # A file that was moved is the same file.
    moved = file.rename(tmp_path / "moved.py")
    file.write_text("x = 1\n", "utf-8")
    assert before == Run(replace(PLAIN, source=str(file)), ARMS["redo"], 0).identity
    assert moved.exists()


def test_a_users_file_registers_what_it_holds(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from rekindle import lab\nfrom rekindle.methods import ShrinkPerturb\n\n"
        "@lab.arm('from a file', when='epoch')\ndef gentle():\n    return ShrinkPerturb(0.1)\n\nNUMBER = 4\n",
        "utf-8",
    )
    assert read_source(file).NUMBER == 4
    assert arms("from a file")[0].when == "epoch" and arms("from a file")[0].build().coefficient == 0.1
    assert read_source(file) is read_source(file)
    with pytest.raises(FileNotFoundError):
        read_source(tmp_path / "none.py")
    (tmp_path / "bad.py").write_text("1/0\n", "utf-8")
    for _ in range(2):  # a file that failed is not taken for read
        with pytest.raises(RuntimeError, match=r"bad\.py, line 1: ZeroDivisionError"):
            read_source(tmp_path / "bad.py")


def test_a_registered_class_becomes_an_arm() -> None:
    @register("half fire", about="half of it")
    class Half(FIRE):
        def __init__(self) -> None:
            super().__init__(strength=0.5)

    assert isinstance(arms("half fire")[0].build(), Half)
    del ARMS["half fire"]


def test_resetting_the_optimizer_alone_leaves_the_weights() -> None:
    model = nn.Linear(3, 2)
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    adam.step()
    before = model.weight.detach().clone()
    OptimizerReset()(model, adam)
    assert torch.equal(before, model.weight)
    assert not any(bool(t.any()) for state in adam.state.values() for t in state.values())


@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd", "muon"])
def test_optimizers_train_everything_at_the_rate_of_setting_and_arm(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    made = make_optimizers(model, replace(PLAIN, optimizer=kind, lr=1e-2), Arm("half", lr=0.5))
    held = [p for o in made for group in o.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()} and len(held) == 4
    assert {group["lr"] for o in made for group in o.param_groups} == {5e-3}
    assert all(group.get("weight_decay", 0.0) == 0.0 for o in made for group in o.param_groups)


def test_an_arms_optimizer_takes_only_options_that_fit() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    adam = replace(PLAIN, optimizer_options={"betas": [0.9, 0.95]})
    decayed = make_optimizers(model, adam, ARMS["weight-decay"])[0].param_groups[0]
    assert decayed["betas"] == (0.9, 0.95) and decayed["weight_decay"] == 0.1
    assert [type(o).__name__ for o in make_optimizers(model, adam, ARMS["muon"])] == ["Muon", "AdamW"]


def test_the_rate_rises_then_stays_or_falls_to_a_tenth() -> None:
    assert rate(PLAIN, 100) is None
    rising = rate(replace(PLAIN, warmup=0.1), 100)
    assert rising is not None
    assert [rising(i) for i in (0, 4, 9, 10, 99)] == [0.1, 0.5, 1.0, 1.0, 1.0]
    cosine = rate(replace(PLAIN, warmup=0.1, schedule="cosine"), 100)
    assert cosine is not None
    assert cosine(9) == 1.0 and cosine(10) == pytest.approx(1.0) and cosine(99) == pytest.approx(0.1)
    assert cosine(60) < cosine(50) < cosine(40)


@pytest.mark.parametrize("name", SETTINGS)
def test_named_settings_are_complete(name: str) -> None:
    from rekindle.lab import networks
    from rekindle.lab.agents import STREAMS as AGENT_STREAMS
    from rekindle.lab.agents.building import AGENTS
    from rekindle.lab.streams import STREAMS

    found = setting(name)
    assert found.name == name and found.about
    agents = found.stream in AGENT_STREAMS
    assert found.network in AGENTS if agents else found.stream in STREAMS and found.network in networks.names()
    assert Setting.from_dict(json.loads(json.dumps(found.to_dict()))).to_dict() == found.to_dict()
    assert set(found.coefficients) <= set(ARMS)
    for arm in arms("all"):
        arm.within(found).build()
    if not agents:
        inspect.signature(networks._BUILT_IN[found.network]).bind((1,), 2, **found.network_options)


def test_the_papers_coefficients() -> None:
    assert coefficients("warm-start", "vit") == {
        "shrink-perturb": {"coefficient": 0.8},
        "dash": {"alpha": 0.1, "lam": 0.05},
        "parseval": {"coefficient": 1e-5, "norms": True, "targets": "layers"},
        "l2-init": {"coefficient": 5e-4},  # its code has half of the squared distance
        "continual-backprop": {"replacement_rate": 1e-4, "maturity_threshold": 100},
        "redo": {"tau": 0.5},
        "self-normalized-reset": {"percentile": 0.99},
    }
    assert coefficients("class-incremental", "vgg16")["self-normalized-reset"] == {"percentile": 0.98}
    paper = SETTINGS["paper/continual-resnet18"]
    assert (paper.batch, paper.lr, paper.clip, paper.warmup, paper.optimizer) == (256, 1e-3, 0.5, 0.1, "adam")
    assert paper.stream_options["chunks"] == 10 and paper.stream_options["epochs"] == 100
    assert ARMS["rescale"].within(SETTINGS["paper/warm-start-vit"]).options["targets"] == ["attention.qk"]
    assert ARMS["fire"].within(paper).options == {"targets": ["auto", "head"], "scale": "paper"}
    assert ARMS["fire-nearest"].within(paper).options["scale"] == "nearest"


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": "lion"},
        {"schedule": "step"},
        {"headline": "f1"},
        {"batch": 0},
        {"warmup": 2.0},
        {"replay": -1},
        {"norm": 0},
        {"norm": "1"},
        {"norm": 1.0, "new_optimizer": False},
        {"norm": 1.0, "headline": "return"},
    ],
)
def test_a_setting_says_what_is_wrong(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        replace(PLAIN, **fields)


def test_a_misspelt_field_is_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'batch'"):
        Setting.from_dict({"name": "x", "stream": "s", "network": "n", "bach": 3})
    with pytest.raises(ValueError, match="did you mean 'random-labels'"):
        setting("random-label")
