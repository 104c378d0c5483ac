"""Nets in which the scores of a layer choose among experts, and nets in which they only look so."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import case, noise

X = noise(6, 8)
SEQUENCE = noise(2, 5, 8)


class Stacked(nn.Module):
    """Experts as stacks of parameters; whatever the router is called."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.inlet, self.pick, self.out = nn.Linear(8, 8), nn.Linear(8, experts, bias=False), nn.Linear(8, 3)
        self.w1 = nn.Parameter(torch.randn(experts, 8, 6))
        self.w2 = nn.Parameter(torch.randn(experts, 6, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(self.inlet(x).relu()))

    def mix(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def every(self, x: Tensor) -> Tensor:
        """(experts, tokens, width)"""
        return torch.bmm(torch.bmm(x.expand(4, *x.shape), self.w1).relu(), self.w2)


@case(X, heads="out", routers="pick")
class TopTwoOfAStack(Stacked):
    def mix(self, x: Tensor) -> Tensor:
        scores, chosen = self.pick(x).softmax(-1).topk(2)
        weights = torch.zeros(len(x), 4).scatter(1, chosen, scores)
        return (self.every(x) * weights.T[:, :, None]).sum(0)


@case(X, heads="out", routers="pick")
class GatheredWeights(Stacked):
    def mix(self, x: Tensor) -> Tensor:
        score, chosen = self.pick(x).softmax(-1).max(-1)
        hidden = torch.bmm(x[:, None], self.w1[chosen]).relu()
        return torch.bmm(hidden, self.w2[chosen])[:, 0] * score[:, None]


@case(X, heads="out", routers="pick")
class SigmoidScores(Stacked):
    def mix(self, x: Tensor) -> Tensor:
        scores = self.pick(x).sigmoid()
        chosen = (scores + torch.ones(4)).topk(2).indices
        weights = torch.zeros(len(x), 4).scatter(1, chosen, scores.gather(1, chosen))
        return torch.einsum("te,etd->td", weights, self.every(x))


@case(X, heads="out", routers="pick")
class SwitchByOneHot(Stacked):
    def mix(self, x: Tensor) -> Tensor:
        scores = self.pick(x).softmax(-1)
        chosen = F.one_hot(scores.argmax(-1), 4).float()
        routed = torch.einsum("te,td->etd", chosen, x)
        made = torch.bmm(torch.bmm(routed, self.w1).relu(), self.w2)
        weights = chosen * scores.gather(1, scores.argmax(-1, keepdim=True))
        return torch.einsum("te,etd->td", weights, made)


class Listed(nn.Module):
    """Experts in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.choose, self.out = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(self.inlet(x).relu()))

    def mix(self, x: Tensor) -> Tensor:
        raise NotImplementedError


@case(X, heads="out", routers="choose")
class TopOneOfAList(Listed):
    def mix(self, x: Tensor) -> Tensor:
        scores, chosen = self.choose(x).softmax(-1).topk(1)
        made = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen[:, 0] == i).nonzero()[:, 0]
            made = made.index_add(0, rows, expert(x[rows]) * scores[rows])
        return made


@case(X, heads="out", routers="choose")
class TopTwoOfAListByPlace(Listed):
    def mix(self, x: Tensor) -> Tensor:
        scores, chosen = self.choose(x).topk(2)
        scores = scores.softmax(-1)
        made = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(chosen == i)
            made[token] += scores[token, place, None] * expert(x[token])
        return made


class Soft(Listed):
    """Every expert runs, weighed by scores: a mixture without a choice."""

    def mix(self, x: Tensor) -> Tensor:
        scores = self.choose(x).softmax(-1)
        return sum(scores[:, i, None] * expert(x) for i, expert in enumerate(self.experts))  # type: ignore[return-value]


@case(X, heads="out", skipped="choose")
class WeighedExperts(Soft):
    pass


@case(X, heads="out", skipped="choose")
class WeighedStack(Listed):
    def mix(self, x: Tensor) -> Tensor:
        made = torch.stack([expert(x) for expert in self.experts], 1)
        return (self.choose(x).softmax(-1)[..., None] * made).sum(1)


@case(X, heads="out")
class GateOfChannels(nn.Module):
    """Squeeze and excitation: a gate, which selects nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.gate, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.c(x).relu()
        return self.out(h * self.gate(h).sigmoid())


@case(SEQUENCE, heads="out")
class PoolingByScores(nn.Module):
    """Scores over tokens, not over parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.score, self.out = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.c(x).tanh()
        return self.out((self.score(h).softmax(1) * h).sum(1))


@case(X, heads="out", cuts={"gating.weight_ih": (8, 8, 8), "gating.weight_hh": (8, 8, 8)})
class GatedResidual(nn.Module):
    """The gates of a GRU around a block are no routers."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.f, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.gating = nn.GRUCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inlet(x).tanh()
        return self.out(self.gating(self.f(h).relu(), h))
