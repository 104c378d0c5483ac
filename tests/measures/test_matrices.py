"""Each measure against a plain float64 reference written from its formula."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from rekindle.measures import matrices as measures
from rekindle.measures import spectra

SHAPES = [(1, 1), (1, 7), (7, 1), (5, 5), (6, 11), (11, 6), (64, 48), (201, 215), (260, 197)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def sigma(w: Tensor) -> np.ndarray:
    return np.linalg.svd(w.double().numpy(), compute_uv=False)


def reference(w: Tensor, scale: float = 1.0, tau: float = 0.8) -> dict[str, float]:
    """Every measure of one matrix, by SVD and loops over pairs."""
    a = w.double().numpy()
    out, in_ = a.shape
    k = min(out, in_)
    s = sigma(w)
    total = float((s**2).sum())
    own = math.sqrt(total / k)
    shares = s / s.sum()
    norms = np.linalg.norm(a, axis=1)
    live = [i for i in range(out) if norms[i] > 1e-6 * norms.max()]
    columns = np.linalg.norm(a, axis=0)
    n = len(live)
    unit = a[live] / norms[live, None]
    cosines = np.abs((unit @ unit.T)[np.triu_indices(n, 1)])
    squared = float(np.mean(cosines**2)) if n > 1 else math.nan
    bound = (n / in_ - 1) / (n - 1) if n > 1 else 0.0

    def reaching(values: np.ndarray, share: float) -> int:
        running = 0.0
        for count, value in enumerate(values, 1):
            running += value
            if running >= share * values.sum() * (1 - 1e-12):
                return count
        raise AssertionError

    return {
        "norm": math.sqrt(total),
        "dfi": float((((s / scale) ** 2 - 1) ** 2).sum()),
        "dfi_per_dimension": float((((s / scale) ** 2 - 1) ** 2).sum()) / k,
        "dfi_scale_free": float((((s / own) ** 2 - 1) ** 2).sum()) / k,
        "spectral_norm": float(s[0]),
        "stable_rank": total / float(s[0] ** 2),
        "participation_rank": total**2 / float((s**4).sum()),
        "condition_number": float(s[0] / s[-1]),
        "effective_rank": math.exp(-sum(p * math.log(p) for p in shares if p > 0)),
        "srank": reaching(s, 0.99),
        "pca_rank": reaching(s**2, 0.99),
        "mean_squared_cosine": squared,
        "welch_ratio": squared / bound if bound > 0 else math.nan,
        "similar_pairs": float(np.mean(cosines > tau)) if n > 1 else math.nan,
        "dead_rows": out - n,
        "dead_columns": int((columns <= 1e-6 * columns.max()).sum()),
        "row_norm_spread": float(norms.std() / norms.mean()),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_full_measures_agree_with_the_formulas(shape: tuple[int, int], dtype: torch.dtype) -> None:
    w = draw(3, *shape, dtype=dtype)
    found = dict(measures.measure(w, scale=1.3, mode="full", tau=0.5).items())
    # Spectra are float64 whatever the weight; what compares rows stays in the weight's precision.
    loose = 1e-9 if dtype == torch.float64 else 1e-5
    of_rows = {"mean_squared_cosine", "welch_ratio", "row_norm_spread"}
    for at in range(3):
        for name, expected in reference(w[at], 1.3, 0.5).items():
            if name == "welch_ratio" and shape[0] <= shape[1]:
                assert name not in found  # its bound is 0
                continue
            tolerance = loose if name in of_rows else 1e-9
            assert found[name][at].item() == pytest.approx(expected, rel=tolerance, abs=tolerance, nan_ok=True), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_cheap_measures_agree_with_the_formulas(shape: tuple[int, int], dtype: torch.dtype) -> None:
    w = draw(2, *shape, seed=1, dtype=dtype)
    cheap = measures.measure(w, scale=0.7)
    # float32 products: rounding of a sum of at most 64 terms; the power iteration is checked on its own below.
    for name, value in cheap.items():
        if name in ("spectral_norm", "stable_rank"):
            continue
        for at in range(2):
            expected = reference(w[at], 0.7)[name]
            assert value[at].item() == pytest.approx(expected, rel=1e-4, abs=1e-5, nan_ok=True), name


def test_cheap_mode_leaves_out_what_it_did_not_measure() -> None:
    cheap = measures.measure(draw(4, 4))
    assert cheap.effective_rank is None
    assert cheap.condition_number is None
    assert cheap.similar_pairs is None
    assert "effective_rank" not in cheap.summary()
    # An out ≤ in matrix has a Welch bound of 0: the ratio is undefined, not 0.
    assert "welch_ratio" not in cheap.summary()


def test_power_iteration_comes_from_below_and_close() -> None:
    w = draw(20, 40, 60)
    exact = torch.tensor([sigma(m)[0] for m in w])
    estimate = spectra.spectral_norm_estimate(spectra.gram(w))
    assert (estimate <= exact * (1 + 1e-12)).all()
    assert (estimate >= 0.95 * exact).all()


def test_single_functions_agree_with_the_formulas() -> None:
    w = draw(9, 5, seed=3)
    w[2] = 0
    w[4] = w[3] * -2
    ref = reference(w, 1.0, 0.8)
    assert ref["similar_pairs"] > 0
    assert ref["dead_rows"] == 1
    for name in ("similar_pairs", "mean_squared_cosine", "welch_ratio", "dead_rows", "dead_columns", "row_norm_spread"):
        assert getattr(measures, name)(w).item() == pytest.approx(ref[name]), name
    assert measures.deviation_from_isometry(w).item() == pytest.approx(ref["dfi"])
    assert measures.deviation_per_dimension(w).item() == pytest.approx(ref["dfi_per_dimension"])
    assert measures.scale_free_deviation(w).item() == pytest.approx(ref["dfi_scale_free"])
    assert measures.frobenius_norm(w).item() == pytest.approx(ref["norm"])
    assert measures.spectral_norm(w).item() == pytest.approx(ref["spectral_norm"])


def test_squared_frobenius_error() -> None:
    w, changed = draw(2, 3, 4), draw(2, 3, 4, seed=1)
    pairs = list(zip(w.flatten(1).tolist(), changed.flatten(1).tolist(), strict=True))
    expected = [sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) for x, y in pairs]
    assert measures.squared_frobenius_error(w, changed).tolist() == pytest.approx(expected)
    norms = [float(x.square().sum()) for x in w]
    relative = [e / n for e, n in zip(expected, norms, strict=True)]
    assert measures.squared_frobenius_error(w, changed, relative=True).tolist() == pytest.approx(relative)
    with pytest.raises(ValueError, match=r"\(3, 4\) and \(4, 3\)"):
        measures.squared_frobenius_error(torch.zeros(3, 4), torch.zeros(4, 3))


def test_deviation_keeps_its_digits_close_to_an_isometry() -> None:
    q = torch.linalg.qr(draw(64, 64))[0] * 3
    q[0] *= 1 + 1e-6
    # (1 + 1e-6)² − 1 = 2e-6; the expanded form ‖G‖² − 2 tr G + k would lose it to rounding.
    assert measures.deviation_from_isometry(q, 3.0).item() == pytest.approx(4e-12, rel=1e-3)


def test_scale_may_differ_from_matrix_to_matrix() -> None:
    w = torch.stack([2 * torch.eye(3), 5 * torch.eye(3)])
    assert measures.measure(w, scale=torch.tensor([2.0, 5.0])).dfi.tolist() == [0.0, 0.0]


def test_zero_and_singular_matrices() -> None:
    zero = measures.measure(torch.zeros(2, 3, 3), mode="full")
    assert zero.dfi.tolist() == [3.0, 3.0]
    assert zero.dfi_scale_free.isnan().all()
    assert zero.effective_rank is not None
    assert zero.effective_rank.tolist() == [0.0, 0.0]
    assert zero.dead_rows.tolist() == [3, 3]
    assert "dfi_scale_free" not in zero.summary()
    twins = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    full = measures.measure(twins, mode="full")
    assert full.condition_number is not None
    assert full.condition_number.item() == math.inf


def test_chunks_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    w = draw(7, 6, 4)
    whole = dict(measures.measure(w, mode="full").items())
    monkeypatch.setattr(measures, "_CHUNK", 50)
    for name, value in measures.measure(w, mode="full").items():
        torch.testing.assert_close(value, whole[name], equal_nan=True)


def test_very_many_neurons_are_compared_by_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    w = draw(60, 4)
    monkeypatch.setattr(measures, "_PAIR_PRODUCTS", 4 * 20**2)
    found = measures.measure(w, mode="full", tau=0.5).similar_pairs
    assert found is not None
    assert found.item() == pytest.approx(reference(w[::3], tau=0.5)["similar_pairs"])
    assert found.item() != pytest.approx(reference(w, tau=0.5)["similar_pairs"])


def test_leading_dimensions_stay() -> None:
    found = measures.measure(draw(2, 3, 4, 5), mode="full")
    assert all(value.shape == (2, 3) for _, value in found.items())
    assert found.spectrum is not None
    assert found.spectrum.shape == (2, 3, 4)


def test_summary_adds_or_averages_as_documented() -> None:
    w = torch.stack([torch.diag(torch.tensor([2.0, 0.0])), torch.eye(2)])
    summary = measures.measure(w, mode="full").summary()
    assert summary["dfi"] == pytest.approx(9 + 1)
    assert summary["dead_rows"] == 1
    assert summary["norm"] == pytest.approx(math.sqrt(4 + 2))
    assert summary["effective_rank"] == pytest.approx(1.5)
    assert summary["spectral_norm"] == pytest.approx(2)


def test_errors_say_what_was_found() -> None:
    with pytest.raises(ValueError, match="NaN or Inf"):
        measures.measure(torch.full((2, 2), math.inf))
    with pytest.raises(TypeError, match="int64"):
        measures.gram(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="two dimensions"):
        measures.gram(torch.ones(2))
    with pytest.raises(ValueError, match="'exact'"):
        measures.measure(torch.eye(2), mode="exact")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no matrix"):
        measures.measure(torch.zeros(0, 2, 2))


def test_orthogonal_start_reaches_the_welch_bound() -> None:
    # 512 neurons in 16 dimensions: QR start at about 1.00 of the bound, a Gaussian above it.
    tall = torch.linalg.qr(draw(512, 16))[0]
    tight = tall / tall.norm(dim=1, keepdim=True)
    assert 1.0 <= measures.welch_ratio(tight).item() < 1.01
    assert measures.welch_ratio(draw(512, 16)).item() > 1.02
