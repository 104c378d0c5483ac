"""Nets whose output layers are not simply the last: several, tied, added up, in other methods, never run."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import case, noise

X = noise(3, 8)
SEQUENCE = noise(2, 5, 8)
IMAGE = noise(2, 3, 8, 8)


class Body(nn.Module):
    """A hidden layer `body` and whatever a subclass does with its value."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.end(self.body(x).relu(), x)

    def end(self, h: Tensor, x: Tensor) -> Any:
        raise NotImplementedError


class WithHeads(Body):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 3), nn.Linear(8, 2)


@case(X, heads="a b")
class TwoHeadsInATuple(WithHeads):
    def end(self, h: Tensor, x: Tensor) -> Any:
        return self.a(h), self.b(h)


@case(X, heads="a b")
class TwoHeadsInADict(WithHeads):
    def end(self, h: Tensor, x: Tensor) -> Any:
        return {"policy": self.a(h).softmax(-1), "rest": [self.b(h)]}


@case(X, heads="a b")
class TwoHeadsInOneTensor(WithHeads):
    def end(self, h: Tensor, x: Tensor) -> Any:
        return torch.cat([self.a(h), self.b(h)], -1)


@case(X, heads="a b")
class OneHeadThatReadsDetached(WithHeads):
    def end(self, h: Tensor, x: Tensor) -> Any:
        return self.a(h), self.b(h.detach())


@case(X, heads="a b")
class OneHeadInsideADistribution(WithHeads):
    def end(self, h: Tensor, x: Tensor) -> Any:
        return torch.distributions.Normal(self.a(h).mean(1, keepdim=True), self.b(h).exp())


class Box:
    def __init__(self, logits: Tensor, value: Tensor) -> None:
        self.logits, self.value = logits, value


@case(X, heads="a b")
class HeadsInAPlainObject(WithHeads):
    def end(self, h: Tensor, x: Tensor) -> Any:
        return Box(self.a(h), self.b(h))


@case(X, heads="value advantage")
class Dueling(Body):
    def __init__(self) -> None:
        super().__init__()
        self.value, self.advantage = nn.Linear(8, 1), nn.Linear(8, 3)

    def end(self, h: Tensor, x: Tensor) -> Any:
        advantage = self.advantage(h)
        return self.value(h) + advantage - advantage.mean(1, keepdim=True)


@case(X, heads="out skip")
class BothSummands(Body):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.skip = nn.Linear(8, 3), nn.Linear(8, 3)

    def end(self, h: Tensor, x: Tensor) -> Any:
        return self.out(h) + self.skip(x)


@case(X, heads="enc")
class TiedAutoencoder(Body):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(8, 4)

    def end(self, h: Tensor, x: Tensor) -> Any:
        return F.linear(self.enc(h).relu(), self.enc.weight.t())


@case(X, heads="enc")
class TiedAutoencoderByProduct(Body):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(8, 4)

    def end(self, h: Tensor, x: Tensor) -> Any:
        return self.enc(h).tanh() @ self.enc.weight


@case(X, heads="heads.0 heads.1 heads.2")
class HeadsInAList(Body):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 2) for _ in range(3))

    def end(self, h: Tensor, x: Tensor) -> Any:
        return [head(h) for head in self.heads]


@case(X, heads="tasks.a", idle="tasks.b")
class OneHeadOfADict(Body):
    def __init__(self) -> None:
        super().__init__()
        self.tasks = nn.ModuleDict({"a": nn.Linear(8, 2), "b": nn.Linear(8, 2)})

    def end(self, h: Tensor, x: Tensor) -> Any:
        return self.tasks["a"](h)


@case(X, heads="out")
class OutputBehindANorm(Body):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.norm = nn.Linear(8, 3), nn.LayerNorm(3)

    def end(self, h: Tensor, x: Tensor) -> Any:
        return self.norm(self.out(h)).tanh() * 2


@case(X, heads="out")
class MeanAndDeviation(Body):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 6)

    def end(self, h: Tensor, x: Tensor) -> Any:
        mean, log = self.out(h).chunk(2, -1)
        return mean, log.exp()


@case(X, heads="out")
class HiddenLayerCalledValue(Body):
    def __init__(self) -> None:
        super().__init__()
        self.value, self.out = nn.Linear(8, 8), nn.Linear(8, 3)

    def end(self, h: Tensor, x: Tensor) -> Any:
        return self.out(self.value(h).relu())


@case(X, heads="out")
class HiddenLayerCalledHead(Body):
    def __init__(self) -> None:
        super().__init__()
        self.mlp_head, self.out = nn.Linear(8, 8), nn.Linear(8, 3)

    def end(self, h: Tensor, x: Tensor) -> Any:
        return self.out(F.gelu(self.mlp_head(h)))


@case(X, heads="out", idle="extra")
class BranchThatIsOff(Body):
    def __init__(self) -> None:
        super().__init__()
        self.extra, self.out, self.on = nn.Linear(8, 8), nn.Linear(8, 3), False

    def end(self, h: Tensor, x: Tensor) -> Any:
        if self.on:
            h = h + self.extra(x)
        return self.out(h)


@case(X, heads="net.out", idle="first.body first.out")
class StoredCopy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = HiddenLayerCalledValue()
        self.first = copy.deepcopy(self.net)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@case(SEQUENCE, heads="features post.2")
class Postnet(Body):
    """A spectrogram, and the same with a correction."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(8, 4)
        self.post = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def end(self, h: Tensor, x: Tensor) -> Any:
        before = self.features(h)
        return before, before + self.post(before)


@case(X, heads="start end_1")
class StartAndEnd(Body):
    """The second output reads the first."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.end_0, self.end_1 = nn.Linear(8, 3), nn.Linear(11, 8), nn.Linear(8, 3)

    def end(self, h: Tensor, x: Tensor) -> Any:
        start = self.start(h)
        return start, self.end_1(torch.tanh(self.end_0(torch.cat([h, start], -1))))


@case(IMAGE, heads="out")
class ImageToImage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 8, 3, 2, 1), nn.ConvTranspose2d(8, 8, 2, 2)
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.up(self.down(x).relu()).relu())


@case(IMAGE, heads="out")
class ClassifierBehindAPool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.out = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(self.out(F.max_pool2d(self.c(x).relu(), 2)), 1).flatten(1)


@case(SEQUENCE, heads="out", cuts={"rnn.weight_ih_l0": (8, 8, 8), "rnn.weight_hh_l0": (8, 8, 8)})
class RecurrentTrunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0][:, -1])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@case(SEQUENCE, heads="out")
class ResidualStream(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(8, 8), nn.ModuleList([Residual(), Residual()])
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


@case(X, heads="out")
class LastIsNoAttribute(Body):
    """Nothing in the class's source says which attribute comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.middle = nn.Linear(8, 3), nn.Linear(8, 8)

    def end(self, h: Tensor, x: Tensor) -> Any:
        for name in ("middle", "out"):
            h = getattr(self, name)(h.relu())
        return h


@case(X, heads="layers.2")
class OneLayerUnderTwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList([self.fc1, nn.ReLU(), self.fc2])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Noisy(nn.Linear):
    """A Linear with a forward of its own."""

    def __init__(self, wide: int, out: int) -> None:
        super().__init__(wide, out)
        self.sigma = nn.Parameter(torch.full((out, wide), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.sigma * torch.ones_like(self.sigma), self.bias)


@case(X, heads="out out.sigma")
class NoisyOutput(Body):
    def __init__(self) -> None:
        super().__init__()
        self.out = Noisy(8, 3)

    def end(self, h: Tensor, x: Tensor) -> Any:
        return self.out(h)


class Agent(nn.Module):
    """`forward` is only the encoder; what an agent does is in other methods."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.policy, self.critic = nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def get_value(self, x: Tensor) -> Tensor:
        return self.critic(self.forward(x))

    def get_action_and_value(self, x: Tensor) -> Any:
        h = self.forward(x)
        return torch.distributions.Categorical(logits=self.policy(h)).probs, self.critic(h)


@case(X, heads="policy critic", run=lambda model, x: model.get_action_and_value(x))  # type: ignore[operator]
class AgentByItsMethods(Agent):
    pass


@case(X, heads="critic", idle="policy", run=lambda model, x: model.get_value(x))  # type: ignore[operator]
class AgentByItsValueAlone(Agent):
    pass


@case(lambda: {"x": noise(3, 8)(), "y": noise(3, 3)()}, heads="out")
class LossBesideLogits(Body):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        logits = self.out(self.body(x).relu())
        return (logits, F.mse_loss(logits, y)) if y is not None else logits


@case(X, heads="blocks.0.forecast blocks.1.forecast")
class ForecastsAddedUp(nn.Module):
    """Each block explains a part of its input and passes the rest on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"h": nn.Linear(8, 8), "back": nn.Linear(8, 8), "forecast": nn.Linear(8, 3)}) for _ in "ab"
        )

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for block in self.blocks:
            h = block["h"](x).relu()
            x = (x - block["back"](h)).tanh()
            total = total + block["forecast"](h)
        return total


@case(X, heads="net.2")
class CouplingLayer(nn.Module):
    """RealNVP: the last layer makes scale and shift of half of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Any:
        fixed, moved = x.chunk(2, -1)
        scale, shift = self.net(fixed).chunk(2, -1)
        return torch.cat([fixed, moved * scale.tanh().exp() + shift], -1), scale.sum(-1)


@case(X, heads="pair")
class BilinearOutput(nn.Module):
    """Scores of edges between what one layer makes of two nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.node, self.pair = nn.Linear(8, 8), nn.Bilinear(8, 8, 2)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.relu(self.node(x))
        return self.pair(made[:-1], made[1:])


@case(X, heads="points", skipped="points")
class DistanceToPrototypes(nn.Module):
    """The last matrix is one of points; the layer before it is no output."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.points = nn.Linear(8, 8), nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return -torch.cdist(torch.relu(self.body(x)), self.points)
