"""Known module classes whose weights hold several matrices, with the layout that their own forward uses.

A rule takes the module and gives a recipe for each fused weight below it; sizes come from the module's own attributes.
Classes are listed by package and name, so nothing has to be imported. What is not listed here is not guessed: users add
their own with `rekindle.blocks.register`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from rekindle.blocks.layouts import Recipe, matrices

Rule = Callable[[Any], Mapping[str, Recipe]]

_QKV = ("query", "key", "value")


def _fused(pattern: str, layer: str, heads: str, out: str = "") -> Rule:
    """q, k and v of all heads in one weight, ordered by the pattern; `heads` names the attribute that counts them."""

    def rule(m: object) -> dict[str, Recipe]:
        count = int(getattr(m, heads))
        return {f"{layer}.weight": matrices(pattern, part=_QKV, head=count, heads="head")} | _output(out, count)

    return rule


_thirds = partial(_fused, "(part head dim) in")  # q | k | v: `reshape(…, 3, heads, dim)` of most vision transformers
_per_head = partial(
    _fused, "(head part dim) in"
)  # q, k, v of each head: `view(…, heads, 3, dim)` of the Megatron lineage


def _sections(weight: str, queries: int, keys: int, m: Any, out: str) -> dict[str, Recipe]:
    """All queries, then all keys, then all values, with fewer key heads than query heads."""
    part = {"query": queries, "key": keys, "value": keys}
    fused = matrices("(part dim) in", part=part, dim=int(m.head_dim), heads="part")
    return {weight: fused} | _output(out, queries)


def _output(layer: str, heads: int) -> dict[str, Recipe]:
    if not layer:
        return {}
    recipe = matrices("out (head in)", head=heads, inputs="head in", heads="head", role="attention-output")
    return {f"{layer}.weight": recipe}


def _gpt2(m: Any) -> dict[str, Recipe]:
    heads = int(m.num_heads if hasattr(m, "num_heads") else m.n_head)
    parts = _QKV[1:] if getattr(m, "is_cross_attention", False) else _QKV
    split = {"head": heads, "heads": "head"}
    return {
        "c_attn.weight": matrices("in (part head dim)", part=parts, **split),  # type: ignore[arg-type]
        "q_attn.weight": matrices("in (head dim)", role="query", **split),  # type: ignore[arg-type]
        "c_proj.weight": matrices("(head in) out", inputs="head in", role="attention-output", **split),  # type: ignore[arg-type]
    }


def _falcon(m: Any) -> dict[str, Recipe]:
    heads, dim = int(m.num_heads), int(m.head_dim)
    if m.new_decoder_architecture:
        groups = int(m.num_kv_heads)
        part = {"query": heads // groups, "key": 1, "value": 1}
        fused = matrices("(group part dim) in", part=part, group=groups, dim=dim, heads="group part")
    elif m.multi_query:
        fused = matrices("(part dim) in", part={"query": heads, "key": 1, "value": 1}, dim=dim, heads="part")
    else:
        fused = matrices("(head part dim) in", part=_QKV, head=heads, heads="head")
    return {"query_key_value.weight": fused} | _output("dense", heads)


def _bigcode(m: Any) -> dict[str, Recipe]:
    heads, dim = int(m.num_heads), int(m.head_dim)
    if m.is_cross_attention:
        return {}
    if m.multi_query:
        fused = matrices("(part dim) in", part={"query": heads, "key": 1, "value": 1}, dim=dim, heads="part")
    else:
        fused = matrices("(head part dim) in", part=_QKV, head=heads, heads="head")
    return {"c_attn.weight": fused} | _output("c_proj", heads)


def _codegen(m: Any) -> dict[str, Recipe]:
    # Trained on four TPU cores: each holds the query, value, key (in this order) of a quarter of the heads.
    cores = 4
    heads = int(m.num_attention_heads)
    fused = matrices(
        "(core part head dim) in",
        part=("query", "value", "key"),
        core=cores,
        head=heads // cores,
        heads="core head",
    )
    return {"qkv_proj.weight": fused} | _output("out_proj", heads)


def _multihead(m: nn.MultiheadAttention) -> dict[str, Recipe]:
    split: dict[str, Any] = {"head": m.num_heads, "heads": "head"}
    packed = {"in_proj_weight": matrices("(part head dim) in", part=_QKV, **split)}
    apart = {f"{r[0]}_proj_weight": matrices("(head dim) in", role=r, **split) for r in _QKV}
    return packed | apart | _output("out_proj", m.num_heads)


def _halves(layer: str, first: str, second: str, out: str) -> Rule:
    def rule(m: object) -> dict[str, Recipe]:
        return {
            f"{layer}.weight": matrices("(part out) in", part=(first, second)),
            f"{out}.weight": matrices("out in", role="mlp-out"),
        }

    return rule


def _llama4_experts(m: object) -> dict[str, Recipe]:
    return {
        "gate_up_proj": matrices("expert in (part out)", count="expert", part=("gate", "up")),
        "down_proj": matrices("expert in out", count="expert", role="mlp-out"),
    }


def _mamba(m: Any) -> dict[str, Recipe]:
    sizes = {"dt": int(m.time_step_rank), "B": int(m.ssm_state_size), "C": int(m.ssm_state_size)}
    return {
        "in_proj.weight": matrices("(part out) in", part=("x", "z")),
        "x_proj.weight": matrices("part in", part=sizes),
        "out_proj.weight": matrices("out in", role="mlp-out"),
    }


def _mamba2(m: Any) -> dict[str, Recipe]:
    state = int(m.n_groups) * int(m.ssm_state_size)
    wide = int(m.intermediate_size)
    sizes = {"z": wide, "x": wide, "B": state, "C": state, "dt": int(m.num_heads)}
    return {
        "in_proj.weight": matrices("part in", part=sizes),
        "out_proj.weight": matrices("out in", role="mlp-out"),
    }


def _gates(m: object) -> dict[str, Recipe]:
    gates = {"LSTM": 4, "GRU": 3}.get(str(getattr(m, "mode", type(m).__name__)).removesuffix("Cell"), 1)
    stacked = matrices("(gate out) in", count="gate", gate=gates)
    names: list[str] = getattr(m, "_flat_weights_names", ["weight_ih", "weight_hh"])  # a cell has the latter two
    recurrent = {n: stacked for n in names if n.startswith(("weight_ih", "weight_hh"))}
    return recurrent | {n: matrices("out in") for n in names if n.startswith("weight_hr")}


def _torch_layer(m: object) -> dict[str, Recipe]:
    return {
        "linear1.weight": matrices("out in", role="mlp-in"),
        "linear2.weight": matrices("out in", role="mlp-out"),
    }


def _latent(m: Any) -> dict[str, Recipe]:
    """DeepSeek's latent attention: keys and values are expanded per head from one compressed vector."""
    heads, plain, value = int(m.num_heads), int(m.qk_nope_head_dim), int(m.v_head_dim)
    expand = matrices("(head part) in", part={"key": plain, "value": value}, head=heads, heads="head")
    compress = {"latent": int(m.kv_lora_rank), "key": int(m.qk_rope_head_dim)}
    return {
        "q_b_proj.weight": matrices("(head dim) in", head=heads, heads="head", role="query"),
        "kv_a_proj_with_mqa.weight": matrices("part in", part=compress),
        "kv_b_proj.weight": expand,
    } | _output("o_proj", heads)


def _neox(m: Any) -> dict[str, Recipe]:
    heads = int(m.config.num_attention_heads)
    fused = matrices("(head part dim) in", part=_QKV, head=heads, heads="head")
    return {"query_key_value.weight": fused} | _output("dense", heads)


def _modernbert(m: Any) -> dict[str, Recipe]:
    fused = matrices("(part head dim) in", part=_QKV, dim=int(m.head_dim), heads="head")
    return {"Wqkv.weight": fused} | _output("Wo", int(m.config.num_attention_heads))


def _phi3(m: Any) -> dict[str, Recipe]:
    return _sections("qkv_proj.weight", int(m.config.num_attention_heads), int(m.num_key_value_heads), m, "o_proj")


def _dbrx(m: Any) -> dict[str, Recipe]:
    return _sections("Wqkv.weight", int(m.num_heads), int(m.num_key_value_heads), m, "out_proj")


KNOWN: dict[tuple[str, str], Rule] = {
    ("torch", "MultiheadAttention"): _multihead,
    ("torch", "RNNBase"): _gates,
    ("torch", "RNNCellBase"): _gates,
    ("torch", "TransformerEncoderLayer"): _torch_layer,
    ("torch", "TransformerDecoderLayer"): _torch_layer,
    ("torch", "Bilinear"): lambda m: {"weight": matrices("count out in", count="count")},
    ("torchvision", "ShiftedWindowAttention"): _thirds("qkv", "num_heads", "proj"),
    # These packages have many classes called Attention, some fused per head: only where it is known to be thirds.
    ("timm.models.vision_transformer", "Attention"): _thirds("qkv", "num_heads", "proj"),
    ("timm.layers.attention", "Attention"): _thirds("qkv", "num_heads", "proj"),
    ("timm.models.swin_transformer", "WindowAttention"): _thirds("qkv", "num_heads", "proj"),
    ("vit_pytorch.vit", "Attention"): _thirds("to_qkv", "heads"),
    ("vit_pytorch.simple_vit", "Attention"): _thirds("to_qkv", "heads"),
}

# Each line was read off the forward of the class in transformers 5.22; tests check the most common ones against it.
_TRANSFORMERS: tuple[tuple[Rule, str], ...] = (
    (_gpt2, "GPT2Attention DecisionTransformerGPT2Attention ImageGPTAttention"),
    (_neox, "GPTNeoXAttention"),
    (_per_head("query_key_value", "num_heads", "dense"), "BloomAttention PersimmonAttention"),
    (_per_head("query_key_value", "num_attention_heads", "dense"), "GPTNeoXJapaneseAttention"),
    (_per_head("in_proj", "num_attention_heads"), "DisentangledSelfAttention"),
    (_falcon, "FalconAttention"),
    (_bigcode, "GPTBigCodeAttention"),
    (_codegen, "CodeGenAttention"),
    (_phi3, "Phi3Attention Phi4MultimodalAttention"),
    (_dbrx, "DbrxAttention"),
    (_modernbert, "ModernBertAttention"),
    (_latent, "DeepseekV2Attention DeepseekV3Attention"),
    (_thirds("Wqkv", "n_heads", "out_proj"), "MptAttention"),
    (_thirds("att_proj", "num_heads", "out_proj"), "BarkSelfAttention"),
    (_thirds("qkv_linear", "num_attention_heads"), "LayoutLMv2SelfAttention"),
    (_thirds("qkv", "num_heads"), "TimesformerSelfAttention"),
    (_thirds("qkv", "num_heads", "proj"), "VitDetAttention HieraMaskUnitAttention MgpstrAttention VisionAttention"),
    (_thirds("qkv", "num_heads", "proj"), "Qwen2_5_VLVisionAttention Qwen3VLVisionAttention Glm4vVisionAttention"),
    (_thirds("qkv", "num_heads", "proj"), "Florence2VisionWindowAttention"),
    (_thirds("qkv", "num_attention_heads", "proj"), "SamVisionAttention SegGptAttention Sam2MultiScaleAttention"),
    (_thirds("qkv", "num_heads", "projection"), "BlipAttention Blip2Attention InstructBlipAttention"),
    (
        _halves("gate_up_proj", "gate", "up", "down_proj"),
        "Phi3MLP Phi4MultimodalMLP GlmMLP Glm4MLP Glm4vTextMLP DiaMLP",
    ),
    (_halves("Wi", "up", "gate", "Wo"), "ModernBertMLP ModernBertDecoderMLP"),
    (_halves("input_linear", "gate", "up", "output_linear"), "GraniteMoeSharedMLP GraniteMoeHybridMLP"),
    (_llama4_experts, "Llama4TextExperts"),
    (_mamba, "MambaMixer FalconMambaMixer JambaMambaMixer"),
    (_mamba2, "Mamba2Mixer BambaMixer FalconH1Mixer Zamba2MambaMixer GraniteMoeHybridMambaLayer NemotronHMamba2Mixer"),
)
KNOWN |= {("transformers", name): rule for rule, names in _TRANSFORMERS for name in names.split()}
