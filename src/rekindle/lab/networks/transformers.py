"""Networks with attention: a GPT over tokens and a ViT over patches.

The GPT is nanoGPT, which the paper trains: `nn.Linear` without biases, q | k | v in one `c_attn`, and `lm_head` shares
its weight with the tokens. With `bias=True` it has GPT-2's sizes, and its function but for the exact GELU in place of
the approximate one. The layout of `c_attn` is registered here, as users register that of their own module.

The ViT's layers are called to_q, to_k, to_v and to_out as in the paper's ViT-Tiny, of which only to_q and to_k are
projected (the preset "paper-vit").
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rekindle.blocks import matrices, register
from rekindle.blocks.layouts import Recipe
from rekindle.lab.dawn import Positions
from rekindle.lab.networks.vision import at_least_one, image

_STD = 0.02


def context(shape: tuple[int, ...]) -> int:
    """The longest sequence of tokens that a language model of this shape reads."""
    if len(shape) != 1 or shape[0] < 1:
        raise ValueError(f"shape={shape} must be (context,) for a network that reads tokens")
    return shape[0]


def whole_heads(width: int, heads: int) -> None:
    """An error unless the width splits evenly over the attention heads."""
    at_least_one(width=width, heads=heads)
    if width % heads:
        raise ValueError(f"width={width} must be a multiple of heads={heads}")


class GPTAttention(nn.Module):
    """Every token looks at itself and at what came before."""

    def __init__(self, width: int, heads: int, bias: bool = False) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) → the same."""
        split = (3, self.heads, self.head_dim)
        q, k, v = self.c_attn(x).unflatten(-1, split).permute(2, 0, 3, 1, 4).unbind()
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.c_proj(seen.transpose(1, 2).flatten(2))
        return mixed


def _layout(attention: GPTAttention) -> dict[str, Recipe]:
    heads = attention.heads
    parts = ("query", "key", "value")
    return {
        "c_attn.weight": matrices("(part head dim) in", part=parts, head=heads, heads="head"),
        "c_proj.weight": matrices("out (head in)", head=heads, inputs="head in", heads="head", role="attention-output"),
    }


register(GPTAttention, _layout)


class GPTMLP(nn.Module):
    """The two layers that work on each token by itself."""

    def __init__(self, width: int, bias: bool = False) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.act = nn.GELU()
        self.c_proj = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) → the same."""
        changed: Tensor = self.c_proj(self.act(self.c_fc(x)))
        return changed


class GPTBlock(nn.Module):
    """Attention and MLP, each added to what it read, normalized."""

    def __init__(self, width: int, heads: int, bias: bool = False) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width, bias=bias), GPTAttention(width, heads, bias)
        self.ln_2, self.mlp = nn.LayerNorm(width, bias=bias), GPTMLP(width, bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) → the same."""
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    """Tokens and learned positions, `layers` blocks, and scores of the next token at every place.

    The sizes are GPT-2-small's unless told.

    >>> model = GPT((32,), 65, layers=2, width=64, heads=4)
    >>> model(torch.zeros(2, 20, dtype=torch.long)).shape
    torch.Size([2, 20, 65])
    >>> model.lm_head.weight is model.wte.weight
    True
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        *,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        bias: bool = False,
        tied: bool = True,
    ) -> None:
        super().__init__()
        at_least_one(layers=layers)
        whole_heads(width, heads)
        self.wte = nn.Embedding(classes, width)
        self.positions = Positions(context(shape), width, _STD)
        self.h = nn.Sequential(*(GPTBlock(width, heads, bias) for _ in range(layers)))
        self.ln_f = nn.LayerNorm(width, bias=bias)
        self.lm_head = nn.Linear(width, classes, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """GPT-2's start: N(0, .02²) throughout, and what writes into the residual stream smaller by √(2·layers)."""
        residual = _STD / math.sqrt(2 * len(self.h))
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=residual if name.endswith("c_proj") else _STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        self.positions.reset_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, time, classes) for tokens (batch, time), time at most the context."""
        x = self.positions(self.wte(tokens))
        logits: Tensor = self.lm_head(self.ln_f(self.h(x)))
        return logits


class ViTAttention(nn.Module):
    """Every token looks at every token."""

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


class ViTMLP(nn.Module):
    """The two layers that work on each token by itself."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) → the same."""
        changed: Tensor = self.fc2(self.act(self.fc1(x)))
        return changed


class ViTBlock(nn.Module):
    """Attention and MLP, each added to what it read, normalized."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), ViTAttention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), ViTMLP(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) → the same."""
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class ViT(nn.Module):
    """Patches of `patch`×`patch` pixels, learned positions, `layers` blocks, and a head on the pooled tokens.

    The sizes are ViT-Tiny's unless told; `hidden`, the width inside the MLPs, is four times `width` unless told. The
    head reads a token that belongs to no patch. Patches are cut by reordering pixels and embedded by a Linear: a
    convolution with its stride computes the same, but would be projected tap by tap, where it is really one matrix.

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
    ) -> None:
        super().__init__()
        channels, high, wide = image(shape)
        hidden = 4 * width if hidden is None else hidden
        at_least_one(patch=patch, layers=layers, hidden=hidden)
        whole_heads(width, heads)
        if high % patch or wide % patch:
            raise ValueError(f"patch={patch} must divide the height and width of shape={shape}")
        tokens = (high // patch) * (wide // patch) + 1
        self.patch = patch
        self.patch_embed = nn.Linear(channels * patch**2, width)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, width))
        self.blocks = nn.Sequential(*(ViTBlock(width, heads, hidden) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw what belongs to no layer; the layers start as torch starts them."""
        nn.init.normal_(self.pos_embed, std=0.02)
        nn.init.normal_(self.cls_token, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, classes) for images (batch, channels, height, width)."""
        tokens = self.patch_embed(F.pixel_unshuffle(x, self.patch).flatten(2).transpose(1, 2))
        tokens = torch.cat([self.cls_token.expand(tokens.shape[0], -1, -1), tokens], dim=1)
        logits: Tensor = self.head(self.norm(self.blocks(tokens + self.pos_embed)[:, 0]))
        return logits
