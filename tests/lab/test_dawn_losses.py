"""Orthogonal starts and diversity losses against plain float64 loops and the Welch bound."""

import pytest
import torch

from rekindle.initial import orthogonal_
from rekindle.lab.dawn import basis_usage, basis_usage_loss, diversity_loss, mean_squared_cosine
from rekindle.measures.matrices import welch_bound


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=gen(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(5, 5), (7, 3), (3, 7), (2, 6, 4), (2, 3, 4, 6), (1, 5)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_smaller_side_is_orthonormal(shape, dtype):
    w = orthogonal_(torch.empty(shape, dtype=dtype), gain=2.0, generator=gen()).double() / 2
    gram = w @ w.mT if shape[-2] <= shape[-1] else w.mT @ w
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(gram, torch.eye(gram.shape[-1]).double().expand_as(gram), atol=tolerance, rtol=0)
    if len(shape) == 3:
        assert not torch.equal(w[0], w[1])


def test_the_draw_is_uniform_and_only_the_generators():
    # Without the sign correction the first column of a square Q is always on one side: its mean is far from 0.
    many = orthogonal_(torch.empty(2000, 3, 3, dtype=torch.float64), generator=gen())
    assert many.mean(0).abs().max() < 0.05
    before = torch.get_rng_state()
    again = orthogonal_(torch.empty(2000, 3, 3, dtype=torch.float64), generator=gen())
    assert torch.equal(many, again)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("shape", [(6, 3), (3, 6), (5, 5)])
def test_mean_squared_cosine_is_the_mean_over_pairs(shape):
    x = randn(*shape)
    x[1] = 0
    pairs = []
    for i in range(shape[0]):
        for j in range(shape[0]):
            if i != j:
                norms = x[i].norm() * x[j].norm()
                pairs.append(float((x[i] @ x[j] / norms) ** 2) if norms > 0 else 0.0)
    assert mean_squared_cosine(x).item() == pytest.approx(sum(pairs) / len(pairs), rel=1e-12)


def test_qr_start_reaches_the_welch_bound_and_gaussian_does_not():
    # 512 neurons in 16 dimensions: the bound is .0607, QR measures 1.003 times that, Gaussian 1.03.
    assert welch_bound(512, 16) == pytest.approx(0.0607, abs=1e-4)
    qr = orthogonal_(torch.empty(512, 16), generator=gen())
    assert diversity_loss(qr).item() == pytest.approx(1.003, abs=0.003)
    assert diversity_loss(randn(512, 16)).item() == pytest.approx(1.03, abs=0.02)
    assert diversity_loss(qr, relative=False).item() == pytest.approx(0.0608, abs=3e-4)
    assert diversity_loss(torch.eye(4)).item() == 0  # n ≤ d: the plain value


def test_memory_is_bounded_by_the_smaller_gram():
    # 100,000² cosines would need 40 GB.
    assert diversity_loss(torch.randn(100_000, 8, generator=gen())).item() == pytest.approx(1.0, abs=0.01)


def test_basis_usage_counts_smoothly_and_has_a_gradient():
    c = torch.tensor([[1.0, 0.01, 0.0, 0.0], [1.0, -1.0, 1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    usage = basis_usage(c)
    assert 1 <= usage[0].item() < 1.001
    assert usage[1].item() == pytest.approx(4)
    torch.testing.assert_close(basis_usage(7 * c), usage)
    loss = basis_usage_loss(c, at_least=3)
    assert loss.item() == pytest.approx((1 - usage[0].item() / 3) / 2)
    (gradient,) = torch.autograd.grad(loss, c)
    assert gradient[0].abs().max() > 0
    assert gradient[1].abs().max() == 0
    assert torch.isfinite(basis_usage(torch.zeros(2, 4))).all()


def test_impossible_requests_are_named():
    with pytest.raises(ValueError, match="two axes"):
        orthogonal_(torch.empty(3))
    with pytest.raises(ValueError, match="int64"):
        orthogonal_(torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="two rows"):
        diversity_loss(torch.ones(1, 4))
    with pytest.raises(ValueError, match="at_least"):
        basis_usage_loss(torch.ones(2, 2), at_least=3)


def test_gradients_match_finite_differences_and_descent_separates_neurons():
    x = randn(5, 3).requires_grad_()
    assert torch.autograd.gradcheck(diversity_loss, x)
    assert torch.autograd.gradcheck(lambda c: basis_usage_loss(c, at_least=2.9), x)
    x = (torch.ones(8, 4) + 0.1 * torch.randn(8, 4, generator=gen())).requires_grad_()
    optimizer = torch.optim.Adam([x], lr=0.05)
    first = diversity_loss(x).item()
    for _ in range(300):
        optimizer.zero_grad()
        diversity_loss(x).backward()
        optimizer.step()
    assert first > 2
    assert diversity_loss(x).item() < 1.01
