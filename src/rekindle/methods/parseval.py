"""Parseval regularisation: rows that stay orthogonal."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rekindle.methods.matrices import Chosen, chosen_matrices, with_gradient
from rekindle.methods.regulariser import Regulariser
from rekindle.methods.remedy import PerModel
from rekindle.projection.targets import Targets


class Parseval(Regulariser):
    """coefficient·Σ‖WWᵀ − scale·I‖²_F (Cissé et al., 2017; for plasticity Chung et al., 2024).

    A convolution is flattened to (out, in·kh·kw). The identity has the size of the rows, as published, which a
    matrix with out > in cannot reach; `side="smaller"` uses the smaller Gram matrix instead. The output head is not
    among the targets. Chung et al. set `scale` to the square of the gain of their orthogonal start (2 for ReLU) and
    the coefficient in proportion to 1/width². FIRE's form of it has `targets="layers"`, head included, and
    `norms=True`: Σ(γ² − scale)² of every normalisation layer's weight γ is added.

    >>> model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.ReLU(), nn.Linear(2, 1))
    >>> _ = nn.init.orthogonal_(model[0].weight)
    >>> Parseval(1.0).loss_term(model).item() < 1e-10
    True
    """

    name = "parseval"

    def __init__(
        self,
        coefficient: float = 1e-3,
        scale: float = 1.0,
        *,
        side: str = "rows",
        norms: bool = False,
        decoupled: bool = False,
        targets: Targets = "auto",
        seed: int = 0,
    ) -> None:
        if side not in ("rows", "smaller"):
            raise ValueError(f"side={side!r} is neither 'rows' nor 'smaller'")
        super().__init__(coefficient, decoupled=decoupled, seed=seed)
        self.scale, self.side, self.norms, self.targets = scale, side, norms, targets
        self._chosen: PerModel[list[Chosen]] = PerModel()

    def penalty(self, model: nn.Module) -> Tensor:
        """The sum over all targeted matrices."""
        if model not in self._chosen:
            self._chosen[model] = chosen_matrices(model, self.targets, conv="flat")[0]
        terms = []
        for each in self._chosen[model]:
            weight = getattr(each.weight.owner, each.weight.tensor)
            for block in each.blocks:
                w = with_gradient(block, weight)
                if self.side == "smaller" and block.out > block.in_:
                    w = w.mT
                eye = torch.eye(w.shape[-2], dtype=w.dtype, device=w.device)
                terms.append((w @ w.mT - self.scale * eye).square().sum())
        if self.norms:
            terms += [(gamma.square() - self.scale).square().sum() for gamma in _gammas(model)]
        return torch.stack(terms).sum()


def _gammas(model: nn.Module) -> list[nn.Parameter]:
    """The weights of the normalisation layers: vectors that are called weight."""
    return [p for name, p in model.named_parameters() if p.dim() == 1 and name.rpartition(".")[2] == "weight"]
