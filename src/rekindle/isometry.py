"""placeholder while the engine is written"""
from __future__ import annotations
from dataclasses import dataclass
import torch
from torch import Tensor

@dataclass(frozen=True)
class Certificate:
    residual: Tensor
    steps: Tensor
    completed: Tensor
    converged: Tensor

def polar(w, *, solver="auto", tol=1e-6, steps=None, complete=True, seed=0, certificate=False):
    if isinstance(w, (list, tuple)):
        both = [polar(x, solver=solver, tol=tol, certificate=True) for x in w]
        return ([q for q, _ in both], [c for _, c in both]) if certificate else [q for q, _ in both]
    u, s, vh = torch.linalg.svd(w.double(), full_matrices=False)
    q = (u @ vh).to(w.dtype)
    z = torch.zeros(w.shape[:-2])
    return (q, Certificate(z, z.int(), z.int(), z == 0)) if certificate else q
