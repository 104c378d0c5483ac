"""Observing a forward pass: activations and attention, as modules or plain function calls.

A torch function mode catches every call, forward hooks say which module was executing, and repeats within one
pass are numbered. Both are removed when the watch ends. An observer gets events; `activity` turns them into numbers.

>>> import torch
>>> class Net(torch.nn.Module):
...     def __init__(self):
...         super().__init__()
...         self.inner = torch.nn.Linear(4, 3)
...     def forward(self, x):
...         return torch.relu(self.inner(x)).square()
>>> seen = []
>>> with Watch(net := Net(), on_activation=lambda event: seen.append((event.site, event.kind, event.after))):
...     _ = net(torch.zeros(2, 4))
>>> seen
[('relu', 'relu', 'inner'), ('relu', 'squared relu', 'inner')]
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from rekindle.blocks.names import cleaner

RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}
ACTIVATIONS = {
    *("relu", "relu6", "leaky_relu", "prelu", "rrelu", "elu", "selu", "celu", "gelu", "silu", "mish"),
    *("softplus", "softsign", "tanh", "sigmoid", "logsigmoid", "hardtanh", "hardsigmoid", "hardswish"),
    *("hardshrink", "softshrink", "tanhshrink", "threshold", "glu"),
    *RECURRENT,
}
# The bounds near which the slope is lost; relu6's zero is ordinary rectification.
BOUNDS: dict[str, tuple[float | None, float | None]] = {
    **dict.fromkeys(("tanh", "softsign", "hardtanh", "lstm", "gru", "rnn_tanh", "lstm_cell", "gru_cell"), (-1.0, 1.0)),
    **dict.fromkeys(("sigmoid", "hardsigmoid"), (0.0, 1.0)),
    "rnn_tanh_cell": (-1.0, 1.0),
    "relu6": (None, 6.0),
}
# Where the units are after a function with weights: the channel dimension, or the last one.
_CHANNELS = re.compile(r"conv(_transpose)?[123]d|batch_norm|group_norm|instance_norm")
_LAST = {"linear", "addmm", "baddbmm", "bilinear", "layer_norm", "rms_norm", "multi_head_attention_forward"}
_PRODUCTS = {"matmul", "mm", "bmm", "einsum"}
_WEIGHTED = {"linear", "addmm", "baddbmm", "bilinear", "multi_head_attention_forward"}
_ACTIVATION_CLASS = re.compile(r"relu|gelu|silu|swish|mish|tanh|sigmoid|softplus|elu|glu|activation", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Activated:
    """One activation that happened. `pre` is its input where one tensor is (not for gated and recurrent units)."""

    site: str
    kind: str
    after: str
    unit_dim: int
    pre: Tensor | None
    out: Tensor
    bounds: tuple[float | None, float | None] | None = None
    replaces: bool = False


@dataclass(frozen=True, eq=False)
class Attended:
    """One attention that happened; `weights` computes (batch, heads, queries, keys) for a few of its samples."""

    site: str
    weights: Callable[[], Tensor]


class Watch(TorchFunctionMode):
    """While open, reports each activation and attention of `model` to the observers, as it happens.

    An event with `replaces` takes the place of the one before it at the same site: a gate was multiplied in, or
    a square taken. `ran` and `followed` hold the names of modules that ran, and of those whose
    output went into an activation; `blind` those whose inside cannot be watched, with the reason.

    >>> with Watch(torch.nn.Tanh(), on_activation=lambda event: print(event.site, event.kind)) as watch:
    ...     _ = watch.model(torch.zeros(1))
    tanh tanh
    """

    def __init__(
        self,
        model: nn.Module,
        on_activation: Callable[[Activated], None],
        on_attention: Callable[[Attended], None] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.on_activation = on_activation
        self.on_attention = on_attention
        self.ran: set[str] = set()
        self.followed: set[str] = set()
        self.blind: dict[str, str] = {}
        # Set during a backward pass: checkpointed modules run again there, and must not count twice.
        self.paused = False
        self._stack: list[tuple[str, nn.Module]] = []
        self._opaque: list[bool] = []  # whether each of them is one activation as a whole
        self._handles: list[RemovableHandle] = []
        self._begin()

    def __enter__(self) -> Watch:
        try:
            clean = cleaner(self.model)
            for name, module in self.model.named_modules():
                self._attach(clean(name), module)
        except BaseException:
            self._detach()
            raise
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        self._detach()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def _attach(self, name: str, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            self.blind[name] = "TorchScript runs outside Python: nothing in it can be watched"
            return
        own = _opaque_activation(module)

        def enter(module: nn.Module, args: object) -> None:
            if not self._stack:
                self._begin()
            self._stack.append((name, module))
            self._opaque.append(own)
            self.ran.add(name)

        def leave(module: nn.Module, args: Sequence[Any], output: object) -> None:
            self._stack.pop()
            self._opaque.pop()
            if own and isinstance(output, Tensor) and not self.paused:
                pre = args[0] if len(args) == 1 and isinstance(args[0], Tensor) else None
                pre = pre if pre is not None and pre.shape == output.shape else None
                self._activated(name or type(module).__name__, type(module).__name__, pre, output, None)

        self._handles.append(module.register_forward_pre_hook(enter))
        # always_call: a forward that raises must not leave its name on the stack.
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()
        self._opaque.clear()
        self._pending.clear()

    def _begin(self) -> None:
        """A new pass: numbering starts again."""
        self._calls: Counter[str] = Counter()
        # Tensors whose site may still be replaced by a product. Few, because each is kept alive.
        self._pending: deque[_Pending] = deque(maxlen=4)
        self._after, self._unit_dim = "", None

    _unit_dim: int | None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        inside = name.strip("_") if name.endswith("_") and not name.startswith("__") else name
        # Outside every module the caller's own code runs, such as a loss: not part of the model.
        if self.paused or not self._opaque or self._opaque[-1]:
            return func(*args, **kwargs)
        kind = _kind(inside, args, kwargs)
        if kind is None:
            out = func(*args, **kwargs)
            self._note(inside, args, kwargs, out)
            return out
        pre = args[0] if args and isinstance(args[0], Tensor) and kind not in RECURRENT and kind != "glu" else None
        in_place = name.endswith("_") or bool(kwargs.get("inplace")) or any(each is True for each in args[1:])
        if pre is not None and in_place:
            pre = pre.detach().clone()
        out = func(*args, **kwargs)
        value = out[0] if isinstance(out, tuple) else out
        if isinstance(value, Tensor) and value.is_floating_point():
            self._activated(self._number(kind), kind, pre, value, _bounds(kind, args, kwargs))
        return out

    def _number(self, kind: str) -> str:
        module_name, module = self._stack[-1] if self._stack else ("", self.model)
        if type(module).__module__ == "torch.nn.modules.activation" or isinstance(module, nn.RNNBase):
            return module_name or kind
        return f"{module_name}:{kind}" if module_name else kind

    def _activated(
        self, site: str, kind: str, pre: Tensor | None, out: Tensor, bounds: tuple[float | None, float | None] | None
    ) -> None:
        self._calls[site] += 1
        if self._calls[site] > 1:
            site = f"{site}#{self._calls[site]}"
        dim = -1 if kind in RECURRENT else self._unit_dim
        if dim is None:
            dim = 1 if out.dim() == 4 else -1
        event = Activated(site, kind, self._after, dim if out.dim() > 1 else -1, pre, out, bounds)
        self.followed.add(self._after)
        self._pending.append(_Pending(out, event, {name for name, _ in self._stack[-2:]}))
        self.on_activation(event)

    def _note(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: object) -> None:
        """What a function that is no activation means for the ones that follow."""
        if name in ("mul", "multiply", "square", "pow"):
            self._combined(name, args, out)
        elif name in _LAST or _CHANNELS.fullmatch(name) or (name in _PRODUCTS and _has_parameter(args)):
            self._unit_dim = -1
            if _CHANNELS.fullmatch(name):
                spatial = int(name[-2]) if name[-1] == "d" and name[-2].isdigit() else None
                self._unit_dim = 0 if spatial and args and args[0].dim() == spatial + 1 else 1
            if name in _WEIGHTED or name.startswith("conv") or name in _PRODUCTS:
                self._after = self._stack[-1][0] if self._stack else ""
        if self.on_attention is not None and isinstance(out, Tensor | tuple):
            weights = weights_of(name, args, kwargs, out)
            if weights is not None:
                where = self._stack[-1][0] if self._stack else ""
                self._calls[f"attention {where}"] += 1
                count = self._calls[f"attention {where}"]
                site = (where or "attention") + (f"#{count}" if count > 1 else "")
                self.on_attention(Attended(site, weights))

    def _combined(self, name: str, args: Sequence[Any], out: object) -> None:
        if not isinstance(out, Tensor) or (name in ("pow", "mul", "multiply") and len(args) < 2):
            return
        if name == "pow" and args[1] != 2:
            return
        here = self._stack[-1][0]
        for each in reversed(self._pending):
            position = next((at for at, argument in enumerate(args[:2]) if argument is each.value), None)
            # Another module that squares it (an RMS norm, say) uses the unit's output; it does not make it.
            if position is None or out.shape != each.value.shape or here not in each.frames:
                continue
            squared = name in ("square", "pow") or args[0] is args[1]
            other = None if squared else args[1 - position]
            if not squared and not (isinstance(other, Tensor) and other.shape == out.shape):
                continue
            before = each.event
            kind = f"squared {before.kind}" if squared else f"{before.kind} gated"
            pre = before.pre if squared else None
            again = Activated(before.site, kind, before.after, before.unit_dim, pre, out, replaces=True)
            self._pending.remove(each)
            self.on_activation(again)
            return


@dataclass(frozen=True, eq=False)
class _Pending:
    """An activation whose product may yet replace it, if it is taken in one of these modules."""

    value: Tensor
    event: Activated
    frames: set[str]


def _kind(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    if name in ACTIVATIONS:
        return name
    # clamp at zero is how some networks write ReLU.
    if name in ("clamp", "clamp_min", "clip"):
        low = args[1] if len(args) > 1 else kwargs.get("min")
        high = args[2] if len(args) > 2 else kwargs.get("max")
        if isinstance(low, int | float) and low == 0 and high is None and args and args[0].is_floating_point():
            return "relu"
    return None


def _bounds(kind: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[float | None, float | None] | None:
    if kind == "hardtanh":
        low = args[1] if len(args) > 1 else kwargs.get("min_val", -1.0)
        high = args[2] if len(args) > 2 else kwargs.get("max_val", 1.0)
        return float(low), float(high)
    return BOUNDS.get(kind)


def _has_parameter(args: Sequence[Any]) -> bool:
    return any(isinstance(each, nn.Parameter) for each in args)


def _opaque_activation(module: nn.Module) -> bool:
    """A module that is one activation as a whole, built of simpler functions (such as a tanh-approximated GELU)."""
    if type(module).__module__ == "torch.nn.modules.activation" or next(module.children(), None) is not None:
        return False
    if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
        return False
    return _ACTIVATION_CLASS.search(type(module).__name__) is not None and not isinstance(module, nn.RNNBase)


# Samples of a batch whose attention is measured: entropy averages over queries, so a few are enough.
SAMPLES = 8


@dataclass(frozen=True)
class HeadEntropy:
    """Entropy per head of one attention, in nats, and as a share of what its visible keys allow (NaN: one key)."""

    name: str
    entropy: Tensor
    share: Tensor

    def to_dict(self) -> dict[str, Any]:
        """Plain lists.

        >>> HeadEntropy("a", torch.zeros(1), torch.zeros(1)).to_dict()
        {'name': 'a', 'entropy': [0.0], 'share': [0.0]}
        """
        share = [None if math.isnan(each) else each for each in self.share.tolist()]
        return {"name": self.name, "entropy": self.entropy.tolist(), "share": share}


def entropy(weights: Tensor, rows: Tensor | None = None) -> Tensor:
    """Mean entropy in nats per head of (batch, heads, queries, keys); `rows` (batch, queries) picks real queries.

    >>> entropy(torch.full((1, 2, 3, 4), 0.25)).exp()
    tensor([4., 4.])
    """
    return _mean_over_queries(torch.special.entr(weights).sum(-1), rows)


def entropy_share(weights: Tensor, rows: Tensor | None = None) -> Tensor:
    """The same ÷ log of the number of keys with any weight, over the queries that see at least two.

    >>> entropy_share(torch.tensor([[[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]]]))
    tensor([1.])
    """
    visible = (weights > 0).sum(-1)
    share = torch.special.entr(weights).sum(-1) / visible.clamp_min(2).log()
    chosen = (visible > 1) if rows is None else (visible > 1) & rows[:, None, :]
    count = chosen.sum((0, 2))
    return torch.where(count > 0, torch.where(chosen, share, 0).sum((0, 2)) / count, math.nan)


def weights_of(name: str, args: Sequence[Any], kwargs: dict[str, Any], out: object) -> Callable[[], Tensor] | None:
    """A function that computes the attention weights of a call, or None if it was no attention.

    >>> weights_of("relu", (), {}, None) is None
    True
    """
    if name == "scaled_dot_product_attention":
        return lambda: _fused(*args, **kwargs)
    if name == "multi_head_attention_forward":
        return lambda: _multi_head(args, kwargs)
    if name == "softmax" and isinstance(out, Tensor) and out.dim() == 4:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if dim in (-1, 3):
            kept = out.detach()[:SAMPLES]
            return lambda: kept.float()
    return None


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The weights that the fused kernel does not return: softmax(scale·QKᵀ + mask)."""
    query, key = query.detach()[:SAMPLES].float(), key.detach()[:SAMPLES].float()
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        seen = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        logits = logits.masked_fill(~seen, -math.inf)
    if attn_mask is not None:
        mask = attn_mask.detach()
        mask = mask[:SAMPLES] if mask.dim() == logits.dim() and mask.shape[0] > 1 else mask
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask.float()
    weights = logits.softmax(-1)
    weights = torch.where(weights.isnan(), 0, weights)
    return weights if weights.dim() == 4 else weights.reshape(-1, *([1] * (4 - weights.dim())), *weights.shape[1:])


def _multi_head(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """The same call again, with the weights returned."""
    with torch.no_grad():
        again = {**kwargs, "need_weights": True, "average_attn_weights": False}
        weights = F.multi_head_attention_forward(*args, **again)[1]
    assert weights is not None
    weights = weights if weights.dim() == 4 else weights[None]
    return weights[:SAMPLES].detach().float()


def _mean_over_queries(values: Tensor, rows: Tensor | None) -> Tensor:
    if rows is None:
        return values.mean((0, 2))
    chosen = rows[:, None, :].expand_as(values)
    return torch.where(chosen, values, 0).sum((0, 2)) / chosen.sum((0, 2))
