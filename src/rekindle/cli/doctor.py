"""`rekindle doctor`: what is installed, what is missing, and whether the arithmetic works here."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import sys
import time
from typing import Any

import typer

import rekindle
from rekindle.cli import options
from rekindle.cli.terminal import FINDINGS, reported, show, show_json
from rekindle.engine import cpu
from rekindle.extras import install
from rekindle.report.words import listed

_NEEDED = ("torch", "numpy", "safetensors")
# Module → the extra that brings it, and what for.
_OPTIONAL = """
typer        | cli          | the command line
rich         | cli          | the command line
jinja2       | cli          | pages
pandas       | report       | to_frame()
transformers | transformers | config.json of checkpoints
accelerate   | transformers | wrapped optimizers
tensorboard  | sinks        | logging
wandb        | sinks        | logging
mlflow       | sinks        | logging
sklearn      | lab          | the laboratory's data
scipy        | lab          | the laboratory's statistics
ray          | ray          | studies on a cluster
"""
# Module of rekindle.integrations → what a trainer is given; its other modules are what these share.
_CALLBACKS = """
transformers | RekindleCallback
lightning    | RekindleCallback
ignite       | RekindleHandler
sb3          | RekindleCallback
peft         | MergedAdapter
"""
_DISTRIBUTIONS = {"sklearn": "scikit-learn", "mlflow": "mlflow-skinny"}


@reported
def doctor(json: options.Json = False) -> None:
    """Show versions, threads, devices, what is installed and what is missing; solve one matrix to be sure.

    [bold]Examples[/]

      rekindle doctor

      rekindle doctor --json
    """
    facts = examined()
    if json:
        show_json(facts)
    else:
        show(_text(facts))
    if not facts["check"]["ok"]:
        raise typer.Exit(FINDINGS)


def examined() -> dict[str, Any]:
    """Everything that a bug report should contain.

    >>> examined()["check"]["ok"]
    True
    """
    import torch

    return {
        "rekindle": rekindle.__version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "needed": {name: _version(name) for name in _NEEDED},
        "optional": {name: _version(name) for name, *_ in listed(_OPTIONAL)},
        "integrations": _integrations(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "devices": _devices(),
        "cpu": {"vendor": cpu.vendor(), "capability": cpu.capability(), "bfloat16_fault": cpu.bfloat16_fault()},
        "check": _check(),
    }


def _version(module: str) -> str | None:
    import importlib.metadata  # slow to import, and help needs none of it

    if importlib.util.find_spec(module) is None:
        return None
    for name in (_DISTRIBUTIONS.get(module, module), module):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown version"


def _integrations() -> dict[str, str | None]:
    """What each trainer is given, as `module.Class`, and what keeps it from being imported."""
    found: dict[str, str | None] = {}
    for module, name in listed(_CALLBACKS):
        key = f"{module}.{name}"
        try:
            getattr(importlib.import_module(f"rekindle.integrations.{module}"), name)
            found[key] = None
        except Exception as error:  # a broken third-party package must not break the doctor
            found[key] = " ".join(str(error).split())
    return found


def _devices() -> list[str]:
    import torch

    found = ["cpu"]
    if torch.cuda.is_available():
        found += [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    return found


def _check() -> dict[str, Any]:
    """The polar factor of one Gaussian 256² matrix."""
    import torch

    from rekindle.engine.isometry import polar

    matrix = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    start = time.perf_counter()
    _, certificate = polar(matrix, certificate=True)
    seconds = time.perf_counter() - start
    residual = float(certificate.residual.max())
    return {"ok": bool(certificate.converged.all()), "residual": residual, "seconds": seconds}


def _text(facts: dict[str, Any]) -> str:
    check = facts["check"]
    lines = [
        f"rekindle  {facts['rekindle']}",
        f"python    {facts['python']}",
        f"platform  {facts['platform']}",
        f"devices   {', '.join(facts['devices'])}; {facts['threads']} torch threads on {facts['cores']} cores",
        f"cpu       {facts['cpu']['vendor']}, {facts['cpu']['capability']}; "
        f"bfloat16 products: {facts['cpu']['bfloat16_fault'] or 'work'}",
        *(f"{name:<13} {version}" for name, version in facts["needed"].items()),
    ]
    for name, extra, use in listed(_OPTIONAL):
        advice = f"missing, for {use}: {install(extra)}"
        lines.append(f"{name:<13} {facts['optional'][name] or advice}")
    lines += [f"rekindle.integrations.{name}: {why or 'ok'}" for name, why in facts["integrations"].items()]
    word = "ok" if check["ok"] else "FAILED"
    lines.append(f"check: 256² polar factor {word}, residual {check['residual']:.1e}, {check['seconds'] * 1e3:.0f} ms")
    return "\n".join(lines)
