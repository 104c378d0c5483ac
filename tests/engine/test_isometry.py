"""polar(): exact on the whole zoo, deterministic, differentiable, and clear about what it cannot take."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import rekindle
from matrices import ZOO, build
from rekindle.engine import arithmetic, isometry, schedules, solving
from rekindle.engine import routes as solvers
from rekindle.engine.completion import Rebuilt
from rekindle.engine.isometry import polar
from rekindle.engine.solving import Source, solve


def dfi(q: Tensor) -> float:
    """DfI/k from its definition, in float64."""
    q = q.double()
    q = q if q.shape[-2] <= q.shape[-1] else q.mT
    k = q.shape[-2]
    return float((q @ q.mT - torch.eye(k, dtype=torch.float64)).square().sum() / k)


def overlap(q: Tensor, w: Tensor) -> float:
    """tr(QᵀW)/‖W‖_*, which is 1 for the polar factor and less for any other isometry."""
    w = w.double()
    w = w / w.abs().max().clamp_min(1e-300)
    nuclear = torch.linalg.svdvals(w).sum()
    return 1.0 if nuclear == 0 else float((q.double() * w).sum() / nuclear)


SMALL = [(1, 1), (1, 9), (9, 1), (5, 3), (16, 17), (40, 40), (64, 70), (65, 65), (100, 128), (150, 100), (90, 300)]
LARGE = [(300, 128), (400, 400), (520, 512), (700, 400), (400, 1000)]


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("shape", [*SMALL, *LARGE])
def test_every_matrix_of_the_zoo_gets_its_exact_polar_factor(name: str, shape: tuple[int, int]) -> None:
    w = build(name, *shape)
    q, proof = polar(w, certificate=True)
    assert q.shape == w.shape and q.dtype == w.dtype
    assert dfi(q) <= 1e-6
    assert overlap(q, w) >= 1 - 5e-4
    assert bool(proof.converged)
    # The certificate is computed in float32, hence the absolute slack.
    assert float(proof.residual) == pytest.approx(dfi(q), rel=0.2, abs=2e-11)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("shape", [(40, 40), (400, 400), (520, 512), (400, 1000)])
def test_without_a_certificate_it_is_as_exact(name: str, shape: tuple[int, int]) -> None:
    w = build(name, *shape, seed=1)
    q = polar(w)
    assert dfi(q) <= 1e-6
    assert overlap(q, w) >= 1 - 5e-4


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("shape", [(40, 40), (150, 100), (400, 400), (128, 300)])
def test_tolerance_zero_goes_to_the_floor_of_float32(name: str, shape: tuple[int, int]) -> None:
    w = build(name, *shape)
    q = polar(w, tol=0)
    assert dfi(q) <= 1e-11
    assert overlap(q, w) >= 1 - 1e-5


@pytest.mark.parametrize("name", ["gaussian", "geometric 1e8", "dead rows 10%", "rank one", "zero", "tiny"])
@pytest.mark.parametrize("shape", [(9, 30), (40, 40), (200, 150)])
def test_float64_in_float64_out(name: str, shape: tuple[int, int]) -> None:
    w = build(name, *shape).double()
    q, proof = polar(w, tol=0, certificate=True)
    assert q.dtype == torch.float64 and bool(proof.converged)
    assert dfi(q) <= 1e-25
    assert overlap(q, w) >= 1 - 1e-7


@pytest.mark.parametrize(("dtype", "floor"), [(torch.bfloat16, 2e-5), (torch.float16, 4e-7)])
@pytest.mark.parametrize("shape", [(3, 50, 50), (2, 100, 300)])
def test_half_precision_is_solved_in_float32_and_rounded_once(
    dtype: torch.dtype, floor: float, shape: tuple[int, ...]
) -> None:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    q, proof = polar(w, certificate=True)
    assert q.dtype == dtype
    assert bool((proof.residual <= 1e-6).all())  # of the factor before the cast
    assert all(dfi(each) < floor for each in q)
    assert torch.equal(q, polar(w.float()).to(dtype))


@given(
    out=st.integers(1, 90),
    in_=st.integers(1, 90),
    exponent=st.integers(-12, 12),
    spread=st.floats(0, 8),
    seed=st.integers(0, 2**16),
)
def test_nearest_isometry_against_float64_svd(out: int, in_: int, exponent: int, spread: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    k = min(out, in_)
    u = torch.linalg.qr(torch.randn(out, k, generator=g, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(in_, k, generator=g, dtype=torch.float64))[0]
    w = ((u * torch.logspace(0, -spread, k, dtype=torch.float64)) @ v.T * 10.0**exponent).float()
    q = polar(w, tol=0)
    assert dfi(q) <= 1e-11
    assert overlap(q, w) >= 1 - 1e-5
    if spread <= 2:  # float32 rounding moves the factor by 1e-7·spread; beyond that only the overlap is well-posed
        a, _, b = torch.linalg.svd(w.double(), full_matrices=False)
        torch.testing.assert_close(q.double(), a @ b, atol=2e-4, rtol=0)


class TestShapes:
    def test_batches_of_any_rank(self) -> None:
        w = torch.randn(2, 3, 20, 30)
        q, proof = polar(w, certificate=True)
        assert q.shape == w.shape and proof.residual.shape == proof.steps.shape == (2, 3)
        for i in range(2):
            for j in range(3):
                assert dfi(q[i, j]) <= 1e-6

    @pytest.mark.parametrize("shape", [(0, 5, 7), (0, 3), (3, 0), (2, 0, 4), (0, 0)])
    def test_nothing_in_nothing_out(self, shape: tuple[int, ...]) -> None:
        q, proof = polar(torch.empty(shape), certificate=True)
        assert q.shape == shape and proof.residual.shape == shape[:-2]

    def test_views_are_read_and_never_written(self) -> None:
        base = torch.randn(60, 90)
        for view in (base.T, base[::2, 1::3], base[:, :1].expand(60, 40), base[None].expand(4, 60, 90)):
            before = base.clone()
            torch.testing.assert_close(polar(view), polar(view.contiguous()), atol=1e-6, rtol=0)
            assert torch.equal(base, before)

    def test_transposing_commutes(self) -> None:
        w = torch.randn(70, 110)
        assert torch.equal(polar(w.T), polar(w).T)

    def test_a_list_of_mixed_shapes_gives_a_list(self) -> None:
        tensors = [torch.randn(30, 40), torch.randn(5, 40, 30), torch.randn(200, 130).double(), torch.randn(0, 3, 2)]
        factors, proofs = polar(tensors, certificate=True)
        assert [q.shape for q in factors] == [w.shape for w in tensors]
        assert factors[2].dtype == torch.float64
        for q, w, proof in zip(factors, tensors, proofs, strict=True):
            assert proof.residual.shape == w.shape[:-2]
            torch.testing.assert_close(q, polar(w), atol=2e-3, rtol=0)

    def test_chunks_change_nothing_but_the_last_bits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        w = torch.randn(40, 24, 30)
        together = polar(w, tol=0)
        monkeypatch.setattr(solving, "CPU_CHUNK", 3 * 24 * 30)
        torch.testing.assert_close(polar(w, tol=0), together, atol=1e-5, rtol=0)


class TestSolve:
    def test_sources_are_read_when_their_turn_comes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(solving, "CPU_CHUNK", 20 * 20)
        reads: list[int] = []
        weights = [torch.randn(1, 20, 20) for _ in range(4)]

        def source(i: int) -> Source:
            return Source((1, 20, 20), torch.float32, torch.device("cpu"), lambda: reads.append(i) or weights[i])

        for done, (i, q, proof) in enumerate(solve([source(i) for i in range(4)])):
            assert reads == list(range(done + 1))
            assert dfi(q[0]) <= 1e-6 and bool(proof.converged.all()) and i == done

    def test_the_certificate_measures_the_matrix_too(self) -> None:
        w = torch.randn(3, 30, 50)
        _, proof = polar(w, certificate=True, tol=0)
        s = torch.linalg.svdvals(w.double())
        torch.testing.assert_close(proof.norm, s.square().sum(1).sqrt(), rtol=1e-5, atol=0)
        torch.testing.assert_close(proof.gram_norm, s.pow(4).sum(1).sqrt(), rtol=1e-5, atol=0)
        torch.testing.assert_close(proof.nuclear, s.sum(1), rtol=1e-5, atol=0)
        assert bool((proof.spectral_norm <= s[:, 0] * (1 + 1e-5)).all())  # an estimate from below
        assert bool((proof.spectral_norm >= s[:, 0] * 0.85).all())

    def test_extreme_scales_do_not_overflow_the_certificate(self) -> None:
        w = torch.randn(30, 50)
        small, large = (polar(w * factor, certificate=True)[1] for factor in (1e-30, 1e30))
        reference = polar(w, certificate=True)[1]
        for proof, factor in ((small, 1e-30), (large, 1e30)):
            torch.testing.assert_close(proof.norm / factor, reference.norm, rtol=1e-4, atol=0)
            torch.testing.assert_close(proof.gram_norm / factor**2, reference.gram_norm, rtol=1e-4, atol=0)

    def test_it_prints_itself(self) -> None:
        _, proof = polar(torch.zeros(2, 5, 5), certificate=True)
        assert str(proof).startswith("2 of 2 converged") and "10 directions completed" in str(proof)


class TestCompletion:
    @pytest.mark.parametrize("shape", [(9, 12), (40, 40), (120, 100), (400, 400), (60, 200)])
    @pytest.mark.parametrize("name", ["dead rows 10%", "duplicates 40%", "rank one", "zero"])
    def test_completed_directions_are_counted(self, shape: tuple[int, int], name: str) -> None:
        w = build(name, *shape)
        s = torch.linalg.svdvals(w.double())
        rank = int((s > 1e-6 * s[0].clamp_min(1e-30)).sum())
        _, proof = polar(w, certificate=True)
        missing = min(shape) - rank
        if name != "rank one":  # a product rounded to float32 has noise of its own in the other directions
            assert int(proof.completed) == missing
        assert int(polar(w, complete=False, certificate=True)[1].completed) == 0

    @pytest.mark.parametrize("shape", [(9, 12), (40, 40), (120, 100), (400, 400), (60, 200)])
    def test_without_completion_a_partial_isometry_is_left(self, shape: tuple[int, int]) -> None:
        w = build("dead rows 60%", *shape)
        q, proof = polar(w, complete=False, certificate=True)
        u, s, vh = torch.linalg.svd(w.double(), full_matrices=False)
        keep = s > 1e-9 * s[0]
        torch.testing.assert_close(q.double(), u[:, keep] @ vh[keep], atol=5e-3, rtol=0)
        assert bool(proof.converged)

    def test_two_dead_matrices_do_not_become_twins(self) -> None:
        a, b = polar(torch.zeros(2, 20, 20))
        assert float((a - b).abs().max()) > 0.1
        c, d = polar([torch.zeros(20, 20), torch.zeros(20, 20)])
        assert float((c - d).abs().max()) > 0.1

    @pytest.mark.parametrize("shape", [(12, 12), (40, 40), (120, 100), (400, 400)])
    def test_the_seed_decides_and_nothing_else(self, shape: tuple[int, int]) -> None:
        w = build("dead rows 60%", *shape)
        state = torch.get_rng_state()
        assert torch.equal(polar(w, seed=3), polar(w, seed=3))
        assert not torch.equal(polar(w, seed=3), polar(w, seed=4))
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("shape", [(64, 64), (130, 128), (400, 400), (100, 260)])
def test_another_thread_count_gives_the_same_to_1e_3(name: str, shape: tuple[int, int]) -> None:
    w = build(name, *shape)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = polar(w)
        torch.set_num_threads(2)
        two = polar(w)
    finally:
        torch.set_num_threads(threads)
    assert float((one - two).abs().max()) <= 1e-3
    assert float((one - two).norm()) <= 1e-3 * math.sqrt(min(shape))


class TestSolvers:
    @pytest.mark.parametrize("steps", [0, 1, 5, 10])
    @pytest.mark.parametrize("shape", [(30, 50), (50, 30), (40, 40)])
    def test_paper_is_the_released_loop(self, shape: tuple[int, int], steps: int) -> None:
        w = torch.randn(shape)
        x = w.double() if shape[0] >= shape[1] else w.double().T
        x = x / x.norm()
        for _ in range(steps):
            x = 1.5 * x - 0.5 * x @ (x.T @ x)
        x = x if shape[0] >= shape[1] else x.T
        torch.testing.assert_close(polar(w, solver="paper", steps=steps).double(), x, atol=1e-6, rtol=0)

    def test_paper_takes_ten_steps_if_not_told(self) -> None:
        w = torch.randn(20, 20)
        assert torch.equal(polar(w, solver="paper"), polar(w, solver="paper", steps=10))
        assert int(polar(w, solver="paper", certificate=True)[1].steps) == 10

    def test_paper_does_not_make_nan_of_zero(self) -> None:
        assert torch.equal(polar(torch.zeros(4, 4), solver="paper"), torch.zeros(4, 4))

    @pytest.mark.parametrize("name", [n for n in ZOO if n not in ("zero",)])
    @pytest.mark.parametrize("shape", [(20, 20), (64, 64), (128, 128), (200, 140), (400, 400), (520, 512), (150, 400)])
    def test_fast_is_no_worse_than_ten_steps_of_the_paper(self, name: str, shape: tuple[int, int]) -> None:
        w = build(name, *shape)
        fast, paper = polar(w, solver="fast"), polar(w, solver="paper")
        # Where the recipe has converged there is nothing left to be worse at: 1e-6 is what counts as an isometry.
        assert dfi(fast) <= dfi(paper) * (1 + 1e-3) + 1e-6

    @pytest.mark.parametrize("name", ["gaussian", "dead rows 10%", "geometric 1e8", "zero"])
    def test_svd_is_the_reference(self, name: str) -> None:
        w = build(name, 60, 80)
        q, proof = polar(w, solver="svd", certificate=True)
        assert bool(proof.converged) and dfi(q) <= 1e-12 and overlap(q, w) >= 1 - 1e-6

    @pytest.mark.parametrize("name", ["gaussian", "trained", "geometric 1e3", "kaiming"])
    @pytest.mark.parametrize("shape", [(1, 60, 60), (3, 100, 130), (2, 300, 300)])
    def test_the_products_only_route_of_accelerators(self, name: str, shape: tuple[int, int, int]) -> None:
        w = torch.stack([build(name, *shape[1:], seed=seed) for seed in range(shape[0])])
        known = arithmetic.start(w)
        solved = solvers.by_products(w, known)
        arithmetic.settle(
            w,
            solved,
            known,
            tol=1e-6,
            complete=True,
            seeds=torch.zeros(3, dtype=torch.int64),
            exact=True,
            last=True,
        )
        for q, each in zip(solved.x, w, strict=True):
            assert dfi(q) <= 1e-6 and overlap(q, each) >= 1 - 5e-4

    def test_a_missed_tolerance_falls_back_to_svd(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def spoiled(w: Tensor, *_: object) -> arithmetic.Solved:
            return arithmetic.Solved.new(torch.full_like(w, 0.01), 1)

        monkeypatch.setattr(solvers, "by_products", spoiled)
        monkeypatch.setattr(solvers, "by_halley", spoiled)
        failed = torch.ones(1, dtype=torch.bool)
        monkeypatch.setattr(arithmetic, "rebuild", lambda x, *_, **__: Rebuilt(x, failed.int(), failed))
        w = torch.randn(40, 40)
        q, proof = polar(w, certificate=True)
        assert bool(proof.converged) and dfi(q) <= 1e-6 and overlap(q, w) >= 1 - 5e-4


class TestCompile:
    def test_a_fixed_schedule_compiles_in_one_graph(self) -> None:
        steps = schedules.products(1e-3)
        compiled = torch.compile(lambda x: solvers.by_schedule(x, steps), fullgraph=True, backend="aot_eager")
        x = torch.randn(2, 30, 40) / 40
        torch.testing.assert_close(compiled(x), solvers.by_schedule(x, steps))

    def test_so_does_the_recipe(self) -> None:
        compiled = torch.compile(lambda x: solvers.by_recipe(x, 5), fullgraph=True, backend="aot_eager")
        x = torch.randn(2, 30, 40)
        torch.testing.assert_close(compiled(x), solvers.by_recipe(x, 5))


class TestGradient:
    @pytest.mark.parametrize("shape", [(4, 4), (3, 6), (6, 3), (2, 3, 5), (1, 4), (4, 1)])
    def test_gradcheck(self, shape: tuple[int, ...]) -> None:
        w = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
        assert torch.autograd.gradcheck(lambda x: polar(x, tol=0), (w,))

    def test_gradcheck_through_an_iterative_route(self) -> None:
        w = torch.randn(20, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
        assert torch.autograd.gradcheck(lambda x: polar(x, tol=0), (w,), fast_mode=True)

    def test_repeated_singular_values_do_no_harm(self) -> None:
        w = torch.eye(5, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x: polar(x, tol=0), (w,))

    def test_completed_directions_get_no_gradient(self) -> None:
        w = torch.randn(6, 6, dtype=torch.float64)
        w[2] = 0
        w[4] = 0
        w.requires_grad_()
        polar(w).square().sum().backward()
        assert w.grad is not None and bool(torch.isfinite(w.grad).all())

    def test_dtype_and_lists(self) -> None:
        tensors = [
            torch.randn(5, 7).bfloat16().requires_grad_(),
            torch.randn(4, 4),
            torch.randn(8, 3, requires_grad=True),
        ]
        factors = polar(tensors)
        assert [q.requires_grad for q in factors] == [True, False, True]
        sum(q.float().sum() for q in factors).backward()
        assert tensors[0].grad is not None and tensors[0].grad.dtype == torch.bfloat16

    def test_no_graph_without_need(self) -> None:
        w = torch.randn(4, 4, requires_grad=True)
        with torch.no_grad():
            assert not polar(w).requires_grad


class TestErrors:
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_not_finite_says_where(self, bad: float) -> None:
        w = torch.randn(2, 5, 6)
        w[1, 2, 3] = bad
        with pytest.raises(ValueError, match=r"w is not finite: .* at index \(1, 2, 3\) \(1 such"):
            polar(w)
        with pytest.raises(ValueError, match=r"w\[1\] is not finite"):
            polar([torch.randn(3, 3), w])

    @pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
    def test_dtype(self, dtype: torch.dtype) -> None:
        with pytest.raises(TypeError, match=str(dtype)):
            polar(torch.ones(3, 3, dtype=dtype))

    def test_dimensions(self) -> None:
        with pytest.raises(ValueError, match=r"shape \(3,\).*two dimensions"):
            polar(torch.ones(3))
        with pytest.raises(TypeError, match="not list"):
            polar([[1.0]])  # type: ignore[list-item]

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"solver": "magic"}, "'auto', 'fast', 'paper', 'svd'"),
            ({"tol": -1.0}, "at least 0"),
            ({"tol": 1.0}, "below 1"),
            ({"steps": 5}, "belongs to solver"),
            ({"solver": "paper", "steps": -1}, "negative"),
        ],
    )
    def test_options(self, options: dict[str, object], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            polar(torch.ones(2, 2), **options)  # type: ignore[call-overload]


def test_the_public_names() -> None:
    assert rekindle.polar is polar and rekindle.Certificate is isometry.Certificate


@pytest.mark.parametrize(("n", "m"), [(36, 144), (64, 256), (128, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_a_wide_matrix_is_solved_with_does_not_change_it(n, m, dtype):
    """Sharded models solve other batches than one process does, and must end at the same weights."""
    batch = torch.randn(4, n, m, dtype=dtype, generator=torch.Generator().manual_seed(n))
    batch[0] *= torch.logspace(0, 1, n, dtype=dtype)[:, None]  # a wider spectrum than the others have
    together = polar(batch, certificate=True)[0]
    for one, expected in zip(batch, together, strict=True):
        found = polar(one, certificate=True)[0]
        assert (found - expected).norm() <= 1e-6 * expected.norm()
