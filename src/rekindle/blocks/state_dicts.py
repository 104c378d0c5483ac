"""Finding blocks in a state dict: by the model without weights that its config describes, or by what the tensors show.

Tensors alone do not show groups, transposition or how a weight is fused. A transformers config (or a model on the
meta device) does: the blocks come from that model and its names are matched to the keys. Without one, only weights
whose orientation is certain are used; everything else is refused with the reason.

transformers 5 renames weights while it loads them, and merges some (one tensor per expert on disk, one stack in
memory). `converted(model, keys)` reads the library's own mapping and says what each key of a file is loaded as.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from rekindle.blocks.configs import meta_model
from rekindle.blocks.families import FUSED, GATE, ROUTER_NAME, named_role
from rekindle.blocks.finding import Found, find
from rekindle.blocks.layouts import Block, convolution, matrices
from rekindle.blocks.names import state_cleaner, unusable
from rekindle.blocks.outputs import ANYWHERE, USUALLY, mark_heads, named_heads
from rekindle.spelling import advice, argument

_LAYOUT = ("layout", "pass config= or a plan saved from the live model")
_ASSUMED = (
    "read with groups=1, but a state dict alone does not show the groups of a convolution; ask for it by its name, or "
)
# Of three dimensions, (experts, out, in) is as likely as a kernel where the last one is long.
_LONGEST_KERNEL = 32
_EMBEDDING = re.compile(r"(^|[._])(wte|wpe|shared|embed\w*|\w*embeddings?|\w*embed)$", re.IGNORECASE)
_HEADS = {"lm_head", "head", "classifier", "fc", "score", "embed_out", "qa_outputs"}
_LINEAR_ONLY = {"query", "key", "value", "attention-output", "mlp-in", "mlp-gate", "mlp-out"}


def _unsure(what: str) -> str:
    return f"a state dict alone does not show {what}; {advice(*_LAYOUT)}"


def find_in_state(
    tensors: Mapping[str, Tensor], config: object = None, *, finding: Mapping[str, Any] | None = None
) -> list[Found]:
    """One `Found` for each tensor, in the order of the keys.

    config: a transformers config, a model on the meta device, or what was found in the live model (a saved plan).

    >>> import torch
    >>> tensors = {"a.weight": torch.zeros(4, 6), "a.bias": torch.zeros(4), "b.weight": torch.zeros(4, 4, 3, 3)}
    >>> for f in find_in_state({**tensors, "head.weight": torch.zeros(2, 4), "head.bias": torch.zeros(2)}):
    ...     print(f.name, f.count, f.reason)
    a.weight 1 None
    a.bias 0 vector
    b.weight 9 read with groups=1, but a state dict alone does not show the groups of a convolution; ...
    head.weight 1 output head, by its name
    head.bias 0 vector
    """
    options = dict(finding or {})
    if config is None:
        flat = options.get("conv") == "flat"
        found = _untied(tensors, {key: _bare(key, tensor, tensors, flat) for key, tensor in tensors.items()})
        return _bare_heads(found, options.get("heads"))
    model: nn.Module | None = None
    if isinstance(config, list):
        known, origin = _saved(config, options), "the saved plan"
    else:
        model = config if isinstance(config, nn.Module) else meta_model(config, len(tensors))
        origin = f"the given {type(config).__name__}" if model is config else "the model of this config"
        known = find(model, meta=True, **options)
    described = {f.name: f for f in known}
    tied = {name: f for f in known for name in f.also}
    rename = _renaming(list(tensors), {*described, *tied}, getattr(model, "base_model_prefix", ""))
    missing = [key for key in tensors if rename(key) not in described and rename(key) not in tied]
    conversions = converted(model, missing) if missing and model is not None else {}
    matched: dict[str, Found] = {}
    for key, tensor in tensors.items():
        loaded = conversions.get(key)
        name = rename(key) if loaded is None else loaded.name
        # Of tied names a file may hold only the later one (safetensors keeps one of each storage).
        stand_in = name in tied and not any(rename(k) == tied[name].name for k in tensors)
        f = tied[name] if stand_in else described.get(name)
        if f is None:
            matched[key] = _unmatched(key, tensor, tensors, origin)
        elif loaded is not None and loaded.operations:
            matched[key] = _piece(key, tensor, f, loaded)
        elif f.shape != tuple(tensor.shape):
            why = f"has shape {tuple(tensor.shape)}, {origin} has {f.shape}"
            matched[key] = replace(f, name=key, key=key, shape=tuple(tensor.shape), blocks=(), refusal=why, marks={})
        else:
            matched[key] = _described(key, tensor, f, f.blocks)
    return _untied(tensors, matched)


def _saved(found: list[Found], options: Mapping[str, Any]) -> list[Found]:
    """What a plan of the live model holds, with other heads or heads apart, if that is asked for."""
    if options.get("heads") is not None:
        bare = [replace(f, marks={mark: why for mark, why in f.marks.items() if mark != "head"}) for f in found]
        found = mark_heads(bare, named_heads(bare, options["heads"]))
    if options.get("split_heads"):
        found = [replace(f, blocks=tuple(block.per_head() for block in f.blocks)) for f in found]
    return found


def _renaming(keys: list[str], names: set[str], prefix: str) -> Callable[[str], str]:
    """The renaming of keys to the model's names with the most matches: wrappers off, the base prefix on or off."""

    plain = state_cleaner(keys)
    ways: list[Callable[[str], str]] = [
        plain,
        lambda key: f"{prefix}.{plain(key)}",
        lambda key: plain(key).removeprefix(f"{prefix}."),
        lambda key: plain(key).removeprefix("model."),
    ]
    return max(ways, key=lambda way: sum(way(key) in names for key in keys))


def _described(key: str, tensor: Tensor, f: Found, blocks: tuple[Block, ...]) -> Found:
    """What the model says about a weight, under the key and with the dtype of the file."""
    marks = {m: why for m, why in f.marks.items() if m != "frozen"}
    refusal = f.refusal or unusable(tensor)
    return replace(
        f,
        name=key,
        key=key,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        refusal=refusal,
        marks=marks,
        blocks=() if refusal else blocks,
    )


def _piece(key: str, tensor: Tensor, f: Found, loaded: Converted) -> Found:
    """A tensor that loading merges with others into one weight: a matrix of it, if its sides say so too."""
    shape = tuple(tensor.shape)
    same = [b for b in f.blocks if (b.out, b.in_) == shape]
    if len(shape) < 2 or f.refusal or (same and loaded.whole):
        words = [p for p in key.split(".") if not p.isdigit()]
        does = named_role(words[-2] if words[-1] == "weight" and len(words) > 1 else words[-1], words[:-2])
        does = same[0].role if does == "other" and same else does
        blocks = matrices("out in")(shape, does) if same else ()
        return replace(_described(key, tensor, f, blocks), role=does)
    why = f"transformers changes it while loading ({', '.join(loaded.operations)}): load the model and save its plan"
    return replace(f, name=key, key=key, shape=shape, dtype=tensor.dtype, blocks=(), refusal=why, marks={}, also=())


def _unmatched(key: str, tensor: Tensor, tensors: Mapping[str, Tensor], origin: str) -> Found:
    f = _bare(key, tensor, tensors)
    if tensor.dim() < 2:
        return f
    # What its module does is not known, so a plain name is no evidence (routers, fused weights).
    return replace(f, refusal=f"not in {origin} under this name", blocks=(), marks={})


def _bare_heads(found: list[Found], heads: Any) -> list[Found]:
    """Every layer that may be an output is skipped. The order of the keys says nothing: safetensors sorts them.

    A layer whose width no other one takes is an output. Where there is none, or at the end of a numbered sequence,
    equal widths prove nothing: an autoencoder ends as wide as it begins.
    """
    if heads is not None:
        return mark_heads(found, named_heads(found, heads))
    # Matrices that a bare file cannot explain (convolutions) count too: a single Linear behind them is the head.
    if sum(len(f.shape) > 1 and f.role != "embedding" for f in found) < 2:
        return found
    weights = [f for f in found if f.blocks and f.role != "embedding"]
    taken = Counter(f.blocks[0].in_ for f in weights)
    plain = [f for f in weights if f.role in ("other", "gate")]
    unread = {f.name for f in plain if taken[f.blocks[0].out] - (f.blocks[0].in_ == f.blocks[0].out) < 1}
    ends = bool(unread) or any("head" in f.marks for f in weights)
    onwards = {f.name: _reads_on(f, weights) for f in plain}
    unsure = unread | {name for name, read in onwards.items() if not (read or (read is None and ends))}
    return mark_heads(
        found,
        unsure,
        f"possibly the output head: nothing in the file surely reads it ({argument('heads')} tells otherwise)",
    )


def _reads_on(f: Found, weights: list[Found]) -> bool | None:
    """Whether the next layer of the same numbered sequence takes what this one makes; None if it is in no sequence."""
    before, number, after = _numbered(f.module)
    if number is None:
        return None
    pattern = _NUMBER.sub("*", f.module)
    if _NUMBER.search(before) or after:  # blocks.3.mix, blocks.3.mlp.2: heads are not repeated in every block
        alike = [w for w in weights if _NUMBER.sub("*", w.module) == pattern and w.blocks[0].out == f.blocks[0].out]
        if len(alike) > 1:
            return True
    following = {
        n: w for w in weights for b, n, a in [_numbered(w.module)] if b == before and n is not None and n > number
    }
    return bool(following) and following[min(following)].blocks[0].in_ == f.blocks[0].out


_NUMBER = re.compile(r"\d+")


def _numbered(module: str) -> tuple[str, int | None, str]:
    """The last number in a name, with what stands before and after it.

    >>> _numbered("net.fc10"), _numbered("layers.3.mix"), _numbered("stem")
    (('net.fc', 10, ''), ('layers.', 3, '.mix'), ('stem', None, ''))
    """
    match = re.fullmatch(r"(.*?(?:^|\D))(\d+)(\D*)", module)
    return (match[1], int(match[2]), match[3]) if match else (module, None, "")


def _untied(tensors: Mapping[str, Tensor], found: dict[str, Found]) -> list[Found]:
    """Tensors that share their memory are one weight."""
    first: dict[tuple[Any, ...], str] = {}
    for key, tensor in tensors.items():
        if tensor.is_meta or not tensor.numel() or found[key].refusal:
            continue
        identity = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if identity in first:
            owner = first[identity]
            is_head = "head" in found[key].marks
            found[key] = replace(found[key], blocks=(), refusal=f"tied to {owner}, treated there", marks={})
            found[owner] = replace(found[owner], also=(*found[owner].also, key))
            if is_head:
                found[owner] = mark_heads([found[owner]], {owner})[0]
        else:
            first[identity] = key
    return list(found.values())


def _bare(key: str, tensor: Tensor, tensors: Mapping[str, Tensor], flat: bool = False) -> Found:
    """What is certain about one tensor without a config."""
    module = key.rpartition(".")[0]
    steps = state_cleaner(())(module).split(".")
    words = [p for p in steps if not p.isdigit()]
    leaf = words[-1].lower() if words else ""
    above = ".".join(steps[:-1])
    beside = {"query"} if f"{above}.query.weight".lstrip(".") in tensors else ()
    does = named_role(leaf, words[:-1], beside)
    refusal = unusable(tensor) or _unclear(key, leaf, does, tensor, tensors)
    marks: dict[str, str] = {}
    transposed = False
    if refusal is None and tensor.dim() > 2:
        return _bare_convolution(key, tensor, tensors, does, flat)
    if refusal is None:
        bias = tensors.get(f"{module}.bias" if module else "bias")
        transposed = bias is not None and tensor.shape[0] != tensor.shape[1] and tuple(bias.shape) == (tensor.shape[1],)
        if _EMBEDDING.search(module):
            does, marks = "embedding", {"embedding": "embedding, by its name"}
        elif steps and _is_head(steps, tensors):
            does, marks = "head", {"head": "output head, by its name"}
        elif _is_router(steps, tuple(tensor.shape), tensors):
            does, marks = "router", {"router": "router, by its name or the experts beside it"}
    blocks = () if refusal else matrices("in out" if transposed else "out in")(tuple(tensor.shape), does)
    shape = () if tensor.dim() == 0 else tuple(tensor.shape)
    return Found(key, key, does, shape, tensor.dtype, blocks, module, "", refusal, marks)


def _bare_convolution(key: str, tensor: Tensor, tensors: Mapping[str, Tensor], does: str, flat: bool) -> Found:
    """A kernel as if it had one group, which is what most have; it is projected only where it is asked for."""
    module, shape = key.rpartition(".")[0], tuple(tensor.shape)
    bias = tensors.get(f"{module}.bias" if module else "bias")
    transposed = bias is not None and tuple(bias.shape) == (shape[1],) != (shape[0],)
    recipe = convolution(shape, groups=1, transposed=transposed, flat=flat)
    does = "conv" if does == "other" else does
    return Found(
        key,
        key,
        does,
        shape,
        tensor.dtype,
        recipe(shape, does),
        module,
        "",
        marks={"assumed": _ASSUMED + advice(*_LAYOUT)},
    )


def _is_head(steps: list[str], tensors: Mapping[str, Tensor]) -> bool:
    above, leaf = ".".join(steps[:-1]), steps[-1]
    if leaf in ("q_head", "v_head") and any(key.endswith(f"{above}.k_head.weight".lstrip(".")) for key in tensors):
        return False
    named = ANYWHERE.fullmatch(leaf) or (USUALLY.fullmatch(leaf) and "_" in leaf)
    return bool(named) or (leaf in _HEADS and len(steps) <= 2)


def _is_router(steps: list[str], shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> bool:
    """Whether some name on the path means a router, or stands beside experts and means a gate, or has their number."""
    if any(ROUTER_NAME.search(step) for step in steps):
        return True
    for i, step in enumerate(steps):
        above = ".".join(steps[:i])
        count = 0 if "expert" in step else _experts_below(above, tensors)
        if count and (GATE.fullmatch(step) or (i == len(steps) - 1 and count > 1 and count in shape)):
            return True
    return False


def _experts_below(path: str, tensors: Mapping[str, Tensor]) -> int:
    """How many experts are in this module: their numbers, or the first axis of their stacks; 0 without experts."""
    inside = re.compile(
        rf"{re.escape(path)}\.\w*experts?(?:\.(\d+))?(?:\.|$)" if path else r"\w*experts?(?:\.(\d+))?(?:\.|$)"
    )
    matches = [(key, match) for key in tensors if (match := inside.match(key)) and "shared" not in match[0]]
    numbers = {int(match[1]) for _, match in matches if match[1]}
    stacks = {tensors[key].shape[0] for key, match in matches if not match[1] and tensors[key].dim() > 2}
    return max([len(numbers), *stacks, int(bool(matches))])


def _unclear(key: str, leaf: str, does: str, tensor: Tensor, tensors: Mapping[str, Tensor]) -> str | None:
    module, _, local = key.rpartition(".")
    if tensor.dim() < 2:
        return "vector"
    if not tensor.numel():
        return "empty"
    if local != "weight":
        return _unsure(f"what {local} is")
    if tensor.dim() > 2:
        return _unclear_kernel(module, tensor, tensors)
    out, in_ = tensor.shape
    if FUSED.search(leaf) or (leaf in ("in_proj", "x_proj") and out != in_):
        return _unsure(f"how {leaf} is fused")
    if ("lora_a" in key.lower()) or ("lora_b" in key.lower()):
        return "adapter (A or B alone is not the layer's matrix)"
    bias = tensors.get(f"{module}.bias" if module else "bias")
    told = out == in_ or (bias is not None and tuple(bias.shape) in ((out,), (in_,)))
    if told or does in _LINEAR_ONLY or _EMBEDDING.search(module):
        return None
    return _unsure("which side of this weight is the output")


def _unclear_kernel(module: str, tensor: Tensor, tensors: Mapping[str, Tensor]) -> str | None:
    long = tensor.dim() == 3 and tensor.shape[-1] > _LONGEST_KERNEL
    if tensor.dim() > 5 or long or "expert" in module.lower():
        return _unsure("what this tensor is")
    if tensor.shape[1] == 1:  # depthwise, or a single input channel
        return _unsure("the groups of a convolution")
    bias = tensors.get(f"{module}.bias" if module else "bias")
    fits = bias is None or tuple(bias.shape) in ((tensor.shape[0],), (tensor.shape[1],))
    return None if fits else _unsure("the groups of a convolution")


# Operations that put whole matrices side by side: each tensor on disk is one of the matrices in memory.
_WHOLE = {"MergeModulelist", "Concatenate"}


@dataclass(frozen=True)
class Converted:
    """The live name of a tensor on disk, and the operations that it goes through; none if it is only renamed."""

    name: str
    operations: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether the tensor's rows and columns are those of a matrix in memory."""
        return set(self.operations) <= _WHOLE


def converted(model: nn.Module, keys: Iterable[str]) -> dict[str, Converted]:
    """What loading makes of each key; empty for a model that is not of transformers, or of a version before 5.

    >>> converted(nn.Linear(1, 1), ["weight"])
    {}
    """
    if not any(c.__name__ == "PreTrainedModel" for c in type(model).__mro__):
        return {}
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        return {}
    whole: Any = model
    steps = get_model_conversion_mapping(whole)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    live = whole.state_dict()
    found = {}
    for key in keys:
        name, pattern = rename_source_key(key, renamings, converters, whole.base_model_prefix, live)
        operations: tuple[str, ...] = ()
        if pattern is not None:
            converter = by_pattern.get(pattern)
            # A pattern that cannot be traced back to its converter means an unknown operation.
            operations = ("?",) if converter is None else tuple(type(o).__name__ for o in converter.operations)
        if name in live:
            found[key] = Converted(name, operations)
    return found
