"""Files whose names transformers changes while loading: planned under their own names, like the live model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rekindle
from rekindle.checkpoint import fire_file

transformers = pytest.importorskip("transformers", minversion="5.0")
load_file = pytest.importorskip("safetensors.torch").load_file

_SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "eos_token_id": 1, "bos_token_id": 1}


def _model(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    special = {
        "Mixtral": {"num_local_experts": 3},
        "Olmoe": _EXPERTS,
        "Qwen2Moe": _EXPERTS | {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 12},
    }[family]
    config = getattr(transformers, f"{family}Config")(**_SMALL, **special)
    model: torch.nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    return model


@pytest.mark.parametrize("family", ["Mixtral", "Olmoe", "Qwen2Moe"])
def test_a_folder_is_fired_like_its_live_model(family: str, tmp_path: Path) -> None:
    live = _model(family)
    live.save_pretrained(tmp_path / "in")
    stored = load_file(tmp_path / "in" / "model.safetensors")
    assert set(stored) != set(live.state_dict())  # else this test shows nothing
    rekindle.fire(live)
    fire_file(tmp_path / "in", tmp_path / "out")
    loaded = type(live).from_pretrained(tmp_path / "out")
    for name, expected in live.state_dict().items():
        assert torch.allclose(loaded.state_dict()[name], expected, atol=2e-5), name


def test_routers_keep_their_role_under_the_name_in_the_file(tmp_path: Path) -> None:
    live = _model("Mixtral")
    live.save_pretrained(tmp_path)
    plan = rekindle.plan(load_file(tmp_path / "model.safetensors"), config=tmp_path, measure="none")
    roles = {entry.name: (entry.role, entry.reason) for entry in plan.entries}
    assert roles["model.layers.0.block_sparse_moe.gate.weight"] == ("router", "router")
    assert roles["model.layers.0.block_sparse_moe.experts.1.w2.weight"] == ("mlp-out", None)


def test_what_loading_rearranges_is_refused_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rekindle.blocks import state_dicts
    from rekindle.blocks.state_dicts import Converted

    live = _model("Mixtral")
    live.save_pretrained(tmp_path)

    def turned(model: torch.nn.Module, keys: list[str]) -> dict[str, Converted]:
        return {k: Converted("model.layers.0.mlp.experts.down_proj", ("Transpose",)) for k in keys if "w2" in k}

    monkeypatch.setattr(state_dicts, "converted", turned)
    plan = rekindle.plan(load_file(tmp_path / "model.safetensors"), config=tmp_path, measure="none")
    reasons = [entry.reason or "" for entry in plan.entries if "w2" in entry.name]
    assert len(reasons) == 3 and all("while loading (Transpose)" in reason for reason in reasons)
