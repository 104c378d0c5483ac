"""Where a class's source cuts a value into parts, and where parts come together again."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

from torch import nn

from rekindle.blocks.containers import Containers
from rekindle.blocks.syntax import integer, leaves_out
from rekindle.blocks.values import Cut, Value, at, base

SPLITS = {"chunk", "split", "unbind", "tensor_split", "split_with_sizes", "hsplit", "dsplit", "vsplit"}
SPLITS |= {f"unsafe_{name}" for name in ("chunk", "split", "split_with_sizes")}
_AXES = {"glu": -1, "hsplit": 1, "dsplit": 2}  # of those that have none among their arguments


class Cutting(Containers):
    """Records cuts."""

    def _slice(self, value: Value, text: str, window: bool = False) -> Value:
        key = ("slice", value.direct, value.viewed, frozenset(self._arguments_in(value)))
        cut = self._cut_at(key, value, Cut(value.direct, "slices", sliced=True))
        cut.parts.add(text)
        if window:
            self.uses.unsettled |= {base(path): "a slice that moves" for path in value.direct}
        part = self._fresh(value, parts=value.parts | {(key, text)}, viewed=value.viewed)
        # x[:, :n] may cut tokens as well: then it is still the whole output.
        return part if "..." in text else replace(part, direct=value.direct)

    def _cut_at(self, key: Any, value: Value, cut: Cut) -> Cut:
        """The cut of this key, with the arguments of the class that it cuts."""
        cut = self.cuts.setdefault(key, cut)
        cut.arguments |= self._arguments_in(value)
        return cut

    def _arguments_in(self, value: Value) -> set[str]:
        return {self.inputs[i] for i in value.ids if i in self.inputs}

    def _on_features(self, index: ast.expr, value: Value) -> bool:
        """Whether an index cuts the axis of features (of a reshaped value, any axis) rather than samples or tokens."""
        parts = index.elts if isinstance(index, ast.Tuple) else [index]
        if value.viewed and any(isinstance(p, ast.Constant) and type(p.value) is int for p in parts):
            return True
        dots = any(isinstance(p, ast.Constant) and p.value is Ellipsis for p in parts)
        if self._convolved(value):
            return not dots and len(parts) > 1 and leaves_out(parts[1])
        return leaves_out(parts[-1]) and (dots or len(parts) > 1)

    def _convolved(self, value: Value) -> bool:
        """Whether a convolution has made this and its axes are as they were: features are the second one."""
        kinds = (nn.Linear, nn.modules.conv._ConvNd)
        made = [[i for i in m.modules() if isinstance(i, kinds)][-1:] for p in value.direct for m in at(self.module, p)]
        convolves = [isinstance(layer, nn.modules.conv._ConvNd) for layers in made for layer in layers]
        return not value.viewed and not value.turned and bool(convolves) and all(convolves)

    def _cut(self, name: str, value: Value, node: ast.Call, method: bool) -> Value:
        position = 1 if method else 2
        given = next((k.value for k in node.keywords if k.arg in ("dim", "axis")), None)
        if name == "unbind":
            position -= 1
        if given is None and len(node.args) > position:
            given = node.args[position]
        dim: int | None = _AXES.get(name, 0)
        if given is not None:
            dim = integer(given)
        size = node.args[position - 1] if len(node.args) > position - 1 and name not in ("unbind", "glu") else None
        single = name == "split" and size is not None and integer(size) == 1
        # Sizes that come from data (`lengths.tolist()`) are sequences of one batch.
        single = single or any(
            isinstance(n, ast.ListComp) or (isinstance(n, ast.Attribute) and n.attr == "tolist")
            for n in ast.walk(size or ast.Constant(0))
        )
        if not value.direct or single or (dim == 0 and not value.viewed and not value.weight):
            return value
        count = integer(size) if name == "chunk" and size is not None else None
        if name.startswith("split") and isinstance(size, ast.List | ast.Tuple):
            count = len(size.elts)
        key = (name, node.lineno, node.col_offset, value.direct)
        equal = count if name == "chunk" and dim == -1 and not value.viewed and not value.weight else None
        self._cut_at(key, value, Cut(value.direct, name, count, equal))
        return replace(self._fresh(value), split=key, viewed=value.viewed)

    def _join(self, sequence: Value) -> None:
        """Parts of one cut that are concatenated again are one vector after all (a partial rotary embedding)."""
        if sequence.items is None:
            if sequence.split is not None:
                cut = self.cuts[sequence.split]
                cut.joined |= cut.parts
            return
        held = [{key: {i for k, i in item.parts if k == key} for key, _ in item.parts} for item in sequence.items]
        for key in {key for each in held for key in each}:
            apart = [each[key] for each in held if key in each]
            if len(apart) > 1 and all(len(a) == 1 for a in apart):
                self.cuts[key].joined |= set().union(*apart)
