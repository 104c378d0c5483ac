"""Plans against the oracle: what the autograd graph of a real run says about outputs, cuts and routers."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import rekindle
from cases import CASES
from corpus import doubts, judged, shown
from corpus import truth_of as run_of
from oracle import Truth, mistakes
from zoo_models import NAMES, batch, build

for path in sorted((Path(__file__).parent / "support").glob("nets_of_*.py")):
    importlib.import_module(path.stem)  # registers its nets

HEADS = {"mlp": "layers.4.weight", "resnet": "fc.weight", "nanogpt": "wte.weight", "llama": "lm_head.weight"}


def truth_of(name: str) -> tuple[Truth, rekindle.Plan]:
    model, inputs = build(name).eval(), batch(name)
    plan = rekindle.plan(model, targets="auto", measure="none")
    if not isinstance(inputs, dict):
        return Truth.of(model, lambda: model(inputs)), plan
    inputs.pop("labels")
    if name == "t5":
        inputs["decoder_input_ids"] = inputs["input_ids"]
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return Truth.of(model, lambda: model(**inputs)), plan


class TestTheOracle:
    @pytest.mark.parametrize("name", HEADS)
    def test_finds_the_output_layer(self, name: str) -> None:
        assert truth_of(name)[0].heads == {HEADS[name]}

    @pytest.mark.parametrize(
        ("name", "weight", "sizes"),
        [
            ("nanogpt", "h.0.attn.c_attn.weight", [1024, 1024, 1024]),
            ("falcon_new", "transformer.h.1.self_attention.query_key_value.weight", [1024, 512, 512]),
            ("phi3", "model.layers.0.mlp.gate_up_proj.weight", [1280, 1280]),
            ("mixtral", "model.layers.0.mlp.experts.gate_up_proj", [3840, 3840]),
        ],
    )
    def test_finds_the_parts_of_a_cut_weight(self, name: str, weight: str, sizes: list[int]) -> None:
        labels = truth_of(name)[0].parts[weight]
        assert sorted((labels == i).sum().item() for i in labels.unique()) == sorted(sizes)

    def test_finds_routers(self) -> None:
        assert truth_of("mixtral")[0].routers == {f"model.layers.{i}.mlp.gate.weight" for i in (0, 1)}


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_the_zoo_is_planned_as_it_runs(name: str) -> None:
    truth, plan = truth_of(name)
    assert truth.heads
    assert mistakes(plan.entries, truth, example=True) == []


@pytest.mark.parametrize("name", CASES)
def test_the_oracle_sees_what_is_true_by_construction(name: str) -> None:
    assert doubts(CASES[name], run_of(CASES[name])) == []


@pytest.mark.parametrize("name", CASES)
def test_a_hand_written_net_is_planned_as_it_runs(name: str) -> None:
    assert judged(CASES[name])[0] == []


@pytest.mark.parametrize("name", CASES)
def test_with_an_example_every_hand_written_net_is_planned_as_it_runs(name: str) -> None:
    wrong, plan, _ = judged(CASES[name], example=shown(CASES[name]))
    assert wrong == []
    assert plan.selected or CASES[name].skipped
