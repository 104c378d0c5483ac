"""DAWN: a language model whose feed-forward layers are composed anew from a pool of routed neurons.

A token does not pass through a fixed matrix. A `Router` scores n low-rank neurons from the token and from what
attention gathers around it, and keeps the best few. Each neuron holds two rows of coefficients over a small basis,
and a `BasisFFN` mixes the kept rows into one *recipe* that says how to compose the up-projection. The network is
here to test a claim: that coefficient matrices with a QR start, and a loss that keeps them diverse, stop the
neurons from becoming copies of one another (`benchmarks/dawn.py` measures it, `analysis` looks inside).

Four things differ from the document that describes the system, each because it was found wrong:

- It composes one up-projection per sequence, from every position. A next-token predictor would see its own target
  in there, so a causal model averages the recipes of the positions so far (`causal=False` keeps the document's way,
  for tasks that may look at the whole sequence).
- Rows of a tall QR factor are not unit vectors (512 in 16 dimensions: norm 0.18). They are scaled to norm 1 here, and
  so is the Gaussian start, so that the two starts differ in angles and not in size.
- Counting coefficients above a threshold has no gradient: `basis_usage_loss` counts softly.
- n > d vectors cannot be orthogonal: the losses are ratios to the Welch bound, 1 being the best there is.

>>> model = DAWN(DAWNConfig(width=16, heads=2, hidden=32, layers=2, neurons=24, chosen=4, basis=4, neuron_rank=4))
>>> model(torch.tensor([[104, 101, 108, 108, 111]])).shape
torch.Size([1, 5, 256])
>>> {name: round(value.item(), 2) for name, value in model.auxiliary_losses().items()}
{'neuron_orthogonality': 2.2..., 'basis_usage': 1.2..., 'diversity': 4.1...}
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rekindle.initial import orthogonal_
from rekindle.isolation import forked_rng
from rekindle.measures import welch_bound

CoefficientStart = Literal["gaussian", "qr", "positive"]

# Fewest basis elements that a neuron should draw on; the document's number.
_LEAST_USED = 3.0


@dataclass(frozen=True)
class DAWNConfig:
    """The sizes of a DAWN; neurons, ranks, basis and the number chosen are the document's.

    >>> DAWNConfig(chosen=600)
    Traceback (most recent call last):
    ValueError: chosen=600 must lie between 1 and neurons=512
    """

    vocabulary: int = 256
    length: int = 128  # the longest sequence
    width: int = 64
    hidden: int = 256
    layers: int = 3
    heads: int = 4
    neurons: int = 512
    neuron_rank: int = 16
    chosen: int = 16
    basis: int = 16
    basis_rank: int = 8
    causal: bool = True
    start: CoefficientStart = "qr"
    # As large as the tokens (1), the loss ends .080 ± .007 higher (docs/evidence/dawn.md).
    position_std: float = 0.1

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if type(size) is int and size < 1:  # causal is a bool
                raise ValueError(f"{name}={size} must be at least 1")
        if not 1 <= self.chosen <= self.neurons:
            raise ValueError(f"chosen={self.chosen} must lie between 1 and neurons={self.neurons}")
        if self.neurons <= max(self.basis, self.neuron_rank):
            raise ValueError(
                f"neurons={self.neurons} must outnumber basis={self.basis} and neuron_rank={self.neuron_rank}: "
                "fewer can be orthogonal outright, and no Welch bound applies"
            )
        if self.basis < _LEAST_USED:
            raise ValueError(f"basis={self.basis} must be at least {_LEAST_USED:.0f}, which each neuron should use")
        if self.width % self.heads:
            raise ValueError(f"width={self.width} must be a multiple of heads={self.heads}")
        if self.start not in get_args(CoefficientStart):
            raise ValueError(f"start={self.start!r} must be one of {', '.join(get_args(CoefficientStart))}")


class Routing(NamedTuple):
    """Which neurons each token chose, and how it weighs them: (batch, time, chosen) both, weights sum to 1."""

    neurons: Tensor
    weights: Tensor

    def dense(self, count: int) -> Tensor:
        """The weights over all `count` neurons, 0 where a neuron was not chosen: (batch, time, count).

        One product with this matrix mixes any per-neuron rows. For 512 neurons that is quicker on a CPU than
        gathering the chosen rows, whose backward scatters.
        """
        empty = self.weights.new_zeros(*self.weights.shape[:-1], count)
        return empty.scatter(-1, self.neurons, self.weights)


class Router(nn.Module):
    """Scores the low-rank neurons A·B from token and context, and chooses the best for each token."""

    def __init__(self, config: DAWNConfig) -> None:
        super().__init__()
        self.chosen, self.heads, self.causal = config.chosen, config.heads, config.causal
        self.A = nn.Parameter(torch.empty(config.neurons, config.neuron_rank))
        self.B = nn.Parameter(torch.empty(config.neuron_rank, config.width))
        self.attention = nn.Linear(config.width, 3 * config.width)
        self.gate = nn.Linear(2 * config.width, 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Neurons of norm about 1, so that a normalized token's scores start with a standard deviation of 1."""
        nn.init.normal_(self.A, std=self.A.shape[1] ** -0.5)
        orthogonal_(self.B)
        self.attention.reset_parameters()
        self.gate.reset_parameters()

    def forward(self, x: Tensor) -> Routing:
        """Choose for each token of x (batch, time, width).

        The gate weighs the token's scores against its context's. Scores are linear, so mixing the two inputs
        first gives the same and is one product instead of two.
        """
        context = self._context(x)
        share = torch.sigmoid(self.gate(torch.cat([x, context], dim=-1)))
        scores = (share * x + (1 - share) * context) @ self.B.mT @ self.A.mT
        best = scores.topk(self.chosen, dim=-1, sorted=False)
        return Routing(best.indices, best.values.softmax(-1))

    def orthogonality_loss(self) -> Tensor:
        """Mean squared cosine between neurons, over the least that vectors of this rank can have.

        Taken on A·B, the neurons themselves: the rows of A have other angles unless B is an isometry.
        """
        neurons, rank = self.A.shape
        return mean_squared_cosine(self.A @ self.B) / float(welch_bound(neurons, min(rank, self.B.shape[1])))

    def _context(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        query, key, value = self.attention(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return context.transpose(1, 2).reshape(batch, time, width)


class BasisFFN(nn.Module):
    """A feed-forward layer whose up-projection is mixed from basis elements by the chosen neurons' coefficients.

    With recipes a and b over the basis, the up-projection is (Σ aᵢ·downᵢ)(Σ bᵢ·upᵢ), of rank `basis_rank`; GELU
    and one shared down-projection follow.
    """

    def __init__(self, config: DAWNConfig) -> None:
        super().__init__()
        self.causal, self.start, self.chosen = config.causal, config.start, config.chosen
        # [0] holds the recipes of the first factor, [1] those of the second: one (2, neurons, basis) tensor.
        self.coefficients = nn.Parameter(torch.empty(2, config.neurons, config.basis))
        self.first = nn.Parameter(torch.empty(config.basis, config.width, config.basis_rank))
        self.second = nn.Parameter(torch.empty(config.basis, config.basis_rank, config.hidden))
        self.down = nn.Linear(config.hidden, config.width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Coefficient rows of norm about 1, and a basis that gives composed up-projections LeCun's variance.

        Mixing k rows with equal weights shrinks the recipe by √k, twice, which the basis makes up for.
        The Gaussian and QR starts draw the same numbers; QR keeps only their orthogonal part. The positive start,
        uniform above 0, is the redundancy that the other two avoid: its mean cosine is .75.
        """
        neurons, basis = self.coefficients.shape[1:]
        if self.start == "qr":
            orthogonal_(self.coefficients, gain=math.sqrt(neurons / basis))
        elif self.start == "gaussian":
            nn.init.normal_(self.coefficients, std=basis**-0.5)
        else:
            nn.init.uniform_(self.coefficients, 0, math.sqrt(3 / basis))
        nn.init.normal_(self.first, std=math.sqrt(self.chosen / self.first.shape[1]))
        nn.init.normal_(self.second, std=math.sqrt(self.chosen / self.second.shape[1]))
        self.down.reset_parameters()

    def recipes(self, mixture: Tensor) -> tuple[Tensor, Tensor]:
        """The two recipes (batch, time, basis) at each position, from the dense weights of the chosen neurons."""
        basis = self.coefficients.shape[-1]
        both = mixture @ self.coefficients.transpose(0, 1).flatten(1)
        if self.causal:
            seen = torch.arange(1, both.shape[1] + 1, dtype=both.dtype, device=both.device)
            both = both.cumsum(1) / seen[:, None]
        else:
            both = both.mean(1, keepdim=True).expand_as(both)
        return both[..., :basis], both[..., basis:]

    def compose(self, a: Tensor, b: Tensor) -> Tensor:
        """The up-projections (…, width, hidden) that recipes a and b (…, basis) stand for, written out.

        `forward` applies them without ever forming one: 16 times less memory per token than these matrices.
        """
        return torch.einsum("...i,iwr->...wr", a, self.first) @ torch.einsum("...i,irh->...rh", b, self.second)

    def forward(self, x: Tensor, mixture: Tensor) -> Tensor:
        """Apply the layer that `mixture` (batch, time, neurons) composes to x (batch, time, width)."""
        a, b = self.recipes(mixture)
        basis, width, rank = self.first.shape
        # Every basis element is applied to every token in one product, and the recipe mixes the results: that is 2
        # products of a usual size instead of a small one per token.
        each = (x @ self.first.transpose(0, 1).reshape(width, -1)).reshape(*x.shape[:-1], basis, rank)
        inner = (a[..., None, :] @ each).squeeze(-2)
        outer = (b[..., :, None] * inner[..., None, :]).flatten(-2)
        composed: Tensor = self.down(F.gelu(outer @ self.second.flatten(0, 1)))
        return composed


class DAWNLayer(nn.Module):
    """Route, add the mix of the chosen neurons, then the feed-forward layer that they compose; pre-norm residuals."""

    def __init__(self, config: DAWNConfig) -> None:
        super().__init__()
        self.router, self.ffn = Router(config), BasisFFN(config)
        self.before_router, self.before_ffn = nn.LayerNorm(config.width), nn.LayerNorm(config.width)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """The layer's output for x (batch, time, width), and the routing that made it."""
        routing: Routing = self.router(self.before_router(x))
        mixture = routing.dense(len(self.router.A))
        x = x + mixture @ self.router.A @ self.router.B
        return x + self.ffn(self.before_ffn(x), mixture), routing


class Positions(nn.Module):
    """A learned vector for each place in the sequence, added to the tokens.

    Not an `nn.Embedding`, so that no set of targets takes it for a matrix: the paper does not project it either.
    """

    def __init__(self, length: int, width: int, std: float) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(length, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw with the standard deviation `std`."""
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, time, width) with its places added."""
        return x + self.weight[: x.shape[1]]

    def stacked(self, x: Tensor, weight: Tensor) -> Tensor:
        """The same for many networks at once (`rekindle.advice.stacking`)."""
        return (x.view(len(weight), -1, *x.shape[1:]) + weight[:, None, : x.shape[1]]).flatten(0, 1)


class DAWN(nn.Module):
    """The whole network: byte embeddings, positions, layers, and scores of the next byte.

    The seed alone decides the start; torch's global random state is left as it was.

    >>> small = DAWNConfig(width=8, heads=2, hidden=12, layers=1, neurons=20, chosen=3, neuron_rank=4, basis=4)
    >>> torch.equal(DAWN(small, seed=1).layers[0].ffn.first, DAWN(small, seed=1).layers[0].ffn.first)
    True
    """

    def __init__(self, config: DAWNConfig | None = None, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config = config or DAWNConfig()
        with forked_rng(torch.Generator().manual_seed(seed)):
            self.tokens = nn.Embedding(config.vocabulary, config.width)
            self.positions = Positions(config.length, config.width, config.position_std)
            self.layers = nn.ModuleList(DAWNLayer(config) for _ in range(config.layers))
            self.norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, config.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores (batch, time, vocabulary) for tokens (batch, time)."""
        return self.trace(tokens)[0]

    def trace(self, tokens: Tensor) -> tuple[Tensor, list[Routing]]:
        """The scores, and the routing of each layer."""
        if tokens.ndim != 2 or not 1 <= tokens.shape[1] <= self.config.length:
            most = f"1 to length={self.config.length} positions"
            raise ValueError(f"tokens must be (batch, time) with {most}, not of shape {tuple(tokens.shape)}")
        x = self.positions(self.tokens(tokens))
        routings: list[Routing] = []
        for layer in self.layers:
            x, routing = layer(x)
            routings.append(routing)
        return self.head(self.norm(x)), routings

    def auxiliary_losses(self) -> dict[str, Tensor]:
        """What keeps the parts of the network different, summed over layers; a function of the weights alone.

        `neuron_orthogonality`: of the routed neurons; `basis_usage`: shortfall of coefficient rows that draw on
        fewer than 3 basis elements; `diversity`: of the coefficient rows. The first and last are ratios to the
        Welch bound, so their least values are the number of layers and twice that (two matrices per layer).
        """
        layers = [layer for layer in self.layers if isinstance(layer, DAWNLayer)]
        coefficients = [layer.ffn.coefficients for layer in layers]
        return {
            "neuron_orthogonality": torch.stack([layer.router.orthogonality_loss() for layer in layers]).sum(),
            "basis_usage": 2 * torch.stack([basis_usage_loss(c, at_least=_LEAST_USED) for c in coefficients]).sum(),
            "diversity": 2 * torch.stack([diversity_loss(c) for c in coefficients]).sum(),
        }


# Losses that keep neurons different: rows are neurons, n of them in d dimensions. Those of n > d neurons are ratios to
# the Welch bound (1974), the least mean squared cosine that so many rows can have.


def mean_squared_cosine(vectors: Tensor) -> Tensor:
    """Mean of cos² over all pairs of different rows of a (…, n, d) tensor, with gradients.

    ‖X̂X̂ᵀ‖_F = ‖X̂ᵀX̂‖_F, so memory is that of the smaller Gram matrix: n = 100,000 neurons in d = 64 dimensions
    need a 64×64 one. A zero row counts as orthogonal to all others.
    """
    n, d = vectors.shape[-2:]
    if n < 2:
        raise ValueError(f"diversity needs at least two rows, the tensor has shape {tuple(vectors.shape)}")
    unit = F.normalize(vectors, dim=-1)
    gram = unit.mT @ unit if d < n else unit @ unit.mT
    alone = unit.square().sum(-1).square().sum(-1)
    return ((gram.square().sum((-2, -1)) - alone) / (n * (n - 1))).clamp_min(0)


def diversity_loss(vectors: Tensor, *, relative: bool = True) -> Tensor:
    """Mean squared cosine between rows, averaged over a batch; as a ratio to the Welch bound where n > d.

    1 is as different as n > d neurons can be; for n ≤ d the plain value, which can reach 0.
    """
    n, d = vectors.shape[-2:]
    value = mean_squared_cosine(vectors).mean()
    return value / float(welch_bound(n, d)) if relative and n > d else value


def basis_usage(coefficients: Tensor) -> Tensor:
    """How many basis elements each row effectively uses: (Σc²)²/Σc⁴, between 1 and d, smooth and scale-free.

    (The participation ratio. Counting entries above a threshold, as the orthogonal-start document does, has a
    gradient of zero everywhere.)
    """
    square = coefficients.square()
    tiny = torch.finfo(coefficients.dtype).tiny
    share = square / square.sum(-1, keepdim=True).clamp_min(tiny)
    return 1 / share.square().sum(-1).clamp_min(1 / coefficients.shape[-1])


def basis_usage_loss(coefficients: Tensor, *, at_least: float = 3.0) -> Tensor:
    """Mean shortfall of rows that use fewer than `at_least` basis elements, relative to it; 0 if none does."""
    if not 1 <= at_least <= coefficients.shape[-1]:
        raise ValueError(f"at_least={at_least} must lie between 1 and the {coefficients.shape[-1]} basis elements")
    return (1 - basis_usage(coefficients) / at_least).clamp_min(0).mean()


@dataclass(frozen=True)
class DAWNLoss:
    """Cross-entropy of the next token plus weighted auxiliary losses, as `loss(model, batch)`.

    >>> small = DAWNConfig(width=8, heads=2, hidden=12, layers=1, neurons=20, chosen=3, neuron_rank=4, basis=4)
    >>> batch = torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long)
    >>> plain = DAWNLoss(neuron_orthogonality=0, basis_usage=0, diversity=0)(DAWN(small), batch)
    >>> bool(DAWNLoss()(DAWN(small), batch) > plain)
    True
    """

    neuron_orthogonality: float = 1.0
    basis_usage: float = 0.01
    diversity: float = 0.01

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of a DAWN on a batch (tokens, the token that follows each)."""
        if not isinstance(model, DAWN):
            raise TypeError(f"DAWNLoss needs a DAWN, not {type(model).__name__}")
        tokens, following = batch
        loss = F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
        for name, value in model.auxiliary_losses().items():
            if weight := getattr(self, name):
                loss = loss + weight * value
        return loss
