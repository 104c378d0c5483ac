"""Names without wrappers: by class for models, by consistent prefixes for state dicts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rekindle
from rekindle import methods
from rekindle.blocks.names import (
    cleaner,
    locate,
    named_buffers,
    named_modules,
    named_parameters,
    state_cleaner,
    unwrapped,
)


class Holder(nn.Module):
    """A user's own model with an attribute called `module`, and a part that is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.body = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(self.module(x)))


NAMES = ["module.0.weight", "module.0.bias", "body.0.weight", "body.0.bias", "head.weight", "head.bias"]


@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel, torch.compile, torch.optim.swa_utils.AveragedModel])
def test_an_attribute_called_module_stays_and_wrappers_go(wrap):
    model = wrap(Holder())
    assert [name for name, _ in named_parameters(model)] == NAMES
    assert type(unwrapped(model)) is Holder
    assert "module.0" in dict(named_modules(model))
    assert [f.name for f in rekindle.blocks.find(model)] == NAMES


def test_activation_checkpointing_in_the_middle():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))), nn.Linear(3, 1))
    assert next(iter(dict(named_parameters(model)))) == "0.0.weight"
    assert next(iter(dict(named_buffers(model)))) == "0.0.running_mean"


def test_a_users_class_of_a_wrappers_name_is_no_wrapper():
    class DataParallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    assert cleaner(DataParallel())("module.weight") == "module.weight"


def test_parametrized_weights_are_located_under_their_own_name():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    place = locate(nn.DataParallel(nn.Sequential(layer)), "module.0.parametrizations.weight.original1")
    assert (place.name, place.owner, place.computed) == ("0.weight", layer, True)


def test_state_dicts_lose_module_only_where_every_key_has_it():
    assert state_cleaner(["module.a.weight", "module.b.weight"])("module.a.weight") == "a.weight"
    assert state_cleaner(["module.a.weight", "b.weight"])("module.a.weight") == "module.a.weight"
    assert state_cleaner(["a._fsdp_wrapped_module.b"])("a._fsdp_wrapped_module.b") == "a.b"


@pytest.mark.parametrize("method", [methods.DASH(), methods.ShrinkPerturb(noise="fresh"), methods.WeightClip()])
def test_methods_take_such_a_model(method):
    torch.manual_seed(0)
    model = Holder()
    before = {name: p.detach().clone() for name, p in named_parameters(model)}
    batches = [(torch.randn(4, 4), torch.randint(2, (4,)))]
    method(model, batches=batches, loss=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]))
    assert set(before) == set(NAMES)
