"""`polar` as one operator of torch: what compilers, exporters and transforms make of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import rekindle
from rekindle.engine.operator import operator
from rekindle.engine.solving import Solver

SOLVERS = get_args(Solver)
SHAPES = [(6, 9), (9, 6), (3, 70, 70)]


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(3))


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_whole_graph_is_compiled_and_gives_the_same_bits_and_layout(solver: Any, shape: tuple[int, ...]) -> None:
    w = random(*shape, dtype=torch.float32)
    expected = rekindle.polar(w, solver=solver)
    found = compiled(lambda x: rekindle.polar(x, solver=solver))(w)
    assert torch.equal(found, expected) and found.stride() == expected.stride()


def test_certificates_lists_and_gradients_are_compiled() -> None:
    w = random(4, 20, 30, dtype=torch.float32)
    q, checked = compiled(lambda x: rekindle.polar(x, certificate=True))(w)
    assert bool(checked.converged.all()) and torch.equal(q, rekindle.polar(w))
    pair = compiled(lambda x: rekindle.polar([x, x[0].mT]))(w)
    assert [tuple(x.shape) for x in pair] == [(4, 20, 30), (30, 20)]
    one, other = w.clone().requires_grad_(), w.clone().requires_grad_()
    weight = random(4, 20, 30, dtype=torch.float32)
    compiled(lambda x: (rekindle.polar(x) * weight).sum())(one).backward()
    (rekindle.polar(other) * weight).sum().backward()
    torch.testing.assert_close(one.grad, other.grad)


class Isometric(nn.Module):
    def __init__(self, solver: Solver) -> None:
        super().__init__()
        self.weight, self.solver = nn.Parameter(random(8, 5, dtype=torch.float32)), solver

    def forward(self, x: Tensor) -> Tensor:
        return x @ rekindle.polar(self.weight, solver=self.solver).mT


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("strict", [False, True])
def test_a_model_is_exported(solver: Any, strict: bool) -> None:
    model, x = Isometric(solver), random(3, 5, dtype=torch.float32)
    program = torch.export.export(model, (x,), strict=strict)
    torch.testing.assert_close(program.module()(x), model(x))
    assert any("rekindle.polar" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("solver", SOLVERS)
def test_opcheck_passes(solver: str) -> None:
    several = [random(4, 6, dtype=torch.float32), random(6, 4, dtype=torch.float32), random(2, 7, 3).requires_grad_()]
    tests = ("test_schema", "test_faketensor") if solver != "auto" else torch.library._OPCHECK_DEFAULT_UTILS
    torch.library.opcheck(operator, (several, solver, 1e-6, 10, True, 0, True), test_utils=tests)


def test_results_share_no_memory() -> None:
    found = operator([random(4, 6), random(4, 6), random(6, 4)], "auto", 1e-6, 10, True, 0, True)
    assert len({x.untyped_storage().data_ptr() for x in found}) == len(found) == 30


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_vmap_is_the_batch(solver: Any, dim: int) -> None:
    w = random(5, 12, 8, dtype=torch.float32)
    found = vmap(lambda x: rekindle.polar(x, solver=solver), in_dims=dim)(w.movedim(0, dim))
    torch.testing.assert_close(found, rekindle.polar(w, solver=solver))


def test_vmap_of_a_list_of_which_a_part_is_batched_and_of_certificates() -> None:
    w, fixed = random(5, 4, 6), random(3, 3)
    several, one = vmap(lambda x: tuple(rekindle.polar([x, fixed])))(w)
    torch.testing.assert_close(several, rekindle.polar(w))
    torch.testing.assert_close(one, rekindle.polar(fixed).expand(5, 3, 3))
    residual = vmap(lambda x: rekindle.polar(x, certificate=True)[1].residual)(w)
    assert residual.shape == (5,) and float(residual.max()) < 1e-6


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (5, 5)])
def test_derivatives_in_both_directions_and_twice(shape: tuple[int, int]) -> None:
    w = random(*shape).requires_grad_()

    def exact(x: Tensor) -> Tensor:
        return rekindle.polar(x, tol=0)

    torch.autograd.gradcheck(exact, (w,), check_forward_ad=True)
    torch.autograd.gradgradcheck(exact, (w,))
    plain = w.detach()
    torch.testing.assert_close(jacfwd(exact)(plain), jacrev(exact)(plain))
    torch.testing.assert_close(
        jvp(exact, (plain,), (plain,))[1], torch.zeros(shape, dtype=torch.float64), atol=1e-9, rtol=0
    )

    def loss(x: Tensor) -> Tensor:
        return exact(x).pow(3).sum()

    torch.testing.assert_close(hessian(loss)(plain), jacrev(jacrev(loss))(plain))
    torch.testing.assert_close(hessian(loss)(plain), torch.autograd.functional.hessian(loss, plain))
    both = torch.stack([plain, 2 * plain])
    torch.testing.assert_close(vmap(grad(loss))(both), grad(lambda x: vmap(loss)(x).sum())(both))


def test_a_second_derivative_where_all_singular_values_are_equal() -> None:
    """Eigenvectors have no derivative there, the polar factor has."""
    w = (3 * torch.eye(4, 6, dtype=torch.float64)).requires_grad_()
    torch.autograd.gradgradcheck(lambda x: rekindle.polar(x, tol=0), (w,))


def test_gradients_of_half_precision_weights_keep_their_dtype() -> None:
    w = random(6, 8, dtype=torch.bfloat16).requires_grad_()
    rekindle.polar(w).pow(3).sum().backward()
    assert w.grad is not None and w.grad.dtype == torch.bfloat16


def test_an_entry_that_is_not_finite_is_named_through_the_operator() -> None:
    w = random(2, 3, 4)
    w[1, 2, 0] = torch.inf
    with pytest.raises(ValueError, match=r"w\[1\] is not finite: inf at index \(1, 2, 0\)"):
        rekindle.polar([random(3, 3), w])
