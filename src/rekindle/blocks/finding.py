"""Which matrices each parameter of a model holds, what they do, and why some are skipped by default.

`find(model)` walks the parameters in registration order and gives one `Found` for each. How matrices lie in a
weight comes from the class of its module (`families.py`, or your own `register`), never from its name alone; a
weight that looks fused but whose class is unknown is skipped and says so.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from rekindle.blocks import parametrized
from rekindle.blocks.entries import Found
from rekindle.blocks.evidence import UNREAD, Fact, Facts, known_of
from rekindle.blocks.families import head_dim, is_registered, looks_fused, recipes_of, register, roles
from rekindle.blocks.fused import cut_layers
from rekindle.blocks.layers import is_transposed_linear, keeps_width
from rekindle.blocks.layouts import ROLES, Block, LayoutError, Recipe, convolution, matrices, same_rows
from rekindle.blocks.names import Location, cleaner, locations, packed_weights, storage_of, unwrapped
from rekindle.blocks.outputs import find_heads, is_backbone, mark_heads, named_heads, root_of, told_heads
from rekindle.blocks.source import changes_weight, unread_above

__all__ = ["ROLES", "Block", "Conv", "Found", "LayoutError", "find", "matrices", "register"]

Conv = Literal["taps", "flat"]

# Marks are reasons by default that a target may overrule; without blocks there is nothing to overrule.
_ROLE_REASONS = {
    "embedding": "embedding",
    "depthwise": "depthwise kernel (1-wide)",
    "router": "router",
    "adapter": "adapter (A or B alone)",
}
_SCRIPTED = (
    "inside a scripted or traced module (torch.jit), which hides its code: plan the module that it was made from"
)
_IN_A_BLOCK = ("attention-output", "mlp-in", "mlp-gate", "mlp-out")
_PLAIN, _TRANSPOSED = matrices("out in"), matrices("in out")
_EMBEDDING_NAMES = re.compile(r"pos(itional)?_?emb|position_emb|token|embed", re.I)


def find(
    model: nn.Module,
    *,
    conv: Conv = "taps",
    split_heads: bool = False,
    heads: Iterable[str] | str | None = None,
    layouts: Mapping[str, Recipe] | None = None,
    meta: bool = False,
    sharded: bool = False,
    facts: Facts | None = None,
    unaided: bool = False,
) -> list[Found]:
    """One `Found` for every parameter of the model, in registration order.

    `conv` gives one matrix per tap, or "flat" ones with the taps side by side. `heads` names the output layers
    (globs of parameter or module names) instead of detecting them; `()` means there is none. `layouts` states the
    layout of single weights by name or glob, before what their classes say. `meta` and `sharded`
    lift the reasons that a parameter has no data here (for plans that are applied elsewhere). `facts` is what a
    recorded pass showed (that of `evidence.using` by default); without them, or `unaided`, the classes' source is read.

    >>> for found in find(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))):
    ...     print(found.name, found.role, found.count, found.reason)
    0.weight other 1 None
    0.bias other 0 bias
    2.weight head 1 output head
    2.bias other 0 bias
    """
    if conv not in get_args(Conv):
        raise ValueError(f'conv is "taps" or "flat", not {conv!r}')
    facts = known_of(unwrapped(model)) if facts is None and not unaided else facts
    finder = _Finder(model, conv, layouts or {}, meta, sharded, facts)
    found = finder.parameters()
    if heads is not None:
        chosen = named_heads(found, heads)
    else:
        chosen = _detect_heads(found, finder) if facts is None else _recorded_heads(found, finder, facts)
    found = mark_heads(found, chosen)
    if split_heads:
        found = [replace(f, blocks=tuple(b.per_head() for b in f.blocks)) for f in found]
    for name, module, shape, dtype in packed_weights(model):
        kind, path = type(module), finder.clean(name)
        why = f"quantized or packed ({dtype})"
        owner = path.rpartition(".")[0]
        found.append(Found(path, name, "other", shape, dtype, (), owner, kind.__name__, why, classes=kind.__mro__))
    return found


class _Finder:
    """Walks the parameters once; keeps the rules of modules and the first name of each parameter."""

    def __init__(
        self,
        model: nn.Module,
        conv: Conv,
        layouts: Mapping[str, Recipe],
        meta: bool,
        sharded: bool,
        facts: Facts | None,
    ) -> None:
        self.model, self.conv, self.layouts, self.meta, self.sharded = model, conv, layouts, meta, sharded
        self.facts = facts
        self.evidence: dict[str, str] = {}
        self.known_class: set[str] = set()
        self.head_names: dict[str, str] = {}
        self.clean = cleaner(model)
        self.places = locations(model)
        self._storage = storage_of([parameter for _, parameter, _ in self.places])
        for _, parameter, place in self.places:
            if any(isinstance(module, torch.jit.ScriptModule) for module in place.modules):
                self._storage[id(parameter)] = self._storage[id(parameter)]._replace(refusal=_SCRIPTED)
        usable = [place for _, parameter, place in self.places if self._storage[id(parameter)].refusal is None]
        self._roles = roles(usable)
        self._recipes = recipes_of([module for place in usable for module in place.modules])
        self.heads = find_heads(model) if facts is None else {id(layer): "told" for layer in told_heads(model)}
        self.cuts = cut_layers(model) if facts is None else {}
        for layer in self.heads:
            self.cuts.pop(layer, None)  # logits that are split into start and end are still a head's

    def parameters(self) -> list[Found]:
        found: dict[str, Found] = {}
        first: dict[int, str] = {}
        for key, parameter, place in self.places:
            name, original = place.name, place.computed
            if id(place.owner) in self.heads:
                self.head_names[name] = self.heads[id(place.owner)]
            if original and name in found:
                # Further originals (the magnitude beside the direction) are written through the first.
                part = f"part of the parametrization of {name}, written through it"
                found[key] = self._refused(place, key, parameter, part, name=self.clean(key))
                continue
            if id(parameter) in first:
                owner = first[id(parameter)]
                if owner == name:  # a wrapper that holds the same model twice
                    continue
                tied = self._refused(place, key, parameter, f"tied to {owner}, treated there")
                found[name] = replace(tied, role=found[owner].role)
                found[owner] = replace(found[owner], also=(*found[owner].also, name))
                if name in self.head_names:
                    self.head_names[owner] = self.head_names[name]
                continue
            first[id(parameter)] = name
            found[name] = self._found(place, key, parameter, original)
        return list(found.values())

    def _found(self, place: Location, key: str, parameter: Tensor, original: bool) -> Found:
        refusal, _, sharded = self._storage[id(parameter)]
        if original and sharded:
            refusal = "parametrized and sharded (DTensor): remove the parametrization before sharding"
        if refusal:
            return self._refused(place, key, parameter, refusal)
        weight = parametrized.read(place.owner, place.tensor) if original else parameter
        blocks, does, refusal = self._blocks(place, weight)
        marks = {}
        if parameter.is_meta and not self.meta:
            refusal = "on the meta device: load the weights first"
        if not refusal:
            if sharded and not self.sharded:
                marks["sharded"] = "sharded (DTensor)"
            if does in _ROLE_REASONS:
                marks[does] = _ROLE_REASONS[does]
            held = parametrized.originals(place.owner, place.tensor) if original else [parameter]
            if not any(p.requires_grad for p in held):
                marks["frozen"] = "frozen"
        if does != "other":
            blocks = tuple(replace(b, role=does) if b.role == "other" and not b.part else b for b in blocks)
        return self._refused(
            place,
            key,
            weight,
            refusal,
            role=does,
            blocks=() if refusal else blocks,
            marks=marks,
            parametrized=original,
            evidence=self.evidence.get(place.name, ""),
        )

    def _refused(self, place: Location, key: str, parameter: Tensor, refusal: str | None, **more: object) -> Found:
        stored = self._storage.get(id(parameter))  # a parametrized weight is computed, not a parameter
        shape = () if stored is not None and stored.lazy else tuple(parameter.shape)
        owner = place.owner
        stated: dict[str, Any] = {"name": place.name, "key": key, "role": "other", "shape": shape, "blocks": ()}
        stated |= {"dtype": parameter.dtype, "module": place.module}
        stated |= {"module_type": type(owner).__name__, "classes": type(owner).__mro__}
        return Found(refusal=refusal, **{**stated, **more})

    def _blocks(self, place: Location, weight: Tensor) -> tuple[tuple[Block, ...], str, str | None]:
        """(blocks, role, refusal) of a usable tensor."""
        owner, shape, does = place.owner, tuple(weight.shape), self._roles[place.name]
        kind, fact = type(owner).__name__, self._fact(place)
        if fact is not None:
            does = fact.role_of(does)
        if "bias" in place.tensor:
            return (), "other", "bias"
        if _is_norm(owner, len(shape)):
            return (), "other", f"norm ({kind})"
        if len(shape) < 2:
            return (), "other", "vector"
        if f"{place.tensor.removesuffix('_orig')}_mask" in owner._buffers:
            return (), does, "pruned: its mask would cut the isometry again (torch.nn.utils.prune.remove first)"
        if math.prod(shape) == 0:
            return (), does, "empty"
        if does == "adapter" and len(shape) == 2:
            return _PLAIN(shape, does), does, None
        if fact is not None and not fact.use:
            self.evidence[place.name] = "recorded"
            return (), does, fact.refusal or "did not run on the example: it is left as it is"
        try:
            known, self.evidence[place.name] = self._recipe(place)
            if isinstance(known, str):
                return (), does, known
            if fact is not None and self.evidence[place.name] != "user":
                decided = self._recorded(place, shape, does, fact, known)
                if decided is not None:
                    self.evidence[place.name] = "recorded"
                    return decided
            if known is not None:
                if not isinstance(place.owner, nn.Bilinear):  # every other known class is the middle of a network
                    self.known_class.add(place.name)
                blocks = known(shape, does)
                # A fused weight goes by its first part that has a role of its own; targets look at the parts.
                return blocks, next((b.role for b in blocks if b.role != "other"), "other"), None
            return self._plain(place, shape, does)
        except LayoutError as error:
            return (), does, f"the shape is not what {kind} should have: {error}"

    def _plain(self, place: Location, shape: tuple[int, ...], does: str) -> tuple[tuple[Block, ...], str, str | None]:
        owner, kind = place.owner, type(place.owner).__name__
        if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
            return _PLAIN(shape, "embedding"), "embedding", None
        torchs = all(type(module).__module__.startswith("torch.") for module in place.modules)
        unread = None if torchs else unread_above(place.modules)
        if unread is not None and does not in ("router", "adapter"):
            self.evidence[place.name] = "name"
            why = f"what {unread} does with it is not known ({UNREAD}): give example=batch"
            return (), does, why
        self.evidence[place.name] = "class" if torchs else "source"
        transposed = type(owner) is not nn.Linear and is_transposed_linear(owner)
        looks = looks_fused(place, shape[::-1] if transposed else shape)
        cut = self.cuts.get(id(owner))
        if cut is not None and place.tensor == "weight":
            parent = place.modules[-2] if len(place.modules) > 1 else owner
            looks = f"{cut}, how is not known: rekindle.blocks.register({type(parent).__name__}, …)"
            if cut.function:  # attention is a function of its own in many packages; BLOOM can cut its sums
                named = ("query", "key", "value", *_IN_A_BLOCK) if " " in cut.function else ("query", "key", "value")
                looks = None if does in named else str(cut)
        layer = isinstance(owner, nn.Linear | nn.modules.conv._ConvNd)
        if looks and does != "router" and (transposed or layer):
            return (), does, looks
        theirs = layer and not type(owner).forward.__module__.startswith("torch.")
        if theirs and place.tensor == "weight" and changes_weight(owner):
            return (), does, f"the forward of {kind} uses it in a way of its own: give example=batch"
        if isinstance(owner, nn.modules.conv._ConvNd) and place.tensor == "weight":
            recipe = convolution(shape, groups=owner.groups, transposed=owner.transposed, flat=self.conv == "flat")
            tap = convolution(shape, groups=owner.groups, transposed=owner.transposed, flat=False)(shape)[0]
            does = "depthwise" if owner.groups > 1 and tap.smaller == 1 else "conv" if does == "other" else does
            return recipe(shape, does), does, None
        plain = transposed or isinstance(owner, nn.Linear) or does == "router"
        if len(shape) == 2 and place.tensor == "weight" and plain:
            return self._split(place, shape, does, transposed), does, None
        if _EMBEDDING_NAMES.search(place.tensor):
            return (), "embedding", f"a position or token vector of {kind}, no matrix"
        return (), does, f"layout not known: a parameter of {kind} (rekindle.blocks.register states it)"

    def _fact(self, place: Location) -> Fact | None:
        """What the recording shows about a weight; of an expert that was not chosen, what it shows about the others."""
        if self.facts is None or place.name in self.facts:
            return None if self.facts is None else self.facts[place.name]
        for depth in range(len(place.names) - 1, -1, -1):
            parent, name = place.modules[depth], place.names[depth]
            if isinstance(parent, nn.ModuleList | nn.ModuleDict):
                for other in parent._modules:
                    twin = ".".join((*place.names[:depth], other, *place.names[depth + 1 :], place.tensor))
                    if (
                        other != name
                        and twin in self.facts
                        and type(parent._modules[other]) is type(parent._modules[name])
                    ):
                        return self.facts[twin]
        return self.facts[place.name]

    def _recorded(
        self, place: Location, shape: tuple[int, ...], does: str, fact: Fact, known: Recipe | None
    ) -> tuple[tuple[Block, ...], str, str | None] | None:
        """(blocks, role, refusal) by what ran; None where the class says more than the recording."""
        owner = place.owner
        if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
            return _PLAIN(shape, "embedding"), "embedding", None
        if fact.use == "table":
            return (), "embedding", "a table that is read by index, no matrix"
        if fact.use == "elementwise":
            return (), does, "it meets values element by element, no matrix"
        if fact.use == "distance":
            return (), does, "what meets it is its distance to each row, no matrix"
        if fact.use in ("opaque", "bilinear"):
            return None
        if fact.router:
            does = "router"
        if known is not None:
            blocks = known(shape, does)
            if not fact.cut or fact.layout is None or same_rows(blocks, fact.blocks(does), shape):
                return None
            return fact.blocks(does), fact.blocks(does)[0].role, None  # the recording wins over the class
        if fact.refusal and fact.refusal != "a grouped convolution" and (fact.cut or not place.computed):
            return (), does, f"recorded: {fact.refusal}"
        if isinstance(owner, nn.modules.conv._ConvNd) and place.tensor == "weight" and not fact.parts:
            recipe = convolution(shape, groups=owner.groups, transposed=owner.transposed, flat=self.conv == "flat")
            tap = convolution(shape, groups=owner.groups, transposed=owner.transposed, flat=False)(shape)[0]
            does = "depthwise" if owner.groups > 1 and tap.smaller == 1 else "conv" if does == "other" else does
            return recipe(shape, does), does, None
        if fact.layout is None or fact.layout.shape != shape:
            return (), does, "recorded: how its matrices lie in it is not seen"
        if fact.use == "convolution" and does == "other":
            does = "conv"
        if fact.parts and fact.use == "convolution" and self.conv == "flat":
            return (), does, "cut into parts, which flat convolutions do not support: use conv='taps'"
        if not fact.parts and place.tensor == "weight" and (is_transposed_linear(owner) or type(owner) is nn.Linear):
            return self._split(place, shape, does, is_transposed_linear(owner)), does, None
        blocks = fact.blocks(does)
        return blocks, next((b.role for b in blocks if b.role != "other"), does), None

    def _split(self, place: Location, shape: tuple[int, ...], does: str, transposed: bool) -> tuple[Block, ...]:
        """A Linear, with its attention heads named where the attention module says how wide a head is."""
        dim = head_dim(place) if does in ("query", "key", "value", "attention-output") else None
        out, in_ = shape[::-1] if transposed else shape
        turn = "{1} {0}" if transposed else "{0} {1}"
        if dim and does == "attention-output" and in_ % dim == 0 and in_ > dim:
            turned = turn.format("out", "(head in)")
            return matrices(turned, inputs="head in", heads="head", head=in_ // dim)(shape, does)
        if dim and does != "attention-output" and out % dim == 0 and out > dim:
            return matrices(turn.format("(head dim)", "in"), heads="head", dim=dim)(shape, does)
        return (_TRANSPOSED if transposed else _PLAIN)(shape, does)

    def _recipe(self, place: Location) -> tuple[Any, str]:
        """The recipe that the caller states, else that of the nearest known class that has one for this tensor.

        With it its evidence.
        """
        for glob, recipe in self.layouts.items():
            if fnmatch.fnmatchcase(place.name, glob):
                return recipe, "user"
        names = [n for n in place.names if n != "base_layer"]
        local = place.tensor
        modules = [m for n, m in zip(("", *place.names), place.modules, strict=True) if n != "base_layer"]
        for depth in range(len(modules) - 1, -1, -1):
            table = self._recipes[id(modules[depth])]
            if isinstance(table, str):
                return table, "class"
            if local in table:
                return table[local], "user" if is_registered(type(modules[depth])) else "class"
            if depth:
                local = f"{names[depth - 1]}.{local}"
        return None, ""


def _detect_heads(found: list[Found], finder: _Finder) -> set[str]:
    # A trace also ends in the last layer of a block; stated and named heads are heads whatever their role.
    plain = ("other", "conv", "embedding", "query", "key", "value")  # `value` is also what critics are called
    parents = {place.name: place.modules[-2:] for _, _, place in finder.places}
    middle = {
        f.name
        for f in found
        if f.name in finder.known_class
        or (f.role not in plain and not (f.role in _IN_A_BLOCK and not keeps_width(*parents[f.name])))
    }
    chosen = {name for name, evidence in finder.head_names.items() if evidence != "traced" or name not in middle}
    matrices_found = [f for f in found if f.blocks and f.role not in ("embedding", "adapter")]
    if chosen or is_backbone(root_of(finder.model)) or len(matrices_found) < 2:
        return chosen
    # No evidence: the last matrix, unless its own class or name says that it is the middle of a block.
    last = matrices_found[-1]
    return {last.name} if last.role in ("other", "conv") and last.name not in finder.known_class else set()


def _recorded_heads(found: list[Found], finder: _Finder, facts: Facts) -> set[str]:
    """What reached the caller on the example, and what the model itself says."""
    aliases = {name: f.name for f in found for name in (f.name, *f.also)}
    chosen = {aliases.get(name, name) for name, fact in facts.by_name.items() if fact.output}
    told = {aliases.get(name, name) for name in finder.head_names}
    if is_backbone(root_of(finder.model)):  # features, which are as wide as what they come from
        chosen = {f.name for f in found if f.name in chosen and f.blocks and f.blocks[0].out < f.blocks[0].in_}
    for place in (place for _, _, place in finder.places if place.name not in facts):
        fact = finder._fact(place)  # the siblings of a head in a list
        if fact is not None and fact.output:
            chosen.add(place.name)
    return chosen | told


def _is_norm(module: nn.Module, dimensions: int) -> bool:
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or (dimensions < 2 and "norm" in type(module).__name__.lower())
