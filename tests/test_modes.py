"""The verbs inside of what evaluation code and set-up code switch on: their answers are those of a plain call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import rekindle


@contextmanager
def default_device_meta() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "meta": default_device_meta}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def loss(net: nn.Module, batch: Any) -> torch.Tensor:
    weight = torch.ones(3)  # on the caller's default device, unless that has no numbers
    return nn.functional.cross_entropy(net(batch[0]), batch[1], weight)


BATCHES = [
    (torch.randn(16, 6, generator=draw), torch.randint(3, (16,), generator=draw))
    for draw in map(torch.Generator().manual_seed, range(4))
]


def fired(net: nn.Module) -> Any:
    rekindle.fire(net, torch.optim.Adam(net.parameters()))
    return net[0].weight.tolist()  # type: ignore[index,union-attr,operator]


def measured(net: nn.Module) -> Any:
    found = rekindle.health(net, BATCHES, loss=loss).to_dict()
    assert found["gradients"]
    return {key: value for key, value in found.items() if key != "seconds"}


def probed(net: nn.Module) -> Any:
    return rekindle.probe(net, BATCHES, loss=loss, steps=6, seeds=2).model


def advised(net: nn.Module) -> Any:
    found = rekindle.advise(net, BATCHES, loss=loss, candidates=["fire"], steps=20, seeds=2, workers=1)
    return [(row.name, row.level) for row in found.rows]


VERBS: dict[str, Callable[[nn.Module], Any]] = {"fire": fired, "health": measured, "probe": probed, "advise": advised}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_a_verb_answers_as_it_does_in_a_plain_call(
    verb: Callable[[nn.Module], Any], mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    here, plain = model(), model()
    with mode():
        found = verb(here)
        assert torch.is_grad_enabled() == (mode is default_device_meta)
    assert found == verb(plain)


def test_weights_made_in_inference_mode_are_refused_with_what_to_do() -> None:
    with torch.inference_mode():
        net = nn.Linear(6, 3)
    with pytest.raises(
        ValueError, match=r"weight was made under torch.inference_mode.*build or load the model outside"
    ):
        rekindle.probe(net, BATCHES, loss=loss, steps=2)
