"""Routers by what they do, and by what stands beside them; heads and routers of files without a config."""

from __future__ import annotations

import json

import torch
from torch import nn

from rekindle.blocks.configs import meta_model
from rekindle.blocks.finding import find
from rekindle.blocks.state_dicts import find_in_state


class Chooser(nn.Module):
    """A mixture whose scorer has an unusual name."""

    def __init__(self) -> None:
        super().__init__()
        self.scorer, self.experts = nn.Linear(8, 4), nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x):
        weights, chosen = torch.softmax(self.scorer(x), dim=-1).topk(2)
        return sum(weights[..., i : i + 1] * self.experts[int(chosen[0, i])](x) for i in range(2))


class Switch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.ModuleDict({"classifier": nn.Linear(8, 4)})
        self.mlp = nn.Linear(8, 8)


def roles(model: nn.Module) -> dict[str, str]:
    return {f.name: f.role for f in find(nn.Sequential(model, nn.Linear(8, 2))) if f.blocks}


def test_a_layer_that_scores_experts_is_a_router() -> None:
    found = roles(Chooser())
    assert found["0.scorer.weight"] == "router"
    assert found["0.experts.0.weight"] != "router"


def test_inside_a_router() -> None:
    found = roles(Switch())
    assert found["0.router.classifier.weight"] == "router"
    assert found["0.mlp.weight"] != "router"


def test_a_gate_beside_experts_in_a_file() -> None:
    names = ["mlp.gate", "mlp.experts.0.up_proj", "mlp.experts.0.down_proj", "other.gate"]
    tensors = {f"layers.0.{name}.weight": torch.zeros(4, 4) for name in names}
    found = {f.name: f for f in find_in_state(tensors)}
    assert found["layers.0.mlp.gate.weight"].reason == "router, by its name or the experts beside it"
    assert "router" not in found["layers.0.other.gate.weight"].marks


def outputs(shapes: dict[str, tuple[int, int]]) -> list[str]:
    """The weights of a file that may be its outputs, in both orders of its keys."""
    tensors = {}
    for name, shape in shapes.items():
        tensors |= {f"net.{name}.bias": torch.zeros(shape[0]), f"net.{name}.weight": torch.zeros(shape)}
    marked = [{f.name for f in find_in_state(t) if "head" in f.marks} for t in (tensors, dict(sorted(tensors.items())))]
    assert marked[0] == marked[1]
    return sorted(name.split(".", 1)[1].removesuffix(".weight") for name in marked[0])


def test_a_layer_whose_width_no_other_takes_is_an_output() -> None:
    assert outputs({"output": (2, 8), "stem": (8, 4), "between": (8, 8)}) == ["output"]
    assert outputs({"fc1": (8, 4), "fc2": (8, 8), "fc10": (3, 8)}) == ["fc10"]


def test_one_head_by_name_leaves_the_others_guarded() -> None:
    assert outputs({"trunk": (8, 4), "policy_head": (3, 8), "score_of_it": (1, 8)}) == ["policy_head", "score_of_it"]


def test_of_equal_widths_only_numbers_show_what_reads_what() -> None:
    assert outputs({"0": (8, 8), "10": (8, 8), "2": (8, 8)}) == ["10"]
    assert outputs({"one": (8, 8), "two": (8, 8)}) == ["one", "two"]
    coder = {"enc.0": (8, 4), "enc.2": (2, 8), "dec.0": (8, 2), "dec.2": (4, 8)}
    assert outputs(coder) == ["dec.2", "enc.2"]
    assert outputs({**coder, "classes": (3, 2)}) == ["classes", "dec.2", "enc.2"]
    assert outputs({"b.0.mix": (8, 8), "b.1.mix": (8, 8), "last": (3, 8)}) == ["last"]


def test_a_router_is_known_by_a_name_on_its_path_or_the_number_of_experts() -> None:
    names = {"moe.router.net.0": (4, 8), "moe.gate.wg": (3, 8), "moe.choose": (3, 8), "moe.mix": (8, 8)}
    tensors = {f"b.0.{name}.weight": torch.zeros(shape) for name, shape in names.items()}
    tensors |= {f"b.0.{name}.bias": torch.zeros(shape[0]) for name, shape in names.items()}
    tensors |= {f"b.0.moe.experts.{i}.fc.weight": torch.zeros(8, 8) for i in range(3)}
    routers = {f.name for f in find_in_state(tensors) if "router" in f.marks}
    assert routers == {f"b.0.{name}.weight" for name in names if name != "moe.mix"}
    stacked = {"moe.choose.weight": torch.zeros(3, 8), "moe.choose.bias": torch.zeros(3)}
    found = find_in_state({**stacked, "moe.experts.gate_up_proj": torch.zeros(3, 8, 8)})
    assert [f.role for f in found if len(f.shape) > 1] == ["router", "other"]


def test_roles_of_unfused_names() -> None:
    tensors = {f"blocks.0.mlp.{n}.weight": torch.zeros(4, 4) for n in ("fc1_g", "fc1_x")}
    tensors |= {f"blocks.0.attention.{n}.weight": torch.zeros(4, 4) for n in ("k_head", "q_head", "v_head")}
    assert [f.role for f in find_in_state(tensors)] == ["mlp-gate", "mlp-in", "key", "query", "value"]


def test_infinities_in_a_config(tmp_path) -> None:
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"model_type": "llama", "vocab_size": 8, "num_key_value_heads": 2, **small}
    config["time_step_limit"] = [0.0, {"__float__": "Infinity"}]
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    assert meta_model(tmp_path).config.time_step_limit == [0.0, float("inf")]


def test_what_the_config_does_not_know_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    found = find_in_state({**model.state_dict(), "mlp.gate.weight": torch.zeros(4, 4)}, model)
    assert (
        next(f for f in found if f.name == "mlp.gate.weight").refusal == "not in the given Sequential under this name"
    )
