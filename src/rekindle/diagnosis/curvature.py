"""The sharpest direction of the loss: the Hessian eigenvalue of largest magnitude, with its sign.

Power iteration on Hessian-vector products, so the Hessian is never formed. Fused attention kernels have no
second derivative on CPU; the plain one is forced for the duration.

>>> import torch
>>> bowl = torch.nn.Linear(2, 1, bias=False)
>>> loss = lambda model, batch: (model.weight * torch.tensor([[3.0, -5.0]]) * model.weight).sum() / 2
>>> found = hessian_eigenvalue(bowl, [torch.zeros(1)], loss)
>>> round(found.value, 3), found.converged
(-5.0, True)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from rekindle.engine.devices import to_float64
from rekindle.isolation import Batch, Loss, isolated


@dataclass(frozen=True)
class Curvature:
    """`value` is vᵀHv at the last vector; `residual` ‖Hv − value·v‖ ÷ ‖Hv‖ says how close v is to an eigenvector.

    By symmetry of H an eigenvalue lies within residual·‖Hv‖ of `value`. Where two eigenvalues have nearly the
    same magnitude, above all with opposite signs, power iteration cannot decide and `converged` stays False.
    """

    value: float
    converged: bool
    steps: int
    residual: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values.

        >>> Curvature(2.0, True, 3, 0.0).to_dict()["value"]
        2.0
        """
        return asdict(self)


def hessian_eigenvalue(
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Loss,
    *,
    steps: int = 100,
    tol: float = 1e-2,
    seed: int = 0,
    parameters: Sequence[nn.Parameter] | None = None,
) -> Curvature:
    """Largest-magnitude eigenvalue of the Hessian of the mean loss over `batches`, in evaluation mode.

    Over all trainable `parameters` unless some are given. `tol` is on the residual; the value's own error is of
    second order in it. The start vector is drawn from a separate generator with `seed`.

    >>> net = torch.nn.Linear(1, 1)
    >>> hessian_eigenvalue(net, [torch.ones(4, 1)], lambda m, x: m(x).square().mean()).value.__round__(3)
    4.0
    """
    chosen = [p for p in (model.parameters() if parameters is None else parameters) if p.requires_grad]
    if not chosen:
        raise ValueError("no parameter requires a gradient, so there is no Hessian to measure")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    # On the CPU, so that the same seed starts at the same vector on every device.
    generator = torch.Generator().manual_seed(seed)
    v = [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p) for p in chosen]
    with isolated(model), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(False):
        held = list(batches)
        if not held:
            raise ValueError("batches is empty: curvature needs at least one batch")
        value, residual, taken = 0.0, float("inf"), 0
        for step in range(1, steps + 1):
            taken = step
            v = _normalized(v)
            product = _product(model, held, loss, chosen, v)
            value, length = _dot(v, product), _dot(product, product) ** 0.5
            if length == 0:
                return Curvature(0.0, True, taken, 0.0)
            residual = max(0.0, 1 - (value / length) ** 2) ** 0.5
            if residual <= tol or not residual < float("inf"):
                break
            v = product
    return Curvature(value, residual <= tol, taken, residual)


def _product(
    model: nn.Module, batches: list[Batch], loss: Loss, chosen: list[nn.Parameter], v: list[Tensor]
) -> list[Tensor]:
    """H·v of the mean loss, batch by batch so that one graph is alive at a time."""
    total = [torch.zeros_like(p) for p in chosen]
    for batch in batches:
        gradients = torch.autograd.grad(loss(model, batch), chosen, create_graph=True, allow_unused=True)
        inner = [(g * each).sum() for g, each in zip(gradients, v, strict=True) if g is not None and g.requires_grad]
        if not inner:
            continue
        products = torch.autograd.grad(torch.stack(inner).sum(), chosen, allow_unused=True)
        for sum_, found in zip(total, products, strict=True):
            if found is not None:
                sum_ += found / len(batches)
    return total


def _dot(a: list[Tensor], b: list[Tensor]) -> float:
    return float(sum(float((to_float64(x) * to_float64(y)).sum()) for x, y in zip(a, b, strict=True)))


def _normalized(v: list[Tensor]) -> list[Tensor]:
    length = _dot(v, v) ** 0.5
    return [each / length for each in v]
