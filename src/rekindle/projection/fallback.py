"""Matrices that missed their tolerance are solved again, by SVD in float64."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rekindle.engine.isometry import Certificate


def by_svd(
    name: str, matrices: Tensor, factors: Tensor, certificate: Certificate, tol: float
) -> tuple[Tensor, Certificate]:
    """The factors and their certificate with what has not converged solved again; an error if that misses `tol` too."""
    missed = (~certificate.converged).nonzero().flatten()
    u, sigma, vh = torch.linalg.svd(matrices[missed.to(matrices.device)].double(), full_matrices=False)
    q = u @ vh
    small = q @ q.mT if q.shape[1] <= q.shape[2] else q.mT @ q
    residual = (small - torch.eye(small.shape[1], dtype=small.dtype, device=small.device)).square().sum((1, 2))
    residual = residual / small.shape[1]
    if not bool((residual <= max(tol, 1e-20)).all()):
        worst = float(residual.max())
        raise RuntimeError(f"{name!r} reaches a residual of {worst:.1e} by float64 SVD, tol is {tol:.1e}")
    factors, residuals = factors.clone(), certificate.residual.clone()
    nuclear, converged = certificate.nuclear.clone(), torch.ones_like(certificate.converged)
    norms = certificate.factor_norm.clone()
    factors[missed.to(factors.device)] = q.to(factors.dtype)
    residuals[missed] = residual.to(residuals)
    nuclear[missed] = sigma.sum(1).to(nuclear)
    norms[missed] = torch.linalg.vector_norm(q, dim=(1, 2)).to(norms)
    return factors, replace(certificate, residual=residuals, nuclear=nuclear, factor_norm=norms, converged=converged)
