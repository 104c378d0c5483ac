"""Weights that are computed from other parameters: torch parametrizations and the older pre-forward hooks.

Such a weight cannot be written itself: `write` goes through the parametrization's `right_inverse` and copies the
result in place into the originals, which the optimizer holds. Not every parametrization can represent every value
(spectral_norm forces σ = 1, orthogonal drops the scale), so `trial` first does all of it on a copy and compares.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

READ_BACK = 1e-4
# As many power steps as torch itself takes when spectral_norm is registered.
_POWER_STEPS = 15


def is_parametrized(module: nn.Module, name: str) -> bool:
    """Whether `module.name` is computed from other parameters.

    >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    >>> is_parametrized(layer, "weight"), is_parametrized(layer, "bias")
    (True, False)
    """
    return parametrize.is_parametrized(module, name) or _hook(module, name) is not None


def hooked_tensor(module: nn.Module, parameter: str) -> str | None:
    """The weight that this parameter of an old-style weight_norm or spectral_norm layer is an original of.

    >>> hooked_tensor(nn.utils.spectral_norm(nn.Linear(3, 2)), "weight_orig")
    'weight'
    """
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm) and parameter in (f"{hook.name}_g", f"{hook.name}_v"):
            return hook.name
        if isinstance(hook, SpectralNorm) and parameter == f"{hook.name}_orig":
            return hook.name
    return None


def originals(module: nn.Module, name: str) -> list[nn.Parameter]:
    """The parameters that the optimizer holds for this weight; the weight itself if it is not parametrized.

    >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    >>> [tuple(p.shape) for p in originals(layer, "weight")]
    [(2, 1), (2, 3)]
    """
    if parametrize.is_parametrized(module, name):
        return [t for t in _stored(_list(module, name)) if isinstance(t, nn.Parameter)]
    hook = _hook(module, name)
    if hook is None:
        return [module._parameters[name]] if isinstance(module._parameters.get(name), nn.Parameter) else []  # type: ignore[list-item]
    names = (f"{name}_g", f"{name}_v") if isinstance(hook, WeightNorm) else (f"{name}_orig",)
    return [p for p in (module._parameters[n] for n in names) if p is not None]


def read(module: nn.Module, name: str) -> Tensor:
    """The weight as the model would use it in eval mode, detached; reading changes nothing.

    >>> layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2))
    >>> read(layer, "weight").shape
    torch.Size([2, 3])
    """
    with torch.no_grad():
        if parametrize.is_parametrized(module, name):
            # In training mode spectral_norm takes a power step at every read, so read a copy in eval mode.
            return _evaluate(copy.deepcopy(_list(module, name)))
        hook = _hook(module, name)
        if isinstance(hook, WeightNorm):
            return hook.compute_weight(module).detach()  # type: ignore[no-any-return]
        if isinstance(hook, SpectralNorm):
            return hook.compute_weight(module, do_power_iteration=False).detach()
        value = getattr(module, name)
        assert isinstance(value, Tensor)
        return value.detach()


def write(module: nn.Module, name: str, value: Tensor) -> None:
    """Give the weight this value by copying into its originals, in place. Call `trial` first.

    >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    >>> write(layer, "weight", torch.ones(2, 3))
    >>> torch.allclose(layer.weight, torch.ones(2, 3))
    True
    """
    with torch.no_grad():
        if parametrize.is_parametrized(module, name):
            _write_list(_list(module, name), value)
            return
        hook = _hook(module, name)
        if hook is None:
            getattr(module, name).copy_(value)
            return
        _write_hook(module, hook, value)
        # The plain attribute is what a reader sees until the next forward pass.
    if hook is not None:
        _refresh(module, hook)


def trial(module: nn.Module, name: str, value: Tensor) -> str | None:
    """Why the weight cannot take this value, found by writing it on a copy; None if it reads back to 1e-4.

    >>> layer = nn.utils.parametrizations.orthogonal(nn.Linear(3, 3))
    >>> trial(layer, "weight", torch.eye(3))
    >>> trial(layer, "weight", 2 * torch.eye(3))
    'parametrized by _Orthogonal, which does not keep this value (reads back 50% off)'
    """
    if not is_parametrized(module, name):
        return None
    kinds = _kinds(module, name)
    try:
        with torch.no_grad():
            if parametrize.is_parametrized(module, name):
                twin = copy.deepcopy(_list(module, name))
                _write_list(twin, value)
                back = _evaluate(twin)
            else:
                back = _hook_trial(module, name, value)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return f"parametrized by {kinds}, which cannot be inverted ({str(error).splitlines()[0]})"
    size = torch.linalg.vector_norm(value.float()).clamp_min(torch.finfo(torch.float32).tiny)
    off = float(torch.linalg.vector_norm((back - value).float()) / size)
    # Half precision cannot read back better than its own rounding.
    allowed = max(READ_BACK, 2 * torch.finfo(value.dtype).eps)
    if off <= allowed:
        return None
    return f"parametrized by {kinds}, which does not keep this value (reads back {off:.0%} off)"


def _list(module: nn.Module, name: str) -> Any:
    return module.parametrizations[name]  # type: ignore[index]


def _hook(module: nn.Module, name: str) -> WeightNorm | SpectralNorm | None:
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm | SpectralNorm) and hook.name == name:
            return hook
    return None


def _stored(parametrizations: Any) -> list[Tensor]:
    if parametrizations.is_tensor:
        return [parametrizations.original]
    return [getattr(parametrizations, f"original{i}") for i in range(parametrizations.ntensors)]


def _evaluate(parametrizations: Any) -> Tensor:
    value = parametrizations.eval()()
    assert isinstance(value, Tensor)
    return value.detach().clone()


def _write_list(parametrizations: Any, value: Tensor) -> None:
    result: Any = value
    for step in reversed(parametrizations):
        if not hasattr(step, "right_inverse"):
            raise NotImplementedError(f"{type(step).__name__} has no right_inverse")
        result = step.right_inverse(result)
    results = [result] if isinstance(result, Tensor) else list(result)
    stored = _stored(parametrizations)
    if len(results) != len(stored) or any(r.shape != s.shape for r, s in zip(results, stored, strict=False)):
        raise ValueError("right_inverse does not give what is stored")
    for target, source in zip(stored, results, strict=True):
        target.copy_(source)
    for step in parametrizations:
        # spectral_norm divides by uᵀWv: its vectors must belong to the new weight also in eval mode.
        if hasattr(step, "_power_method") and hasattr(step, "_u"):
            step._power_method(step._reshape_weight_to_matrix(stored[0]), _POWER_STEPS)


def _write_hook(module: nn.Module, hook: WeightNorm | SpectralNorm, value: Tensor) -> None:
    held: Sequence[nn.Parameter] = originals(module, hook.name)
    if isinstance(hook, WeightNorm):
        magnitude, direction = held
        magnitude.copy_(torch.norm_except_dim(value, 2, hook.dim))
        direction.copy_(value)
        return
    held[0].copy_(value)
    for _ in range(_POWER_STEPS):
        hook.compute_weight(module, do_power_iteration=True)


def _refresh(module: nn.Module, hook: WeightNorm | SpectralNorm) -> None:
    if isinstance(hook, WeightNorm):
        setattr(module, hook.name, hook.compute_weight(module))
    else:
        setattr(module, hook.name, hook.compute_weight(module, do_power_iteration=False))


def _hook_trial(module: nn.Module, name: str, value: Tensor) -> Tensor:
    # The module itself cannot be deep-copied: its plain weight attribute is not a leaf of the graph.
    hook = _hook(module, name)
    assert hook is not None
    twin = nn.Module()
    for key in (f"{name}_g", f"{name}_v", f"{name}_orig", f"{name}_u"):
        held = module._parameters.get(key)
        if held is not None:
            twin.register_parameter(key, nn.Parameter(held.detach().clone()))
        elif module._buffers.get(key) is not None:
            twin.register_buffer(key, module._buffers[key].clone())  # type: ignore[union-attr]
    twin.register_forward_pre_hook(hook)
    _write_hook(twin, hook, value)
    return read(twin, name)


def _kinds(module: nn.Module, name: str) -> str:
    if parametrize.is_parametrized(module, name):
        return " and ".join(type(step).__name__ for step in _list(module, name))
    return type(_hook(module, name)).__name__ + " (hook)"
