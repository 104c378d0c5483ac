"""FIRE as an object with a configuration: one weight matrix at a time, decided by the caller.

For code that walks its own layers. `rekindle.fire` does a whole model, finds convolutions and fused projections,
and keeps a receipt; this is the small interface: configure once, ask `should_reinitialize`, call `reinitialize`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import Parameter

from rekindle.engine.isometry import polar
from rekindle.engine.solving import Solver
from rekindle.measures.spectra import condition_number, participation_rank, singular_values
from rekindle.optimizers.resetting import check, reset

_RANGES: dict[str, tuple[float, float]] = {
    "target_dfi": (1e-6, 1e-2),
    "newton_schulz_iters": (3, 15),
    "variance_factor": (0.5, 1.5),
    "min_weight_norm": (1e-5, 1e-2),
}


@dataclass(frozen=True, init=False)
class FIREConfig:
    """How weights are reinitialized, and when.

    >>> FIREConfig().target_dfi, FIREConfig(target_sfe=1e-3).target_dfi
    (1e-05, 0.001)
    >>> FIREConfig(newton_schulz_iters=50)
    Traceback (most recent call last):
    ValueError: newton_schulz_iters=50 is outside [3, 15]

    Args:
        target_dfi: the DfI ‖QQᵀ − I‖²_F that the factor must reach.
        newton_schulz_iters: cubic steps of the "paper" solver; the exact solvers stop at target_dfi instead.
        variance_factor: multiplies the scale.
        min_weight_norm: a weight with a smaller Frobenius norm is skipped.
        target_sfe: another name of target_dfi.
        solver: as in `rekindle.polar`.
        scale: "fan_in", √fan_in, or "paper", √(out/in).
        max_condition: `should_reinitialize` from this condition number on.
        max_deviation: the same for the scale-free deviation (DfI/k at its own norm); a Gaussian square matrix has 1.
        min_gradient: gradients have vanished when their norm is below this times the weight's.
    """

    target_dfi: float
    newton_schulz_iters: int
    variance_factor: float
    min_weight_norm: float
    solver: Solver
    scale: Literal["fan_in", "paper"]
    max_condition: float
    max_deviation: float
    min_gradient: float

    def __init__(
        self,
        target_dfi: float | None = None,
        newton_schulz_iters: int = 8,
        variance_factor: float = 1.0,
        min_weight_norm: float = 1e-3,
        *,
        target_sfe: float | None = None,
        solver: Solver = "auto",
        scale: Literal["fan_in", "paper"] = "fan_in",
        max_condition: float = 1e4,
        max_deviation: float = 2.0,
        min_gradient: float = 1e-7,
    ) -> None:
        if target_dfi is not None and target_sfe is not None and target_dfi != target_sfe:
            raise ValueError(f"target_dfi={target_dfi} and target_sfe={target_sfe} are two names for one thing")
        given = target_dfi if target_dfi is not None else target_sfe
        values: dict[str, Any] = {
            "target_dfi": 1e-5 if given is None else given,
            "newton_schulz_iters": newton_schulz_iters,
            "variance_factor": variance_factor,
            "min_weight_norm": min_weight_norm,
            "solver": solver,
            "scale": scale,
            "max_condition": max_condition,
            "max_deviation": max_deviation,
            "min_gradient": min_gradient,
        }
        for name, (low, high) in _RANGES.items():
            if not low <= values[name] <= high:
                raise ValueError(f"{name}={values[name]} is outside [{low:g}, {high:g}]")
        for name in ("max_condition", "max_deviation", "min_gradient"):
            if not values[name] > 0:
                raise ValueError(f"{name}={values[name]} must be positive")
        if not isinstance(newton_schulz_iters, int):
            raise TypeError(f"newton_schulz_iters={newton_schulz_iters!r} must be a whole number")
        if scale not in ("fan_in", "paper"):
            raise ValueError(f"scale={scale!r} is neither 'fan_in' nor 'paper'")
        if solver not in get_args(Solver):
            raise ValueError(f"solver={solver!r} is not one of {', '.join(map(repr, get_args(Solver)))}")
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def target_sfe(self) -> float:
        """Another name of target_dfi: it compares QQᵀ with I, not the weight with what it was."""
        return self.target_dfi


@dataclass(frozen=True)
class ReinitStats:
    """What `reinitialize` did to one weight.

    >>> stats = ReinitStats(True, initial_norm=2.0, final_norm=3.0, orthogonality_error=1e-6, iterations_used=7)
    >>> stats.is_successful(), stats.norm_preservation()
    (True, 1.5)

    Attributes:
        was_reinitialized: False for a weight that was too small.
        initial_norm: its Frobenius norm before.
        final_norm: its Frobenius norm after.
        orthogonality_error: the DfI of the factor before it is scaled.
        iterations_used: steps of the solver.
    """

    was_reinitialized: bool
    initial_norm: float
    final_norm: float
    orthogonality_error: float
    iterations_used: int

    def is_successful(self) -> bool:
        """Whether the weight was written and its factor is an isometry to 1e-3."""
        return self.was_reinitialized and self.orthogonality_error < 1e-3

    def norm_preservation(self) -> float:
        """Norm after ÷ norm before; NaN for a weight that was zero."""
        return self.final_norm / self.initial_norm if self.initial_norm else math.nan

    def to_dict(self) -> dict[str, Any]:
        """The fields and the two derived values."""
        return {**asdict(self), "successful": self.is_successful(), "norm_preservation": self.norm_preservation()}


class FIREReinitializer:
    """Reinitializes weight matrices in place.

    >>> layer = torch.nn.Linear(8, 4)
    >>> fire = FIREReinitializer()
    >>> fire.reinitialize(layer.weight).is_successful()
    True
    >>> torch.allclose(layer.weight @ layer.weight.T, 8 * torch.eye(4), atol=1e-4)
    True

    Args:
        config: how and when; its defaults if it is left out.
    """

    def __init__(self, config: FIREConfig | None = None) -> None:
        self.config = config or FIREConfig()

    def reinitialize(self, weight: Tensor, *, optimizer: object = None) -> ReinitStats:
        """Replace `weight` by its scaled nearest isometry, in place; with `optimizer`, start its state afresh too.

        A weight whose norm is below `min_weight_norm` is not touched, and the stats say so.

        >>> FIREReinitializer().reinitialize(torch.zeros(3, 3)).was_reinitialized
        False
        """
        matrix = self._matrix(weight)
        norm = float(torch.linalg.vector_norm(matrix))
        if norm < self.config.min_weight_norm:
            return ReinitStats(False, norm, norm, math.nan, 0)
        changed = {"weight": weight} if isinstance(weight, Parameter) else {}
        if optimizer is not None:
            if not changed:
                raise TypeError("with optimizer= the weight must be the Parameter that it trains, not a plain tensor")
            check(optimizer, changed)
        out, in_ = matrix.shape
        k = min(out, in_)
        paper = self.config.solver == "paper"
        factor, certificate = polar(
            matrix,
            solver=self.config.solver,
            tol=self.config.target_dfi / k,
            steps=self.config.newton_schulz_iters if paper else None,
            certificate=True,
        )
        scale = math.sqrt(in_ if self.config.scale == "fan_in" else out / in_) * self.config.variance_factor
        with torch.no_grad():
            weight.copy_(factor * scale)
        if optimizer is not None:
            reset(optimizer, changed)
        return ReinitStats(
            was_reinitialized=True,
            initial_norm=norm,
            final_norm=float(torch.linalg.vector_norm(self._matrix(weight))),
            orthogonality_error=float(certificate.residual) * k,
            iterations_used=int(certificate.steps),
        )

    def should_reinitialize(self, weight: Tensor, gradients: Tensor | None = None) -> bool:
        """Whether a weight needs it: not if tiny; yes if its gradient vanished, or if its spectrum is uneven.

        >>> fire = FIREReinitializer()
        >>> fire.should_reinitialize(torch.eye(4)), fire.should_reinitialize(torch.eye(4), torch.zeros(4, 4))
        (False, True)
        >>> fire.should_reinitialize(torch.diag(torch.tensor([1.0, 1e-6])))
        True
        """
        matrix = self._matrix(weight)
        norm = float(torch.linalg.vector_norm(matrix))
        if norm < self.config.min_weight_norm:
            return False
        if gradients is not None and float(torch.linalg.vector_norm(gradients)) < self.config.min_gradient * norm:
            return True
        spectrum = singular_values(matrix)
        deviation = spectrum.numel() / float(participation_rank(spectrum)) - 1
        return float(condition_number(spectrum)) > self.config.max_condition or deviation > self.config.max_deviation

    def _matrix(self, weight: Tensor) -> Tensor:
        if weight.ndim != 2 or not weight.is_floating_point():
            raise ValueError(
                f"expected a real floating-point matrix, got shape {tuple(weight.shape)} of {weight.dtype}: "
                "rekindle.fire(model) handles convolutions and fused weights"
            )
        if not bool(torch.isfinite(weight).all()):
            raise ValueError(f"the weight of shape {tuple(weight.shape)} holds NaN or Inf")
        matrix = weight.detach()
        return matrix if matrix.dtype in (torch.float32, torch.float64) else matrix.float()
