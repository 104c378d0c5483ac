"""Every optimizer class of torch, pytorch_optimizer, schedulefree, lion and bitsandbytes, and one way to make each."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import Parameter

PACKAGES = ("torch.optim", "pytorch_optimizer", "schedulefree", "lion_pytorch", "bitsandbytes.optim", "transformers")
Groups = list[dict[str, Any]]
Maker = Callable[[type[Any], Groups], Any]


def _around(cls: type[Any], groups: Groups) -> Any:
    return cls(torch.optim.AdamW(groups, lr=1e-2))


def _around_plain(cls: type[Any], groups: Groups) -> Any:
    return cls(torch.optim.SGD(groups, lr=1e-2))


def _with_base(cls: type[Any], groups: Groups) -> Any:
    return cls(groups, base_optimizer=torch.optim.SGD, lr=1e-2, momentum=0.9)


def _with_momentum(cls: type[Any], groups: Groups) -> Any:
    return cls(groups, lr=1e-2, momentum=0.9)


def _with_muon(cls: type[Any], groups: Groups) -> Any:
    matrices = [{**group, "use_muon": all(p.ndim == 2 for p in group["params"])} for group in groups]
    return cls(matrices, lr=1e-2)


class _Holder(nn.Module):
    """A module that holds the parameters: some classes take the model."""

    def __init__(self, groups: Groups) -> None:
        super().__init__()
        self.held = nn.ParameterList([parameter for group in groups for parameter in group["params"]])


def _gsam(cls: type[Any], groups: Groups) -> Any:
    package = importlib.import_module("pytorch_optimizer")
    base = torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    rates = package.LinearScheduler(base, t_max=50, max_lr=1e-2)
    return cls(groups, base, _Holder(groups), package.ProportionScheduler(rates, max_lr=1e-2, max_value=0.1))


# What a class needs beyond its parameters and a learning rate.
MAKERS: dict[str, Maker] = {
    **dict.fromkeys(("TRAC", "Lookahead", "Magma", "OrthoGrad", "PCGrad", "SafeFP16Optimizer"), _around),
    **dict.fromkeys(("ScheduleFreeWrapper", "ScheduleFreeWrapperReference"), _around_plain),
    **dict.fromkeys(("SAM", "FriendlySAM", "LookSAM"), _with_base),
    **dict.fromkeys(("AdaGO", "AdaMuon", "DistributedMuon", "Muon", "MuonClip", "NorMuon"), _with_muon),
    **dict.fromkeys(("LARS", "LARS8bit", "LARS32bit", "SGD", "SGD8bit", "SGD32bit", "PytorchLARS"), _with_momentum),
    "WSAM": lambda cls, groups: cls(_Holder(groups), groups, torch.optim.SGD, lr=1e-2, momentum=0.9),
    "GSAM": _gsam,
    "BSAM": lambda cls, groups: cls(groups, num_data=100, lr=1e-2),
    "Ranger21": lambda cls, groups: cls(groups, num_iterations=100, lr=1e-2),
    **dict.fromkeys(("LOMO", "AdaLOMO", "AdamMini"), lambda cls, groups: cls(_Holder(groups), lr=1e-2)),
    "CPUOffloadOptimizer": lambda cls, groups: cls(groups, torch.optim.AdamW, lr=1e-2),
    "LBFGS": lambda cls, groups: cls([p for group in groups for p in group["params"]], lr=1e-2),
    "Adafactor": lambda cls, groups: cls(groups),
}
# Only matrices, or only gradients that are not dense.
MATRICES = ("torch.optim.Muon", "pytorch_optimizer.SpectralSphere")


def classes() -> Iterator[tuple[str, str]]:
    """Package and name of each."""
    for package in PACKAGES:
        try:
            module = importlib.import_module(package)
        except ImportError:
            continue
        names = ["Adafactor"] if package == "transformers" else sorted(vars(module))
        for name in names:
            cls = getattr(module, name)
            if inspect.isclass(cls) and _optimizes(cls) and name not in ("Optimizer", "BaseOptimizer"):
                yield package, name


def _optimizes(cls: type[Any]) -> bool:
    return callable(getattr(cls, "step", None)) and callable(getattr(cls, "zero_grad", None))


def made(package: str, name: str, groups: Groups, **options: Any) -> Any:
    """An optimizer of this class."""
    cls = getattr(importlib.import_module(package), name)
    small = {"min_8bit_size": 16} if package.startswith("bitsandbytes") else {}
    if name in MAKERS and not options and (package, name) != ("torch.optim", "Muon"):
        optimizer = MAKERS[name](cls, groups)
    else:
        optimizer = cls(groups, **{"lr": 1e-2, **small, **options})
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    return optimizer


def step(optimizer: Any, parameters: list[Parameter], seed: int) -> None:
    """One step with gradients drawn from this seed, by whichever way the class has."""
    draws = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(parameter.shape, generator=draws) for parameter in parameters]

    def closure() -> torch.Tensor:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        return torch.tensor(1.0)

    def forward_and_backward() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(1), closure()

    closure()
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    if "hessian" in inspect.signature(optimizer.step).parameters:
        members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        optimizer.step(hessian=[parameter.grad.square() for parameter in members])
        return
    if hasattr(optimizer, "forward_backward_func"):
        optimizer.forward_backward_func = forward_and_backward
    try:
        optimizer.step()
    except Exception as error:  # each package has its own
        if "closure" not in str(error):
            raise
        optimizer.step(closure)
