"""health(): what it measures, what it refuses to say, and the rules of its verdict."""

import json
import math
import pickle
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor, nn

from rekindle.diagnosis.examination import Health, health
from rekindle.diagnosis.verdict import REMEDIES, Numbers, Thresholds, Verdict, judge
from rekindle.measures import matrices as measures


@pytest.fixture(autouse=True)
def _same_networks_every_time() -> None:
    torch.manual_seed(0)


def net(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))


def data(count: int = 64) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(1))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def test_weights_are_the_measures_of_their_blocks() -> None:
    model = net()
    found = health(model)
    for name in ("0.weight", "2.weight", "4.weight"):
        weight = model.get_parameter(name)
        scale = math.sqrt(weight.shape[0] / weight.shape[1])
        expected = measures.measure(weight, scale=scale, mode="full").summary()
        assert {k: found.weights[name][k] for k in expected} == pytest.approx(expected)
    total = math.sqrt(sum(model.get_parameter(n).square().sum().item() for n in found.weights))
    assert found.whole["weight_norm"] == pytest.approx(total, rel=1e-5)


def test_without_data_only_weights_are_measured_and_it_says_so() -> None:
    found = health(net())
    assert found.units == {}
    assert found.gradients == {}
    assert "dormant" not in found.flat()
    assert "gradient_norm" not in found.flat()
    assert any(each.reason == "no batches were given" for each in found.unmeasured)
    assert "no batches were given" in str(found)
    with_data = health(net(), [data()])
    assert "dormant" in with_data.flat()
    assert any(each.reason == "no loss was given" for each in with_data.unmeasured)


def test_cheap_mode_shows_no_spectrum() -> None:
    found = health(net(), [data()], mode="cheap")
    assert "effective_rank" not in found.weights["0.weight"]
    assert "cond." not in str(found)
    assert "eff. rank" in str(health(net(), mode="full"))


def test_embeddings_depthwise_kernels_and_fused_layouts() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 8)
            self.depthwise = nn.Conv1d(8, 8, 3, groups=8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.head = nn.Linear(8, 4)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            return self.head(self.attention(x, x, x)[0])

    found = health(Model(), [torch.arange(10)[None]])
    assert {name for name in found.weights if "in_proj" in name} == {
        f"attention.in_proj_weight[{part}]" for part in ("query", "key", "value")
    }
    skipped = {each.name for each in found.unmeasured if each.what == "weight"}
    assert {"embed.weight", "depthwise.weight"} <= skipped
    assert found.heads.keys() == {"attention"}
    assert 0 < found.heads["attention"] <= 1


def test_a_parametrized_weight_is_measured_as_it_is_used() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
    with torch.no_grad():
        layer.parametrizations.weight.original0.fill_(2.0)
    found = health(layer)
    assert found.weights["weight"]["norm"] == pytest.approx(math.sqrt(6 * 4), rel=1e-5)
    assert found.weights["weight"]["row_norm_spread"] == pytest.approx(0, abs=1e-5)


def test_nan_weights_and_outputs_are_act_and_no_number_is_shown_for_them() -> None:
    model = net()
    with torch.no_grad():
        model[2].weight[0, 0] = math.nan
    found = health(model, [data()])
    assert found.verdict == "act"
    assert found.verdict.sure
    assert "2.weight" not in found.weights
    assert "2" not in found.units
    assert {f.layer for f in found.verdict.findings if f.sign == "broken values"} == {"2.weight", "2"}
    assert "restore an earlier checkpoint" in str(found)


def test_curvature_is_shown_only_if_it_converged() -> None:
    found = health(net(), [data()], loss=loss, curvature=True)
    assert ("curvature" in found.whole) != any(each.what == "curvature" for each in found.unmeasured)
    with pytest.raises(ValueError, match="needs a loss"):
        health(net(), [data()], curvature=True)


def test_reference_may_be_a_health_or_a_fresh_model() -> None:
    fresh, spoilt = net(), net()
    with torch.no_grad():
        spoilt[0].bias[:12] = -100.0
        spoilt[2].weight.copy_(spoilt[2].weight[:1].expand_as(spoilt[2].weight) * 3)
    by_model = health(spoilt, [data()], reference=fresh)
    by_health = health(spoilt, [data()], reference=health(fresh, [data()]))
    assert by_model.verdict == by_health.verdict == "act"
    assert by_model.verdict.sure
    signs = {f.sign for f in by_model.verdict.findings if f.level == "act"}
    assert {"dormancy", "feature rank", "weight rank"} <= signs
    assert [str(f) for f in by_model.verdict.findings] == [str(f) for f in by_health.verdict.findings]
    # A generator can be read once only; both models still see the same data.
    assert health(spoilt, (x for x in [data()]), reference=fresh).verdict == "act"


def test_without_a_reference_the_text_says_that_it_is_less_sure() -> None:
    model = net()
    with torch.no_grad():
        model[0].bias[:12] = -100.0
    found = health(model, [data()])
    assert found.verdict == "act"
    assert not found.verdict.sure
    assert "dormant share ≥ 0.5" in found.verdict.rule
    assert "low confidence" in str(found)
    assert "low confidence" not in str(found.against(found))
    # The same dormancy that was there at the reference is no loss.
    assert found.against(found).verdict == "healthy"


def units(**now: float) -> Numbers:
    return Numbers(units={"fc": {"rank_limit": 100.0, **now}})


THEN = units(dormant=0.1, feature_rank=60.0, usage=0.5)


@pytest.mark.parametrize(
    ("now", "level", "signs"),
    [
        (units(dormant=0.1, feature_rank=60.0, usage=0.5), "healthy", set()),
        (units(dormant=0.26, feature_rank=60.0, usage=0.5), "watch", {"dormancy"}),
        (units(dormant=0.9, feature_rank=60.0, usage=0.5), "watch", {"dormancy"}),
        (units(dormant=0.1, feature_rank=29.0, usage=0.5), "watch", {"feature rank"}),
        (units(dormant=0.36, feature_rank=29.0, usage=0.5), "act", {"dormancy", "feature rank"}),
        (units(dormant=0.36, feature_rank=31.0, usage=0.5), "watch", {"dormancy", "feature rank"}),
        (units(dormant=0.1, feature_rank=60.0, usage=0.05), "watch", {"usage"}),
        (units(dormant=0.0, feature_rank=90.0, usage=0.9), "healthy", set()),
    ],
)
def test_rules_against_a_reference(now: Numbers, level: str, signs: set[str]) -> None:
    verdict = judge(now, THEN, Thresholds())
    assert verdict == level
    assert {f.sign for f in verdict.findings} == signs
    for finding in verdict.findings:
        assert finding.remedy == REMEDIES[finding.sign]
        assert any(char.isdigit() for char in finding.rule)


def test_ranks_of_different_limits_are_not_compared() -> None:
    fewer = Numbers(units={"fc": {"dormant": 0.1, "feature_rank": 20.0, "rank_limit": 30.0}})
    assert judge(fewer, THEN, Thresholds()) == "healthy"


def test_every_other_rule_fires_at_its_threshold_and_not_before() -> None:
    t = Thresholds()
    cases: list[tuple[Numbers, Numbers | None, str]] = []
    for sign, measure, threshold in [
        ("dead weights", "dead_rows", t.dead_rows_watch * 8),
        ("similar neurons", "similar_pairs", t.similar_watch),
    ]:
        for value, fires in ((threshold, True), (threshold * 0.99, False)):
            numbers = {"rows": 8.0, "columns": 8.0, measure: value}
            cases.append((Numbers(weights={"w": numbers}), None, sign if fires else ""))
    cases.append((Numbers(weights={"w": {"columns": 7.0, "similar_pairs": 1.0}}), None, ""))
    for sign, measure, growth in [
        ("weight norm", "weight_norm", t.norm_growth_watch),
        ("curvature", "curvature", t.curvature_growth_watch),
    ]:
        for value, fires in ((growth, True), (growth * 0.99, False)):
            cases.append((Numbers(whole={measure: value}), Numbers(whole={measure: 1.0}), sign if fires else ""))
    for value, fires in ((t.weight_rank_fall_watch, True), (t.weight_rank_fall_watch * 0.99, False)):
        now = Numbers(weights={"w": {"effective_rank": 10.0}})
        cases.append((now, Numbers(weights={"w": {"effective_rank": 10 * value}}), "weight rank" if fires else ""))
    for value, fires in ((3.1, True), (2.9, False)):
        now = Numbers(weights={"w": {"dfi_scale_free": value}})
        then = Numbers(weights={"w": {"dfi_scale_free": 1.0}})
        cases.append((now, then, "deviation from isometry" if fires else ""))
    for value, fires in ((t.saturation_watch, True), (0.49, False)):
        cases.append((Numbers(units={"u": {"saturation": value}}), None, "saturation" if fires else ""))
    for value, fires in ((0.4, True), (0.3, False)):
        now, then = Numbers(units={"u": {"saturation": value}}), Numbers(units={"u": {"saturation": 0.1}})
        cases.append((now, then, "saturation" if fires else ""))
    for value, fires in ((0.04, True), (0.06, False)):
        cases.append((Numbers(heads={"a": value}), None, "attention" if fires else ""))
    for value, fires in ((1e-7, True), (1e-5, False)):
        cases.append((Numbers(whole={"gradient_norm": value}), None, "gradient" if fires else ""))
    then = Numbers(whole={"gradient_norm": 1.0, "loss": 1.0})
    cases.append((Numbers(whole={"gradient_norm": 0.009, "loss": 1.0}), then, "gradient"))
    # A loss that fell explains a small gradient.
    cases.append((Numbers(whole={"gradient_norm": 0.009, "loss": 0.1}), then, ""))
    for now, before, sign in cases:
        verdict = judge(now, before, t)
        assert [f.sign for f in verdict.findings] == ([sign] if sign else []), (now, before)
        assert verdict == ("watch" if sign else "healthy" if now.units or now.heads else "unknown")


def test_what_was_not_measured_fires_nothing() -> None:
    assert judge(Numbers(units={"fc": {}}, weights={"w": {}}), THEN, Thresholds()) == "healthy"
    assert judge(Numbers(), None, Thresholds()) == "unknown"


def test_thresholds_are_documented_and_obeyed() -> None:
    assert Thresholds.__doc__ is not None
    for field in fields(Thresholds):
        assert f" {field.name}: " in Thresholds.__doc__
    model = net()
    strict = replace(Thresholds(), norm_growth_watch=1.0, tau=1e9)
    found = health(model, [data()], reference=model, thresholds=strict)
    assert {"weight norm"} <= {f.sign for f in found.verdict.findings}
    assert found.units["0"]["dormant"] == 1.0


def test_verdict_is_its_word() -> None:
    verdict = Verdict("act", (), "because", sure=False)
    assert verdict == "act"
    assert f"{verdict}" == "act"
    assert verdict.level == 2
    again = pickle.loads(pickle.dumps(verdict))
    assert (again, again.rule, again.sure) == ("act", "because", False)


def test_dict_json_frame_and_flat() -> None:
    model = net()
    found = health(model, [data()], loss=loss, reference=health(model, [data()]))
    again = Health.from_dict(json.loads(found.to_json()))
    assert again.flat() == pytest.approx(found.flat())
    assert again.verdict == found.verdict
    assert str(again).splitlines()[2:] == str(found).splitlines()[2:]
    assert all(isinstance(value, float) for value in found.flat("x/").values())
    assert all(key.startswith("x/") for key in found.flat("x/"))
    frame = found.to_frame()
    row = frame[(frame.layer == "0") & (frame.measure == "usage")]
    assert row.value.item() == found.units["0"]["usage"]


def test_json_has_no_infinities(tmp_path: object) -> None:
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight[1] = layer.weight[0]
    found = health(layer)
    assert found.weights["weight"]["condition_number"] == math.inf
    text = found.to_json()
    assert "Infinity" not in text
    assert "condition_number" not in Health.from_dict(json.loads(text)).weights["weight"]


def test_compare_names_both_values() -> None:
    a, b = health(net(), [data()]), health(net())
    compared = a.compare(b)
    rows = {row.name: row for row in compared.rows}
    row = rows["weights/0.weight/norm"]
    assert row.ratio == pytest.approx(a.weights["0.weight"]["norm"] / b.weights["0.weight"]["norm"])
    assert "dormant" in compared.only_one
    assert "measured once only" in str(compared)
    assert compared.to_dict()["rows"][0].keys() == {"name", "then", "now", "ratio"}


def test_printing_fits_and_never_shows_what_was_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in ("60", "100", "160"):
        monkeypatch.setenv("COLUMNS", columns)
        text = str(health(net(), [data()], loss=loss))
        shown = [line for line in text.splitlines() if not line.startswith("next: ")]  # that one is to be copied
        assert max(map(len, shown)) <= int(columns)
        assert "nan" not in text
    only_tanh = health(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), [data()])
    assert "saturated" not in str(only_tanh)


def test_errors_speak_of_the_argument() -> None:
    with pytest.raises(TypeError, match=r"nn\.Module, got dict"):
        health({})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batches is not"):
        health(net(), loss=loss)
    with pytest.raises(TypeError, match="earlier Health or a model, got str"):
        health(net(), reference="before")  # type: ignore[arg-type]


def test_a_transformer_of_transformers_with_padding() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=32,
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 32, (3, 6))
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    found = health(model, [batch], loss=lambda m, b: m(**b).loss)
    assert {u["rows"] for u in found.units.values()} == {16.0}
    assert [found.about[name]["kind"] for name in found.units] == ["SiLUActivation gated"] * 2
    assert len(found.heads) == 2


def test_weights_before_a_normalization_are_named_with_their_effective_learning_rate() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1:].parameters()}]
    found = health(model, optimizer=torch.optim.SGD(groups, lr=0.1))
    assert found.about["0.weight"]["norm"] == "1" and "norm" not in found.about["3.weight"]
    assert found.weights["0.weight"]["effective_lr"] == pytest.approx(0.5 / model[0].weight.norm().item() ** 2)
    assert "effective_lr" not in found.weights["3.weight"]
    assert "1 of 2 weights (0.weight) have a normalization right behind them" in " ".join(str(found).split())
    assert "lr/‖W‖²" in str(found) and "norm" in Health.from_dict(found.to_dict()).about["0.weight"]
    assert "effective_lr" not in health(model).weights["0.weight"]
