"""rekindle::polar, the operator behind `polar`: what torch.compile, torch.export, vmap and both kinds of AD need.

`kernel` computes, `_fake` says which shapes and layouts come out, `_Derivative` differentiates in both directions and
`_batched` is the rule of vmap. torch's own registration of derivatives has no forward mode; a function of a single
level, as functorch makes of any `autograd.Function`, has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from rekindle.engine.devices import has_float64, to_float64
from rekindle.engine.solving import NotFinite, Options, Solver, Source, solutions

_library: Any = torch.library.Library("rekindle", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "polar(Tensor[] w, str solver, float tol, int steps, bool complete, int seed, bool certificate) -> Tensor[]"
)
operator: Callable[..., list[Tensor]] = torch.ops.rekindle.polar.default
"""The factors, in the arithmetic's dtype, then the fields of their certificates if `certificate` asks for them."""


def kernel(
    w: Sequence[Tensor], solver: Solver, tol: float, steps: int, complete: bool, seed: int, certificate: bool
) -> list[Tensor]:
    """What the operator computes, on any device."""
    factors: dict[int, Tensor] = {}
    certificates: dict[int, list[Tensor]] = {}
    sources = [Source((x.shape[:-2].numel(), *x.shape[-2:]), x.dtype, x.device, _reader(x)) for x in w]
    try:
        for i, q, checked in solutions(sources, Options(solver, tol, steps, complete, seed, certificate)):
            tall = q.shape[1] > q.shape[2]
            q = q.mT.contiguous().mT if tall else q.contiguous()  # as they are, but for the recipe's
            factors[i] = _own(q.reshape(w[i].shape))
            if checked is not None:
                checked = checked.reshape(w[i].shape[:-2])
                certificates[i] = [_own(getattr(checked, field.name)) for field in fields(checked)]
    except NotFinite:
        _say_where(w)
        raise
    return [factors[i] for i in range(len(w))] + [part for i in sorted(certificates) for part in certificates[i]]


def _own(part: Tensor) -> Tensor:
    """The same, copied if it is a part of what was solved together: results of an operator must not share memory."""
    return part if part.untyped_storage().nbytes() == part.nbytes else part.clone()


def _reader(w: Tensor) -> Callable[[], Tensor]:
    return lambda: w.detach().reshape(w.shape[:-2].numel(), *w.shape[-2:])


def _say_where(tensors: Sequence[Tensor]) -> None:
    """Every chunk looks at its largest entry anyway, so checking each tensor beforehand would do the work twice."""
    for i, w in enumerate(tensors):
        wrong = (~torch.isfinite(w.detach())).nonzero()
        if len(wrong):
            at, name = tuple(wrong[0].tolist()), f"w[{i}]" if len(tensors) > 1 else "w"
            raise NotFinite(f"{name} is not finite: {w[at].item()} at index {at} ({len(wrong)} such entries in all)")


def _fake(
    w: Sequence[Tensor], solver: str, tol: float, steps: int, complete: bool, seed: int, certificate: bool
) -> list[Tensor]:
    found: list[Tensor] = []
    for x in w:
        *batch, rows, columns = x.shape
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        tall = rows > columns
        q = x.new_empty([*batch, columns, rows] if tall else x.shape, dtype=dtype)
        found.append(q.mT if tall else q)
    wide = torch.float64
    for x, q in zip(w, found[:], strict=True) if certificate else ():
        dtypes = (q.dtype, torch.int32, torch.int32, torch.bool, wide, wide, wide, wide, wide)
        device = x.device if has_float64(x.device) else torch.device("cpu")
        found += [x.new_empty(x.shape[:-2], dtype=dtype, device=device) for dtype in dtypes]
    return found


class _Derivative(_SingleLevelFunction):
    """With W = HQ wide or square, dW ↦ dQ = XQ + H⁻¹(dW − AQ), where A = dW·Qᵀ and HX + XH = A − Aᵀ.

    The map is its own adjoint, so that both directions of differentiation are one function.
    """

    @staticmethod
    def forward(options: tuple[Any, ...], *w: Tensor) -> tuple[Tensor, ...]:
        # Switched off for this level; those further out, if there are any, go on recording.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return tuple(_below(w, options))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.count, ctx.beside = len(inputs) - 1, len(output) - len(inputs) + 1
        ctx.set_materialize_grads(False)
        needed = ctx.needs_input_grad[1:] if forward_ad._current_level < 0 else [True] * ctx.count
        still = [q for q, moves in zip(output, needed, strict=False) if not moves]
        ctx.mark_non_differentiable(*still, *output[ctx.count :])
        ctx.save_for_backward(*inputs[1:], *output[: ctx.count])
        ctx.save_for_forward(*inputs[1:], *output[: ctx.count])

    @staticmethod
    def backward(ctx: object, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *_moved(ctx, grads, like=0)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_moved(ctx, tangents, like=1), *[None] * ctx.beside


def _moved(ctx: Any, directions: Sequence[Tensor | None], like: int) -> list[Tensor | None]:
    pairs = zip(ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :], strict=True)
    return [
        None if direction is None else _derivative(*pair, direction).to(pair[like])
        for pair, direction in zip(pairs, directions, strict=False)
    ]


def _derivative(w: Tensor, q: Tensor, direction: Tensor) -> Tensor:
    """How Q moves when W moves in a direction, in float64.

    With H = U diag(s) Uᵀ both equations are solved by divisions, by s and by sums of two of them and never by a
    difference, so that repeated singular values do no harm. Directions that W lacks were filled from the seed and do
    not move with W: they get 0. Where a second derivative may be asked for, a step of refinement, which changes no
    number, carries the derivative of both solutions; the eigenvectors' own would divide by differences.
    """
    w, q, direction = map(to_float64, (w, q, direction))
    tall = w.shape[-2] > w.shape[-1]
    if tall:
        w, q, direction = w.mT, q.mT, direction.mT
    h = w @ q.mT
    h = (h + h.mT) / 2
    s, u = torch.linalg.eigh(h.detach())
    zero = s <= s.amax(-1, keepdim=True).clamp_min(0) * 1e-12
    s = s.masked_fill(zero, 0)
    sums = s[..., :, None] + s[..., None, :]
    of_sums, of_values = torch.where(sums > 0, 1 / sums, 0), torch.where(zero, 0, 1 / s)[..., None]

    def turned(skew: Tensor) -> Tensor:
        result: Tensor = u @ ((u.mT @ skew @ u) * of_sums) @ u.mT
        return result

    def divided(rows: Tensor) -> Tensor:
        result: Tensor = u @ (of_values * (u.mT @ rows))
        return result

    a = direction @ q.mT
    skew, outside = a - a.mT, direction - a @ q
    x, y = turned(skew), divided(outside)
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        x, y = x.detach(), y.detach()
        x, y = x + turned(skew - h @ x - x @ h), y + divided(outside - h @ y)
    out: Tensor = x @ q + y
    return out.mT if tall else out


def _below(w: Sequence[Tensor], options: tuple[Any, ...]) -> list[Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        return operator(list(w), *options)


def _differentiable(_: object, w: Sequence[Tensor], *options: object) -> list[Tensor]:
    tracked = torch.is_grad_enabled() and any(x.requires_grad for x in w)
    if not tracked and forward_ad._current_level < 0:
        return _below(w, options)
    with enable_single_level_autograd_function():
        return list(cast(Any, _Derivative).apply(options, *w))


def _batched(_: object, in_dims: Any, w: Sequence[Tensor], *options: object) -> tuple[list[Tensor], list[int | None]]:
    found = operator([x if d is None else x.movedim(d, 0) for x, d in zip(w, in_dims[0], strict=True)], *options)
    dims = [None if d is None else 0 for d in in_dims[0]]
    beside = len(found) // len(w) - 1
    return found, dims + [d for d in dims for _ in range(beside)]


_library.impl("polar", kernel, "CompositeExplicitAutograd")
_library.impl("polar", _differentiable, "Autograd", with_keyset=True)
torch.library.register_fake("rekindle::polar", _fake, lib=_library)
torch.library.register_vmap("rekindle::polar", _batched, lib=_library)
