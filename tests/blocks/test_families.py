"""Layouts of known classes, each held against the module's own forward.

For every family the tensors that the model itself computes (q, k, v; gate; x, z, dt, B, C) are caught inside its
forward. Rewriting one block must change exactly the tensor that the block claims to make.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rekindle.blocks.families import recipes
from rekindle.blocks.finding import Found, find
from zoo_models import VOCABULARY, batch, build

Seen = dict[str, Tensor]


def catch_eager(model: nn.Module, attention: nn.Module, patch: pytest.MonkeyPatch) -> Seen:
    """The arguments of the model's eager attention function, for its first attention layer."""
    seen: Seen = {}
    source = importlib.import_module(type(attention).__module__)
    original = source.eager_attention_forward
    model.config._attn_implementation = "eager"  # type: ignore[union-attr]

    def spy(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if module is attention:
            seen.update(query=query, key=key, value=value)
        return original(module, query, key, value, *args, **kwargs)

    patch.setattr(source, "eager_attention_forward", spy)
    return seen


def catch_method(name: str, returns: bool) -> Callable[[nn.Module, nn.Module, pytest.MonkeyPatch], Seen]:
    """What a method of the attention returns as (q, k, v), or takes as its first three arguments."""

    def catch(model: nn.Module, attention: nn.Module, patch: pytest.MonkeyPatch) -> Seen:
        seen: Seen = {}
        original = getattr(attention, name)

        def spy(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            seen.update(zip(("query", "key", "value"), result if returns else args, strict=False))
            return result

        patch.setattr(attention, name, spy)
        return seen

    return catch


Catch = Callable[[nn.Module, nn.Module, pytest.MonkeyPatch], Seen]
# model → (name of the fused weight, how to catch q, k and v, the axis of q that runs over heads)
ATTENTION: dict[str, tuple[str, Catch, int]] = {
    "gpt2": ("c_attn.weight", catch_eager, 1),
    "gpt_neox": ("query_key_value.weight", catch_eager, 1),
    "bloom": ("query_key_value.weight", catch_method("_reshape", True), 1),
    "falcon_old": ("query_key_value.weight", catch_method("_split_heads", True), 2),
    "falcon_rw": ("query_key_value.weight", catch_method("_split_heads", True), 2),
    "falcon_new": ("query_key_value.weight", catch_method("_split_heads", True), 2),
    "phi3": ("qkv_proj.weight", catch_eager, 1),
    "bigcode": ("c_attn.weight", catch_eager, 1),
    "codegen": ("qkv_proj.weight", catch_method("_attn", False), 1),
    "modernbert": ("Wqkv.weight", catch_eager, 1),
}


def run(model: nn.Module, name: str, seen: Seen) -> Seen:
    with torch.no_grad():
        model.eval()(**batch(name))
    assert seen, "the model's forward was not caught"
    return {key: value.detach().clone() for key, value in seen.items()}


def first(model: nn.Module, ending: str, **options: Any) -> tuple[Found, nn.Parameter]:
    found = next(f for f in find(model, **options) if f.name.endswith(ending))
    return found, model.get_parameter(found.key)


def replace_block(weight: nn.Parameter, block: Any, which: slice = slice(None)) -> None:
    """New numbers for (some matrices of) one block."""
    value = block.read(weight.data).clone()
    value[which] = torch.randn(value[which].shape, generator=torch.Generator().manual_seed(3))
    block.write(weight.data, value)


@pytest.mark.parametrize("part", ["query", "key", "value"])
@pytest.mark.parametrize("name", ATTENTION)
def test_each_part_of_a_fused_weight_makes_its_own_tensor(
    name: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending, catch, _ = ATTENTION[name]
    model = build(name)
    found, weight = first(model, ending)
    seen = catch(model, model.get_submodule(found.module.rpartition(".")[0]), monkeypatch)
    before = run(model, name, seen)
    assert {b.part for b in found.blocks} == {"query", "key", "value"}
    replace_block(weight, next(b for b in found.blocks if b.part == part))
    after = run(model, name, seen)
    assert {key for key in before if not torch.equal(before[key], after[key])} == {part}


@pytest.mark.parametrize("head", [0, 2, 3])
@pytest.mark.parametrize("name", ATTENTION)
def test_each_head_of_the_query_is_one_matrix(name: str, head: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ending, catch, axis = ATTENTION[name]
    model = build(name)
    found, weight = first(model, ending, split_heads=True)
    seen = catch(model, model.get_submodule(found.module.rpartition(".")[0]), monkeypatch)
    before = run(model, name, seen)["query"]
    block = next(b for b in found.blocks if b.part == "query")
    assert (block.count, block.out, block.in_, block.fans) == (4, 8, 32, (32, 32))
    replace_block(weight, block, slice(head, head + 1))
    after = run(model, name, seen)["query"]
    changed = [i for i in range(4) if not torch.equal(before.select(axis, i), after.select(axis, i))]
    assert changed == [head]


@pytest.mark.parametrize("head", [0, 3])
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "phi3", "llama", "bert", "vit", "encoder"])
def test_each_head_reads_its_own_columns_of_the_output(name: str, head: int) -> None:
    """The output layer's input is the heads side by side: one head's matrix acts on its 8 numbers alone."""
    model = build(name)
    found = next(f for f in find(model, split_heads=True) if f.role == "attention-output")
    layer, weight = model.get_submodule(found.module), model.get_parameter(found.key)
    block = found.blocks[0]
    assert (block.count, block.out, block.in_, block.fans) == (4, 32, 8, (32, 32))
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    x[:, 8 * head : 8 * head + 8] = 0
    before = layer(x).detach()
    replace_block(weight, block, slice(head, head + 1))
    assert torch.equal(layer(x), before)
    assert not torch.equal(layer(x + 1), build(name).get_submodule(found.module)(x + 1))


@pytest.mark.parametrize("part", ["gate", "up"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "phi3"])
def test_gate_and_up_are_told_apart(name: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes through the activation is the gate; gpt_oss clamps gate and up differently instead."""
    model = build(name)
    found, weight = first(model, "gate_up_proj.weight" if name == "phi3" else "gate_up_proj")
    owner = model.get_submodule(found.module.removesuffix(".gate_up_proj"))
    seen: Seen = {}
    if name == "gpt_oss":
        model.config._experts_implementation = "eager"  # type: ignore[union-attr]
        owner.limit = 1e9  # type: ignore[assignment]
        owner.alpha = 0.0  # type: ignore[assignment]  # glu = gate/2, so (up + 1)·gate/2 comes out
        original = owner._apply_gate

        def spy(fused: Tensor) -> Tensor:
            result = original(fused)
            zero_up = fused.clone().unflatten(-1, (-1, 2))
            zero_up[..., 1] = 0
            seen["gate"] = original(zero_up.flatten(-2)) * 2
            seen["up"] = result / (seen["gate"] / 2) - 1
            return result

        monkeypatch.setattr(owner, "_apply_gate", spy)
    else:
        activation = "activation_fn" if name == "phi3" else "act_fn"
        original = getattr(owner, activation)

        class Spy(nn.Module):
            def forward(self, gate: Tensor) -> Tensor:
                seen["gate"] = gate.clone()
                return original(gate)  # type: ignore[no-any-return]

        if name == "mixtral":
            model.config._experts_implementation = "eager"  # type: ignore[union-attr]
        setattr(owner, activation, Spy())
    before = run(model, name, seen)
    block = next(b for b in found.blocks if b.part == part)
    assert (block.count, block.out, block.in_) == (1 if name == "phi3" else 3, 40, 32)
    replace_block(weight, block)
    after = run(model, name, seen)
    assert torch.equal(before["gate"], after["gate"]) == (part == "up")
    if "up" in before:
        assert torch.allclose(before["up"], after["up"], atol=1e-3) == (part == "gate")


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_each_expert_is_one_matrix(name: str) -> None:
    model = build(name)
    found, weight = first(model, "experts.down_proj")
    block = found.blocks[0]
    assert (block.role, block.count, block.out, block.in_) == ("mlp-out", 3, 32, 40)
    expert = weight.data[1] if name == "mixtral" else weight.data[1].mT
    assert torch.equal(block.read(weight.data)[1], expert)


@pytest.mark.parametrize(
    ("name", "ending", "part", "changed"),
    [
        ("mamba", "in_proj.weight", "z", {"z"}),
        ("mamba", "in_proj.weight", "x", {"x", "dt", "B", "C"}),
        ("mamba", "x_proj.weight", "dt", {"dt"}),
        ("mamba", "x_proj.weight", "B", {"B"}),
        ("mamba", "x_proj.weight", "C", {"C"}),
        ("mamba2", "in_proj.weight", "x", {"x"}),
        ("mamba2", "in_proj.weight", "B", {"B"}),
        ("mamba2", "in_proj.weight", "C", {"C"}),
        ("mamba2", "in_proj.weight", "dt", {"dt"}),
        ("mamba2", "in_proj.weight", "z", {"z"}),
    ],
)
def test_state_space_projections(
    name: str, ending: str, part: str, changed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(name)
    found, weight = first(model, ending)
    mixer = model.get_submodule(found.module.rpartition(".")[0])
    source = importlib.import_module(type(mixer).__module__)
    scan = "mamba_selective_scan" if name == "mamba" else "mamba2_chunk_scan"
    seen: Seen = {}
    original = getattr(source, scan)

    def spy(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *args: Any, **kwargs: Any) -> Any:
        if "x" not in seen:  # the first layer only
            seen.update(x=x, dt=dt, B=b, C=c)
            if kwargs.get("z") is not None:
                seen["z"] = kwargs["z"]
        return original(x, dt, a, b, c, *args, **kwargs)

    monkeypatch.setattr(source, scan, spy)
    if name == "mamba2":
        mixer.norm.register_forward_pre_hook(lambda _, args: seen.update(z=args[1]))  # type: ignore[union-attr]
    before = run(model, name, seen)
    seen.clear()
    replace_block(weight, next(b for b in found.blocks if b.part == part))
    after = run(model, name, seen)
    assert set(before) == {"x", "dt", "B", "C", "z"}
    assert {key for key in before if not torch.equal(before[key], after[key])} == changed


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_gates_rebuild_one_step(kind: str) -> None:
    layer = getattr(nn, kind)(5, 7, bias=False).double()
    found = {f.name: f for f in find(layer)}
    w = found["weight_ih_l0"].blocks[0].read(layer.weight_ih_l0)
    u = found["weight_hh_l0"].blocks[0].read(layer.weight_hh_l0)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, generator=generator, dtype=torch.float64)
    h = torch.randn(7, generator=generator, dtype=torch.float64)
    a, b = w @ x, u @ h
    if kind == "LSTM":
        c = torch.randn(7, generator=generator, dtype=torch.float64)
        i, f, g, o = a + b
        state = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        expected = torch.sigmoid(o) * torch.tanh(state)
        given: Any = (h[None], c[None])
    elif kind == "GRU":
        r, z = torch.sigmoid(a[0] + b[0]), torch.sigmoid(a[1] + b[1])
        n = torch.tanh(a[2] + r * b[2])
        expected = (1 - z) * n + z * h
        given = h[None]
    else:
        expected = torch.tanh(a[0] + b[0])
        given = h[None]
    assert torch.allclose(layer(x[None], given)[0][0], expected)


def test_cells_and_projections_of_recurrent_layers() -> None:
    cell = {f.name: f.count for f in find(nn.LSTMCell(5, 7)) if f.blocks}
    assert cell == {"weight_ih": 4, "weight_hh": 4}
    projected = {
        f.name: (f.count, f.blocks[0].out, f.blocks[0].in_) for f in find(nn.LSTM(5, 8, proj_size=3)) if f.blocks
    }
    assert projected == {"weight_ih_l0": (4, 8, 5), "weight_hh_l0": (4, 8, 3), "weight_hr_l0": (1, 3, 8)}


@pytest.mark.parametrize("separate", [False, True])
def test_multihead_attention_rebuilds_its_scores(separate: bool) -> None:
    layer = nn.MultiheadAttention(8, 2, bias=False, kdim=6 if separate else None, batch_first=True).double()
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 8, generator=generator, dtype=torch.float64)
    k = torch.randn(1, 5, 6 if separate else 8, generator=generator, dtype=torch.float64)
    v = torch.randn(1, 5, 8, generator=generator, dtype=torch.float64)
    read = {}
    for f in find(layer, split_heads=True):
        for block in f.blocks:
            read[block.role] = block.read(layer.get_parameter(f.key)).detach()
    out = torch.zeros(1, 4, 8, dtype=torch.float64)
    for head in range(2):
        scores = (q @ read["query"][head].mT) @ (k @ read["key"][head].mT).mT / 2.0
        out += scores.softmax(-1) @ (v @ read["value"][head].mT) @ read["attention-output"][head].mT
    assert torch.allclose(layer(q, k, v)[0], out)


@pytest.mark.parametrize("kind", ["VitDetAttention", "SamVisionAttention", "BlipAttention", "MptAttention"])
def test_fused_thirds_rebuild_the_attention(kind: str) -> None:
    """softmax(QKᵀ/√d)·V·O, head by head from the blocks, is what the module's forward returns."""
    transformers = pytest.importorskip("transformers")
    family = {"VitDetAttention": "vitdet", "SamVisionAttention": "sam", "BlipAttention": "blip", "MptAttention": "mpt"}
    module = importlib.import_module(f"transformers.models.{family[kind]}.modeling_{family[kind]}")
    vision = {"hidden_size": 32, "num_attention_heads": 4, "qkv_bias": True}
    x = torch.randn(1, 2, 3, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    flat = x.reshape(1, 6, 32)
    if kind == "VitDetAttention":
        layer = module.VitDetAttention(transformers.VitDetConfig(**vision)).double()
        result = layer(x)[0].reshape(6, 32)
    elif kind == "SamVisionAttention":
        config = transformers.SamVisionConfig(**vision, use_rel_pos=False)
        layer = module.SamVisionAttention(config, 0).double()
        result = layer(x)[0].reshape(6, 32)
    elif kind == "BlipAttention":
        layer = module.BlipAttention(transformers.BlipVisionConfig(hidden_size=32, num_attention_heads=4)).double()
        result = layer(flat)[0][0]
    else:
        layer = module.MptAttention(transformers.MptConfig(d_model=32, n_heads=4)).double()
        result = layer(flat, None)[0][0]
    read = {}
    for f in find(layer, split_heads=True):
        read.update({b.role: b.read(layer.get_parameter(f.key)).detach() for b in f.blocks})
    fused = getattr(layer, "qkv", getattr(layer, "Wqkv", None))
    out = getattr(layer, "proj", getattr(layer, "projection", getattr(layer, "out_proj", None)))
    biases = torch.zeros(3, 4, 1, 8).double() if fused.bias is None else fused.bias.detach().view(3, 4, 1, 8)
    q, k, v = (flat[0] @ read[r].mT + biases[i] for i, r in enumerate(("query", "key", "value")))
    heads = (q @ k.mT / 8**0.5).softmax(-1) @ v @ read["attention-output"].mT
    assert torch.allclose(result, heads.sum(0) + (0 if out.bias is None else out.bias))


def test_bilinear_has_one_matrix_an_output() -> None:
    layer = nn.Bilinear(3, 4, 5, bias=False).double()
    a, b = torch.randn(2, 3).double(), torch.randn(2, 4).double()
    forms = find(layer)[0].blocks[0].read(layer.weight)
    assert forms.shape == (5, 3, 4)
    assert torch.allclose(layer(a, b), torch.stack([((a @ form) * b).sum(1) for form in forms], 1))


def test_latent_attention_of_deepseek() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=40, moe_intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1, kv_lora_rank=12,
        q_lora_rank=10, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=8, first_k_dense_replace=0,
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config)
    found, weight = first(model, "kv_b_proj.weight")
    key, value = found.blocks
    assert [(b.part, b.out, b.in_) for b in found.blocks] == [("key", 24, 12), ("value", 32, 12)]
    x = torch.randn(12)
    parts = (weight @ x).view(4, 14)
    assert torch.allclose(key.read(weight)[0] @ x, parts[:, :6].flatten(), atol=1e-6)
    assert torch.allclose(value.read(weight)[0] @ x, parts[:, 6:].flatten(), atol=1e-6)
    assert next(f for f in find(model) if f.name.endswith("mlp.gate.weight")).role == "router"


def test_every_known_transformers_class_exists() -> None:
    """A renamed class would silently lose its rule, a name used twice would get a wrong one."""
    transformers = pytest.importorskip("transformers")
    from pathlib import Path

    from rekindle.blocks.known_classes import _TRANSFORMERS

    source = Path(transformers.__file__).parent / "models"
    text = "\n".join(p.read_text("utf-8") for p in source.glob("*/modeling_*.py"))
    counts = {n: text.count(f"\nclass {n}(") for _, names in _TRANSFORMERS for n in names.split()}
    assert [n for n, count in counts.items() if count == 0] == []
    # DeBERTa and its second version share a name; only the first has the fused weight that the rule names.
    assert [n for n, count in counts.items() if count > 1] == ["DisentangledSelfAttention"]


def test_a_subclass_has_the_layout_of_its_class() -> None:
    class Mine(nn.MultiheadAttention):
        pass

    assert recipes(Mine(8, 2)).keys() == recipes(nn.MultiheadAttention(8, 2)).keys()


def test_models_are_not_changed_by_looking() -> None:
    model = build("gpt2")
    before = copy.deepcopy(model.state_dict())
    find(model, split_heads=True)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
