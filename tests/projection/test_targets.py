"""Targets: presets, roles, names, globs, module types, predicates; include and exclude."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rekindle.blocks.finding import Found
from rekindle.blocks.state_dicts import find_in_state
from rekindle.projection.planning import Plan, plan
from rekindle.projection.targets import PRESETS, choose
from zoo_models import build


def names(drawn: Plan) -> list[str]:
    return [entry.name for entry in drawn.selected]


class TestPresets:
    def test_all_of_them_are_known(self) -> None:
        for preset in PRESETS:
            model = build("vit" if "vit" in preset or "attention" in preset else "gpt2")
            model = build("resnet") if preset in ("conv", "paper-cnn") else model
            assert plan(model, targets=preset, measure="none").selected

    def test_auto(self) -> None:
        expected = ["stem.weight", "pointwise.weight", "grouped.weight"]
        assert names(plan(build("mobilenet"), targets="auto")) == expected

    def test_all_takes_embeddings_heads_and_depthwise_kernels(self) -> None:
        model = build("mobilenet")
        matrices = [n for n, p in model.named_parameters() if p.dim() > 1]
        assert names(plan(model, targets="all")) == matrices
        assert "embedding.weight" in names(plan(build("lstm"), targets="all"))

    def test_paper_cnn_is_every_conv2d_and_linear(self) -> None:
        model = build("resnet")
        kinds = (nn.Conv2d, nn.Linear)
        every = [f"{n}.weight" for n, m in model.named_modules() if isinstance(m, kinds)]
        assert names(plan(model, targets="paper-cnn")) == every
        assert "up.weight" not in names(plan(build("unet"), targets="paper-cnn"))

    def test_paper_vit_is_query_and_key(self) -> None:
        chosen = plan(build("vit"), targets="paper-vit").selected
        assert {e.role for e in chosen} == {"query", "key"}
        assert len(chosen) == 4

    @pytest.mark.parametrize("name", ["nanogpt", "gpt2"])
    def test_paper_gpt_is_every_linear_with_c_attn_split_and_the_tied_embedding(self, name: str) -> None:
        model = build(name)
        drawn = plan(model, targets="paper-gpt")
        tied = "wte.weight" if name == "nanogpt" else "transformer.wte.weight"
        linear = [k for k, p in model.named_parameters() if p.dim() == 2 and "wpe" not in k]
        assert names(drawn) == linear
        assert tied in linear
        for entry in drawn.selected:
            if "c_attn" in entry.name:
                assert [(b.part, b.out, b.in_) for b in entry.blocks] == [
                    (p, 32, 32) for p in ("query", "key", "value")
                ]

    def test_paper_gpt_reads_thirds(self) -> None:
        model = build("nanogpt")
        entry = next(e for e in plan(model, targets="paper-gpt").selected if "c_attn" in e.name)
        weight = model.get_parameter(entry.key)
        for block, third in zip(entry.blocks, weight.chunk(3), strict=True):
            assert torch.equal(block.read(weight)[0], third)

    def test_queries_and_keys_of_a_fused_weight(self) -> None:
        drawn = plan(build("gpt_neox"), targets="attention.qk")
        assert all([b.role for b in e.blocks] == ["query", "key"] for e in drawn.selected)
        assert drawn.selected[0].left == ("value",)
        assert "project query, key; skip value" in drawn.table(120)


class TestTargets:
    def test_roles(self) -> None:
        assert {e.role for e in plan(build("llama"), targets=["query", "mlp-out"]).selected} == {"query", "mlp-out"}
        assert names(plan(build("mobilenet"), targets="depthwise")) == ["depthwise.weight"]
        assert names(plan(build("resnet"), targets="head")) == ["fc.weight"]

    def test_globs_and_names(self) -> None:
        assert names(plan(build("resnet"), targets="layer1*")) == ["layer1.conv1.weight", "layer1.conv2.weight"]
        assert names(plan(build("resnet"), targets="layer1")) == ["layer1.conv1.weight", "layer1.conv2.weight"]
        assert names(plan(build("resnet"), targets="fc.weight")) == ["fc.weight"]
        assert names(plan(build("resnet"), targets=["fc", "conv1"])) == ["conv1.weight", "fc.weight"]

    def test_a_wildcard_does_not_drag_in_what_is_left_alone(self) -> None:
        assert names(plan(build("mobilenet"), targets="*")) == names(plan(build("mobilenet"), targets="auto"))

    def test_module_types(self) -> None:
        assert names(plan(build("unet"), targets=nn.ConvTranspose2d)) == ["up.weight", "up_grouped.weight"]
        assert names(plan(build("lstm"), targets=nn.Embedding)) == ["embedding.weight"]
        assert names(plan(build("resnet"), targets=(nn.Conv2d, nn.Linear))) == names(
            plan(build("resnet"), targets="auto")
        )

    def test_a_predicate(self) -> None:
        def wide(found: Found) -> bool:
            return found.shape[0] == 16

        assert names(plan(build("mlp"), targets=wide)) == ["layers.2.weight"]
        assert "wide" in plan(build("mlp"), targets=wide).targets

    def test_include_and_exclude(self) -> None:
        model = build("mobilenet")
        expected = ["stem.weight", "depthwise.weight", "pointwise.weight", "grouped.weight"]
        assert names(plan(model, include="depthwise", targets="auto")) == expected
        assert names(plan(model, exclude=["stem", "group*"], targets="auto")) == ["pointwise.weight"]
        excluded = plan(model, exclude="stem", targets="auto")
        assert next(e for e in excluded.entries if e.name == "stem.weight").reason == "excluded"
        assert excluded.targets == "auto − stem"

    def test_include_overrules_frozen(self) -> None:
        model = build("mlp").requires_grad_(False)
        with pytest.raises(ValueError, match="2 × frozen"):
            plan(model, targets="auto")
        assert names(plan(model, include="layers.0", targets="auto")) == ["layers.0.weight"]

    def test_a_head_tied_to_an_embedding_needs_both(self) -> None:
        with pytest.raises(ValueError, match="leaves nothing to project"):
            plan(build("gpt2"), targets="head")
        assert names(plan(build("gpt2"), targets="transformer.wte.weight")) == ["transformer.wte.weight"]

    @pytest.mark.parametrize("targets", ["atention", "nothing.here", "*.nope", nn.Bilinear, lambda f: False, "router"])
    def test_no_match_is_an_error_that_lists_what_there_was(self, targets: Any) -> None:
        with pytest.raises(ValueError, match="matches no weight") as error:
            plan(build("llama"), targets=targets)
        text = str(error.value)
        assert "model.layers.0.self_attn.q_proj.weight" in text
        assert "attention.qk" in text
        assert "query" in text
        if targets == "atention":
            assert "Did you mean 'attention'" in text

    def test_a_typo_in_include_or_exclude_is_an_error(self) -> None:
        for option in ("include", "exclude"):
            with pytest.raises(ValueError, match=f"{option}='typo'"):
                plan(build("mlp"), **{option: "typo"})

    def test_an_iterator_is_read_once(self) -> None:
        drawn = plan(build("resnet"), targets=iter(["conv1", "fc"]), exclude=iter(["conv1"]))
        assert names(drawn) == ["fc.weight"]
        assert drawn.targets == "conv1, fc − conv1"

    def test_wrong_types(self) -> None:
        with pytest.raises(TypeError, match="predicate"):
            plan(build("mlp"), targets=[3])  # type: ignore[list-item]
        with pytest.raises(TypeError, match="state dict"):
            plan(3)  # type: ignore[arg-type]

    def test_heads_can_be_told(self) -> None:
        model = build("mlp")
        assert names(plan(model, heads=(), targets="auto")) == ["layers.0.weight", "layers.2.weight", "layers.4.weight"]
        assert names(plan(model, heads="layers.0", targets="auto")) == ["layers.2.weight", "layers.4.weight"]


def test_a_preset_that_matches_nothing_is_not_proposed_again_and_what_was_not_read_is_said() -> None:
    found = find_in_state({"h.0.attn.c_attn.weight": torch.zeros(8, 24), "h.0.mlp.c_fc.weight": torch.zeros(8, 32)})
    assert any(each.refusal for each in found)
    with pytest.raises(ValueError, match="matches no weight") as error:
        choose(found, targets="attention.qk")
    text = str(error.value)
    assert "Not read: 1 × " in text and "'attention.qk' or" not in text.split("Did you mean")[-1]
