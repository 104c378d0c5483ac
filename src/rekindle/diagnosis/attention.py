"""Attention weights, where they can be had, and how spread out each head's attention is.

A head whose entropy falls to 0 looks at one token only; one at its maximum averages over all.

>>> import torch
>>> weights = torch.tensor([[[[0.5, 0.5], [1.0, 0.0]]]])  # one sample, one head, two queries, two keys
>>> entropy(weights)
tensor([0.3466])
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Samples of a batch whose attention is looked at: entropy averages over queries, so a few are plenty.
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


def weights_of(name: str, args: Any, kwargs: dict[str, Any], out: Any) -> Callable[[], Tensor] | None:
    """A way to the attention weights of a function call that attended, or None if it did not.

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


def _multi_head(args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Once more with the weights asked for; everything else of the call stays."""
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
