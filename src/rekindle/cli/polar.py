"""`rekindle polar`: the matrix operation itself, on a numpy file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rekindle import files
from rekindle.cli import options
from rekindle.cli.terminal import refuse_existing, reported, show, show_json

if TYPE_CHECKING:
    import torch


@reported
def polar(
    file: Annotated[Path, typer.Argument(metavar="FILE.npy", help="A matrix, or a stack of them.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="OUT.npy", help="Where to write it.", show_default=False)
    ] = None,
    solver: Annotated[
        options.Solver,
        typer.Option(help="How it is computed; auto is exact."),
    ] = "auto",
    tol: Annotated[float, typer.Option(help="Largest DfI per dimension.")] = 1e-6,
    json: options.Json = False,
    force: options.Force = False,
) -> None:
    """Compute the nearest isometry (polar factor) of the matrices in a .npy file, with its certificate.

    [bold]Examples[/]

      rekindle polar weight.npy -o isometry.npy

      rekindle polar weight.npy --json
    """
    import numpy

    from rekindle.engine.isometry import polar as polar_factor

    if output is not None:
        refuse_existing(output, force, file)
    matrices = _read(file)
    factor, certificate = polar_factor(matrices, solver=solver, tol=tol, certificate=True)
    if output is not None:
        with files.replacing(output, overwrite=force) as handle:
            numpy.save(handle, factor.numpy())
    facts = {
        "shape": list(matrices.shape),
        "residual": float(certificate.residual.max()),
        "steps": int(certificate.steps.max()),
        "completed": int(certificate.completed.sum()),
        "converged": bool(certificate.converged.all()),
        "norm": float(certificate.norm.square().sum().sqrt()),
        "nuclear": float(certificate.nuclear.sum()),
        "spectral_norm": float(certificate.spectral_norm.max()),
        "output": None if output is None else str(output),
    }
    if json:
        show_json(facts)
        return
    shape = "×".join(map(str, matrices.shape))
    show(
        f"{shape}: DfI per dimension {facts['residual']:.1e} in {facts['steps']} steps"
        f"{'' if facts['converged'] else ' (did not converge)'}, {facts['completed']} directions completed\n"
        f"‖W‖_F {facts['norm']:.4g}, ‖W‖_* {facts['nuclear']:.4g}, σ_max {facts['spectral_norm']:.4g}"
    )
    if output is None:
        show("nothing written: -o OUT.npy keeps the isometry")


def _read(file: Path) -> torch.Tensor:
    import numpy
    import torch

    try:
        array = numpy.load(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{file} is not a .npy file of numbers: {error}") from None
    if not isinstance(array, numpy.ndarray):
        raise ValueError(f"{file} is an archive of several arrays; save one with numpy.save")
    if array.dtype.kind not in "fiu" or array.ndim < 2:
        raise ValueError(f"{file} holds {array.dtype} of shape {array.shape}: a matrix of real numbers is needed")
    wide = numpy.float64 if array.dtype.itemsize > 4 or array.dtype.kind in "iu" else numpy.float32
    matrices = torch.from_numpy(numpy.ascontiguousarray(array, dtype=wide))
    if not bool(matrices.isfinite().all()):
        raise ValueError(f"{file} holds NaN or Inf")
    return matrices
