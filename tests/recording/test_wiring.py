"""Who consumes a neuron: checked by its meaning, not by a list of names.

A neuron whose consuming columns are zero cannot reach the output, whatever its incoming weights are. If a
column were missed, the output would move; if a foreign one were taken, other neurons would be cut.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import zoo_models
from rekindle.blocks.layers import as_layer
from rekindle.recording import record
from rekindle.recording.first_pass import FirstPass
from rekindle.recording.wiring import Wiring, WiringError, watch, wire


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs else nn.Identity()

    def forward(self, x):
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.one, self.two = nn.Conv2d(3, 6, 3, padding=1), Block(6, 6), Block(6, 8, 2)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.two(self.one(F.relu(self.stem(x)))).mean((2, 3)))


class ConvNet(nn.Module):
    """Functional and shared activations, pooling, a view, BatchNorm after the flatten's Linear."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 6, 3, padding=1)
        self.hidden, self.norm, self.head = nn.Linear(6 * 16, 7), nn.BatchNorm1d(7), nn.Linear(7, 4)
        self.act = nn.ReLU()

    def forward(self, x):
        x = self.act(self.one(x))
        x = F.max_pool2d(self.act(self.two(x)), 2)
        x = x.view(x.size(0), -1)
        return self.head(F.dropout(torch.tanh(self.norm(self.hidden(x))), 0.1, self.training))


class TokenFlatten(nn.Module):
    """Tokens flattened with the neurons innermost: a neuron owns every fifth column."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Linear(3, 5), nn.Linear(8 * 5, 4)

    def forward(self, x):
        return self.head(F.gelu(self.tokens(x.flatten(2).transpose(1, 2)[:, :8])).flatten(1))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.down(F.silu(self.gate(x.flatten(2).mean(1)[:, :8])) * self.up(x.flatten(2).mean(1)[:, :8]))


class WrittenOut(nn.Module):
    """GELU by its tanh formula: the same neuron meets itself in sums and products."""

    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(8, 6), nn.Linear(6, 4)

    def forward(self, x):
        h = self.fc(x[:, 0, 0])
        return self.out(0.5 * h * (1 + torch.tanh(0.8 * (h + 0.044715 * h**3))))


class Branching(nn.Module):
    """Control flow on the input: fx gives up, torch.export does not."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5)
        self.fc, self.head = nn.Linear(5 * 36, 8), nn.Linear(8, 4)

    def forward(self, x):
        if x.shape[0] > 100:
            return x
        return self.head(F.gelu(self.fc(F.relu(self.norm(self.conv(x))).flatten(1))))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 2)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.layers(self.embed(x[:, 0])).mean(1))


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up, self.out = nn.Conv2d(3, 5, 2, 2), nn.ConvTranspose2d(5, 6, 2, 2), nn.Conv2d(6, 2, 1)

    def forward(self, x):
        return self.out(F.leaky_relu(self.up(F.relu(self.down(x)))))


class Concatenated(nn.Module):
    """Two layers side by side, and something of the input beside them."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 5), nn.Linear(8, 4), nn.Linear(5 + 8 + 4, 4)

    def forward(self, x):
        x = x[:, 0, 0]
        return self.head(torch.cat([self.a(x).relu(), x, self.b(x).tanh()], 1))


class TwoNames(nn.Module):
    """As the authors of continual backpropagation write it: every layer an attribute and in a list."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc, self.head = nn.Conv2d(3, 5, 3), nn.Linear(5 * 9, 6), nn.Linear(6, 4)
        self.layers = nn.ModuleList([self.conv, nn.ReLU(), self.fc, nn.ReLU(), self.head])

    def forward(self, x):
        x = F.max_pool2d(self.layers[1](self.layers[0](x)), 2).view(x.shape[0], -1)
        return self.head(self.layers[3](self.layers[2](x)))


class Siamese(nn.Module):
    """One layer on two inputs: each neuron is read by two columns that lie apart."""

    def __init__(self):
        super().__init__()
        self.shared, self.head = nn.Linear(8, 5), nn.Linear(10, 4)

    def forward(self, x):
        return self.head(torch.cat([self.shared(x[:, 0, 0]).relu(), self.shared(x[:, 1, 1]).relu()], -1))


class ByData(nn.Module):
    """Another path for another input: only what ran is wired, and nothing else is wrong."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 5), nn.Linear(8, 5), nn.Linear(5, 4)

    def forward(self, x):
        x = x[:, 0, 0]
        return self.head(self.a(x).relu() if x.abs().sum() > 0 else self.b(x).relu())


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 6)), nn.Linear(6, 4)

    def forward(self, x):
        kept = torch.utils.checkpoint.checkpoint(self.inner, x[:, 0, 0], use_reentrant=False)
        return self.head(F.leaky_relu(kept))


class OwnNorm(nn.Module):
    """Batch renormalization as sb3-contrib's CrossQ has it: statistics of the batch, written out."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.head = nn.Linear(8, 5), Renorm(5), nn.Linear(5, 4)

    def forward(self, x):
        return self.head(self.norm(self.fc(x[:, 0, 0])).relu())


class Renorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.register_buffer("ra_mean", torch.zeros(size))
        self.register_buffer("ra_var", torch.ones(size))

    def forward(self, x):
        mean, var = (x.mean(0), x.var(0)) if self.training else (self.ra_mean, self.ra_var)
        if self.training:
            self.ra_mean += 0.1 * (mean.detach() - self.ra_mean)
        return self.scale * (x - mean[None]) / (var[None] + 1e-5).sqrt() + self.bias


def image():
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


WIRED = {
    ConvNet: ["one", "two", "hidden"],
    ResNet: ["one.conv1", "two.conv1"],
    TokenFlatten: ["tokens"],
    Gated: ["gate"],
    WrittenOut: ["fc"],
    Branching: ["conv", "fc"],
    Encoder: ["layers.layers.0.linear1", "layers.layers.1.linear1"],
    Transposed: ["down", "up"],
    Concatenated: ["a", "b"],
    TwoNames: ["conv", "fc"],
    Siamese: ["shared"],
    ByData: ["a"],
    Checkpointed: ["inner.0", "inner.2"],
    OwnNorm: ["fc"],
}


def rows(layer, neurons):
    return layer.weight.data.movedim(layer.out_axis, 0)[neurons]


@pytest.mark.parametrize("kind", WIRED)
def test_a_neuron_reaches_the_output_through_its_columns_and_no_other_way(kind):
    torch.manual_seed(1)
    model, x = kind().eval(), image()
    wiring = wire(model, [x])
    assert [group.name for group in wiring] == WIRED[kind]
    for group in wiring:
        neurons = torch.tensor([0, group.width - 1])
        before = model(x)
        saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        change_incoming(group, neurons)
        assert (model(x) - before).abs().max() > 1e-3  # they do matter while connected
        model.load_state_dict(saved)
        for consumer in group.consumers:
            columns = consumer.columns(neurons)
            consumer.layer.weight.data.movedim(consumer.layer.in_axis, 0)[columns] = 0
        cut = model(x)
        assert (cut - before).abs().max() > 1e-3
        change_incoming(group, neurons)
        torch.testing.assert_close(model(x), cut, rtol=0, atol=1e-6)
        model.load_state_dict(saved)
        others = torch.tensor([1])
        change_incoming(group, others)
        assert (model(x) - before).abs().max() > 1e-4  # and nobody else was cut
        model.load_state_dict(saved)


ZOO = ("mlp", "resnet", "unet", "encoder", "nanogpt", "gpt2", "gpt_neox", "bloom", "phi", "llama", "vit", "bert", "t5")


@pytest.mark.parametrize("name", ZOO)
def test_the_same_holds_for_every_group_of_the_zoo(name):
    model, batch = zoo_models.build(name).double().eval(), zoo_models.batch(name)
    if isinstance(batch, dict):
        batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    elif batch.is_floating_point():
        batch = batch.double()
    with torch.no_grad():
        for group in wire(model, [batch]):
            neurons = torch.tensor([1, group.width - 1])
            saved = {key: tensor.clone() for key, tensor in model.state_dict().items()}
            before = zoo_models.loss(model, batch)
            change_incoming(group, neurons)
            assert abs(zoo_models.loss(model, batch) - before) > 1e-9
            model.load_state_dict(saved)
            for consumer in group.consumers:
                layer = consumer.layer
                layer.weight.index_fill_(layer.in_axis, consumer.columns(neurons), 0)
            cut = zoo_models.loss(model, batch)
            change_incoming(group, neurons)
            assert zoo_models.loss(model, batch).item() == pytest.approx(cut.item(), rel=1e-12)
            model.load_state_dict(saved)


def change_incoming(group, neurons):
    for maker in group.makers:
        maker.weight.data.movedim(maker.out_axis, 0)[neurons] += 3.0
        if maker.bias is not None:
            maker.bias.data[neurons] += 2.0


def test_activity_is_read_after_the_nonlinearity():
    torch.manual_seed(0)
    model, x = ConvNet().eval(), image()
    wiring = wire(model, [x])
    seen = {}
    handles = [watch(model, group, lambda a, n=group.name: seen.update({n: a})) for group in wiring]
    model(x)
    for handle in handles:
        handle.remove()
    one = F.relu(model.one(x))
    torch.testing.assert_close(seen["one"], one.movedim(1, -1))
    pooled = F.max_pool2d(F.relu(model.two(one)), 2)
    torch.testing.assert_close(
        seen["two"].reshape(4, 16, 6), pooled.flatten(2).movedim(1, 2)
    )  # after the pooling: the first module that sees it is the Linear behind the view
    hidden = torch.tanh(model.norm(model.hidden(pooled.flatten(1))))
    torch.testing.assert_close(seen["hidden"], hidden)
    seen.clear()
    model(x)
    assert not seen


def test_norms_between_are_named():
    assert [[name for name, _ in group.norms] for group in wire(ResNet(), [image()])] == [["one.bn1"], ["two.bn1"]]
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 2))
    assert wire(model, [torch.zeros(2, 3)]).groups[0].norms == (("1", model[1]),)


def test_a_norm_that_is_written_out_is_a_norm_in_training_too():
    model = OwnNorm().train()
    graph = record(model, image(), training=True)
    (group,) = wire(model, graphs=[graph])
    assert [name for name, _ in group.norms] == ["norm"] and not group.late
    assert torch.equal(model.norm.ra_mean, torch.zeros(5))


def test_what_runs_in_one_of_several_passes_is_wired():
    model = ByData()
    graphs = [record(model, image()), record(model, torch.zeros(4, 3, 8, 8))]
    refused = wire(Siamese(), [image()]).refused
    assert "output" in refused["head"]
    with pytest.raises(WiringError, match="reads several layers"):
        wire(model, graphs=graphs)


def test_columns_that_lie_apart_belong_to_one_neuron():
    group = wire(Siamese(), [image()]).groups[0]
    assert group.consumers[0].columns(torch.tensor([1, 4])).tolist() == [1, 6, 4, 9]
    concatenated = wire(Concatenated(), [image()])
    assert concatenated.groups[1].consumers[0].columns(torch.tensor([0])).tolist() == [13]


def test_without_a_batch_it_says_what_to_give():
    with pytest.raises(WiringError, match="give batches="):
        wire(ConvNet())
    with pytest.raises(WiringError, match="does not run on the example"):
        wire(ConvNet(), [torch.zeros(2, 7)])


def test_a_wiring_survives_a_checkpoint_and_new_parts_of_the_same_size():
    model = ConvNet()
    wiring = wire(model, [image()])
    model.one = nn.Conv2d(3, 5, 3, padding=1)
    again = Wiring.of_state(wiring.state(), model)
    assert str(again) == str(wiring)
    assert again.groups[0].makers[0].module is model.one
    model.two = nn.Conv2d(5, 9, 3)
    assert Wiring.of_state(wiring.state(), model) is None


def test_the_first_training_pass_is_recorded_and_nothing_else_changes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    twin, graphs = copy.deepcopy(model), []
    waiting = FirstPass(model, graphs.append)
    with torch.no_grad():
        model(torch.ones(5, 3))
        twin(torch.ones(5, 3))
    assert not graphs
    for _ in range(2):
        torch.manual_seed(1)
        ours = model(torch.randn(5, 3))
        torch.manual_seed(1)
        assert torch.equal(ours, twin(torch.randn(5, 3)))
    assert len(graphs) == 1 and not any(m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True))
    waiting.remove()


def test_networks_that_are_called_by_themselves_are_recorded_one_by_one():
    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
            self.critic = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
            self.mu, self.std = nn.Linear(2, 1), nn.Linear(2, 1)

    model, graphs = Agent(), []
    FirstPass(model, graphs.append)
    for _ in range(2):
        model.critic(torch.zeros(1, 3))
        latent = model.actor(torch.zeros(1, 3))
        model.mu(latent), model.std(latent)
    assert len(graphs) == 4
    wiring = wire(model, graphs=graphs[-1:])
    assert [group.name for group in wiring] == ["actor.0", "actor.2", "critic.0"]
    assert [consumer.layer.name for consumer in wiring.groups[1].consumers] == ["mu", "std"]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules() if m is not model)


def test_residual_streams_are_refused_with_the_reason():
    refused = wire(ResNet(), [image()]).refused
    for name in ("stem", "one.conv2", "two.conv2", "two.shortcut"):
        assert "residual" in refused[name]
    assert "output" in refused["head"]


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.a(x).relu()) + self.head(self.b(x).relu())


class Partial(nn.Module):
    """A mean over one of two image axes would turn columns into something else."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.conv(x).relu().mean(2))


def depthwise():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4), nn.ReLU(), nn.Conv2d(4, 2, 1))


def tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("make", "x", "reason"),
    [
        (Shared, torch.zeros(2, 3), "reads several layers"),
        (Partial, image(), "along another axis"),
        (depthwise, image(), "0: it feeds 2, a convolution in 4 groups; 2: it is a convolution in 4 groups"),
        (tied, torch.zeros(2, 4), "shared"),
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1), nn.Linear(4, 2)), torch.zeros(2, 3), "softmax"),
        (lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), torch.zeros(2, 3), "parametrized"),
    ],
)
def test_what_is_not_known_is_refused(make, x, reason):
    with pytest.raises(WiringError, match=reason):
        wire(make(), [x])


def test_a_recurrent_network_is_refused_and_says_why():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.lstm(x)[0])

    with pytest.raises(WiringError, match="lstm: its neurons feed back into its own gates"):
        wire(Recurrent(), [torch.zeros(2, 1, 3)])


def test_the_users_map_is_checked_and_taken():
    model = Branching()
    wiring = wire(model, consumers={"conv": "fc", "fc": ["head"]})
    assert [consumer.spread for group in wiring for consumer in group.consumers] == [36, 1]
    assert wiring.groups[0].consumers[0].columns(torch.tensor([1])).tolist() == list(range(36, 72))
    with pytest.raises(WiringError, match="not a multiple"):
        wire(model, consumers={"conv": "head"})
    with pytest.raises(WiringError, match="no module 'nope'"):
        wire(model, consumers={"nope": "head"})
    with pytest.raises(WiringError, match="BatchNorm2d"):
        wire(model, consumers={"norm": "head"})


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit"])
def test_transformers_mlps_are_found(name):
    transformers = pytest.importorskip("transformers")
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
    if name == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=8)
        model, layer = transformers.GPT2LMHeadModel(config), "transformer.h.1.mlp.c_fc"
    elif name == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **small))
        layer = "model.layers.1.mlp.gate_proj"
    else:
        config = transformers.ViTConfig(image_size=8, patch_size=4, **small)
        model, layer = transformers.ViTForImageClassification(config), "vit.layers.1.mlp.fc1"
    batch = torch.zeros(1, 3, 8, 8) if name == "vit" else {"input_ids": torch.zeros(1, 4, dtype=torch.long)}
    wiring = wire(model, [batch])
    assert layer in [group.name for group in wiring]
    assert len(wiring) == 2
    if name == "llama":
        assert [len(group.makers) for group in wiring] == [2, 2]
    if name == "gpt2":
        assert as_layer("x", model.transformer.h[0].mlp.c_fc).out_size == 64


def test_targets_narrow_the_wiring():
    wiring = wire(ConvNet(), [image()]).only(lambda name: name == "two")
    assert [group.name for group in wiring] == ["two"]
    assert wiring.refused["one"] == "not among the targets"


class Remembers(nn.Module):
    """Stores activations, counts calls and grows a list in its forward, as real code does."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.last, self.seen = None, []

    def forward(self, x):
        self.calls += 1
        h = torch.relu(self.a(x))
        self.mean = 0.9 * self.mean + h.mean(0)
        self.last = h
        self.seen.append(x)
        return self.b(h)


def test_tracing_leaves_no_trace_on_the_model():
    model = Remembers()
    with pytest.raises(WiringError, match="meets mean"):  # which the next pass may read
        wire(model, [torch.zeros(2, 3)])
    assert model.calls == 0
    assert model.last is None
    assert model.seen == []
    assert torch.equal(model.mean, torch.zeros(4))
    assert model._buffers["mean"] is model.mean
    model(torch.zeros(2, 3))
    assert len(model.seen) == 1
