"""The laboratory's networks: sizes as published, starts by seed, layers that the library understands, and learning."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rekindle
from rekindle.initial import draw, snapshot
from rekindle.lab import networks
from rekindle.lab.networks import names, network, register
from rekindle.lab.networks.transformers import GPTAttention
from rekindle.methods import FullReset, ReDo
from rekindle.recording.wiring import wire

CLASSES = 10
# One laptop size of each: (shape of an input, options).
SMALL = {
    "mlp": ((1, 8, 8), {"width": 32}),
    "cnn": ((1, 8, 8), {"width": 4, "hidden": 32}),
    "resnet18": ((3, 16, 16), {"width": 4}),
    "vgg16": ((3, 16, 16), {"width": 4}),
    "vit": ((3, 16, 16), {"layers": 2, "width": 24}),
    "gpt": ((16,), {"layers": 2, "width": 32, "heads": 4}),
    "dawn": ((16,), {"layers": 2, "width": 16, "hidden": 32, "neurons": 40, "chosen": 4, "basis": 4}),
}
EVERY = pytest.mark.parametrize("name", SMALL)


def build(name, seed=0, **changed):
    shape, chosen = SMALL[name]
    return network(name, shape=shape, classes=CLASSES, seed=seed, **{**chosen, **changed})


def inputs(name, count=6, seed=0):
    shape, generator = SMALL[name][0], torch.Generator().manual_seed(seed)
    if len(shape) == 1:
        return torch.randint(0, CLASSES, (count, *shape), generator=generator)
    return torch.randn(count, *shape, generator=generator)


def parameters(name, shape, classes, **chosen):
    with torch.device("meta"):
        model = network(name, shape=shape, classes=classes, seed=0, **chosen)
    return sum(p.numel() for p in model.parameters())


def roles(model, targets="auto"):
    """What a plan would project: the role of each block by the weight's name."""
    return {e.name: [b.role for b in e.blocks] for e in rekindle.plan(model, targets=targets).selected}


def test_every_network_is_swept_here():
    swept_in_test_units = {"autoencoder", "vq-vae", "expert-gpt", "lora-gpt"}
    assert set(SMALL) | swept_in_test_units == set(networks._BUILT_IN)


@EVERY
def test_logits_for_every_input_and_any_batch(name):
    model, x = build(name), inputs(name)
    places = x.shape if x.ndim == 2 else x.shape[:1]
    assert model(x).shape == (*places, CLASSES)
    assert model(x[:2]).shape == (2, *places[1:], CLASSES)
    model.eval()
    torch.testing.assert_close(model(x)[:2], model(x[:2]), rtol=1e-4, atol=1e-5)  # no sample sees another


@pytest.mark.parametrize(
    ("name", "shape", "classes", "chosen", "count"),
    [
        ("resnet18", (3, 32, 32), 10, {}, 11_173_962),
        ("resnet18", (3, 224, 224), 1000, {"stem": "imagenet"}, 11_689_512),
        ("vgg16", (3, 32, 32), 10, {}, 14_728_266),
        ("vit", (3, 224, 224), 1000, {"patch": 16}, 5_717_416),  # ViT-Tiny
        ("gpt", (1024,), 50257, {"bias": True}, 124_439_808),  # GPT-2-small
        ("mlp", (1, 28, 28), 10, {}, 784 * 128 + 2 * 128 * 128 + 128 * 10 + 3 * 128 + 10),
    ],
)
def test_standard_sizes_have_the_published_number_of_parameters(name, shape, classes, chosen, count):
    assert parameters(name, shape, classes, **chosen) == count


@EVERY
def test_the_seed_alone_decides_the_start(name):
    before = torch.get_rng_state()
    first = build(name, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    again, other = build(name, seed=3).state_dict(), build(name, seed=4).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    weights = [key for key, value in first.items() if value.dim() > 1]
    assert all(not torch.equal(first[key], other[key]) for key in weights)


@EVERY
def test_a_fresh_start_has_the_same_scheme_as_the_first(name):
    model = build(name)
    start, again = snapshot(model), draw(model, generator=torch.Generator().manual_seed(9))
    assert set(start) == set(again)
    for key, value in start.items():
        assert torch.isfinite(again[key]).all(), key
        if value.numel() >= 400:
            torch.testing.assert_close(again[key].std(), value.std(), rtol=0.25, atol=0)
            assert not torch.equal(again[key], value)


@EVERY
def test_options_can_be_written_as_json(name):
    shape, chosen = SMALL[name]
    model = network(name, shape=list(shape), classes=CLASSES, seed=0, **json.loads(json.dumps(chosen)))
    torch.testing.assert_close(model.state_dict(), build(name).state_dict())


# ---- what the library sees in them


@EVERY
def test_the_head_is_the_head(name):
    model = build(name)
    entries = {e.name: e for e in rekindle.plan(model, targets="auto").entries}
    heads = [e.name for e in entries.values() if e.role == "head"]
    expected = {"resnet18": ["fc.weight"], "vgg16": ["classifier.0.weight"], "gpt": []}
    assert heads == expected.get(name, ["head.weight"])
    if name == "gpt":  # tied: the one weight is embedding and head
        assert entries["wte.weight"].reason == "embedding, tied to the output head"
        assert build(name, tied=False).lm_head.weight.shape == (CLASSES, 32)
        free = {e.name: e.role for e in rekindle.plan(build(name, tied=False)).entries}
        assert free["lm_head.weight"] == "head"


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet18", "vgg16"])
def test_paper_cnn_takes_every_convolution_and_linear(name):
    model = build(name)
    layers = {n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    assert {key.removesuffix(".weight") for key in roles(model, "paper-cnn")} == layers


def test_paper_vit_takes_queries_and_keys_alone():
    found = roles(build("vit"), "paper-vit")
    assert found == {
        f"blocks.{i}.attn.to_{part}.weight": [role] for i in range(2) for part, role in (("q", "query"), ("k", "key"))
    }


def test_every_layer_of_a_vit_has_its_role():
    found = roles(build("vit"), "all")
    assert {key.removeprefix("blocks.1."): role for key, role in found.items() if key.startswith("blocks.1.")} == {
        "attn.to_q.weight": ["query"],
        "attn.to_k.weight": ["key"],
        "attn.to_v.weight": ["value"],
        "attn.to_out.weight": ["attention-output"],
        "mlp.fc1.weight": ["mlp-in"],
        "mlp.fc2.weight": ["mlp-out"],
    }
    assert {key for key in found if not key.startswith("blocks.")} == {"patch_embed.weight", "head.weight"}


def test_paper_gpt_takes_every_linear_split_and_the_tied_tokens_but_no_positions():
    model = build("gpt")
    found = roles(model, "paper-gpt")
    assert found == roles(model, "all")
    assert found == {
        "wte.weight": ["embedding"],
        **{
            f"h.{i}.{layer}.weight": blocks
            for i in range(2)
            for layer, blocks in {
                "attn.c_attn": ["query", "key", "value"],
                "attn.c_proj": ["attention-output"],
                "mlp.c_fc": ["mlp-in"],
                "mlp.c_proj": ["mlp-out"],
            }.items()
        },
    }
    assert set(roles(model, "attention.qk")) == {"h.0.attn.c_attn.weight", "h.1.attn.c_attn.weight"}


def test_the_fused_layer_is_split_where_the_forward_splits_it():
    attention = GPTAttention(8, heads=2)
    model = nn.ModuleDict({"attn": attention, "lm_head": nn.Linear(8, 3)})
    (entry,) = (e for e in rekindle.plan(model, split_heads=True).entries if e.name == "attn.c_attn.weight")
    pieces = {(b.part, i): b.read(attention.c_attn.weight)[i] for b in entry.blocks for i in range(b.count)}
    x = torch.randn(1, 5, 8)
    caught = []
    original = F.scaled_dot_product_attention

    def catch(q, k, v, **rest):
        caught.extend([q, k, v])
        return original(q, k, v, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", catch)
        attention(x)
    for part, used in zip(("query", "key", "value"), caught, strict=True):
        for head in range(2):
            torch.testing.assert_close(x[0] @ pieces[part, head].T, used[0, head])


def test_the_router_of_dawn_is_split_too():
    found = roles(build("dawn"))
    assert found["layers.0.router.attention.weight"] == ["query", "key", "value"]


WIRED = {
    "mlp": ["body.1", "body.3", "body.5"],
    "cnn": ["features.0", "features.3", "features.6", "hidden.1"],
    "resnet18": [f"layer{s}.{b}.conv1" for s in (1, 2, 3, 4) for b in (0, 1)],
    "vgg16": [f"features.{i}" for i in (0, 3, 7, 10, 14, 17, 20, 24, 27, 30, 34, 37, 40)],
    "vit": ["blocks.0.mlp.fc1", "blocks.1.mlp.fc1"],
    "gpt": ["h.0.mlp.c_fc", "h.1.mlp.c_fc"],
}


@pytest.mark.parametrize("name", WIRED)
def test_consumers_of_hidden_neurons_are_found(name):
    assert [group.name for group in wire(build(name), [inputs(name, 2)])] == WIRED[name]


@pytest.mark.parametrize("name", WIRED)
def test_redo_recycles_a_dead_neuron_without_changing_the_function(name):
    model, x = build(name).eval(), inputs(name, 16)
    group = wire(model, [x]).groups[0]
    with torch.no_grad():
        group.makers[0].weight[1] = 0
        for owner in (group.makers[0].bias, *(norm.bias for _, norm in group.norms)):
            if owner is not None:
                owner[1] = -1.0 if isinstance(group.makers[0].module, nn.Conv2d) or name == "mlp" else 0.0
        before = model(x)
    receipt = ReDo(tau=0.0)(model, batches=[x])
    assert receipt.totals()["counts"]["neurons"] >= 1
    assert group.makers[0].weight[1].abs().sum() > 0
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)


# ---- that they work


def train(model, x, y, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return optimizer, losses


@EVERY
def test_it_learns_is_projected_and_learns_again(name):
    model, x = build(name), inputs(name, 32)
    y = torch.randint(0, CLASSES, x.shape if x.ndim == 2 else (32,), generator=torch.Generator().manual_seed(1))
    optimizer, losses = train(model, x, y, 25)
    assert losses[-1] < 0.9 * losses[0]
    # Of the parameters none is idle: gradient reaches each.
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    rekindle.fire(model, optimizer, targets="all")
    for entry in rekindle.plan(model, targets="all").selected:
        for dfi, block in zip(entry.dfi_free, entry.blocks, strict=True):
            assert dfi is not None and dfi / block.count < 1e-3 * min(block.out, block.in_), entry.name
    _, losses = train(model, x, y, 25)
    assert losses[-1] < 0.95 * losses[0]


@EVERY
def test_its_health_can_be_measured(name):
    model, x = build(name), inputs(name, 8)
    measured = rekindle.health(model, [x], mode="cheap").to_dict()
    assert json.dumps(measured)


@EVERY
def test_a_full_reset_of_the_same_seed_does_not_draw_the_same_start(name):
    model = build(name, seed=5)
    old = snapshot(model)
    FullReset(seed=5)(model)
    weights = {key: value for key, value in snapshot(model).items() if value.dim() > 1}
    assert all(not torch.equal(old[key], value) for key, value in weights.items())


# ---- sizes and mistakes


@pytest.mark.parametrize("name", ["cnn", "resnet18", "vgg16"])
@pytest.mark.parametrize("size", [(1, 1, 1), (2, 3, 5), (1, 28, 28), (3, 8, 32)])
def test_convolutional_networks_take_any_image(name, size):
    chosen = {**SMALL[name][1], "width": 2}
    model = network(name, shape=size, classes=4, seed=0, **chosen).eval()
    assert model(torch.randn(2, *size)).shape == (2, 4)


@pytest.mark.parametrize(("width", "depth", "found"), [(5, 0, []), (5, 2, [5, 5]), ([7, 3], None, [7, 3])])
def test_an_mlp_of_any_depth_and_width(width, depth, found):
    model = network("mlp", shape=(6,), classes=2, seed=0, width=width, depth=depth)
    assert [m.out_features for m in model.modules() if isinstance(m, nn.Linear)] == [*found, 2]


@pytest.mark.parametrize(
    ("name", "shape", "chosen", "words"),
    [
        ("resnet", (3, 8, 8), {}, "there is no network 'resnet'; there are: mlp, cnn.*Did you mean 'resnet18'"),
        ("resnet18", (3, 8, 8), {"depth": 2}, "'resnet18' does not take .'depth': 2.: got an unexpected"),
        ("dawn", (8,), {"vocabulary": 9}, "'dawn' does not take .'vocabulary': 9.: .* multiple values"),
        ("resnet18", (3, 8, 8), {"stem": "tiny"}, "stem='tiny' must be one of cifar, imagenet"),
        ("resnet18", (64,), {}, r"shape=\(64,\) must be \(channels, height, width\)"),
        ("resnet18", (3, 8, 8), {"width": 0}, "width=0 must be"),
        ("cnn", (3, 8, 8), {"activation": "relo"}, "activation='relo' must be one of relu"),
        ("mlp", (8,), {"width": [4, 4], "depth": 3}, "depth=3 contradicts width=.4, 4."),
        ("mlp", (8,), {"depth": -1}, "depth=-1"),
        ("mlp", (0,), {}, "shape=0 must be"),
        ("vit", (3, 10, 8), {}, r"patch=4 must divide the height and width of shape=\(3, 10, 8\)"),
        ("vit", (3, 8, 8), {"width": 10}, "width=10 must be a multiple of heads=3"),
        ("gpt", (3, 8, 8), {}, r"shape=\(3, 8, 8\) must be \(context,\)"),
        ("gpt", (8,), {"width": 10, "heads": 4}, "width=10 must be a multiple of heads=4"),
    ],
)
def test_mistakes_are_named(name, shape, chosen, words):
    with pytest.raises(ValueError, match=words):
        network(name, shape=shape, classes=3, seed=0, **chosen)


def test_classes_must_be_counted():
    with pytest.raises(ValueError, match="classes=0 must be"):
        network("mlp", shape=(3,), classes=0, seed=0)


@pytest.fixture
def own(monkeypatch):
    monkeypatch.setattr(networks, "_own", {})


@pytest.mark.usefixtures("own")
def test_an_own_network_is_built_by_name_and_seed():
    @register("mine")
    class Mine(nn.Linear):
        def __init__(self, shape, classes, *, bias):
            super().__init__(*shape, classes, bias=bias)

    assert names()[-1] == "mine"
    first, again = (network("mine", shape=(3,), classes=2, seed=5, bias=False) for _ in range(2))
    assert isinstance(first, Mine)
    assert torch.equal(first.weight, again.weight)
    with pytest.raises(ValueError, match=r"'mine' does not take .*: missing a required"):
        network("mine", shape=(3,), classes=2, seed=5)

    @register("mine")
    def anything(shape, classes, **chosen):
        return chosen["answer"]

    with pytest.raises(TypeError, match="'mine' must return a Module, not int"):
        network("mine", shape=(3,), classes=2, seed=5, answer=3)


@pytest.mark.usefixtures("own")
def test_registering_is_checked():
    with pytest.raises(ValueError, match="'mlp' is built in"):
        register("mlp")
    with pytest.raises(TypeError, match=r'as in @register\("mine"\)'):
        register(nn.Linear)
