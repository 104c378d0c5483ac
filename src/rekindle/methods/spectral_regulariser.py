"""Spectral regularisation: largest singular values near one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.blocks.names import named_modules, named_parameters
from rekindle.methods.matrices import Chosen, chosen_matrices, with_gradient
from rekindle.methods.regulariser import Regulariser
from rekindle.methods.remedy import PerModel
from rekindle.projection.targets import Targets

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


class SpectralRegulariser(Regulariser):
    """coefficient·[Σ(σ_max(W)^k − 1)² + Σ(max|γ|^k − 1)² + Σ‖b‖^2k] (Lewandowski et al., 2024).

    What multiplies is pulled to one, what adds to zero: weights by their largest singular value (a convolution
    flattened to (out, in·kh·kw)), scales γ of normalisation layers, biases b. σ_max comes from `iterations` steps of
    a power iteration whose vectors are kept from call to call, as in spectral normalisation; k = 2 in the paper.

    >>> model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 1, bias=False))
    >>> _ = nn.init.eye_(model[0].weight), nn.init.constant_(model[2].weight, 3**-0.5)
    >>> SpectralRegulariser(1.0).loss_term(model).item() < 1e-6
    True
    """

    name = "spectral-regulariser"

    def __init__(
        self,
        coefficient: float = 1e-3,
        k: int = 2,
        *,
        iterations: int = 1,
        decoupled: bool = False,
        targets: Targets = "layers",
        seed: int = 0,
    ) -> None:
        if k < 1 or iterations < 1:
            raise ValueError(f"k={k} and iterations={iterations} must be at least 1")
        super().__init__(coefficient, decoupled=decoupled, seed=seed)
        self.k, self.iterations, self.targets = k, iterations, targets
        self._chosen: PerModel[tuple[list[Chosen], list[Tensor], list[Tensor]]] = PerModel()
        self._vectors: dict[str, Tensor] = {}

    def penalty(self, model: nn.Module) -> Tensor:
        """The sum over weights, scales and biases."""
        if model not in self._chosen:
            self._chosen[model] = (chosen_matrices(model, self.targets, conv="flat")[0], *_vectors_of(model))
        chosen, scales, biases = self._chosen[model]
        terms = [bias.square().sum() ** self.k for bias in biases]
        terms += [(scale.abs().amax() ** self.k - 1).square() for scale in scales]
        for each in chosen:
            weight = getattr(each.weight.owner, each.weight.tensor)
            for number, block in enumerate(each.blocks):
                sigma = self._largest(f"{each.found.name}:{number}", with_gradient(block, weight))
                terms.append((sigma**self.k - 1).square().sum())
        return torch.stack(terms).sum()

    def _largest(self, name: str, w: Tensor) -> Tensor:
        """σ_max of each matrix (count, out, in): uᵀWv with vectors that get no gradient."""
        with torch.no_grad():
            v = self._vectors.get(name)
            steps = self.iterations
            if v is None:
                v = torch.randn(w.shape[0], w.shape[2], 1, generator=self._own).to(w)
                steps = max(steps, 15)  # the vectors start anywhere
            for _ in range(steps):
                u = nn.functional.normalize(w @ v, dim=1)
                v = nn.functional.normalize(w.mT @ u, dim=1)
            self._vectors[name] = v
        return (u.mT @ w @ v).flatten()

    def gathered(self) -> dict[str, Any]:
        """The vectors of the power iteration."""
        return {"vectors": dict(self._vectors)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        self._vectors = dict(state["vectors"])


def _vectors_of(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """The scales of normalisation layers, and all biases."""
    norms = {name for name, module in named_modules(model) if isinstance(module, _NORMS)}
    scales: list[Tensor] = []
    biases: list[Tensor] = []
    for name, parameter in named_parameters(model):
        owner, _, local = name.rpartition(".")
        if parameter.requires_grad and owner in norms and local == "weight":
            scales.append(parameter)
        elif parameter.requires_grad and "bias" in local:
            biases.append(parameter)
    return scales, biases
