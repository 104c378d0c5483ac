"""Stored and fresh starts of a module.

A remedy that goes "back to the start" needs to know what the start was. Either it was stored while the
model was new (:func:`snapshot`), or it is drawn again by the model's own scheme (:func:`draw`): the
`reset_parameters` of torch modules, the `_init_weights` of transformers, or a factory that the user gives.
Those schemes read torch's global random state, so every draw happens inside a fork of it, seeded from the
caller's generator: the global state is the same afterwards, and the draw depends on the generator alone.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from rekindle.blocks.names import cleaner, named_buffers, named_parameters
from rekindle.engine.devices import for_lapack
from rekindle.isolation import forked_rng


class UnknownStart(ValueError):
    """No scheme is known for a parameter, or a stored start does not fit the model."""


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and persistent or running buffer of the model by clean name, each tensor once."""
    return dict([*named_parameters(model), *named_buffers(model)])


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters and buffers, to be kept as the start of this model.

    >>> model = nn.Linear(2, 3)
    >>> start = snapshot(model)
    >>> sorted(start)
    ['bias', 'weight']
    >>> start["weight"].data_ptr() == model.weight.data_ptr()
    False
    """
    return {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}


def check_start(model: nn.Module, start: Mapping[str, Tensor], names: Collection[str] | None = None) -> None:
    """Raise :class:`UnknownStart` unless `start` has every named tensor of the model in its shape."""
    own = tensors_of(model)
    for name in own if names is None else names:
        if name not in start:
            raise UnknownStart(f"the stored start has no {name!r}; take it with snapshot(model) while the model is new")
        if start[name].shape != own[name].shape:
            found, wanted = tuple(start[name].shape), tuple(own[name].shape)
            raise UnknownStart(f"the stored start has {name!r} in shape {found}, the model in {wanted}")
        if not bool(torch.isfinite(start[name]).all()):
            raise UnknownStart(f"the stored start has NaN or Inf in {name!r}")


def draw(
    model: nn.Module,
    *,
    generator: torch.Generator,
    fresh: Callable[[], nn.Module] | None = None,
    names: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """A fresh start of the model's parameters and buffers by the model's own scheme.

    `names` restricts the draw (clean names); `fresh` is a factory whose new model is taken instead, for
    models that initialize in their `__init__`. The model itself is not touched.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    >>> start = draw(model, generator=torch.Generator().manual_seed(1))
    >>> bool((start["0.weight"] != model[0].weight).any()), start["1.weight"].tolist()
    (True, [1.0, 1.0, 1.0, 1.0])
    >>> class Scale(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.gain = nn.Parameter(torch.full((2,), 0.1))
    >>> draw(Scale(), generator=torch.Generator())
    Traceback (most recent call last):
    ...
    rekindle.initial.UnknownStart: no scheme re-draws 'gain': give fresh=, a factory of a new model, or a stored start
    """
    own = tensors_of(model)
    wanted = list(own) if names is None else list(names)
    missing = [name for name in wanted if name not in own]
    if missing:
        raise UnknownStart(f"the model has no parameter or buffer {missing[0]!r}")
    if fresh is not None:
        with forked_rng(generator, model):
            made = snapshot(fresh())
        check_start(model, made, wanted)
        return {name: made[name].to(own[name].device, own[name].dtype) for name in wanted}
    found: dict[str, Tensor] = {}
    clean = cleaner(model)
    with forked_rng(generator, model):
        for root in _scheme_roots(model, wanted):
            prefix = f"{root}." if root else ""
            again = _redrawn(model.get_submodule(root))
            for name, tensor in [*again.named_parameters(), *again.named_buffers()]:
                found[clean(prefix + name)] = tensor.detach()
    for name in wanted:
        if name not in found or (found[name].is_floating_point() and bool(torch.isnan(found[name]).any())):
            if isinstance(own[name], nn.Parameter):
                raise UnknownStart(
                    f"no scheme re-draws {name!r}: give fresh=, a factory of a new model, or a stored start"
                )
            found[name] = own[name].detach().clone()  # a constant such as a mask: no module resets it
    return {name: found[name] for name in wanted}


def has_scheme(module: nn.Module) -> bool:
    """Whether the module itself says how its parameters start."""
    return any(callable(getattr(module, known, None)) for known in ("reset_parameters", "_reset_parameters"))


def _scheme_roots(model: nn.Module, names: Collection[str]) -> list[str]:
    """The highest modules with a scheme over each named tensor: a parent may set its children's start again.

    (`MultiheadAttention` zeroes the bias of its `out_proj`; GPT-2 scales the projections of a block.)
    """
    clean = cleaner(model)
    whole = {clean(name): name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    roots: dict[str, None] = {}
    for name in names:
        parts = whole[name].split(".")[:-1]
        for depth in range(len(parts) + 1):
            path = ".".join(parts[:depth])
            module = model.get_submodule(path)
            if has_scheme(module) or _takes_module(module) is not None:
                roots[path] = None
                break
    return [root for root in roots if not any(root != other and _below(root, other) for other in roots)]


def _below(path: str, root: str) -> bool:
    return root == "" or path.startswith(f"{root}.")


def _takes_module(module: nn.Module) -> bool | None:
    """Whether `module._init_weights` takes a module (transformers), takes nothing, or (None) does not exist."""
    scheme = getattr(module, "_init_weights", None)
    if not callable(scheme):
        return None
    required = [p for p in inspect.signature(scheme).parameters.values() if p.default is p.empty]
    return None if len(required) > 1 else bool(required)


def _redrawn(module: nn.Module) -> nn.Module:
    """A copy of the module with every parameter drawn again, or NaN where nothing draws it."""
    try:
        again = copy.deepcopy(module)
    except Exception as error:
        raise UnknownStart(
            f"{type(module).__name__} cannot be copied to draw a fresh start ({error}): give fresh=, a factory"
        ) from error
    with torch.no_grad():
        for parameter in again.parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.fill_(float("nan"))
        _visit(again, None)
    return again


def _visit(module: nn.Module, owner: nn.Module | None) -> None:
    """Children first, then the module, then its owner's `_init_weights`: the order of construction."""
    takes = _takes_module(module)
    inner = module if takes else owner
    for name, child in module.named_children():
        if name != "parametrizations":
            _visit(child, inner)
    if parametrize.is_parametrized(module):
        _reset_parametrized(module, inner)
        return
    _reset_one(module)
    if inner is not None:
        inner._init_weights(module)  # type: ignore[operator]
    elif takes is False:
        module._init_weights()  # type: ignore[operator]


def _reset_one(module: nn.Module) -> None:
    for known in ("reset_parameters", "_reset_parameters"):
        scheme = getattr(module, known, None)
        if callable(scheme):
            scheme()
            return


def _reset_parametrized(module: nn.Module, owner: nn.Module | None) -> None:
    """Draw the plain weights, then assign them: torch turns a value into the originals by `right_inverse`."""
    lists = module.parametrizations
    assert isinstance(lists, nn.ModuleDict)
    plain = _without_parametrizations(module, list(lists))
    _reset_one(plain)
    if owner is not None:
        owner._init_weights(plain)  # type: ignore[operator]
    for name, parameter in module.named_parameters(recurse=False):
        parameter.copy_(getattr(plain, name))
    for name, parametrizations in lists.items():
        for parameter in parametrizations.parameters():
            parameter.nan_to_num_(0.0)  # a NaN would survive an assignment that only rescales
        try:
            setattr(module, name, getattr(plain, name).detach())
        except (NotImplementedError, RuntimeError) as error:
            raise UnknownStart(
                f"the parametrization of {name!r} has no right_inverse: give fresh=, a factory of a new model"
            ) from error


def _without_parametrizations(module: nn.Module, names: list[str]) -> nn.Module:
    """A plain copy. `remove_parametrizations` will not do: copies share the class that it edits."""
    kind: type[nn.Module] = parametrize.type_before_parametrizations(module)
    plain: nn.Module = kind.__new__(kind)
    plain.__dict__.update(copy.deepcopy(module.__dict__))
    del plain._modules["parametrizations"]
    for name in names:
        plain.register_parameter(name, nn.Parameter(getattr(module, name).detach().clone()))
    return plain


@torch.no_grad()
def orthogonal_(tensor: Tensor, *, gain: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """Fill a (…, n, d) tensor in place with matrices whose smaller side is orthonormal, uniformly drawn.

    Tall matrices get orthonormal columns, wide ones orthonormal rows, each matrix of a batch its own draw. The
    sign of R's diagonal is moved into Q: without that, QR does not draw uniformly (Mezzadri, 2007).

    >>> w = orthogonal_(torch.empty(6, 3), generator=torch.Generator().manual_seed(0))
    >>> torch.allclose(w.T @ w, torch.eye(3), atol=1e-5)
    True
    """
    if tensor.ndim < 2:
        raise ValueError(f"an orthogonal start needs (…, n, d) with at least two axes, not shape {tuple(tensor.shape)}")
    if not tensor.is_floating_point():
        raise ValueError(f"an orthogonal start needs a floating-point tensor, not {tensor.dtype}")
    *batch, rows, columns = tensor.shape
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    tall, short = max(rows, columns), min(rows, columns)
    device = generator.device if generator is not None else tensor.device
    gaussian = torch.randn(*batch, tall, short, generator=generator, dtype=dtype, device=device)
    q, r = torch.linalg.qr(for_lapack(gaussian))
    signs = r.diagonal(dim1=-2, dim2=-1).sign()
    q *= torch.where(signs == 0, 1, signs)[..., None, :]
    return tensor.copy_(gain * (q if rows >= columns else q.mT))
