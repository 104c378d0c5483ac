"""What the laboratory's networks compute, against slow and obvious references in float64."""

import pytest
import torch
import torch.nn.functional as F

from rekindle.lab.networks import network
from rekindle.lab.networks.transformers import ViTAttention
from rekindle.lab.networks.vision import ResidualBlock


def test_attention_of_the_vit_is_softmax_of_scaled_products():
    attention = ViTAttention(6, heads=3).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    q, k, v = (to(x) for to in (attention.to_q, attention.to_k, attention.to_v))
    mixed = torch.zeros_like(x)
    for head in range(3):
        own = slice(2 * head, 2 * head + 2)
        for i in range(4):
            scores = torch.stack([q[i, own] @ k[j, own] / 2**0.5 for j in range(4)]).softmax(0)
            mixed[i, own] = sum(scores[j] * v[j, own] for j in range(4))
    torch.testing.assert_close(attention(x[None])[0], attention.to_out(mixed), rtol=1e-10, atol=1e-12)


def test_the_vit_reads_patches_in_rows():
    model = network("vit", shape=(2, 6, 9), classes=3, seed=0, patch=3, layers=1, width=12).double()
    x = torch.randn(2, 2, 6, 9, dtype=torch.float64)
    patches = [x[:, :, i : i + 3, j : j + 3].reshape(2, -1) for i in (0, 3) for j in (0, 3, 6)]
    tokens = model.patch_embed(torch.stack(patches, 1))
    tokens = torch.cat([model.cls_token.expand(2, 1, 12), tokens], 1)
    tokens = model.blocks(tokens + model.pos_embed)
    expected = model.head(model.norm(tokens[:, 0]))
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-12)


def test_the_resnet_computes_what_its_layers_say_in_any_memory_format():
    model = network("resnet18", shape=(1, 9, 9), classes=3, seed=0, width=2, stem="imagenet").double().eval()
    x = torch.randn(3, 1, 9, 9, dtype=torch.float64)
    y = F.max_pool2d(F.relu(model.bn1(model.conv1(x))), 3, 2, 1)
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        for block in stage:
            assert isinstance(block, ResidualBlock)
            inner = block.bn2(block.conv2(F.relu(block.bn1(block.conv1(y)))))
            y = F.relu(inner + (y if block.downsample is None else block.downsample(y)))
    torch.testing.assert_close(model(x), model.fc(y.mean((2, 3))), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("name", "shape"), [("resnet18", (1, 12, 12)), ("vgg16", (3, 12, 12)), ("cnn", (1, 12, 12))])
@pytest.mark.parametrize("batch", [1, 7, 32])
def test_the_memory_format_changes_no_gradient(name, shape, batch):
    exact = network(name, shape=shape, classes=5, seed=0, width=8).double().eval()
    fast = network(name, shape=shape, classes=5, seed=0, width=8).eval()
    x, y = torch.randn(batch, *shape), torch.randint(0, 5, (batch,))
    # oneDNN, whose kernels know the format, takes no float64: torch's own plain ones compute the reference.
    for model, each in ((exact, x.double()), (fast, x)):
        F.cross_entropy(model(each), y).backward()
    for (key, slow), quick in zip(exact.named_parameters(), fast.parameters(), strict=True):
        assert (slow.grad - quick.grad).norm() <= 1e-4 * slow.grad.norm() + 1e-7, key


def test_the_gpt_with_biases_is_gpt2():
    transformers = pytest.importorskip("transformers", reason="compares with transformers' GPT-2")
    model = network("gpt", shape=(12,), classes=20, seed=0, layers=2, width=16, heads=4, bias=True).double().eval()
    with torch.no_grad():  # zero biases would hide a mistake
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    sizes = {"vocab_size": 20, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**sizes, **ends, activation_function="gelu")
    theirs = transformers.GPT2LMHeadModel(config).double().eval()
    state = {}
    for key, value in model.state_dict().items():
        turned = value.T if key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else value
        state["lm_head.weight" if key == "lm_head.weight" else f"transformer.{key}"] = turned
    state["transformer.wpe.weight"] = state.pop("transformer.positions.weight")
    theirs.load_state_dict(state)
    tokens = torch.randint(0, 20, (3, 9))
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["gpt", "dawn"])
def test_no_token_sees_a_later_one(name):
    sizes = {
        "gpt": {"layers": 2, "width": 32, "heads": 4},
        "dawn": {"layers": 2, "width": 16, "neurons": 40, "chosen": 4},
    }
    model = network(name, shape=(16,), classes=10, seed=0, **sizes[name])
    tokens = torch.randint(0, 10, (6, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 10
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :9], before[:, :9])
    assert not torch.allclose(after[:, 9:], before[:, 9:])


def test_the_gpt_starts_as_gpt2_does():
    model = network("gpt", shape=(64,), classes=100, seed=0, layers=8, width=64, heads=4)
    assert model.h[3].mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.h[3].mlp.c_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert model.wte.weight.std().item() == pytest.approx(0.02, rel=0.05)
