"""What studies/start-norm.yaml needs beside the laboratory's own: networks with a normalisation behind each weight."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import Tensor, nn

from rekindle import lab
from rekindle.lab.networks.transformers import GPT


@lab.network("mlp-normed")
def mlp(shape: tuple[int, ...], classes: int, *, width: Sequence[int] = (128, 128, 128)) -> nn.Module:
    """Hidden layers without a bias, each with a LayerNorm behind it, so that the norm of its weight is free."""
    sizes = [prod(shape), *width]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after, bias=False), nn.LayerNorm(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


class Between(nn.Module):
    """The MLP of a block with a LayerNorm behind each of its two weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc, self.inner = nn.Linear(width, 4 * width, bias=False), nn.LayerNorm(4 * width)
        self.c_proj, self.outer = nn.Linear(4 * width, width, bias=False), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) → the same."""
        out: Tensor = self.outer(self.c_proj(nn.functional.gelu(self.inner(self.c_fc(x)))))
        return out


@lab.network("gpt-normed")
def gpt(
    shape: tuple[int, ...], classes: int, *, layers: int = 2, width: int = 64, heads: int = 4, tied: bool = True
) -> nn.Module:
    """The laboratory's GPT, with normalisation behind the MLP's weights and the output of attention too."""
    model = GPT(shape, classes, layers=layers, width=width, heads=heads, tied=tied)
    for block in model.h:
        block.mlp = Between(width)
        block.attn.c_proj = nn.Sequential(block.attn.c_proj, nn.LayerNorm(width))  # type: ignore[union-attr]
    return model
