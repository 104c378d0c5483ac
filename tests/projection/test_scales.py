"""Scale rules against their formulas, and the words they are parsed from."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rekindle.blocks.finding import find
from rekindle.blocks.layouts import Block, convolution, matrices
from rekindle.projection.planning import plan
from rekindle.projection.scales import Scale, settled

SIDE = st.integers(1, 40)


def linear(out: int, in_: int, role: str = "other") -> Block:
    return matrices("out in", role=role)((out, in_))[0]


def conv(out: int, in_: int, kernel: int, groups: int = 1, *, transposed: bool = False, flat: bool = False) -> Block:
    cls = nn.ConvTranspose2d if transposed else nn.Conv2d
    shape = tuple(cls(in_, out, kernel, groups=groups).weight.shape)
    return convolution(shape, groups=groups, transposed=transposed, flat=flat)(shape)[0]


@given(SIDE, SIDE)
def test_paper_scale_of_a_linear_is_root_out_over_in(out: int, in_: int) -> None:
    assert Scale.parse("paper").known(linear(out, in_)) == pytest.approx(math.sqrt(out / in_))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3])
def test_paper_scale_of_a_convolution(kernel: int, groups: int, transposed: bool) -> None:
    """√(out/in)/taps with the sides of one group's matrix; flat is one matrix with in·taps inputs."""
    block = conv(12, 8, kernel, groups, transposed=transposed)
    assert Scale.parse("paper").known(block) == pytest.approx(math.sqrt(12 / 8) / kernel**2)
    flat = conv(12, 8, kernel, groups, transposed=transposed, flat=True)
    assert Scale.parse("paper").known(flat) == pytest.approx(math.sqrt(12 / (8 * kernel**2)))


@given(SIDE, SIDE, st.floats(0.01, 9))
def test_numbers_and_fan_in(out: int, in_: int, factor: float) -> None:
    assert Scale.parse(factor).known(linear(out, in_)) == factor
    assert Scale.parse("fan_in").known(linear(out, in_)) == pytest.approx(math.sqrt(in_))
    assert Scale.parse(f"fan_in:{factor}").known(linear(out, in_)) == pytest.approx(math.sqrt(in_) * factor)
    assert Scale.parse("fan_in").known(conv(4, 5, 3)) == pytest.approx(math.sqrt(45))


@pytest.mark.parametrize(
    ("spec", "initialize"),
    [
        ("init:kaiming", lambda w: nn.init.kaiming_normal_(w)),
        ("init:kaiming(1)", lambda w: nn.init.kaiming_normal_(w, nonlinearity="linear")),
        ("init:xavier", lambda w: nn.init.xavier_normal_(w)),
        ("init:xavier(2)", lambda w: nn.init.xavier_normal_(w, gain=2)),
        ("init:lecun", lambda w: nn.init.normal_(w, std=(w.shape[1] * w[0, 0].numel()) ** -0.5)),
        ("init:torch", lambda w: nn.init.kaiming_uniform_(w, a=math.sqrt(5))),
        ("init:normal(0.02)", lambda w: nn.init.normal_(w, std=0.02)),
        ("init:orthogonal", lambda w: nn.init.orthogonal_(w)),
        ("init:orthogonal(1.4)", lambda w: nn.init.orthogonal_(w, gain=1.4)),
    ],
)
@pytest.mark.parametrize("shape", [(160, 90), (90, 160), (64, 48, 3, 3), (48, 64, 3, 3)])
def test_an_isometry_at_an_init_scale_has_the_variance_of_that_scheme(
    spec: str, initialize: object, shape: tuple[int, ...]
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        weight = torch.empty(shape)
        initialize(weight)  # type: ignore[operator]
    block = matrices("out in")(shape)[0] if len(shape) == 2 else conv(shape[0], shape[1], 3)
    scale = Scale.parse(spec).known(block)
    assert scale is not None
    # ‖sQ‖²_F = s²k over all matrices; the drawn weights' variance is known to 1/√(2·numel) < 2 %.
    variance = block.count * scale**2 * block.smaller / weight.numel()
    assert variance == pytest.approx(float(weight.square().mean()), rel=0.05)


@pytest.mark.parametrize("role", ["attention-output", "mlp-out", "mlp-in", "query"])
def test_depth_shrinks_what_writes_to_the_residual_stream(role: str) -> None:
    plain = Scale.parse("init:normal(0.02)").known(linear(8, 4, role))
    deep = Scale.parse("init:normal(0.02)/depth(12)").known(linear(8, 4, role))
    assert plain is not None
    expected = plain / math.sqrt(24) if role in ("attention-output", "mlp-out") else plain
    assert deep == pytest.approx(expected)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_measured_scales_per_matrix(out: int, in_: int, count: int, seed: int) -> None:
    """nearest minimizes ‖W − sQ‖_F, norm keeps ‖W‖_F, reference takes ‖W₀‖_F."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(count, out, in_, generator=generator, dtype=torch.float64)
    start = torch.randn(count, out, in_, generator=generator, dtype=torch.float64)
    block = matrices("count out in", count="count")((count, out, in_))[0]
    u, sigma, vh = torch.linalg.svd(w, full_matrices=False)
    q = u @ vh
    norm, nuclear = torch.linalg.matrix_norm(w), sigma.sum(1)
    initial = torch.linalg.matrix_norm(start)
    nearest, keep, reference = (
        Scale.parse(rule).values(block, norm=norm, nuclear=nuclear, reference=initial)[:, None, None]
        for rule in ("nearest", "norm", "reference")
    )
    assert torch.allclose(torch.linalg.matrix_norm(keep * q), norm)
    assert torch.allclose(torch.linalg.matrix_norm(reference * q), initial)
    best = torch.linalg.matrix_norm(w - nearest * q)
    for other in (0.99, 1.01):
        assert bool((best <= torch.linalg.matrix_norm(w - other * nearest * q) + 1e-12).all())


def test_known_values_fill_the_block() -> None:
    block = conv(4, 4, 3, groups=2)
    values = Scale.parse("paper").values(block, norm=torch.ones(18, dtype=torch.float64))
    assert values.shape == (18,)
    assert values.dtype == torch.float64
    assert torch.allclose(values, torch.full((18,), 1 / 9, dtype=torch.float64))


def test_a_split_per_head_keeps_its_parents_scale() -> None:
    block = matrices("(head dim) in", head=4, heads="head")((64, 16))[0]
    for spec in ("paper", "fan_in", "init:xavier", "init:normal(0.02)", "init:orthogonal"):
        assert Scale.parse(spec).known(block.per_head()) == Scale.parse(spec).known(block)
    assert find(nn.MultiheadAttention(8, 2), split_heads=True)[0].blocks[0].fans == (8, 8)


@pytest.mark.parametrize(
    "spec",
    [
        "paper",
        "nearest",
        "norm",
        "reference",
        "fan_in",
        "fan_in:0.5",
        "paper:0.3",
        "norm:0.1",
        "init:kaiming",
        "init:normal(0.02)",
        "init:normal(0.02)/depth(12)",
        "paper/depth(3)",
        "0.7",
    ],
)
def test_a_scale_prints_as_what_it_is_parsed_from(spec: str) -> None:
    scale = Scale.parse(spec)
    assert str(scale) == spec
    assert Scale.parse(scale) is scale
    assert Scale.parse(str(scale)) == scale


@pytest.mark.parametrize(
    "spec",
    [
        *(
            "papers",
            "init",
            "init:he",
            "init:normal",
            "fan_in:x",
            "paper:x",
            "norm:-1",
            "nearest/depth(3)",
            "init:normal(-1)",
        ),
        *("", "0", "paper/depth(0)", "nan", 0, -1.0, math.nan, math.inf),
    ],
)
def test_unknown_scales_are_errors(spec: str | float) -> None:
    with pytest.raises(ValueError, match="scale="):
        Scale.parse(spec)


def test_other_types_and_missing_measures_are_errors() -> None:
    for wrong in (None, True, [1.0]):
        with pytest.raises(TypeError, match="word or a number"):
            Scale.parse(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="initial weights"):
        Scale.parse("reference").values(linear(2, 2))
    with pytest.raises(ValueError, match="one number per matrix"):
        Scale.parse("norm").values(linear(2, 2), norm=torch.ones(2))


@pytest.mark.parametrize("rule", ["paper", "nearest", "norm", "reference", "fan_in"])
def test_a_factor_multiplies_the_rule(rule: str) -> None:
    block, w = linear(6, 4), torch.randn(1, 6, 4, dtype=torch.float64)
    given = {
        "norm": torch.linalg.matrix_norm(w),
        "nuclear": torch.linalg.svdvals(w).sum(1),
        "reference": torch.tensor([2.0], dtype=torch.float64),
    }
    plain, tenth = (Scale.parse(spec).values(block, **given) for spec in (rule, f"{rule}:0.1"))
    torch.testing.assert_close(tenth, plain / 10)


class _Unsure(nn.Module):
    """May divide by a size of its own making."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


_BARE = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
_NORMED = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
AUTO = Scale.parse("auto")


@pytest.mark.parametrize(
    ("model", "rule", "why"),
    [
        (_BARE, "init:kaiming", "no activation"),
        (_NORMED, "paper", "normalizes"),
        (_Unsure(), "init:kaiming", "the source does not show"),
        (_NORMED.state_dict(), "paper", "normalizes"),
        (_BARE.state_dict(), "init:kaiming", "a state dict does not show"),
    ],
)
def test_the_default_scale_is_hes_norm_unless_activations_are_normalized(model: object, rule: str, why: str) -> None:
    found, said = settled(AUTO, model)  # type: ignore[arg-type]
    assert str(found) == rule and why in said
    made = plan(model)  # type: ignore[arg-type]
    assert str(made.scale) == rule and f"scale {rule} ({said})" in " ".join(made.table(width=400).split())


def test_an_example_and_a_config_settle_what_source_and_keys_leave_open() -> None:
    assert str(plan(_Unsure(), example=torch.randn(3, 4)).scale) == "paper"
    with torch.device("meta"):
        shape = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 2))
    keys = nn.Sequential(nn.Linear(4, 8), nn.Identity(), nn.Linear(8, 2)).state_dict()
    assert str(plan(keys).scale) == "init:kaiming"
    assert str(plan(keys, config=shape).scale) == "paper"
    live = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 2))
    assert str(plan(keys, config=plan(live)).scale) == "paper"


def test_what_is_asked_for_is_what_is_taken() -> None:
    assert str(plan(_BARE, scale="paper").scale) == "paper" and plan(_BARE, scale="paper").why == ""
    assert str(plan(_BARE, targets="paper-cnn").scale) == "paper"
    made = plan(_NORMED)
    assert type(made).from_dict(made.to_dict()) == made
    for wrong in ("auto:0.3", "auto/depth(2)"):
        with pytest.raises(ValueError, match="auto takes no factor"):
            Scale.parse(wrong)
    with pytest.raises(ValueError, match="depends on the model"):
        AUTO.known(linear(2, 2))


def test_an_output_layer_that_alone_could_be_read_is_not_projected_by_default() -> None:
    """A file shows no groups: with its convolutions skipped, only the classifier would be left."""
    keys = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 4)).state_dict()
    with pytest.raises(ValueError, match="1 × output head, and the layers before it were not read"):
        plan(keys)
    assert [e.name for e in plan(keys, targets="head").selected] == ["3.weight"]
