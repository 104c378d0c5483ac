"""What a weight does in its network: its role.

A role is a label for choosing targets and for printing; it never decides how matrices lie in a tensor, so here a
name may speak.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeGuard

from torch import nn

from rekindle.blocks.names import Location
from rekindle.consumers.source import uses_of

_ATTENTION_ROLES = (
    ("query", {"q", "query_proj", "w_q", "linear_q", "q_head"}),
    ("key", {"k", "key_proj", "w_k", "linear_k", "k_head"}),
    ("value", {"v", "value_proj", "w_v", "linear_v", "v_head"}),
    (
        "attention-output",
        {"o", "out_proj", "to_out", "linear_out", "wo", "w_o", "c_proj", "proj", "dense", "projection", "out"},
    ),
)
_MLP_ROLES = (
    ("mlp-out", {"down", "fc_out", "fc2", "c_proj", "wo", "lin2", "linear2", "w2", "out_proj", "dense2"}),
    ("mlp-gate", {"gate", "wi_0", "w1", "linear_gate", "fc1_g"}),
    ("mlp-in", {"up", "fc_in", "fc1", "fc1_x", "wi", "wi_1", "lin1", "linear1", "w3", "in_proj", "dense", "dense1"}),
)

# Names that mean one thing wherever they stand; the others need an attention or MLP module above them.
_ANYWHERE = {
    **dict.fromkeys(("q_proj", "query", "to_q", "wq", "q_lin", "q_attn", "q_proj_weight"), "query"),
    **dict.fromkeys(("k_proj", "key", "to_k", "wk", "k_lin", "k_proj_weight"), "key"),
    **dict.fromkeys(("v_proj", "value", "to_v", "wv", "v_lin", "v_proj_weight"), "value"),
    **dict.fromkeys(("o_proj", "out_lin"), "attention-output"),
    **dict.fromkeys(("up_proj", "c_fc", "dense_h_to_4h"), "mlp-in"),
    "gate_proj": "mlp-gate",
    **dict.fromkeys(("down_proj", "dense_4h_to_h"), "mlp-out"),
}

_ATTENTION = re.compile(r"att(n|ention)|^mha$", re.IGNORECASE)
_MLP = re.compile(
    r"mlp|ffn|feed_?forward|densereludense|densegated|denseact|expert|intermediate|^ff(_layer)?$", re.IGNORECASE
)
_ROUTER = re.compile(r"router|topk.*gate|gating$", re.IGNORECASE)
_ROUTER_NAME = re.compile(r"(^|_)router(_|$)|^shared_expert_gate$")
_GATE = re.compile(r"gates?|wg|gat(e|ing)_(network|layer|net)|gating|selector")
_ADAPTERS = ("lora_", "ia3_", "hada_", "vera_", "oft_", "boft_")


def role(place: Location) -> str:
    """The role that names and classes above the parameter suggest, "other" if none does.

    >>> attention = nn.ModuleDict({"c_proj": nn.Linear(4, 4)})
    >>> model = nn.ModuleDict({"attn": attention})
    >>> role(Location(("attn", "c_proj"), (model, attention, attention["c_proj"]), "weight"))
    'attention-output'
    """
    if is_adapter(place):
        return "adapter"
    if is_router(place):
        return "router"
    # `to_out.0` and `dense.base_layer` are named by the module above; a bare parameter names itself.
    steps = [(n, type(m).__name__) for n, m in zip(place.names, place.modules[1:], strict=True)]
    steps = [(n, c) for n, c in steps if not n.isdigit() and n != "base_layer"]
    leaf = place.tensor
    if leaf == "weight" and steps:
        leaf, _ = steps.pop()
    root = type(place.modules[0]).__name__
    above = [root] if _ATTENTION.search(root) and len(place.modules) > 1 else []
    return named_role(leaf.lower(), [*above, *(word for step in steps for word in step)])


def roles(places: Iterable[Location]) -> dict[str, str]:
    """The role of each of these parameters, by its clean name."""
    return {place.name: role(place) for place in places}


def named_role(leaf: str, above: Sequence[str]) -> str:
    """The role of a layer called `leaf` under layers of these names and classes, outermost first.

    >>> named_role("wo", ["layers", "0", "attention"]), named_role("wo", ["DenseReluDense"])
    ('attention-output', 'mlp-out')
    >>> named_role("fc1", []), named_role("q_proj", [])
    ('other', 'query')
    """
    if leaf in _ANYWHERE:
        return _ANYWHERE[leaf]
    context = _context(above)
    tables = _ATTENTION_ROLES if context == "attention" else _MLP_ROLES if context == "mlp" else ()
    for name, leaves in tables:
        if leaf in leaves:
            return name
    if not context and leaf == "dense" and "output" in above[-2:]:
        return "mlp-out"  # BERT's layer.N.output.dense; its twin in the attention has the attention above it
    return "other"


def is_adapter(place: Location) -> bool:
    """Whether the parameter belongs to a LoRA-like adapter rather than to the layer that it adapts."""
    if any(
        name.startswith(("lora_", "ia3_", "hada_", "vera_", "oft_", "boft_")) for name in (*place.names, place.tensor)
    ):
        return True
    tuned = [i for i, m in enumerate(place.modules) if _is_tuner(m)]
    if not tuned:
        return False
    below = place.names[tuned[-1] :]
    return bool(below) and below[0] not in ("base_layer", "modules_to_save", "original_module")


def is_router(place: Location) -> bool:
    """Whether the parameter scores experts: inside a router, a gate beside experts, or by what becomes of its output.

    >>> moe = nn.ModuleDict({"gate": nn.Linear(4, 2), "experts": nn.ModuleList([nn.Linear(4, 4)])})
    >>> is_router(Location(("gate",), (moe, moe["gate"]), "weight"))
    True
    """
    if any(_ROUTER_NAME.search(name) for name in place.names):
        return True
    if any(_ROUTER.search(type(m).__name__) and not _holds_experts(m) for m in place.modules):
        return True
    steps = zip(place.names, place.modules, place.modules[1:], strict=False)
    return any(_scores_experts(name, parent, child) for name, parent, child in steps)


def _scores_experts(name: str, parent: nn.Module, child: nn.Module) -> bool:
    """Whether this child of a module chooses among its experts, or among as many branches as the child has outputs."""
    if not parent._modules or isinstance(parent, nn.ModuleList) or any(_holds_experts(m) for m in child.modules()):
        return False
    beside = _holds_experts(parent)
    if beside and not _is_experts(name) and _GATE.fullmatch(name):
        return True
    if _is_experts(name) or not (beside or _chooses_among(child, parent)):
        return False
    uses = uses_of(parent)
    path = f"{name}.*" if _is_list(child) else name
    if not beside and (uses is None or path in uses.returns):
        return False  # probabilities that leave are an output, however many branches there are
    return (uses is not None and path in uses.scores) or (not _is_list(child) and _ends_in_scores(child))


def _ends_in_scores(module: nn.Module) -> bool:
    """Whether the module itself turns what it returns into scores."""
    if isinstance(module, nn.Sequential):
        return len(module) > 0 and isinstance(module[-1], nn.Softmax | nn.Sigmoid | nn.LogSoftmax)
    uses = uses_of(module) if module._modules else None
    return uses is not None and bool(uses.scores & uses.returns)


def _chooses_among(layer: nn.Module, parent: nn.Module) -> bool:
    """Whether the layer has one output per element of a list of like modules beside it."""
    widths = [m.out_features for m in layer.modules() if isinstance(m, nn.Linear)]
    lists = [m for m in parent._modules.values() if _is_list(m) and m is not layer]
    return any(len(m) == widths[-1] > 1 and len({type(c) for c in m.children()}) == 1 for m in lists if widths)


def _is_list(module: nn.Module | None) -> TypeGuard[nn.ModuleList | nn.ModuleDict]:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _is_experts(name: str) -> bool:
    return "expert" in name


def _holds_experts(module: nn.Module) -> bool:
    return any(map(_is_experts, module._modules))


def _context(above: Sequence[str]) -> str:
    for word in reversed(above):
        if _ATTENTION.search(word):
            return "attention"
        if _MLP.search(word):
            return "mlp"
    return ""


def _is_tuner(module: nn.Module) -> bool:
    return any(c.__module__.split(".")[0] == "peft" and c.__name__ == "BaseTunerLayer" for c in type(module).__mro__)
