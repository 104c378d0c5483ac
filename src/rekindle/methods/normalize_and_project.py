"""Normalize-and-Project: weights keep the norm that they started with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rekindle.engine.devices import to_float64
from rekindle.initial import UnknownStart
from rekindle.methods.caching import PerModel
from rekindle.methods.call import Call
from rekindle.methods.remedy import Remedy
from rekindle.methods.selection import Share, mask_of, plain_weights
from rekindle.optimizers import StateReset
from rekindle.projection.receipt import BlockRecord, Receipt
from rekindle.projection.targets import Targets
from rekindle.sharding.team import refuse_shards


class KeptNorms(Remedy):
    """A remedy that holds weights to the norms that they had at the start; subclasses implement `apply`.

    `remember(model)` stores the norms while the model is new, of a fused weight that of its targeted parts; or give
    `norms` by name.
    """

    def __init__(self, *, targets: Targets = "auto", norms: Mapping[str, float] | None = None, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.targets = targets
        self._norms = dict(norms) if norms is not None else None
        self._remembered = norms is None
        self._chosen: PerModel[tuple[list[Share], dict[str, str]]] = PerModel()

    def remember(self, model: nn.Module) -> None:
        """Store the norms that the weights have now."""
        refuse_shards(model, type(self).__name__, call="method.remember(model)")
        shares, _ = self._chosen.get(model, lambda: self.choose(model))
        self._norms = dict(zip([share.name for share in shares], norms_of(shares), strict=True))

    def weights(self, model: nn.Module) -> tuple[list[Share], dict[str, str]]:
        """The weights whose norms are kept, and why others are not.

        A batch can show later what a weight is that `remember` could not know: its first norm is not known.
        """
        shares, skipped = self._chosen.get(model, lambda: self.choose(model))
        if not self._remembered or self._norms is None:
            return shares, skipped
        late = {
            share.name: "no first norm: it was not among the targets when the start was remembered"
            for share in shares
            if share.name not in self._norms
        }
        return [share for share in shares if share.name not in late], {**skipped, **late}

    def choose(self, model: nn.Module) -> tuple[list[Share], dict[str, str]]:
        """Find them."""
        picked, skipped = plain_weights(model, self.targets)
        return [Share(c.name, c.parameters()[c.name], None if c.whole else mask_of(c)) for c in picked], skipped

    def first(self, shares: list[Share]) -> list[float]:
        """The norms at the start."""
        if self._norms is None:
            raise UnknownStart(
                f"{type(self).__name__} needs the norms at the start: call remember(model) while it is new"
            )
        if missing := [share.name for share in shares if share.name not in self._norms]:
            raise UnknownStart(f"no first norm is stored for {missing[0]!r}")
        return [self._norms[share.name] for share in shares]

    def gathered(self) -> dict[str, Any]:
        """The first norms."""
        return {"norms": None if self._norms is None else dict(self._norms)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        self._norms = None if state["norms"] is None else dict(state["norms"])


def norms_of(shares: list[Share]) -> list[float]:
    """The norm of each of these."""
    with torch.no_grad():
        norms = [to_float64(torch.linalg.vector_norm(share.of(share.parameter))) for share in shares]
        values: list[float] = torch.stack([norm.to(norms[0].device) for norm in norms]).tolist()
    return values


class NormalizeAndProject(KeptNorms):
    """W ← W·‖W₀‖_F/‖W‖_F after every step (NaP; Lyle et al., 2024).

    Behind a normalization layer, growing weights are a shrinking learning rate; a constant norm keeps it constant.
    This is the projection half, of every weight but the output layer's, whose scale no normalization takes back; the
    layers that normalize, and their own scales and offsets, belong to the model. Call `remember(model)` while it is
    new. The optimizer's state is kept.

    >>> model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    >>> method = NormalizeAndProject()
    >>> method.remember(model)
    >>> norm = model[0].weight.norm().item()
    >>> _ = model[0].weight.data.mul_(7)
    >>> _ = method(model)
    >>> abs(model[0].weight.norm().item() - norm) < 1e-5
    True

    Args:
        targets: which parameters, as for `rekindle.plan`.
        norms: the norms to keep by name, instead of those that `remember` saw.
        seed: what its own random numbers start from, when the call gives no generator.
    """

    name = "normalize-and-project"
    moment = "step"

    def apply(self, call: Call) -> Receipt:
        """Give every targeted weight its first norm again."""
        shares, skipped = self.weights(call.model)
        kept, now = self.first(shares), norms_of(shares)
        for share, norm in zip(shares, now, strict=True):
            if not 0 < norm < float("inf"):
                raise ValueError(f"{share.name!r} has norm {norm}, it cannot be rescaled; nothing was changed")
        records = []
        with torch.no_grad():
            for share, first, norm in zip(shares, kept, now, strict=True):
                if share.mask is None:
                    share.parameter.mul_(first / norm)
                else:
                    share.parameter.copy_(share.merged(share.parameter * (first / norm)))
                records.append(BlockRecord(share.name, norm_before=norm, norm_after=first))
        return Receipt(self.name, tuple(records), skipped, optimizer=StateReset("none"))
