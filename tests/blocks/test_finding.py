"""find(): every parameter of every architecture has its matrices, its role, or the right reason."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from rekindle.blocks.families import _registered
from rekindle.blocks.finding import Found, find, matrices, register
from zoo_models import NAMES, NanoAttention, build


def by_name(model: nn.Module, **options: Any) -> dict[str, Found]:
    return {f.name: f for f in find(model, **options)}


@pytest.mark.parametrize("options", [{}, {"split_heads": True}, {"conv": "flat"}], ids=["plain", "heads", "flat"])
@pytest.mark.parametrize("name", NAMES)
def test_blocks_partition_every_weight_of_the_zoo(name: str, options: dict[str, Any]) -> None:
    model = build(name)
    found = find(model, **options)
    assert [f.key for f in found] == [k for k, _ in model.named_parameters(remove_duplicate=False)]
    for f in found:
        assert f.blocks or f.refusal, f"{f.name} has neither matrices nor a reason"
        assert f.shape == tuple(model.get_parameter(f.key).shape)
        if f.blocks:
            index = torch.arange(math.prod(f.shape)).reshape(f.shape)
            read = torch.cat([b.read(index).flatten() for b in f.blocks])
            assert torch.equal(read.sort().values, torch.arange(math.prod(f.shape)))
            assert all(min(b.out, b.in_) >= 1 for b in f.blocks)


# Of each model: role → how many weights have it; then the reasons of those left alone that hold matrices.
EXPECTED: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "mlp": ({"other": 2, "head": 1}, {"output head": 1}),
    "resnet": ({"conv": 6, "head": 1}, {"output head": 1}),
    "mobilenet": ({"conv": 3, "depthwise": 1, "head": 1}, {"output head": 1, "depthwise kernel (1-wide)": 1}),
    "unet": ({"conv": 4, "head": 1}, {"output head": 1}),
    "lstm": ({"other": 10, "embedding": 1, "head": 1}, {"output head": 1, "embedding": 1}),
    "encoder": (
        {"query": 2, "attention-output": 2, "mlp-in": 2, "mlp-out": 2, "embedding": 1, "head": 1},
        {"output head": 1, "embedding": 1},
    ),
    "gpt2": (
        {"query": 2, "attention-output": 2, "mlp-in": 2, "mlp-out": 2, "embedding": 2},
        {"embedding, tied to the output head": 1, "embedding": 1},
    ),
    "gpt_neox": (
        {"query": 2, "attention-output": 2, "mlp-in": 2, "mlp-out": 2, "embedding": 1, "head": 1},
        {"output head": 1, "embedding": 1},
    ),
    "bloom": (
        {"query": 2, "attention-output": 2, "mlp-in": 2, "mlp-out": 2, "embedding": 1},
        {"embedding, tied to the output head": 1},
    ),
    "phi": (
        {"query": 2, "key": 2, "value": 2, "attention-output": 2, "mlp-in": 2, "mlp-out": 2, "embedding": 1, "head": 1},
        {"output head": 1, "embedding": 1},
    ),
    "llama": (
        {"query": 2, "key": 2, "value": 2, "attention-output": 2, "mlp-in": 2, "mlp-gate": 2, "mlp-out": 2}
        | {"embedding": 1, "head": 1},
        {"output head": 1, "embedding": 1},
    ),
    "mixtral": (
        {"query": 2, "key": 2, "value": 2, "attention-output": 2, "mlp-gate": 2, "mlp-out": 2, "router": 2}
        | {"embedding": 1, "head": 1},
        {"output head": 1, "embedding": 1, "router": 2},
    ),
    "vit": (
        {"query": 2, "key": 2, "value": 2, "attention-output": 2, "mlp-in": 2, "mlp-out": 2, "conv": 1, "head": 1},
        {"output head": 1},
    ),
    "bert": (
        {"query": 2, "key": 2, "value": 2, "attention-output": 2, "mlp-in": 2, "mlp-out": 2, "other": 1}
        | {"embedding": 3, "head": 1},
        {"output head": 1, "embedding": 3},
    ),
    "t5": (
        {"query": 6, "key": 6, "value": 6, "attention-output": 6, "mlp-gate": 4, "mlp-in": 4, "mlp-out": 4}
        | {"embedding": 3},
        {"embedding, tied to the output head": 1, "embedding": 2},
    ),
    "mamba": (
        {"mlp-in": 2, "mlp-out": 2, "other": 4, "depthwise": 2, "embedding": 1},
        {"embedding, tied to the output head": 1, "depthwise kernel (1-wide)": 2},
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_roles_and_reasons_of_the_zoo(name: str) -> None:
    found = [f for f in find(build(name)) if f.blocks]
    roles: dict[str, int] = {}
    reasons: dict[str, int] = {}
    for f in found:
        roles[f.role] = roles.get(f.role, 0) + 1
        if f.reason:
            reasons[f.reason] = reasons.get(f.reason, 0) + 1
    assert (roles, reasons) == EXPECTED[name]


def test_reasons_of_what_holds_no_matrix() -> None:
    found = by_name(build("vit"))
    assert found["vit.embeddings.cls_token"].reason == "a position or token vector of ViTEmbeddings, no matrix"
    assert found["vit.layers.0.layernorm_before.weight"].reason == "norm (LayerNorm)"
    assert found["vit.layers.0.attention.q_proj.bias"].reason == "bias"
    assert by_name(build("mamba"))["backbone.layers.0.mixer.D"].reason == "vector"
    assert "MambaMixer" in str(by_name(build("mamba"))["backbone.layers.0.mixer.A_log"].reason)
    assert by_name(build("gpt_oss"))["model.layers.0.mlp.experts.gate_up_proj_bias"].reason == "bias"


def test_transformers_conv1d_is_transposed() -> None:
    block = by_name(build("gpt2"))["transformer.h.0.mlp.c_fc.weight"].blocks[0]
    assert (block.out, block.in_) == (128, 32)


def test_unknown_fused_weights_are_left_alone_and_say_how_to_change_that() -> None:
    found = by_name(build("nanogpt"))["h.0.attn.c_attn.weight"]
    assert found.blocks == ()
    assert found.reason == (
        "fused: NanoAttention cuts its output into parts (split), how is not known: "
        "rekindle.blocks.register(NanoAttention, …)"
    )


@pytest.mark.parametrize(
    ("leaf", "out", "beside", "fused"),
    [
        ("qkv", 24, "proj", True),
        ("Wqkv", 24, "proj", True),
        ("kv_proj", 16, "q_proj", True),
        ("gate_up_proj", 16, "down_proj", True),
        ("in_proj", 16, "out_proj", True),
        ("in_proj", 16, "body", False),
        ("in_proj", 8, "out_proj", False),
        ("linear", 24, "proj", False),
    ],
)
def test_what_looks_fused(leaf: str, out: int, beside: str, fused: bool) -> None:
    layer = nn.ModuleDict({leaf: nn.Linear(8, out), beside: nn.Linear(8, 8)})
    model = nn.ModuleDict({"block": layer, "head": nn.Linear(8, 2)})
    found = by_name(model)[f"block.{leaf}.weight"]
    assert bool(found.refusal and "looks fused" in found.refusal) == fused


def test_fused_convolutions_and_wrapped_layers_are_left_alone_too() -> None:
    attention = nn.ModuleDict({"qkv": nn.Conv2d(8, 24, 1), "proj": nn.Conv2d(8, 8, 1)})
    wrapped = nn.ModuleDict({"to_qkv": nn.Sequential(nn.Linear(8, 24)), "proj": nn.Linear(8, 8)})
    found = by_name(nn.ModuleDict({"a": attention, "b": wrapped, "head": nn.Linear(8, 2)}))
    for name in ("a.qkv.weight", "b.to_qkv.0.weight"):
        assert "looks fused" in str(found[name].reason)
    for name in ("a.proj.weight", "b.proj.weight"):
        assert found[name].reason is None


def test_a_linear_layer_with_norm_in_its_name_is_no_norm() -> None:
    class NormedLinear(nn.Linear):
        pass

    found = by_name(nn.Sequential(NormedLinear(4, 4), nn.LayerNorm((3, 4)), nn.Linear(4, 2)))
    assert found["0.weight"].blocks
    assert found["1.weight"].reason == "norm (LayerNorm)"


def test_pruned_weights_say_why_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    prune.l1_unstructured(model[0], "weight", 0.5)
    assert "pruned" in str(by_name(model)["0.weight_orig"].reason)


def test_registering_an_own_layout_takes_three_lines() -> None:
    register(
        NanoAttention,
        lambda m: {"c_attn.weight": matrices("(part head dim) in", part=("query", "key", "value"), head=m.n_head)},
    )
    try:
        found = by_name(build("nanogpt"))["h.0.attn.c_attn.weight"]
        assert [(b.role, b.out, b.in_) for b in found.blocks] == [(r, 32, 32) for r in ("query", "key", "value")]
    finally:
        del _registered[NanoAttention]
    with pytest.raises(TypeError, match="subclass"):
        register("NanoAttention", lambda m: {})  # type: ignore[arg-type]


def test_a_rule_that_does_not_fit_is_a_reason_and_no_crash() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 25)

    model = nn.ModuleDict({"odd": Odd(), "head": nn.Linear(8, 2)})
    register(Odd, lambda m: {"qkv.weight": matrices("(part out) in", part=("query", "key", "value"))})
    try:
        assert "25" in str(by_name(model)["odd.qkv.weight"].reason)
        register(Odd, lambda m: {"qkv.weight": matrices("(head dim) in", head=m.missing)})
        assert "missing" in str(by_name(model)["odd.qkv.weight"].reason)
    finally:
        del _registered[Odd]


def test_layouts_can_be_stated_by_name() -> None:
    thirds = matrices("(part out) in", part=("query", "key", "value"))
    found = by_name(build("nanogpt"), layouts={"*.c_attn.weight": thirds})
    assert [b.role for b in found["h.1.attn.c_attn.weight"].blocks] == ["query", "key", "value"]


class TestHeads:
    def test_last_matrix_of_a_plain_network(self) -> None:
        found = by_name(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)))
        assert [f.role for f in found.values() if f.blocks] == ["other", "other", "head"]

    def test_known_names_go_before_registration_order(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc = nn.Linear(8, 2)
                self.body = nn.Linear(4, 8)

        assert by_name(Net())["fc.weight"].role == "head"
        assert by_name(Net())["body.weight"].role == "other"

    def test_all_named_heads_count(self) -> None:
        net = nn.ModuleDict({"body": nn.Linear(4, 8), "action_net": nn.Linear(8, 2), "value_net": nn.Linear(8, 1)})
        assert [f.role for f in find(net) if f.blocks] == ["other", "head", "head"]

    def test_through_modules_that_hold_one_other(self) -> None:
        outer = nn.Module()
        outer.model = build("resnet")
        assert by_name(outer)["model.fc.weight"].role == "head"

    def test_overridden(self) -> None:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        assert [f.role for f in find(net, heads="0") if f.blocks] == ["head", "other", "other"]
        assert [f.role for f in find(net, heads=["0.weight", "1*"]) if f.blocks] == ["head", "head", "other"]
        assert [f.role for f in find(net, heads=()) if f.blocks] == ["other", "other", "other"]
        with pytest.raises(ValueError, match=r"heads='nope'.*0\.weight"):
            find(net, heads="nope")

    @pytest.mark.parametrize(
        "body", [nn.LSTM(4, 4), nn.TransformerEncoderLayer(8, 2), nn.MultiheadAttention(8, 2), nn.Linear(3, 3)]
    )
    def test_a_body_alone_has_none(self, body: nn.Module) -> None:
        assert all("head" not in f.marks for f in find(body))

    def test_a_transformers_backbone_has_none(self) -> None:
        assert all("head" not in f.marks for f in find(build("gpt2").transformer))  # type: ignore[arg-type]
        assert all("head" not in f.marks for f in find(build("bert").bert))  # type: ignore[arg-type]


def test_tied_weights_are_treated_once() -> None:
    found = by_name(build("t5"))
    assert found["shared.weight"].also == (
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        "lm_head.weight",
    )
    for name in found["shared.weight"].also:
        assert found[name].reason == "tied to shared.weight, treated there"
        assert not found[name].blocks


def test_frozen_weights_say_so() -> None:
    model = build("resnet")
    model.layer1.requires_grad_(False)  # type: ignore[union-attr]
    assert by_name(model)["layer1.conv1.weight"].marks == {"frozen": "frozen"}


def test_wrappers_are_seen_through() -> None:
    names = [f.name for f in find(build("resnet"))]
    compiled = torch.compile(build("resnet"))
    wrapped: list[nn.Module] = [compiled, nn.DataParallel(build("resnet")), nn.DataParallel(compiled)]  # type: ignore[list-item, arg-type]
    wrapped.append(torch.optim.swa_utils.AveragedModel(build("resnet")))
    for model in wrapped:
        found = find(model)
        assert [f.name for f in found] == names
        assert [f.key for f in found] == [k for k, _ in model.named_parameters()]
        assert [f.name for f in found if f.role == "head"] == ["fc.weight"]
    parts = build("resnet")
    parts.layer1.conv1 = torch.compile(parts.layer1.conv1)  # type: ignore[union-attr, assignment]
    assert [f.name for f in find(parts)] == names


def test_a_module_that_is_called_module_keeps_its_name() -> None:
    model = nn.ModuleDict({"module": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    assert find(model)[0].name == "module.weight"


class TestOddParameters:
    def reason(self, parameter: Any) -> str:
        layer = nn.Linear(4, 4, bias=False)
        layer.weight = parameter
        model = nn.Sequential(layer, nn.Linear(4, 4), nn.Linear(4, 4))
        found = find(model)[0]
        assert not found.blocks or found.marks
        return str(found.reason)

    def test_lazy(self) -> None:
        assert "lazy: run one forward" in str(find(nn.LazyLinear(4))[0].reason)

    def test_meta(self) -> None:
        assert "meta device" in self.reason(nn.Parameter(torch.empty(4, 4, device="meta")))
        model = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.Linear(4, 4, device="meta"))
        assert find(model, meta=True)[0].blocks

    def test_sparse(self) -> None:
        assert "sparse" in self.reason(nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False))

    def test_complex(self) -> None:
        assert "complex" in self.reason(nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64)))

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
    def test_quantized(self, dtype: torch.dtype) -> None:
        assert "quantized" in self.reason(nn.Parameter(torch.zeros(4, 4, dtype=dtype), requires_grad=False))

    def test_tensor_subclass_that_hides_its_numbers(self) -> None:
        class Hidden(Tensor):
            pass

        weight = nn.Parameter(torch.zeros(4, 4).as_subclass(Hidden))
        assert "Hidden" in self.reason(weight)

    def test_packed_modules_and_buffers(self) -> None:
        layer = torch.ao.nn.quantized.dynamic.Linear(4, 3)
        model = nn.Sequential(nn.Linear(4, 4), layer)
        packed = by_name(model)["1.weight"]
        assert packed.shape == (3, 4)
        assert "quantized or packed" in str(packed.reason)
        integers = nn.Linear(2, 2)
        integers.register_buffer("qweight", torch.zeros(2, 2, dtype=torch.int32))
        assert "torch.int32" in str(by_name(integers)["qweight"].reason)

    def test_sharded(self) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,))
            weight = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]))
            assert self.reason(weight) == "sharded (DTensor)"
            layer = nn.Linear(4, 4, bias=False)
            layer.weight = weight
            found = find(layer, sharded=True)[0]
            assert found.reason is None
            assert found.blocks[0].out == 4
        finally:
            dist.destroy_process_group()

    def test_empty(self) -> None:
        assert self.reason(nn.Parameter(torch.zeros(0, 4))) == "empty"


def test_lora_adapters_are_left_alone_and_their_base_keeps_its_layout() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["c_attn"], r=4, fan_in_fan_out=True)
    found = {f.name: f for f in find(peft.get_peft_model(build("gpt2"), config))}
    prefix = "base_model.model.transformer.h.0.attn.c_attn"
    for side in "AB":
        adapter = found[f"{prefix}.lora_{side}.default.weight"]
        assert (adapter.role, adapter.reason) == ("adapter", "adapter (A or B alone)")
    base = found[f"{prefix}.base_layer.weight"]
    assert [b.role for b in base.blocks] == ["query", "key", "value"]
    assert base.reason == "frozen"


def test_bias_like_parameters_of_attention() -> None:
    found = by_name(nn.MultiheadAttention(8, 2, add_bias_kv=True))
    assert found["bias_k"].reason == "bias"
    assert not found["bias_k"].blocks
