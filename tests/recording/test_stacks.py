"""Experts, codes, latents and ranks are found by what they do, in models of public packages and in plain torch."""

import pytest
import torch
from torch import Tensor, nn

from known_units import draw
from rekindle.recording.recorder import record
from rekindle.recording.stacks import Stacks, stacks_in
from stacked_models import CASES, Adapted, Autoencoder, Quantizer, Switch


def found(model: nn.Module, batch: object, units: dict[str, str | None] | None = None) -> Stacks:
    return stacks_in(record(model, batch), units, model)


@pytest.mark.parametrize("name", CASES)
def test_every_client_as_it_is(name: str) -> None:
    case = CASES[name]()
    seen = found(case.model, case.batch)
    assert not seen.unmeasured
    stacks = [stack for stack in seen.stacks if stack.kind != "rows"]
    assert [stack.kind for stack in stacks] == [case.kind] * case.stacks
    assert {stack.size for stack in stacks} == {case.size}
    for stack in stacks:
        for role, member in stack.holds.items():
            if role not in ("modules", "base"):
                named = {**dict(case.model.named_parameters()), **dict(case.model.named_buffers())}
                assert named[member.tensor].shape[member.axis] == case.size // stack.books


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 2)), draw(4, 8)),
        (
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4)),
            draw(2, 3, 8, 8),
        ),
        (nn.TransformerEncoderLayer(8, 2, 32, batch_first=True), draw(2, 5, 8)),
        (nn.LSTM(4, 8, batch_first=True), draw(2, 5, 4)),
        (nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 8)), draw(4, 8)),
    ],
)
def test_ordinary_layers_are_no_stacks(model: nn.Module, batch: Tensor) -> None:
    assert not found(model, batch)


def test_a_choice_among_classes_is_no_router() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.head(self.body(x).relu())
            return logits, logits.argmax(-1)

    assert not found(Classifier(), draw(5, 4))


def test_a_residual_block_that_widens_is_no_autoencoder() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.up(x).relu())

    assert not found(Block(), draw(5, 8))


def test_masks_and_distances_to_a_grid_are_no_codes() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.into(x)
            low = h.floor()
            between = (low + 1 - h) * 2 + (h - low) * 3  # as in interpolation
            weight = self.out.weight * 127
            return nn.functional.linear(h * (h > 0) + between, (weight.round() - weight).detach() + weight)

    assert not found(Steps(), draw(5, 4))


def test_computed_codes_are_measured_and_cannot_be_changed() -> None:
    package = pytest.importorskip("vector_quantize_pytorch")
    (stack,) = found(package.SimVQ(dim=16, codebook_size=32), draw(2, 8, 16)).stacks
    assert (stack.kind, stack.size, stack.refusal) == ("codes", 32, "its codes are computed from other weights")


def test_tied_and_shared_units_are_refused_by_name() -> None:
    class Tied(Autoencoder):
        def forward(self, x: Tensor) -> Tensor:
            return self.encode(x) @ self.W_enc.T + self.b_dec

    (stack,) = found(Tied("topk"), draw(9, 16)).stacks
    assert stack.refusal == "encoder and decoder are one weight (W_enc)"

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Switch(), Switch()
            self.two.router = self.one.router

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    stacks = found(Two(), draw(64, 16) + 1).stacks
    assert [stack.refusal for stack in stacks] == ["one is shared by one, two"]
    switch = Switch()
    switch.experts[3] = switch.experts[1]
    assert [s.refusal for s in found(switch, draw(64, 16)).stacks] == ["several experts of experts are one module"]


def test_units_by_hand() -> None:
    model = Quantizer()
    assert found(model, draw(5, 8), {"codes.weight": None}).stacks == ()
    assert [s.kind for s in found(model, draw(5, 8), {"codes.weight": "codes"}).stacks] == ["codes"]
    wrong = found(model, draw(5, 8), {"nothing.weight": "codes"})
    assert wrong.unmeasured == {"nothing.weight": "it was named as codes, and the pass does not use it as such"}
    with pytest.raises(ValueError, match="the kinds are experts, codes, latents, ranks, rows"):
        found(model, draw(5, 8), {"codes.weight": "neurons"})
    plain = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))  # a transcoder: told by nobody but the user
    assert not found(plain, draw(5, 8))
    assert [s.kind for s in found(plain, draw(5, 8), {"2.weight": "latents"}).stacks] == ["latents"]


def test_rows_of_a_table_are_what_the_input_looks_up() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids)

    (stack,) = found(Tokens(), torch.tensor([[1, 2]])).stacks
    assert (stack.kind, stack.name) == ("rows", "table.weight")


def test_square_weights_lie_as_their_products_say() -> None:
    (stack,) = found(Autoencoder("topk", width=16, inputs=16), draw(9, 16)).stacks
    assert (stack.holds["encoder"].axis, stack.holds["decoder"].axis) == (1, 0)
    model = Adapted()
    model.base, model.down, model.up = nn.Linear(12, 12), nn.Linear(12, 4, bias=False), nn.Linear(4, 12, bias=False)
    (stack,) = found(model, draw(3, 12)).stacks
    assert stack.factor == 2.0
    assert stack.holds["base"].axis == 0
