"""The paper's four theorems on random networks: they hold, and for whom they say anything at all."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rekindle.diagnosis.activity import activity
from rekindle.engine.isometry import polar
from rekindle.measures.bounds import covariance_bound, curvature_bound, rank_bound, score_bounds
from rekindle.measures.matrices import deviation_from_isometry, singular_values, squared_frobenius_error, srank

DRAWS = range(25)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def released(w: Tensor, steps: int = 10) -> Tensor:
    """The released recipe: Frobenius normalization and cubic Newton–Schulz steps."""
    x = w / w.norm()
    for _ in range(steps):
        x = 1.5 * x - 0.5 * x @ (x.mT @ x)
    return x


def dfi(w: Tensor) -> float:
    return deviation_from_isometry(w).item()


def near_isometry(out: int, in_: int, seed: int, noise: float) -> Tensor:
    q = polar(draw(out, in_, seed=seed))
    return q + noise * draw(out, in_, seed=seed + 1000) / math.sqrt(out * in_)


# Theorem 1


def features(weights: list[Tensor], z: Tensor, activation: nn.Module) -> Tensor:
    for w in weights:
        z = activation(z @ w.mT)
    return z


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh(), nn.LeakyReLU(0.2)])
@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0])
def test_1_sfe_bounds_the_change_of_the_features(activation: nn.Module, size: float) -> None:
    tightest = 0.0
    for seed in DRAWS:
        depth = 1 + seed % 4
        weights = [draw(12, 12, seed=seed * 10 + k) / math.sqrt(12) for k in range(depth)]
        changed = [w + size * draw(12, 12, seed=seed * 10 + k + 500) for k, w in enumerate(weights)]
        z = draw(30, 12, seed=seed + 900)
        h, h2 = features(weights, z, activation), features(changed, z, activation)
        moved = (h @ h.mT / h.square().sum() - h2 @ h2.mT / h2.square().sum()).norm().item()
        bound = covariance_bound(
            sum(squared_frobenius_error(a, b).item() for a, b in zip(weights, changed, strict=True)),
            inputs=z.norm().item(),
            features=min(h.norm().item(), h2.norm().item()),
            layers=depth,
            spectral_norm=max(singular_values(w)[0].item() for w in weights + changed),
        )
        assert moved <= bound
        tightest = max(tightest, moved / bound)
    # The bound is loose by one to two orders, not by accident many more.
    assert tightest > (0.003 if size < 1 else 0.001)


def test_1_binds_for_a_small_change_and_not_for_a_projection_of_a_gaussian() -> None:
    w, z = draw(64, 64, seed=0) / 8, draw(100, 64, seed=1)
    small = w + 1e-4 * draw(64, 64, seed=2)

    def bound(changed: Tensor) -> float:
        h = [F.relu(z @ each.mT).norm().item() for each in (w, changed)]
        sfe, norm = (
            squared_frobenius_error(w, changed).item(),
            max(singular_values(each)[0].item() for each in (w, changed)),
        )
        return covariance_bound(sfe, inputs=z.norm().item(), features=min(h), layers=1, spectral_norm=norm)

    assert bound(small) < math.sqrt(2)
    # Projecting a random matrix moves it too far for the theorem to promise anything.
    assert bound(polar(w)) > math.sqrt(2)


# Theorem 2


def hessian_norm(weights: list[Tensor], masks: list[Tensor], z: Tensor, y: Tensor) -> float:
    shapes = [w.shape for w in weights]

    def loss(flat: Tensor) -> Tensor:
        h = z
        parts = flat.split([s.numel() for s in shapes])
        for at, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
            h = h @ part.view(shape).mT
            if at < len(shapes) - 1:
                h = h * masks[at]
        return F.cross_entropy(h, y)

    flat = torch.cat([w.flatten() for w in weights])
    return torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, flat)).abs().max().item()


def whitened(rows: int, columns: int, seed: int) -> Tensor:
    return torch.linalg.qr(draw(rows, columns, seed=seed))[0] * math.sqrt(rows)


CROSS_ENTROPY = {"hessian": 0.5, "gradient": math.sqrt(2)}


@pytest.mark.parametrize("kind", ["gaussian", "released", "converged"])
def test_2_dfi_bounds_the_curvature(kind: str) -> None:
    make = {"gaussian": lambda w: w, "released": released, "converged": polar}[kind]
    for seed in DRAWS:
        depth, width = 2 + seed % 2, 4
        weights = [make(draw(width, width, seed=seed * 10 + k)) for k in range(depth)]
        masks = [(draw(width, seed=seed * 10 + k + 300) > -0.5).double() for k in range(depth - 1)]
        z = whitened(20, width, seed + 600)
        y = torch.randint(0, width, (20,), generator=torch.Generator().manual_seed(seed))
        bound = curvature_bound([dfi(w) for w in weights], **CROSS_ENTROPY)
        assert hessian_norm(weights, masks, z, y) <= bound
        least = curvature_bound([0.0] * depth, **CROSS_ENTROPY)
        if kind == "converged":
            assert bound == pytest.approx(least, rel=1e-4)


def test_2_is_far_from_the_isometry_value_for_the_released_recipe() -> None:
    weights = [draw(512, 512, seed=seed) for seed in range(3)]
    least = curvature_bound([0.0] * 3, **CROSS_ENTROPY)
    converged = curvature_bound([dfi(polar(w)) for w in weights], **CROSS_ENTROPY)
    ten_steps = curvature_bound([dfi(released(w)) for w in weights], **CROSS_ENTROPY)
    assert converged == pytest.approx(least, rel=0.01)
    assert ten_steps > 10 * least


# Theorem 3


@pytest.mark.parametrize("delta", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("shape", [(8, 8), (16, 40), (40, 40)])
def test_3_dfi_bounds_the_feature_rank(shape: tuple[int, int], delta: float) -> None:
    said_something = 0
    for seed in DRAWS:
        out, in_ = shape
        w = near_isometry(out, in_, seed, noise=0.02 * (seed % 10) * math.sqrt(out))
        z = draw(200, in_, seed=seed + 77) * (1 + torch.arange(in_) / in_ * (seed % 3))
        eta = singular_values(z).square()
        bound = rank_bound(dfi=dfi(w), dimensions=out, delta=delta, spread=(eta[0] / eta[-1]).item())
        if bound is not None:
            said_something += 1
            assert srank(singular_values(z @ w.mT), delta).item() >= bound
    assert said_something > 10


def test_3_binds_for_the_converged_projection_only() -> None:
    w = draw(512, 512, seed=3)
    z = whitened(600, 512, 4)
    assert dfi(released(w)) > 1
    assert rank_bound(dfi=dfi(released(w)), dimensions=512) is None
    bound = rank_bound(dfi=dfi(polar(w)), dimensions=512)
    found = srank(singular_values(z @ polar(w).mT)).item()
    # 507 of 512: all that δ = 0.01 leaves to promise, and what is there.
    assert bound == found == 507


# Theorem 4


@pytest.mark.parametrize("shape", [(6, 6), (10, 30), (64, 64)])
def test_4_dfi_bounds_the_dormancy_scores(shape: tuple[int, int]) -> None:
    said_something = 0
    for seed in DRAWS:
        w = near_isometry(*shape, seed, noise=0.02 * (seed % 10) * math.sqrt(shape[0]))
        bounds = score_bounds(dfi=dfi(w))
        if bounds is None:
            continue
        said_something += 1
        # On Gaussian inputs a positive-homogeneous unit's mean |a| is proportional to its row's norm.
        norms = w.norm(dim=1)
        scores = norms / norms.mean()
        assert bounds[0] * (1 - 1e-12) <= scores.min().item()
        assert scores.max().item() <= bounds[1] * (1 + 1e-12)
    assert said_something > 10


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.1)])
def test_4_measured_on_data(activation: nn.Module) -> None:
    layer = nn.Linear(96, 64, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(near_isometry(64, 96, 5, noise=0.5))
    bounds = score_bounds(dfi=dfi(layer.weight))
    assert bounds is not None
    rows = 20_000
    found = activity(nn.Sequential(layer, activation), [draw(rows, 96, seed=6)], mode="cheap").layers[0].scores
    # Four standard errors of a mean |a| over this many rows: the relative spread of |N(0, 1)| rectified is 1.5.
    margin = 4 * 1.5 / math.sqrt(rows)
    assert bounds[0] - margin <= found.min().item()
    assert found.max().item() <= bounds[1] + margin


def test_4_binds_for_the_converged_projection_only() -> None:
    w = draw(512, 512, seed=8)
    assert score_bounds(dfi=dfi(released(w))) is None
    low, high = score_bounds(dfi=dfi(polar(w)))
    assert 0.99 < low <= high < 1.01


def test_4_says_nothing_where_out_exceeds_in() -> None:
    tall = polar(draw(512, 128, seed=9))
    norms = tall.norm(dim=1)
    scores = norms / norms.mean()
    assert dfi(tall) < 128 * 1e-6
    # An isometry, and yet outside [1, 1]: the rows are not orthonormal, only the columns are.
    assert scores.min().item() < 0.9
    assert scores.max().item() > 1.1
