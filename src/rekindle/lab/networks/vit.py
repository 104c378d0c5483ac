"""The vision transformer: pre-norm blocks over patches, with queries, keys and values in layers of their own.

The layers are called to_q, to_k, to_v and to_out as in the paper's ViT-Tiny, of which only to_q and to_k are projected
(the preset "paper-vit").
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rekindle.lab.networks.sizes import at_least_one, image, whole_heads

Pooling = Literal["class", "mean"]


class Attention(nn.Module):
    """Every token looks at every token.

    >>> Attention(8, heads=2)(torch.zeros(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.to_q, self.to_k, self.to_v = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.to_out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) → the same."""
        split = (self.heads, self.head_dim)
        q, k, v = (to(x).unflatten(-1, split).transpose(1, 2) for to in (self.to_q, self.to_k, self.to_v))
        mixed: Tensor = self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return mixed


class MLP(nn.Module):
    """The two layers that work on each token by itself.

    >>> MLP(8, 32)(torch.zeros(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) → the same."""
        changed: Tensor = self.fc2(self.act(self.fc1(x)))
        return changed


class Block(nn.Module):
    """Attention and MLP, each added to what it read, normalised.

    >>> Block(8, heads=2, hidden=32)(torch.zeros(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), MLP(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) → the same."""
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class ViT(nn.Module):
    """Patches of `patch`×`patch` pixels, learned positions, `layers` blocks, and a head on the pooled tokens.

    The sizes are ViT-Tiny's unless told; `hidden`, the width inside the MLPs, is four times `width` unless told.
    `pooling="class"` reads a token that belongs to no patch, `"mean"` the average of all. Patches are cut by
    reordering pixels and embedded by a Linear: a convolution with its stride computes the same, but would be
    projected tap by tap, where it is really one matrix.

    >>> ViT((3, 16, 16), 10, layers=3, width=48)(torch.zeros(2, 3, 16, 16)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        *,
        patch: int = 4,
        layers: int = 12,
        width: int = 192,
        heads: int = 3,
        hidden: int | None = None,
        pooling: Pooling = "class",
    ) -> None:
        super().__init__()
        channels, high, wide = image(shape)
        hidden = 4 * width if hidden is None else hidden
        at_least_one(patch=patch, layers=layers, hidden=hidden)
        whole_heads(width, heads)
        if high % patch or wide % patch:
            raise ValueError(f"patch={patch} must divide the height and width of shape={shape}")
        if pooling not in get_args(Pooling):
            raise ValueError(f"pooling={pooling!r} must be one of {', '.join(get_args(Pooling))}")
        tokens = (high // patch) * (wide // patch) + (pooling == "class")
        self.patch = patch
        self.patch_embed = nn.Linear(channels * patch**2, width)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width)) if pooling == "class" else None
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, width))
        self.blocks = nn.Sequential(*(Block(width, heads, hidden) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw what belongs to no layer; the layers start as torch starts them."""
        nn.init.normal_(self.pos_embed, std=0.02)
        if self.cls_token is not None:
            nn.init.normal_(self.cls_token, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, classes) for images (batch, channels, height, width)."""
        tokens = self.patch_embed(F.pixel_unshuffle(x, self.patch).flatten(2).transpose(1, 2))
        if self.cls_token is not None:
            tokens = torch.cat([self.cls_token.expand(tokens.shape[0], -1, -1), tokens], dim=1)
        tokens = self.blocks(tokens + self.pos_embed)
        # Pooled before it is normalised: the class token is the only one that the head reads.
        pooled = tokens.mean(1) if self.cls_token is None else tokens[:, 0]
        logits: Tensor = self.head(self.norm(pooled))
        return logits
