"""Normalize-and-Project: weights keep the norm that they started with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from rekindle.initial import UnknownStart
from rekindle.methods.matrices import plain_weights
from rekindle.methods.remedy import PerModel, Remedy
from rekindle.optimizers import StateReset
from rekindle.projection.receipt import Batch, BlockRecord, Loss, Meter, Receipt
from rekindle.projection.targets import Targets


class NormalizeAndProject(Remedy):
    """W ← W·‖W₀‖_F/‖W‖_F after every step (NaP; Lyle et al., 2024).

    Behind a normalisation layer, growing weights are a shrinking learning rate; a constant norm keeps it constant.
    This is the projection half, of every weight but the output layer's, whose scale no normalisation takes back; the
    layers that normalise, and their own scales and offsets, are the model's business. Call `remember(model)`
    while it is new: only the norms are stored. The optimizer's state is kept.

    >>> model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    >>> method = NormalizeAndProject()
    >>> method.remember(model)
    >>> norm = model[0].weight.norm().item()
    >>> _ = model[0].weight.data.mul_(7)
    >>> _ = method(model)
    >>> abs(model[0].weight.norm().item() - norm) < 1e-5
    True
    """

    name = "normalize-and-project"
    moment = "step"

    def __init__(self, *, targets: Targets = "auto", norms: Mapping[str, float] | None = None, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.targets = targets
        self._norms = dict(norms) if norms is not None else None
        self._skipped: dict[str, str] = {}
        self._chosen: PerModel[dict[str, Parameter]] = PerModel()

    def remember(self, model: nn.Module) -> None:
        """Store the norms that the weights have now."""
        weights = self._weights(model)
        self._norms = dict(zip(weights, _norms(list(weights.values())).tolist(), strict=True))

    def __call__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        batches: Iterable[Batch] | None = None,
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
    ) -> Receipt:
        """Give every targeted weight its first norm again."""
        meter = Meter()
        weights = self._weights(model)
        if self._norms is None:
            raise UnknownStart("NormalizeAndProject needs the norms at the start: call remember(model) while it is new")
        if missing := [name for name in weights if name not in self._norms]:
            raise UnknownStart(f"no first norm is stored for {missing[0]!r}")
        now = _norms(list(weights.values())).tolist()
        records = []
        for (name, _), norm in zip(weights.items(), now, strict=True):
            if not 0 < norm < float("inf"):
                raise ValueError(f"{name!r} has norm {norm}, it cannot be rescaled; nothing was changed")
        with torch.no_grad():
            for (name, weight), norm in zip(weights.items(), now, strict=True):
                weight.mul_(self._norms[name] / norm)
                records.append(BlockRecord(name, norm_before=norm, norm_after=self._norms[name]))
        return Receipt(
            self.name,
            tuple(records),
            self._skipped,
            self.settings(),
            StateReset("none"),
            seconds=meter.seconds,
            memory=meter.memory,
        )

    def _weights(self, model: nn.Module) -> dict[str, Parameter]:
        if model not in self._chosen:
            picked, self._skipped = plain_weights(model, self.targets)
            self._chosen[model] = {n: p for c in picked for n, p in c.weight.parameters(c.found.name).items()}
        return self._chosen[model]

    def gathered(self) -> dict[str, Any]:
        """The first norms."""
        return {"norms": None if self._norms is None else dict(self._norms)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        self._norms = None if state["norms"] is None else dict(state["norms"])


def _norms(weights: list[Parameter]) -> Tensor:
    with torch.no_grad():
        return torch.stack([torch.linalg.vector_norm(weight).double() for weight in weights])
