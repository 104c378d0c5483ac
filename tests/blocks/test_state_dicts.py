"""Plans from a state dict: with a config they equal the live model's, without one only what is sure is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rekindle.projection.planning import Plan, plan
from zoo_models import TRANSFORMERS, build


def names(drawn: Plan) -> list[str]:
    return [entry.name for entry in drawn.selected]


class TestStateDict:
    @pytest.mark.parametrize("form", ["object", "dict", "file", "meta"])
    def test_a_config_gives_the_live_models_plan(self, form: str, tmp_path: Path) -> None:
        model = build("falcon_new")
        config: Any = model.config
        config.architectures = [type(model).__name__]
        if form == "dict":
            config = config.to_dict()
        elif form == "file":
            model.config.save_pretrained(tmp_path)  # type: ignore[operator, union-attr]
            config = tmp_path
        elif form == "meta":
            config = model.to("meta")
            model = build("falcon_new")
        live = {e.name: e for e in plan(model).entries}
        drawn = plan(model.state_dict(), config=config)
        assert drawn.selected
        for entry in drawn.entries:
            assert entry.blocks == live[entry.name].blocks
            assert entry.reason == live[entry.name].reason
            assert entry.dfi == live[entry.name].dfi

    @pytest.mark.parametrize("name", TRANSFORMERS)
    def test_every_transformers_model(self, name: str) -> None:
        model = build(name)
        model.config.architectures = [type(model).__name__]  # type: ignore[union-attr]
        live = plan(model, measure="none")
        drawn = plan(model.state_dict(), config=model.config, measure="none")
        assert {e.name: e.blocks for e in drawn.selected} == {e.name: e.blocks for e in live.selected}

    def test_prefixes_differ(self) -> None:
        model = build("gpt2")
        model.config.architectures = [type(model).__name__]  # type: ignore[union-attr]
        expected = len(plan(model).selected)
        wrapped = {f"module._orig_mod.{k}": v for k, v in model.state_dict().items()}
        body = model.transformer.state_dict()  # type: ignore[operator, union-attr]
        for tensors in (wrapped, body):
            drawn = plan(tensors, config=model.config)
            assert len(drawn.selected) == expected
            assert set(names(drawn)) <= set(tensors)

    def test_a_file_that_keeps_only_the_tied_head(self) -> None:
        model = build("gpt2")
        model.config.architectures = [type(model).__name__]  # type: ignore[union-attr]
        tensors = {k: v for k, v in model.state_dict().items() if k != "transformer.wte.weight"}
        entry = next(
            e for e in plan(tensors, config=model.config, targets="auto").entries if e.name == "lm_head.weight"
        )
        assert entry.reason == "embedding, tied to the output head"
        assert entry.blocks

    def test_shapes_that_differ_from_the_config_are_refused(self) -> None:
        model = build("llama")
        model.config.architectures = [type(model).__name__]  # type: ignore[union-attr]
        tensors = dict(model.state_dict())
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.randn(7, 32)
        tensors["extra.weight"] = torch.randn(3, 4, 5)
        entries = {e.name: e for e in plan(tensors, config=model.config).entries}
        assert "has shape (7, 32)" in str(entries["model.layers.0.mlp.up_proj.weight"].reason)
        assert "not in the model of this config" in str(entries["extra.weight"].reason)

    def test_without_a_config_only_what_is_sure_is_used(self) -> None:
        tensors = {
            "embed.weight": torch.randn(10, 8),
            "a.weight": torch.randn(16, 8),
            "a.bias": torch.randn(16),
            "turned.weight": torch.randn(8, 16),
            "turned.bias": torch.randn(16),
            "square.weight": torch.randn(8, 8),
            "attn.q_proj.weight": torch.randn(4, 8),
            "attn.qkv.weight": torch.randn(24, 8),
            "attn.qkv.bias": torch.randn(24),
            "plain.weight": torch.randn(16, 8),
            "conv.weight": torch.randn(8, 8, 3, 3),
            "lstm.weight_hh_l0": torch.randn(32, 8),
            "codes.weight": torch.zeros(8, 8, dtype=torch.int8),
            "bn.num_batches_tracked": torch.tensor(3),
            "last.weight": torch.randn(4, 4),
        }
        entries = {e.name: e for e in plan(tensors, targets="auto").entries}
        chosen = {k: (e.blocks[0].out, e.blocks[0].in_) for k, e in entries.items() if e.reason is None}
        assert chosen == {
            "square.weight": (8, 8),
            "attn.q_proj.weight": (4, 8),
        }
        for key, word in {
            "embed.weight": "embedding",
            "attn.qkv.weight": "how qkv is fused",
            "plain.weight": "which side",
            "conv.weight": "groups of a convolution",
            "lstm.weight_hh_l0": "what weight_hh_l0 is",
            "codes.weight": "quantized",
            "a.bias": "vector",
            "a.weight": "possibly the output head",
            "last.weight": "possibly the output head",
        }.items():
            assert word in str(entries[key].reason), key
        chosen = {
            e.name: (e.blocks[0].out, e.blocks[0].in_) for e in plan(tensors, heads="last", targets="auto").selected
        }
        assert (chosen["a.weight"], chosen["turned.weight"]) == ((16, 8), (16, 8))

    def test_a_convolution_is_read_with_one_group_and_projected_where_it_is_asked_for(self) -> None:
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 4, 3), nn.Conv1d(4, 6, 5), nn.Linear(6, 6))
        tensors = dict(net.state_dict())
        with pytest.raises(ValueError, match="groups of a convolution"):
            plan(tensors, targets="auto")
        live = {e.name: e for e in plan(net, heads=(), targets="auto").entries}
        for name in ("0.weight", "1.weight", "2.weight"):
            for asked in ({"include": name}, {"targets": name}, {"targets": "conv"}):
                entry = next(e for e in plan(tensors, **asked).selected if e.name == name)
                assert (entry.blocks, entry.role) == (live[name].blocks, "conv")
        assert all(e.name != "0.weight" for e in plan(tensors, targets="*", include="2.weight").selected)
        flat = plan(tensors, include="0.weight", conv="flat", targets="auto").selected[0].blocks
        assert flat == next(e for e in plan(net, conv="flat", targets="auto").entries if e.name == "0.weight").blocks

    @pytest.mark.parametrize(
        ("module", "shape", "bias"),
        [("depthwise", (8, 1, 3, 3), 8), ("experts.w", (4, 8, 8), None), ("w", (4, 8, 64), None), ("c", (8, 4, 3), 5)],
    )
    def test_what_may_be_no_plain_convolution_is_not_read(
        self, module: str, shape: tuple[int, ...], bias: int | None
    ) -> None:
        tensors = {f"{module}.weight": torch.randn(shape)}
        if bias is not None:
            tensors[f"{module}.bias"] = torch.randn(bias)
        entry = plan(tensors, allow_empty=True).entries[0]
        assert not entry.blocks and "state dict alone does not show" in str(entry.reason)

    def test_tensors_that_share_memory_are_one_weight(self) -> None:
        w = torch.randn(8, 8)
        entries = {
            e.name: e for e in plan({"a.weight": w, "b.weight": w, "c.weight": torch.randn(8, 8)}, heads="c").entries
        }
        assert entries["b.weight"].reason == "tied to a.weight, treated there"

    def test_a_model_on_the_meta_device_shows_groups_and_orientation(self) -> None:
        model = build("unet")
        drawn = plan(model.state_dict(), config=build("unet").to("meta"))
        assert {e.name: e.blocks for e in drawn.selected} == {e.name: e.blocks for e in plan(model).selected}

    def test_shapes_alone_are_enough(self) -> None:
        """A file is planned from its header: tensors on the meta device have shape and dtype, no numbers."""
        model = build("gpt_neox")
        model.config.architectures = [type(model).__name__]  # type: ignore[union-attr]
        header = {k: torch.empty_like(v, device="meta") for k, v in model.state_dict().items()}
        drawn = plan(header, config=model.config)
        assert {e.name: e.blocks for e in drawn.selected} == {e.name: e.blocks for e in plan(model).selected}
        assert drawn.selected[0].dfi == (None, None, None)

    def test_wrong_inputs(self) -> None:
        with pytest.raises(TypeError, match="'step'"):
            plan({"a.weight": torch.randn(2, 2), "step": 3})  # type: ignore[dict-item]
        with pytest.raises(ValueError, match="live model"):
            plan(build("mlp"), config={})
        with pytest.raises(ValueError, match="model_type"):
            plan({"a.weight": torch.randn(2, 2)}, config={})
