"""A GPT: decoder blocks over tokens, with a fused query-key-value layer and a head tied to the token embedding.

An own module rather than transformers' GPT-2. The paper trains nanoGPT, in which the layers are `nn.Linear` without
biases, q | k | v lie in one `c_attn`, and `lm_head` shares its weight with the tokens; GPT-2 in transformers stores
transposed weights (`Conv1D`) with biases. It keeps the laboratory free of a large dependency, and at the size that the
laboratory runs (2 layers, width 64, context 32, batch 32, one CPU thread) a training step takes 19 ms where GPT-2 takes
26: no caches, masks or output classes around the products. With `bias=True` it has GPT-2's sizes, and its function but
for the exact GELU in place of the approximate one.

The layout of `c_attn` is registered here, as a user registers that of an own module.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rekindle.blocks.finding import matrices, register
from rekindle.blocks.layouts import Recipe
from rekindle.lab.networks.sizes import at_least_one, context, whole_heads

_STD = 0.02


class Attention(nn.Module):
    """Every token looks at itself and at what came before.

    >>> Attention(8, heads=2)(torch.zeros(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

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


def _layout(attention: Attention) -> dict[str, Recipe]:
    heads = attention.heads
    parts = ("query", "key", "value")
    return {
        "c_attn.weight": matrices("(part head dim) in", part=parts, head=heads, heads="head"),
        "c_proj.weight": matrices("out (head in)", head=heads, inputs="head in", heads="head", role="attention-output"),
    }


register(Attention, _layout)


class MLP(nn.Module):
    """The two layers that work on each token by itself.

    >>> MLP(8)(torch.zeros(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    def __init__(self, width: int, bias: bool = False) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.act = nn.GELU()
        self.c_proj = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) → the same."""
        changed: Tensor = self.c_proj(self.act(self.c_fc(x)))
        return changed


class Block(nn.Module):
    """Attention and MLP, each added to what it read, normalised.

    >>> Block(8, heads=2)(torch.zeros(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    def __init__(self, width: int, heads: int, bias: bool = False) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width, bias=bias), Attention(width, heads, bias)
        self.ln_2, self.mlp = nn.LayerNorm(width, bias=bias), MLP(width, bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) → the same."""
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    """Tokens and learned positions, `layers` blocks, and scores of the next token at every place.

    The sizes are GPT-2-small's unless told. Positions are vectors of the model and not an `nn.Embedding`, so that
    no set of targets takes them for a matrix: the paper does not project them either.

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
        self.pos_embed = nn.Parameter(torch.empty(context(shape), width))
        self.h = nn.Sequential(*(Block(width, heads, bias) for _ in range(layers)))
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
        nn.init.normal_(self.pos_embed, std=_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, time, classes) for tokens (batch, time), time at most the context."""
        x = self.wte(tokens) + self.pos_embed[: tokens.shape[1]]
        logits: Tensor = self.lm_head(self.ln_f(self.h(x)))
        return logits
