"""From a solver's certificate to the line of a receipt.

The cheap numbers need no product beyond the solver's own: with k = min(out, in), W before and Q its factor,
DfI(W, s) = ‖WWᵀ‖²_F/s⁴ − 2‖W‖²_F/s² + k and SFE = ‖W‖²_F − 2s·tr(QᵀW) + s²‖Q‖²_F.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from rekindle.blocks.finding import Block
from rekindle.engine.isometry import Certificate
from rekindle.measures.matrices import deviation_from_isometry, measure, squared_frobenius_error
from rekindle.measures.spectra import gram, spectral_norm_estimate
from rekindle.projection.receipt import BlockRecord

Measuring = Literal["cheap", "full", "none"]
_SPECTRAL = ("effective_rank", "stable_rank", "srank", "condition_number", "spectrum")


def record(
    name: str,
    block: Block,
    certificate: Certificate,
    scale: Tensor,
    *,
    strength: float,
    before: Tensor,
    factor_norm: Tensor,
    kept: Tensor,
    stored: Tensor,
    written_exactly: bool,
    measuring: Measuring,
    fallback: int = 0,
) -> BlockRecord:
    """The record of one block.

    before and stored: its matrices (count, out, in) before the write and as they now are; before is read in full
    measuring only. factor_norm: ‖Q‖_F a matrix. kept: which matrices were left as they are. written_exactly: what is
    stored is s·Q up to the rounding of one float32 product, so that its DfI is the certificate's.
    """
    k = block.smaller
    known: dict[str, Any] = {
        "name": name,
        "role": block.role,
        "part": block.part,
        "count": block.count,
        "out": block.out,
        "in_": block.in_,
        "scale": float(scale.double().mean()),
        "residual": float(certificate.residual.max()),
        "steps": int(certificate.steps.max()),
        "completed": int(certificate.completed.sum()),
        "converged": bool(certificate.converged.all()),
        "fallback": fallback,
    }
    if measuring == "none":
        return BlockRecord(**known)
    norm, energy, s = certificate.norm.double(), certificate.gram_norm.double().square(), scale.double()
    per_dimension = (
        certificate.residual.double() if written_exactly else deviation_from_isometry(stored, scale).double() / k
    )
    known["residual_stored"] = float(per_dimension.max())
    known["dfi_after"] = _sum(per_dimension * k)
    known["norm_before"] = float(norm.square().sum().sqrt())
    known["spectral_before"] = float(certificate.spectral_norm.max())
    known["dfi_free_before"] = _mean(k * energy / norm.pow(4) - 1)
    if written_exactly:
        norm_after = factor_norm.double() * s
    else:
        norm_after = torch.linalg.vector_norm(stored.detach(), dim=(1, 2), dtype=_at_least_single(stored)).double()
    known["norm_after"] = float(norm_after.square().sum().sqrt())
    if measuring == "cheap":
        known["dfi_before"] = _sum((energy / s.pow(4) - 2 * norm.square() / s.square() + k).clamp_min(0))
        error = norm.square() - 2 * s * certificate.nuclear.double() + s.square() * factor_norm.double().square()
        known["sfe"] = float((strength**2 * error).clamp_min(0).masked_fill(kept, 0).sum())
        if known["converged"]:
            pulled = (1 - strength) * certificate.spectral_norm.double() + strength * s
            known["spectral_after"] = float(torch.where(kept, certificate.spectral_norm.double(), pulled).max())
        else:
            known["spectral_after"] = float(spectral_norm_estimate(gram(stored)).max())
    else:
        known.update(_full(before, stored, scale))
    total = known["norm_before"] ** 2
    known["sfe_relative"] = known["sfe"] / total if total else None
    return BlockRecord(**known)


def _full(before: Tensor, stored: Tensor, scale: Tensor) -> dict[str, Any]:
    first, last = (measure(matrices, scale=scale, mode="full") for matrices in (before, stored))
    values: dict[str, Any] = {}
    for key in _SPECTRAL:
        for when, measured in (("before", first), ("after", last)):
            value = getattr(measured, key)
            values[f"{key}_{when}"] = value.tolist() if key == "spectrum" else _mean(value.double())
    return {
        "dfi_before": _sum(first.dfi),
        "dfi_after": _sum(last.dfi),
        "dfi_free_before": _mean(first.dfi_scale_free),
        "dfi_free_after": _mean(last.dfi_scale_free),
        "sfe": float(squared_frobenius_error(before.double(), stored.double()).sum()),
        "norm_before": float(first.norm.square().sum().sqrt()),
        "norm_after": float(last.norm.square().sum().sqrt()),
        "spectral_before": float(first.spectral_norm.max()),
        "spectral_after": float(last.spectral_norm.max()),
        "values": values,
    }


def _sum(value: Tensor) -> float | None:
    known = value[value.isfinite()]
    return float(known.sum()) if known.numel() else None


def _mean(value: Tensor) -> float | None:
    known = value[value.isfinite()]
    return float(known.mean()) if known.numel() else None


def _at_least_single(value: Tensor) -> torch.dtype:
    return torch.float64 if value.dtype == torch.float64 else torch.float32
