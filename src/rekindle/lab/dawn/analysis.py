"""What became of a DAWN's neurons: who is chosen, who resembles whom, and how much of the basis is in use.

`analyze(model, batches)` returns an `Analysis` that prints itself and gives `to_dict()`.
Routing is looked at on data; the coefficients are looked at as matrices. There are two of these per layer, one for
each factor of the up-projection, and both are shown.

>>> from rekindle.lab.dawn import DAWN, DAWNConfig
>>> small = DAWNConfig(width=8, heads=2, hidden=12, layers=2, neurons=40, chosen=4, neuron_rank=4, basis=4)
>>> print(analyze(DAWN(small), [torch.arange(64).view(4, 16)]))
layer  usage  balance  similar pairs  × Welch bound  effective rank  basis per neuron  basis active
    0  ...
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rekindle.lab.dawn import DAWN, DAWNLayer, basis_usage
from rekindle.measures import effective_rank, participation_rank, similar_pairs, singular_values, welch_ratio

Pair = tuple[float, float]

_COLUMNS = {
    "usage": "usage",
    "balance": "balance",
    "similar_pairs": "similar pairs",
    "welch_ratio": "× Welch bound",
    "effective_rank": "effective rank",
    "basis_per_neuron": "basis per neuron",
    "basis_active": "basis active",
}
_BINS = 50


@dataclass(frozen=True)
class LayerAnalysis:
    """One layer; a pair holds the values of the two coefficient matrices."""

    usage: float
    """Share of neurons that any token chose."""
    balance: float
    """Effective share of neurons in use: exp of the entropy of `picks`, over their number; 1 if all are chosen alike.
    Unlike `usage` it does not grow with the amount of data."""
    similar_pairs: Pair
    """Share of neuron pairs with |cosine| > τ between their coefficients."""
    welch_ratio: Pair
    """Mean squared cosine over the least possible one: 1 is as diverse as can be."""
    effective_rank: Pair
    """Of the coefficient matrix, as a share of the basis."""
    basis_per_neuron: Pair
    """Basis elements that a neuron draws on, softly counted, on average."""
    basis_active: Pair
    """Effective share of the basis that the recipes composed on this data put their energy in."""
    picks: Tensor
    """(neurons,): each neuron's share of all choices."""
    spectra: Tensor
    """(2, basis): singular values of the coefficient matrices, largest first."""
    cosines: Tensor
    """(2, bins): histogram of the cosines of all pairs, from −1 to 1, summing to 1."""
    basis_shares: Tensor
    """(2, basis): share of the recipes' energy that each basis element has."""

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers and lists."""
        return {name: v.tolist() if isinstance(v, Tensor) else v for name, v in vars(self).items()}


@dataclass(frozen=True)
class Analysis:
    """All layers of one DAWN at one moment."""

    layers: tuple[LayerAnalysis, ...]
    tokens: int
    tau: float

    def mean(self, name: str) -> float:
        """A measure averaged over layers and, where there are two, over both coefficient matrices."""
        if name not in _COLUMNS:
            raise ValueError(f"{name!r} is not a measure of this analysis; there are {', '.join(_COLUMNS)}")
        return float(torch.tensor([getattr(layer, name) for layer in self.layers]).mean())

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able numbers and lists, one entry per layer."""
        return {"tokens": self.tokens, "tau": self.tau, "layers": [layer.to_dict() for layer in self.layers]}

    def __str__(self) -> str:
        rows = [["layer", *_COLUMNS.values()]]
        for number, layer in enumerate(self.layers):
            rows.append([str(number), *(_cell(name, getattr(layer, name)) for name in _COLUMNS)])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([*lines, f"on {self.tokens:,} tokens; similar: |cosine| > {self.tau}; a / b: the two factors"])


@torch.no_grad()
def analyze(model: DAWN, batches: Iterable[Any], *, tau: float = 0.8) -> Analysis:
    """Look at every layer of `model` on `batches` (token tensors, or tuples that start with one)."""
    layers = [layer for layer in model.layers if isinstance(layer, DAWNLayer)]
    neurons = model.config.neurons
    picks = torch.zeros(len(layers), neurons, dtype=torch.float64)
    energy = torch.zeros(len(layers), 2, model.config.basis, dtype=torch.float64)
    tokens = 0
    for batch in batches:
        read: Tensor = batch if isinstance(batch, Tensor) else batch[0]
        tokens += read.numel()
        for number, (layer, routing) in enumerate(zip(layers, model.trace(read)[1], strict=True)):
            picks[number] += torch.bincount(routing.neurons.flatten(), minlength=neurons).cpu()
            recipes = torch.stack(layer.ffn.recipes(routing.dense(neurons)))
            energy[number] += recipes.double().square().sum((1, 2)).cpu()
    if not tokens:
        raise ValueError("batches are empty: usage needs data to be seen on")
    found = [_layer(each.ffn.coefficients, p, e, tau) for each, p, e in zip(layers, picks, energy, strict=True)]
    return Analysis(tuple(found), tokens, tau)


def _layer(coefficients: Tensor, picks: Tensor, energy: Tensor, tau: float) -> LayerAnalysis:
    basis = coefficients.shape[-1]
    spectra = singular_values(coefficients).cpu()
    shares = picks / picks.sum()
    return LayerAnalysis(
        usage=float((picks > 0).double().mean()),
        balance=float(torch.special.entr(shares).sum().exp() / len(picks)),
        similar_pairs=_pair(similar_pairs(coefficients, tau)),
        welch_ratio=_pair(welch_ratio(coefficients)),
        effective_rank=_pair(effective_rank(spectra) / basis),
        basis_per_neuron=_pair(basis_usage(coefficients).mean(-1)),
        # The participation rank squares what it is given: the root of an energy is its singular value.
        basis_active=_pair(participation_rank(energy.sqrt()) / basis),
        picks=shares,
        spectra=spectra,
        cosines=torch.stack([_histogram(each) for each in coefficients]),
        basis_shares=energy / energy.sum(-1, keepdim=True),
    )


def _histogram(rows: Tensor) -> Tensor:
    unit = torch.nn.functional.normalize(rows.double(), dim=-1)
    above = torch.triu_indices(len(unit), len(unit), offset=1, device=unit.device)
    cosines = (unit @ unit.mT)[above[0], above[1]].clamp(-1, 1).cpu()
    counts = torch.histc(cosines, bins=_BINS, min=-1, max=1)
    return counts / counts.sum()


def _pair(values: Tensor) -> Pair:
    first, second = values.tolist()
    return first, second


def _cell(name: str, value: float | Pair) -> str:
    form = {"welch_ratio": ".3f", "basis_per_neuron": ".1f", "similar_pairs": ".2%"}.get(name, ".1%")
    return " / ".join(format(each, form) for each in (value if isinstance(value, tuple) else (value,)))
