"""Modules with several outputs: one is read on, another leaves; tuples, dicts, dataclasses, sums, outputs read again.

What is a head was written down from each class before the planner was asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


def many(make: Callable[[], nn.Module], count: int) -> nn.ModuleList:
    return nn.ModuleList([make() for _ in range(count)])


class Basis(Net):
    """A block of N-BEATS: what it explains of the past, and what it adds to the forecast."""

    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.fc(x))
        return self.backcast(h), self.forecast(h)


class Forecaster(Net):
    """N-BEATS: forecasts are summed, the past goes on without what was explained."""

    def forward(self, x: Tensor) -> Any:
        total = torch.zeros(len(x), 4)
        for block in self.blocks:
            past, future = block(x)
            x = x - past
            total = total + future
        return total


class Structure(Net):
    """Two outputs of one module by name, of which one is read on."""

    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.inner(x))
        return {"states": h, "angles": self.angles(h)}


class Folding(Net):
    """ESMFold: outputs are put into the dict that another module returned."""

    def forward(self, x: Tensor) -> Any:
        structure = {k: v for k, v in self.trunk(self.inp(x)).items() if k in ("states", "angles")}
        structure["distances"] = self.distances(structure["states"])
        structure["lddt"] = self.lddt(structure["states"])
        structure["ptm"] = self.ptm(structure["states"])
        structure.update(extra=structure["ptm"].mean())
        return structure


@dataclass
class Output:
    features: Tensor
    scores: Tensor


class Scored(Net):
    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.body(x))
        return Output(features=h, scores=self.scores(h))


class Fielded(Net):
    """A dataclass of which one field is read on."""

    def forward(self, x: Tensor) -> Any:
        found = self.first(x)
        return self.last(found.features), found.scores


class Quality(Net):
    """D-FINE: a quality is added to scores that it was not computed from."""

    def forward(self, scores: Tensor, corners: Tensor) -> Any:
        quality = self.conf(F.softmax(corners, -1))
        scores = scores + quality
        return scores


class Detector(Net):
    def forward(self, x: Tensor) -> Any:
        logits = ()
        h = F.relu(self.body(x))
        scores, corners = self.cls(h), self.box(h)
        logits += (self.quality(scores, corners),)
        return torch.stack(logits), corners


class Post(Net):
    """Tacotron's draft of a spectrogram, and the correction of it."""

    def forward(self, h: Tensor) -> Any:
        draft = self.draft(h)
        x = draft
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return draft, draft + x


class Spoken(Net):
    """FastSpeech 2: pitch is predicted, returned, and read again."""

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        h = F.relu(self.encoder(x))
        pitch = self.pitch(h).masked_fill(mask, 0.0)
        h = h + self.pitch_embed(pitch)
        draft, after = self.post(F.relu(self.decoder(h)))
        return {"spectrogram": after, "before": draft, "pitch": pitch}


class Added(Net):
    """BERT's output layer: the residual stream is an argument of its own."""

    def forward(self, x: Tensor, stream: Tensor) -> Any:
        return self.norm(self.dense(x) + stream)


class Layer(Net):
    """A layer that returns more than the stream."""

    def forward(self, x: Tensor) -> Any:
        h = F.gelu(self.up(x))
        return self.out(h, x), h.mean()


class Encoder(Net):
    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        states, means = (x,), ()
        for layer in self.layers:
            outputs = layer(x)
            x = outputs[0]
            states += (x,)
            means += (outputs[1],)
        return {"last_hidden_state": x, "hidden_states": states, "means": means}


class Classifier(Net):
    def forward(self, x: Tensor) -> Any:
        outputs = self.encoder(x)
        return {"logits": self.head(outputs["last_hidden_state"]), "hidden_states": outputs["hidden_states"]}


class Nested(Net):
    """A function inside the method calls the layers."""

    def forward(self, x: Tensor) -> Any:
        def step(h: Tensor, again: Tensor) -> Any:
            return F.relu(self.one(h)), F.relu(self.two(again))

        a, b = step(x, x)
        return self.out(a + b)


def _encoder() -> Encoder:
    def layer() -> Layer:
        return Layer(up=L(8, 32), out=Added(dense=L(32, 8), norm=nn.LayerNorm(8)))

    return Encoder(embed=L(16, 8), layers=many(layer, 2))


L = nn.Linear
_STREAM = "{0}embed {0}layers.0.up {0}layers.0.out.dense {0}layers.1.up"
NETS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "forecaster": (
        lambda: Forecaster(blocks=many(lambda: Basis(fc=L(8, 16), backcast=L(16, 8), forecast=L(16, 4)), 3)),
        "blocks.0.fc blocks.0.backcast blocks.1.fc blocks.1.backcast blocks.2.fc blocks.2.backcast",
        "blocks.0.forecast blocks.1.forecast blocks.2.forecast",
    ),
    "folding": (
        lambda: Folding(
            inp=L(4, 16),
            trunk=Structure(inner=L(16, 16), angles=L(16, 7)),
            distances=L(16, 24),
            lddt=L(16, 5),
            ptm=L(16, 9),
        ),
        "inp trunk.inner",
        "trunk.angles distances lddt ptm",
    ),
    "fielded": (
        lambda: Fielded(first=Scored(body=L(4, 16), scores=L(16, 3)), last=L(16, 2)),
        "first.body",
        "first.scores last",
    ),
    "quality": (
        lambda: Detector(body=L(4, 16), cls=L(16, 5), box=L(16, 8), quality=Quality(conf=L(8, 1))),
        "body",
        "box quality.conf",
    ),
    "spoken": (
        lambda: Spoken(
            encoder=L(6, 32),
            pitch=L(32, 1),
            pitch_embed=L(1, 32),
            decoder=L(32, 32),
            post=Post(draft=L(32, 8), layers=nn.ModuleList([L(8, 16), L(16, 16), L(16, 8)])),
        ),
        "encoder pitch_embed decoder post.layers.0 post.layers.1",
        "pitch post.draft post.layers.2",
    ),
    "nested": (lambda: Nested(one=L(4, 8), two=L(4, 8), out=L(8, 2)), "one two", "out"),
    # The other side: a residual stream makes no heads, whatever else its layers return. Where there is no head at all,
    # the last matrix is taken for one.
    "encoder": (_encoder, _STREAM.format(""), "layers.1.out.dense"),
    "classifier": (
        lambda: Classifier(encoder=_encoder(), head=L(8, 3)),
        _STREAM.format("encoder.") + " encoder.layers.1.out.dense",
        "head",
    ),
}


@pytest.mark.parametrize("name", NETS)
def test_outputs_that_leave_are_heads_and_the_others_are_projected(name: str) -> None:
    make, projected, heads = NETS[name]
    plan = rekindle.plan(make(), measure="none", targets="auto")
    found = [e.name.removesuffix(".weight") for e in plan.skipped if e.reason == "output head"]
    chosen = [e.name.removesuffix(".weight") for e in plan.selected]
    assert sorted(set(heads.split()) - set(found)) == []
    assert sorted(set(projected.split()) - set(chosen)) == []
