"""What the classes and names around a weight say about it: the layout of a known class, and the role that it has.

A layout comes from the class of a module (subclasses too): `known_classes`, or what users `register`; a name alone only
makes a weight suspect (`looks_fused`). A role is a label for choosing targets and for printing; it never decides how
matrices lie in a tensor, so there a name is enough.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from torch import nn
from torch.nn.parameter import is_lazy

from rekindle.blocks.known_classes import KNOWN, Rule
from rekindle.blocks.layers import layers_in
from rekindle.blocks.layouts import Recipe, matrices
from rekindle.blocks.names import Location
from rekindle.blocks.source import uses_of

FUSED = re.compile(
    r"qkv|query_key_value|c_attn|(^|_)kv(_|$)|gate_up|gate_and_up|^in_proj_\w+$|^att_proj$", re.IGNORECASE
)
_FUSED_WRAPPED = re.compile(r"(to_|w_?)?qkv(_proj|_linear|_conv)?|query_key_value|(to_)?kv(_proj)?", re.I)
_registered: dict[type[nn.Module], Rule] = {}


def register(module_class: type[nn.Module], rule: Rule) -> None:
    """Register the layout of your own module: `rule(module)` maps weight names below it to `matrices(…)` recipes.

    >>> class Attention(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.qkv = nn.Linear(8, 24)
    >>> from rekindle.blocks.layouts import matrices
    >>> register(Attention, lambda m: {"qkv.weight": matrices("(part out) in", part=("query", "key", "value"))})
    >>> sorted(recipes(Attention()))
    ['qkv.weight']
    >>> _ = _registered.pop(Attention)
    """
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise TypeError(f"register() takes a subclass of torch.nn.Module, got {module_class!r}")
    if not callable(rule):
        raise TypeError(f"the rule of {module_class.__name__} must be callable: module -> {{name: matrices(…)}}")
    _registered[module_class] = rule


def is_registered(kind: type) -> bool:
    """Whether a user has registered this class, or one that it derives from."""
    return any(cls in _registered for cls in kind.__mro__)


def recipes(module: nn.Module) -> Mapping[str, Recipe]:
    """The recipes of a known class, keyed by weight names below the module; empty for any other.

    >>> list(recipes(nn.MultiheadAttention(8, 2)))
    ['in_proj_weight', 'q_proj_weight', 'k_proj_weight', 'v_proj_weight', 'out_proj.weight']
    """
    for cls in type(module).__mro__:
        if cls in _registered:
            return _registered[cls](module)
        places = (cls.__module__, cls.__module__.partition(".")[0])
        rule = next((KNOWN[place, cls.__name__] for place in places if (place, cls.__name__) in KNOWN), None)
        if rule is not None:
            return rule(module)
    if _is_expert_stack(module):
        return _experts(module)
    return {}


def recipes_of(modules: Iterable[nn.Module]) -> dict[int, Mapping[str, Recipe] | str]:
    """The recipes of each of these modules by its id, or what it lacks to have them.

    >>> layer = nn.Linear(1, 1)
    >>> recipes_of([layer]) == {id(layer): {}}
    True
    """
    found: dict[int, Mapping[str, Recipe] | str] = {}
    for module in modules:
        if id(module) not in found:
            try:
                found[id(module)] = recipes(module)
            except (AttributeError, TypeError) as error:
                found[id(module)] = f"{type(module).__name__} lacks what its layout needs: {error}"
    return found


def looks_fused(place: Location, shape: tuple[int, ...]) -> str | None:
    """Why a weight of shape (out, in, …) and unknown class may hold several matrices, by its name; None if not.

    >>> attention = nn.ModuleDict({"qkv": nn.Linear(4, 12)})
    >>> looks_fused(Location(("qkv",), (attention, attention["qkv"]), "weight"), (12, 4))
    'looks fused, but how ModuleDict splits qkv is not known: rekindle.blocks.register(ModuleDict, …)'
    """
    names = [n for n in place.names if n != "base_layer"]
    leaf = next((n for n in reversed(names) if not n.isdigit()), "")
    parent = place.modules[-2] if len(place.modules) > 1 else place.owner
    beside = {name for name, _ in parent.named_children()}
    # A state-space mixer or an attention has an out_proj beside its in_proj; an input layer of that name has not.
    mixer = leaf in ("in_proj", "x_proj") and shape[0] != shape[1] and bool(beside & {"out_proj", "conv1d", "dt_proj"})
    # A fused layer may be wrapped: qkv.linear, to_qkv.0.
    wrapped = len(names) > 1 and bool(_FUSED_WRAPPED.fullmatch(names[-2])) and len(list(layers_in(parent))) == 1
    if not (mixer or wrapped or FUSED.search(leaf)):
        return None
    if re.fullmatch(
        "in_proj(_[a-z])?|x_proj", leaf
    ):  # weak evidence: where the source calls it and splits nothing, it is one matrix
        uses = uses_of(parent)
        if uses is not None and leaf in uses.called:
            return None
    if wrapped:
        leaf, parent = ".".join(names[-2:]), place.modules[-3]
    kind = type(parent).__name__
    return f"looks fused, but how {kind} splits {leaf} is not known: rekindle.blocks.register({kind}, …)"


def _is_expert_stack(module: nn.Module) -> bool:
    # transformers marks these classes with a decorator that sets the orientation on the instance.
    return (
        type(module).__module__.partition(".")[0] == "transformers"
        and isinstance(getattr(module, "is_transposed", None), bool)
        and isinstance(getattr(module, "is_concatenated", None), bool)
    )


def _experts(m: Any) -> dict[str, Recipe]:
    fused = "(part out)" if m.is_concatenated else "(out part)"
    turn = "expert in {}" if m.is_transposed else "expert {} in"
    return {
        "gate_up_proj": matrices(turn.format(fused), count="expert", part=("gate", "up")),
        "up_proj": matrices(turn.format("out"), count="expert", role="mlp-in"),
        "down_proj": matrices(turn.format("out"), count="expert", role="mlp-out"),
    }


_ATTENTION_ROLES = (
    ("query", {"q", "query", "query_proj", "w_q", "linear_q", "q_head", "c_q"}),
    ("key", {"k", "key", "key_proj", "w_k", "linear_k", "k_head", "c_k"}),
    ("value", {"v", "value", "value_proj", "w_v", "linear_v", "v_head", "c_v"}),
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
    **dict.fromkeys(("q_proj", "to_q", "wq", "q_lin", "q_attn", "q_proj_weight"), "query"),
    **dict.fromkeys(("k_proj", "to_k", "wk", "k_lin", "k_proj_weight"), "key"),
    **dict.fromkeys(("v_proj", "to_v", "wv", "v_lin", "v_proj_weight"), "value"),
    **dict.fromkeys(("o_proj", "out_lin"), "attention-output"),
    **dict.fromkeys(("up_proj", "c_fc", "dense_h_to_4h"), "mlp-in"),
    "gate_proj": "mlp-gate",
    **dict.fromkeys(("down_proj", "dense_4h_to_h"), "mlp-out"),
}

_ATTENTION = re.compile(r"att(n|ention)|^mha$", re.IGNORECASE)
_MLP = re.compile(
    r"mlp|ffn|feed_?forward|densereludense|densegated|denseact|expert|intermediate|^ff(_layer)?$", re.IGNORECASE
)
_GATED = re.compile(r"(.*_)?gates?")
_ROUTER = re.compile(r"router|topk.*gate|(?<!gru)gating$", re.IGNORECASE)
ROUTER_NAME = re.compile(r"(^|_)router(_|$)|^shared_expert_gate$")
GATE = re.compile(r"gates?|wg|gat(e|ing)_(network|layer|net)|gating|selector")
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
    leaf, beside = place.tensor, set[str]()
    if leaf == "weight" and steps:
        leaf, _ = steps.pop()
        beside = {name for module in place.modules if leaf in module._modules for name in module._modules}
    root = type(place.modules[0]).__name__
    above = [root] if _ATTENTION.search(root) and len(place.modules) > 1 else []
    return named_role(leaf.lower(), [*above, *(word for step in steps for word in step)], beside)


def roles(places: Iterable[Location]) -> dict[str, str]:
    """The role of each of these parameters, by its clean name."""
    return {place.name: role(place) for place in places}


def named_role(leaf: str, above: Sequence[str], beside: Iterable[str] = ()) -> str:
    """The role of a layer called `leaf` under layers of these names and classes, outermost first.

    `beside` are the names in the same place: a `value` beside a `query` is an attention's, one alone is a critic.

    >>> named_role("wo", ["layers", "0", "attention"]), named_role("wo", ["DenseReluDense"])
    ('attention-output', 'mlp-out')
    >>> named_role("fc1", []), named_role("q_proj", []), named_role("value", []), named_role("value", [], ["query"])
    ('other', 'query', 'other', 'value')
    """
    if leaf in _ANYWHERE:
        return _ANYWHERE[leaf]
    context = _context(above) or ("attention" if leaf in ("query", "key", "value") and "query" in beside else "")
    tables = _ATTENTION_ROLES if context == "attention" else _MLP_ROLES if context == "mlp" else ()
    for name, leaves in tables:
        if leaf in leaves:
            return name
    if not context and leaf == "dense" and "output" in above[-2:]:
        return "mlp-out"  # BERT's layer.N.output.dense; its twin in the attention has the attention above it
    return "gate" if _GATED.fullmatch(leaf) else "other"


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
    if any(ROUTER_NAME.search(name) for name in place.names):
        return True
    if any(_ROUTER.search(type(m).__name__) and not _holds_experts(m) for m in place.modules):
        return True
    steps = zip(place.names, place.modules, place.modules[1:], strict=False)
    return any(_scores_experts(name, parent, child) for name, parent, child in steps)


def _scores_experts(name: str, parent: nn.Module, child: nn.Module) -> bool:
    """Whether this child of a module chooses among its experts, or among as many branches as the child has outputs."""
    if not parent._modules or isinstance(parent, nn.ModuleList) or _is_experts(name):
        return False
    beside = _holds_experts(parent)
    # The check that visits every module inside comes last: this runs for each weight and each module above it.
    if not (beside or _chooses_among(child, parent)) or any(_holds_experts(m) for m in child.modules()):
        return False
    if beside and GATE.fullmatch(name):
        return True
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
    return uses is not None and bool(uses.returns) and uses.returns <= uses.scores


def _chooses_among(layer: nn.Module, parent: nn.Module) -> bool:
    """Whether the layer has one output per element of a list of like modules, or of a stack of matrices, beside it."""
    lists = [m for m in parent._modules.values() if _is_list(m) and m is not layer and len(m) > 1]
    counts = {len(m) for m in lists if len({type(c) for c in m.children()}) == 1}
    holders = [parent, *(m for m in parent._modules.values() if m is not None and not m._modules)]
    for holder in holders:
        if holder is not layer and not isinstance(holder, nn.modules.conv._ConvNd):
            stacks = [p for p in holder._parameters.values() if p is not None and not is_lazy(p) and p.dim() > 2]
            counts |= {p.shape[0] for p in stacks}
    widths = [m.out_features for m in layer.modules() if isinstance(m, nn.Linear)] if counts else []
    return bool(widths) and widths[-1] in counts


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


def head_dim(place: Location) -> int | None:
    """How wide an attention head is, where the modules around a layer or beside it say so."""
    for module in place.modules[-2:-4:-1]:
        if width := _width_of_heads(module):
            return width
    beside = {_width_of_heads(module) for module in place.modules[-3].children()} if len(place.modules) > 2 else set()
    return next(iter(beside - {None})) if len(beside - {None}) == 1 else None


def _width_of_heads(module: nn.Module) -> int | None:
    for attribute in ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "dim_head"):
        value = getattr(module, attribute, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
