"""Outputs, cuts and scores in networks as people write them: lists, dicts, `getattr`, methods beside `forward`.

What is a head, fused or a router was written down from each class before the planner was asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rekindle


class Net(nn.Module):
    """A module with the given children."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def many(make: Callable[[], nn.Module], count: int) -> nn.ModuleList:
    return nn.ModuleList([make() for _ in range(count)])


class Exits(Net):
    """Outputs that are appended to a list, beside one that is returned."""

    def forward(self, x: Tensor) -> Any:
        outputs = []
        for layer, out in zip(self.body, self.exits, strict=True):
            x = F.relu(layer(x))
            outputs.append(out(x))
        return self.final(x), outputs


class ByName(Net):
    """Layers that are looked up by a name that is put together."""

    def forward(self, x: Tensor) -> Any:
        for i in range(2):
            x = F.relu(getattr(self, "fc%d" % i)(x))  # noqa: UP031
        return [getattr(self, f"head_{i}")(x) for i in range(2)]


class Adversarial(Net):
    """A training step has one network judge what `forward` returns."""

    def forward(self, z: Tensor) -> Any:
        return self.maker(z)

    def training_step(self, z: Tensor) -> Any:
        return self.judge(self(z)).mean()


class Pretrained(Net):
    """The loss reads a projection that `forward` does not have."""

    def forward(self, x: Tensor) -> Any:
        return self.backbone(x)

    def training_step(self, a: Tensor, b: Tensor) -> Any:
        return (self.projector(self(a)) * self.projector(self(b))).sum()


class Kept(Net):
    """An auxiliary output that is kept on the module."""

    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.first(x))
        self.aux_logits = self.aux(h)
        return self.main(F.relu(self.second(h)))


class Dynamics(Net):
    """The next state as a difference to the present one."""

    def forward(self, state: Tensor, action: Tensor) -> Any:
        h = F.relu(self.trunk(torch.cat([state, action], -1)))
        return state + self.delta(h), self.reward(h)


class Denoiser(Net):
    """The noise is taken from the image; the shortcut inside is none of the model's outputs."""

    def forward(self, y: Tensor) -> Any:
        h = F.relu(self.first(y))
        return y - self.tail(self.body(h) + F.relu(self.shortcut(h)))


class Scattered(Net):
    """Messages between nodes are summed in place."""

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Any:
        for layer in (self.one, self.two, self.three):
            message = layer(x)
            x = torch.zeros_like(message)
            x.index_add_(0, target, message[source])
        return x


class Levels(Net):
    """YOLO's outputs take the place of the features that they were made of."""

    def forward(self, x: Tensor) -> Any:
        a = F.silu(self.one(x))
        x = [a, F.silu(self.two(a))]
        for i in range(2):
            x[i] = self.outs[i](x[i])
        return x


class Stages(Net):
    """Scores after every stage, which the next stage reads."""

    def forward(self, x: Tensor) -> Any:
        scores = []
        for i in range(2):
            x = F.relu(self.stages[i](x))
            scores.append(self.score[i](x))
            x = x + self.back[i](scores[i])
        return scores


class Keyed(Net):
    """Networks in a dict, each called by its key."""

    def forward(self, x: Tensor, a: Tensor) -> Any:
        z = self.nets["dynamics"](torch.cat([self.nets["encoder"](x), a], -1))
        return self.nets["decoder"](z), self.nets["other"](z)


def each(heads: Any, x: Tensor) -> Any:
    return [head(x) for head in heads]


class Elsewhere(Net):
    """A function outside the class calls the list that it is given."""

    def forward(self, x: Tensor) -> Any:
        return each(self.outs, F.relu(self.body(x)))


class Blurred(Net):
    """Mean and variance by convolutions."""

    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.enc(x))
        m, v = self.m(h), self.v(h)
        return self.dec(m + torch.randn_like(m) * v.exp()), m, v


class Generated(Net):
    """One layer makes the weight of the last product."""

    def forward(self, x: Tensor, z: Tensor) -> Any:
        return F.linear(F.relu(self.body(x)), self.hyper(z).view(3, 8))


class Compared(Net):
    """A bare matrix reads the last layer."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__(**children)
        self.classes = nn.Parameter(torch.randn(8, 3))

    def forward(self, x: Tensor) -> Any:
        return F.normalize(self.last(F.relu(self.body(x))), dim=-1) @ self.classes


class Mlp(Net):
    def forward(self, x: Tensor) -> Any:
        return self.fc2(F.gelu(self.fc1(x)))


class ClosedByMlp(Net):
    """An MLP block that makes the logits."""

    def forward(self, x: Tensor) -> Any:
        return self.mlp(F.relu(self.conv(x)).mean((2, 3)))


class Gated(Net):
    """Channels of a convolution, cut with the time axis written out."""

    def forward(self, x: Tensor) -> Any:
        h = self.conv(self.inp(x))
        return self.out(torch.tanh(h[:, :8, :]) * torch.sigmoid(h[:, 8:, :]))


class Cropped(Net):
    """The ends of a signal, cut off along time: no channels are parted."""

    def forward(self, x: Tensor) -> Any:
        h = self.conv(self.inp(x))
        return self.out(h[..., 1:] + h[..., :-1])


class Interleaved(Net):
    def forward(self, x: Tensor) -> Any:
        h = self.w(F.relu(self.inp(x)))
        return self.out(h[..., ::2] * torch.sigmoid(h[..., 1::2]))


class Narrowed(Net):
    def forward(self, x: Tensor) -> Any:
        h = self.w(F.relu(self.inp(x)))
        return self.out(h.narrow(-1, 0, 8) * torch.sigmoid(torch.narrow(h, -1, 8, 8)))


class Gate(Net):
    def forward(self, x: Tensor) -> Any:
        return F.softmax(self.fc(x), -1)


class Mixture(Net):
    """A gate of several layers or of a class of its own, beside experts."""

    def forward(self, x: Tensor) -> Any:
        x = self.inp(x)
        p = self.choice(x)
        return self.out(sum(p[:, i : i + 1] * e(x) for i, e in enumerate(self.experts)))


class Tasks(Net):
    """One gate per task."""

    def forward(self, x: Tensor) -> Any:
        e = torch.stack([expert(x) for expert in self.experts], 1)
        return [t((torch.softmax(g(x), -1).unsqueeze(1) @ e).squeeze(1)) for g, t in zip(self.g, self.t, strict=True)]


class Colors(Net):
    """As many probabilities as layers, which leave: nothing is chosen."""

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.rgb(x)


def conv(a: int, b: int) -> nn.Conv1d:
    return nn.Conv1d(a, b, 3, padding=1)


L, C = nn.Linear, nn.Conv2d
HEAD = "output head"
NETS: dict[str, tuple[Callable[[], nn.Module], str, dict[str, str]]] = {
    "exits": (
        lambda: Exits(body=many(lambda: L(8, 8), 2), exits=many(lambda: L(8, 2), 2), final=L(8, 2)),
        "body.0 body.1",
        {"exits.0": HEAD, "exits.1": HEAD, "final": HEAD},
    ),
    "getattr": (
        lambda: ByName(fc0=L(4, 8), fc1=L(8, 8), head_0=L(8, 2), head_1=L(8, 3)),
        "fc0 fc1",
        {"head_0": HEAD, "head_1": HEAD},
    ),
    "adversarial": (
        lambda: Adversarial(maker=mlp(4, 16, 24), judge=mlp(24, 16, 1)),
        "maker.0 judge.0",
        {"maker.2": HEAD, "judge.2": HEAD},
    ),
    "gan without forward": (
        lambda: Net(G=mlp(4, 16, 24), D=mlp(24, 16, 1)),
        "G.0 D.0",
        {"G.2": HEAD, "D.2": HEAD},
    ),
    "pretrained": (
        lambda: Pretrained(backbone=mlp(8, 16, 16), projector=mlp(16, 16, 4)),
        "backbone.0 projector.0",
        {"projector.2": HEAD},
    ),
    "kept": (
        lambda: Kept(first=L(4, 8), second=L(8, 8), main=L(8, 3), aux=L(8, 5)),
        "first second",
        {"main": HEAD, "aux": HEAD},
    ),
    "dynamics": (
        lambda: Dynamics(trunk=mlp(10, 16, 16), delta=L(16, 8), reward=L(16, 1)),
        "trunk.0 trunk.2",
        {"delta": HEAD, "reward": HEAD},
    ),
    "denoiser": (
        lambda: Denoiser(first=C(1, 8, 3), body=C(8, 8, 1), tail=C(8, 1, 1), shortcut=C(8, 8, 1)),
        "first body shortcut",
        {"tail": HEAD},
    ),
    "scattered": (lambda: Scattered(one=L(4, 8), two=L(8, 8), three=L(8, 3)), "one two", {"three": HEAD}),
    "levels": (
        lambda: Levels(one=C(3, 8, 3), two=C(8, 16, 3), outs=nn.ModuleList([C(8, 21, 1), C(16, 21, 1)])),
        "one two",
        {"outs.0": HEAD, "outs.1": HEAD},
    ),
    "stages": (
        lambda: Stages(stages=many(lambda: L(8, 8), 2), score=many(lambda: L(8, 4), 2), back=many(lambda: L(4, 8), 2)),
        "stages.0 stages.1 back.0 back.1",
        {"score.0": HEAD, "score.1": HEAD},
    ),
    "keyed": (
        lambda: Keyed(
            nets=nn.ModuleDict(
                {"encoder": mlp(4, 8, 8), "dynamics": mlp(10, 8, 8), "other": mlp(8, 8, 1), "decoder": mlp(8, 8, 4)}
            )
        ),
        "nets.encoder.0 nets.encoder.2 nets.dynamics.0 nets.dynamics.2 nets.other.0 nets.decoder.0",
        {"nets.other.2": HEAD, "nets.decoder.2": HEAD},
    ),
    "elsewhere": (
        lambda: Elsewhere(body=mlp(4, 8, 8), outs=nn.ModuleList([L(8, 2), L(8, 4)])),
        "body.0 body.2",
        {"outs.0": HEAD, "outs.1": HEAD},
    ),
    "blurred": (
        lambda: Blurred(enc=C(3, 8, 3), m=C(8, 4, 1), v=C(8, 4, 1), dec=nn.Sequential(C(4, 8, 1), C(8, 3, 1))),
        "enc dec.0",
        {"m": HEAD, "v": HEAD, "dec.1": HEAD},
    ),
    "generated": (
        lambda: Generated(body=mlp(4, 8, 8), hyper=mlp(2, 8, 24)),
        "body.0 body.2 hyper.0",
        {"hyper.2": HEAD},
    ),
    "compared": (
        lambda: Compared(body=mlp(4, 8, 8), last=L(8, 8), unused=L(8, 8)),
        "body.0 body.2 last",
        {"classes": "layout not known"},
    ),
    "closed by an mlp": (
        lambda: ClosedByMlp(conv=C(3, 8, 3), mlp=Mlp(fc1=L(8, 16), fc2=L(16, 5))),
        "conv mlp.fc1",
        {"mlp.fc2": HEAD},
    ),
    "gated": (
        lambda: Gated(inp=conv(1, 8), conv=conv(8, 16), out=conv(8, 1)),
        "inp",
        {"conv": "fused", "out": HEAD},
    ),
    "cropped": (lambda: Cropped(inp=conv(1, 8), conv=conv(8, 8), out=conv(8, 1)), "inp conv", {"out": HEAD}),
    "interleaved": (lambda: Interleaved(inp=L(4, 8), w=L(8, 16), out=L(8, 2)), "inp", {"w": "fused", "out": HEAD}),
    "narrowed": (lambda: Narrowed(inp=L(4, 8), w=L(8, 16), out=L(8, 2)), "inp", {"w": "fused", "out": HEAD}),
    "gate of layers": (
        lambda: Mixture(
            inp=L(4, 8),
            choice=nn.Sequential(L(8, 8), nn.ReLU(), L(8, 3), nn.Softmax(-1)),
            experts=many(lambda: L(8, 8), 3),
            out=L(8, 2),
        ),
        "inp experts.0 experts.1 experts.2",
        {"choice.0": "router", "choice.2": "router", "out": HEAD},
    ),
    "gate of a class": (
        lambda: Mixture(inp=L(4, 8), choice=Gate(fc=L(8, 3)), experts=many(lambda: L(8, 8), 3), out=L(8, 2)),
        "inp experts.0 experts.1 experts.2",
        {"choice.fc": "router", "out": HEAD},
    ),
    "gate per task": (
        lambda: Tasks(experts=many(lambda: L(4, 8), 3), g=many(lambda: L(4, 3), 2), t=many(lambda: mlp(8, 8, 1), 2)),
        "experts.0 experts.1 experts.2 t.0.0 t.1.0",
        {"g.0": "router", "g.1": "router", "t.0.2": HEAD, "t.1.2": HEAD},
    ),
    "colors": (
        lambda: Colors(layers=many(lambda: L(8, 8), 3), rgb=nn.Sequential(L(8, 8), nn.ReLU(), L(8, 3), nn.Sigmoid())),
        "layers.0 layers.1 layers.2 rgb.0",
        {"rgb.2": HEAD},
    ),
}


@pytest.mark.parametrize("name", NETS)
def test_what_leaves_is_cut_or_chooses_is_not_projected(name: str) -> None:
    make, projected, skipped = NETS[name]
    plan = rekindle.plan(make(), measure="none", targets="auto")
    reasons = {entry.name.removesuffix(".weight"): entry.reason or "" for entry in plan.skipped}
    for layer, reason in skipped.items():
        assert reasons.get(layer, "projected").startswith(reason), layer
    assert [entry.name.removesuffix(".weight") for entry in plan.selected] == projected.split()
