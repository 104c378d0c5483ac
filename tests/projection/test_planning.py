"""plan(): which blocks, at which scale, and why not; printed, saved, and made from a state dict."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.projection.entries import PlanEntry
from rekindle.projection.planning import Plan, plan
from rekindle.projection.scales import Scale
from zoo_models import NAMES, build


def names(drawn: Plan) -> list[str]:
    return [entry.name for entry in drawn.selected]


def slow_dfi(matrices: Tensor, scale: float | None) -> float:
    """Σ ‖(W/s)(W/s)ᵀ − I‖²_F on the smaller side, one matrix at a time in float64."""
    total = 0.0
    for matrix in matrices.double():
        matrix = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
        k = matrix.shape[0]
        s = float(matrix.norm()) / math.sqrt(k) if scale is None else scale
        total += float(((matrix / s) @ (matrix / s).mT - torch.eye(k, dtype=torch.float64)).square().sum())
    return total


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_of_every_model_measures_what_is_there(name: str) -> None:
    model = build(name)
    drawn = plan(model, targets="auto", scale="paper")
    assert [e.key for e in drawn.entries] == [k for k, _ in model.named_parameters(remove_duplicate=False)]
    assert drawn.selected
    assert len(drawn.selected) + len(drawn.skipped) == len(drawn.entries)
    for entry in drawn.selected:
        weight = model.get_parameter(entry.key)
        for block, scale, dfi, free in zip(entry.blocks, entry.scales, entry.dfi, entry.dfi_free, strict=True):
            assert scale == pytest.approx(math.sqrt(block.out / block.in_) / block.taps)
            assert dfi == pytest.approx(slow_dfi(block.read(weight), scale), rel=1e-3)
            assert free == pytest.approx(slow_dfi(block.read(weight), None), rel=1e-3)
    for entry in drawn.skipped:
        assert entry.reason
        assert entry.scales == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3, 900), (900, 3), (40, 30)])
def test_the_look_in_slices_equals_the_slow_one(
    dtype: torch.dtype, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rekindle.blocks.layouts import matrices
    from rekindle.measures import spectra
    from rekindle.projection import measuring

    monkeypatch.setattr(measuring, "_CHUNK", 500)
    monkeypatch.setattr(spectra, "_SLICE", 500)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2, *shape, generator=generator).to(dtype)
    block = matrices("count out in", count="count")((2, *shape))[0]
    norms, dfi, free = measuring.look(block, weight, 0.7)
    assert norms.tolist() == pytest.approx([float(w.double().norm()) for w in weight], rel=1e-5)
    assert dfi == pytest.approx(slow_dfi(weight, 0.7), rel=1e-4)
    assert free == pytest.approx(slow_dfi(weight, None), rel=1e-4)
    assert measuring.look(block, weight, None)[1] == free


class TestZeroMatrices:
    def test_a_zero_weight_is_left_alone_unless_asked_for(self) -> None:
        model = build("mlp")
        nn.init.zeros_(model.layers[0].weight)  # type: ignore[index, union-attr, arg-type]
        for measure in ("cheap", "none"):
            first = plan(model, measure=measure).entries[0]
            assert "min_norm" in str(first.reason)
        assert plan(model, min_norm=0).entries[0].reason is None
        assert plan(model, min_norm=0).entries[0].dfi == (12.0,)
        assert plan(model, min_norm=0, scale="norm").entries[0].dfi_free == (12.0,)

    def test_some_zero_matrices_of_a_block_are_counted(self) -> None:
        model = build("mixtral")
        with torch.no_grad():
            model.model.layers[0].mlp.experts.down_proj[1] = 0  # type: ignore[union-attr, index]
        drawn = plan(model)
        entry = next(e for e in drawn.selected if e.name.endswith("0.mlp.experts.down_proj"))
        assert entry.small == (1,)
        assert "1 zero matrices stay" in drawn.table(120)

    def test_a_zero_part_is_left(self) -> None:
        model = build("gpt2")
        with torch.no_grad():
            model.transformer.h[0].attn.c_attn.weight[:, 32:64] = 0  # type: ignore[union-attr, index]
        entry = plan(model).selected[0]
        assert [b.part for b in entry.blocks] == ["query", "value"]
        assert entry.left == ("key",)

    def test_the_threshold_is_checked(self) -> None:
        with pytest.raises(ValueError, match="min_norm"):
            plan(build("mlp"), min_norm=-1)
        with pytest.raises(ValueError, match=r"nothing is left to project.*norm below"):
            plan(build("mlp"), min_norm=1e9)


class TestScales:
    def test_rules_that_look_at_the_matrix_are_not_known_beforehand(self) -> None:
        drawn = plan(build("mlp"), scale="nearest")
        assert drawn.selected[0].scale is None
        assert "by matrix" in str(drawn)
        assert drawn.selected[0].dfi == drawn.selected[0].dfi_free

    def test_reference_holds_the_norms_of_the_initial_weights(self) -> None:
        model, start = build("resnet"), build("resnet")
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3.0)
        for reference in (start, start.state_dict(), torch.compile(start)):
            drawn = plan(model, scale="reference", reference=reference)
            entry = drawn.selected[1]
            block = entry.blocks[0]
            initial = torch.linalg.matrix_norm(block.read(start.get_parameter(entry.key).detach()))
            assert torch.allclose(torch.tensor(entry.references[0]).float(), initial)
            expected = initial / math.sqrt(block.smaller)
            assert torch.allclose(drawn.scale_values(entry, block).float(), expected)

    def test_reference_problems_name_the_weight(self) -> None:
        with pytest.raises(ValueError, match="needs reference="):
            plan(build("mlp"), scale="reference")
        with pytest.raises(ValueError, match=r"layers\.0\.weight.*no such weight"):
            plan(build("mlp"), scale="reference", reference={})
        with pytest.raises(ValueError, match=r"layers\.0\.weight has shape \(24, 12\)"):
            plan(build("mlp"), scale="reference", reference={"layers.0.weight": torch.zeros(2, 2)})

    def test_flat_convolutions(self) -> None:
        entry = plan(build("resnet"), conv="flat").selected[1]
        assert (entry.blocks[0].out, entry.blocks[0].in_, entry.count) == (8, 72, 1)
        assert entry.scale == pytest.approx(math.sqrt(8 / 72))
        with pytest.raises(ValueError, match="flat"):
            plan(build("resnet"), conv="round")  # type: ignore[arg-type]

    def test_split_heads(self) -> None:
        entry = plan(build("llama"), split_heads=True).selected[1]
        assert (entry.role, entry.count, entry.blocks[0].out) == ("key", 2, 8)
        assert entry.scale == pytest.approx(math.sqrt(16 / 32))


class TestObject:
    @pytest.mark.parametrize("name", ["resnet", "gpt2", "mixtral", "falcon_new", "lstm"])
    def test_saved_and_loaded(self, name: str, tmp_path: Path) -> None:
        drawn = plan(build(name), split_heads=name == "falcon_new", scale="init:normal(0.02)/depth(2)")
        drawn.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == drawn
        json.loads((tmp_path / "plan.json").read_text("utf-8"))

    def test_a_loaded_plan_applies_to_the_files_tensors(self, tmp_path: Path) -> None:
        model = build("gpt_neox")
        plan(model).save(tmp_path / "plan.json")
        tensors = {k: v.clone() for k, v in model.state_dict().items()}
        for entry in Plan.load(tmp_path / "plan.json").selected:
            for block in entry.blocks:
                block.write(tensors[entry.key], torch.zeros(block.count, block.out, block.in_))
            assert not tensors[entry.key].any()

    def test_another_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "x.json").write_text("{}", "utf-8")
        with pytest.raises(ValueError, match="not a rekindle plan"):
            Plan.load(tmp_path / "x.json")

    def test_frame(self) -> None:
        pytest.importorskip("pandas")
        frame = plan(build("falcon_old")).to_frame()
        fused = frame[frame["name"].str.endswith("0.self_attention.query_key_value.weight")]
        assert list(fused["part"]) == ["query", "key", "value"]
        assert list(fused["out"]) == [32, 8, 8]
        assert frame[frame["reason"].notna()]["dfi"].isna().all()

    @pytest.mark.parametrize("width", [80, 100, 120, 200])
    @pytest.mark.parametrize("name", ["resnet", "bert", "t5", "nanogpt"])
    def test_the_table_fits_and_explains_every_parameter(self, name: str, width: int) -> None:
        drawn = plan(build(name))
        lines = drawn.table(width=width).splitlines()
        assert max(map(len, lines)) <= max(width, 86)  # below that the numbers alone need the room
        assert sum("skipped: " in line or "project" in line for line in lines[:-1]) >= len(drawn.entries)
        if width == 200:
            assert all(any(line.startswith(e.name) for line in lines) for e in drawn.entries)

    def test_measuring_can_be_left_out(self) -> None:
        drawn = plan(build("mlp"), measure="none")
        assert drawn.selected[0].dfi == (None,)
        assert drawn.selected[0].dfi_now is None

    def test_nan_is_shown(self) -> None:
        model = build("mlp")
        with torch.no_grad():
            model.layers[0].weight[0, 0] = math.nan  # type: ignore[union-attr, index]
        drawn = plan(model)
        assert math.isnan(drawn.selected[0].dfi_now or 0.0)
        assert "nan" in str(drawn)

    def test_nothing_is_changed_and_no_random_number_is_drawn(self) -> None:
        model = build("gpt2")
        before = {k: v.clone() for k, v in model.state_dict().items()}
        state = torch.random.get_rng_state()
        plan(model, targets="all")
        assert torch.equal(state, torch.random.get_rng_state())
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())


def test_meta_models_are_planned_and_not_projected() -> None:
    live, meta = plan(build("mlp"), measure="none"), plan(build("mlp").to("meta"))
    assert [e.name for e in meta.selected] == [e.name for e in live.selected]
    with pytest.raises(ValueError, match="meta device"):
        rekindle.fire(build("mlp").to("meta"))


def test_entries_know_their_scale() -> None:
    entry = plan(build("falcon_old")).selected[0]
    assert entry.scale is None
    assert entry.scales == pytest.approx((1.0, 0.5, 0.5))
    assert Scale.parse("paper").known(entry.blocks[1]) == 0.5
    assert PlanEntry.from_dict(json.loads(json.dumps(entry.to_dict()))) == entry


def test_weights_before_a_normalization_are_counted() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4, 2)
    )
    found = plan(model, targets="auto")
    assert {e.name: e.norm for e in found.selected} == {"0.weight": "1", "3.weight": ""}
    assert "1 of the 2 have a normalization right behind them" in " ".join(str(found).split())
    assert Plan.from_dict(found.to_dict()) == found
    old = found.to_dict()
    for entry in old["entries"]:
        del entry["norm"]  # a plan that was saved before
    assert Plan.from_dict(old).selected[0].norm == ""
    assert "normalization right behind" not in str(plan(model, measure="none", targets="auto"))
