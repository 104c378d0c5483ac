"""What one expression of a class's source holds: a `Value`, which submodules' outputs it was made of.

Calls of submodules and of the class's own methods are followed; any other function is assumed to mix its arguments.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

from torch import nn

from rekindle.blocks.cutting import SPLITS, Cutting
from rekindle.blocks.functions import may_cut
from rekindle.blocks.layers import has_matrices
from rekindle.blocks.syntax import argument_names, glob_of, integer, is_outputs, is_window
from rekindle.blocks.values import EMPTY, INPUT, OWN, Cut, Value, at, base

_VIEWS = {"view", "reshape", "unflatten", "rearrange", "permute", "unfold", "reshape_as", "view_as"}
_SCORES = {"softmax", "log_softmax", "topk", "sigmoid", "argmax", "logsigmoid", "one_hot", "gumbel_softmax"}
_TURNS = {"transpose", "movedim", "moveaxis", "swapaxes", "swapdims"}
_EXTREMES = {"max", "amax", "min", "amin"}
_TAKES = {"narrow", "narrow_copy", "index_select"}
_JOINS = {"cat", "concat", "concatenate", "hstack"}
_MIXES = {"matmul", "bmm", "einsum", "scaled_dot_product_attention", "baddbmm", "gather", "embedding", "mm", "outer"}
_NUMBERS = {
    "shape",
    "dtype",
    "device",
    "ndim",
    "is_cuda",
    "requires_grad",
    "training",
    "size",
    "dim",
    "numel",
    "ndimension",
}
_SAME = {"T", "mT", "H", "mH", "data", "real", "imag", "grad", "values"}
_WEIGHTED = {"linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"}
_NONE: frozenset[Any] = frozenset()
_OPENED: dict[str, Any] = {"items": None, "result": None, "named": ()}  # a tensor, no longer what holds it


class Expressions(Cutting):
    """Evaluates expressions on `Value`s instead of tensors."""

    def _assign(self, target: ast.expr, value: Value, scope: dict[str, Value]) -> None:
        """Bind a name; statements are walked by `Reader`."""
        raise NotImplementedError

    def _inline(self, name: str, level: int, bound: dict[str, Value], static: bool = False) -> Value:
        """What a method returns; statements are walked by `Reader`."""
        raise NotImplementedError

    # Expressions

    def _value(self, node: ast.expr | None, scope: dict[str, Value]) -> Value:
        if node is None or isinstance(node, ast.Constant | ast.Compare | ast.JoinedStr | ast.Lambda):
            return EMPTY
        if isinstance(node, ast.Name):
            return scope.get(node.id, EMPTY)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, scope)
        if isinstance(node, ast.Call):
            return self._call(node, scope)
        if isinstance(node, ast.Subscript):
            return self._subscript(node, scope)
        if isinstance(node, ast.BinOp):
            left, right = self._value(node.left, scope), self._value(node.right, scope)
            if left.items is not None and right.items is not None:
                return Value(items=left.items + right.items)
            if left.items is not None or right.items is not None:
                return self._fresh(self._flat(left), self._flat(right))  # (loss,) + outputs joins tuples
            if isinstance(node.op, ast.Add) and all(is_outputs(side) for side in (node.left, node.right)):
                return self._fresh(left, right)  # decoder_outputs + encoder_outputs joins tuples too
            if isinstance(node.op, ast.MatMult):
                return self._product([self._flat(left), self._flat(right)])
            return self._combine(left, right, isinstance(node.op, ast.Add | ast.Sub))
        if isinstance(node, ast.UnaryOp):
            return self._value(node.operand, scope)
        if isinstance(node, ast.Tuple | ast.List):
            return Value(items=tuple(self._value(e, scope) for e in node.elts))
        if isinstance(node, ast.IfExp):
            return self._merged(self._value(node.body, scope), self._value(node.orelse, scope))
        if isinstance(node, ast.BoolOp):
            return self._merged(*(self._value(v, scope) for v in node.values))
        if isinstance(node, ast.Starred | ast.Await | ast.NamedExpr):
            value = self._value(node.value, scope)
            if isinstance(node, ast.NamedExpr):
                self._assign(node.target, value, scope)
            return value
        if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp):
            made = node.value if isinstance(node, ast.DictComp) else node.elt
            inner, found = dict(scope), []
            for generator in node.generators[:-1]:
                self._assign(generator.target, self._element(self._value(generator.iter, inner)), inner)
            last = node.generators[-1]
            for element in self._elements(self._value(last.iter, inner)):
                self._assign(last.target, element, inner)
                found.append(self._value(made, inner))
            whole = self._merged(*found)
            return whole if isinstance(node, ast.DictComp) else replace(whole, result=None, named=())
        if isinstance(node, ast.Dict):
            held = [self._value(v, scope) for v in node.values]
            whole = self._merged(*(self._flat(v) for v in held))
            keys = [k.value if isinstance(k, ast.Constant) else None for k in node.keys]
            if not keys or not all(isinstance(k, str) for k in keys):
                return whole
            return replace(whole, result=None, named=tuple(zip(map(str, keys), held, strict=True)))
        return self._merged(*(self._value(c, scope) for c in ast.iter_child_nodes(node) if isinstance(c, ast.expr)))

    def _attribute(self, node: ast.Attribute, scope: dict[str, Value]) -> Value:
        value = self._value(node.value, scope)
        if value.module is None:
            if node.attr in _NUMBERS:
                return EMPTY
            return self._field(value, node.attr) if (value.result or value.named) and node.attr not in _SAME else value
        path = f"{value.module}.{node.attr}".lstrip(".")
        if at(self.module, path):
            return Value(module=path)
        holders = at(self.module, value.module)
        if holders and holders[0]._parameters.get(node.attr) is not None:
            source = frozenset({value.module or (OWN if node.attr == "weight" else f"<{node.attr}>")})
            return self._fresh(direct=source, weight=True)
        if value.module == "":
            known = self.attributes.get(node.attr, EMPTY)
            return replace(known, method=node.attr) if node.attr in self.methods else known
        return value if node.attr in ("forward", "__call__", "modules", "children", "values", "items") else EMPTY

    def _subscript(self, node: ast.Subscript, scope: dict[str, Value]) -> Value:
        value = self._value(node.value, scope)
        if value.module is not None:
            if isinstance(node.slice, ast.Slice):
                return value
            return Value(module=f"{value.module}.{self._key(value.module, node.slice)}".lstrip("."))
        index = node.slice
        if value.items is not None:
            if (
                isinstance(index, ast.Constant)
                and isinstance(index.value, int)
                and -len(value.items) <= index.value < len(value.items)
            ):
                return value.items[index.value]
            return self._flat(value)
        if (value.result or value.named) and isinstance(index, ast.Constant) and isinstance(index.value, str | int):
            if isinstance(index.value, str):
                return self._field(value, index.value)
            if value.result and index.value >= 0:
                return self._field(value, str(index.value))
        if value.split is not None:
            return self._part(value, ast.unparse(index))
        if not value.direct or not self._on_features(index, value):
            return value
        return self._slice(value, ast.unparse(index), is_window(index))

    def _key(self, path: str, index: ast.expr) -> str:
        """Which child a constant index means; `*` for any other index."""
        held = at(self.module, path)
        names = list(held[0]._modules) if held else []
        if isinstance(index, ast.Constant) and isinstance(index.value, str):
            return index.value if index.value in names else "*"
        number = integer(index)
        return names[number] if number is not None and -len(names) <= number < len(names) else "*"

    def _product(self, values: list[Value]) -> Value:
        """A matrix product: what meets a parameter of the class has been read by a matrix."""
        mixed = self._fresh(*values)
        for name in {n for v in values if v.weight for n in v.direct if n.startswith("<")}:
            parameter = self.module._parameters.get(name.strip("<>"))
            if parameter is not None and parameter.dim() > 1:
                self.uses.feeds |= {(path, name) for path in mixed.near}
                mixed = replace(mixed, near=_NONE)
        return mixed

    def _combine(self, left: Value, right: Value, adds: bool) -> Value:
        left, right = self._flat(left), self._flat(right)
        sides = (left, right)
        if not left.taint or not right.taint:
            tensor = left if left.taint else right
            return replace(tensor, module=None, split=None, **_OPENED) if tensor.taint else self._fresh(left, right)
        direct: frozenset[str] = _NONE
        ids: frozenset[int] = _NONE
        if adds:
            residual = False
            for one, other in (sides, sides[::-1]):
                for path in one.near - {INPUT}:
                    own = bool(other.ids & self.given.get(base(path), _NONE))
                    came = {self.inputs[i] for i in other.ids if i in self.inputs}
                    if own or came:
                        self.uses.added.add(path)
                        residual = True
                        self.uses.drafts |= {(path, draft) for draft in other.direct}
                        if came:
                            self.uses.corrects.add(path)
                            self.uses.joins |= {(path, argument) for argument in came}
                        if own:
                            self.residual.add(path)
            direct = _NONE if residual else left.direct | right.direct
            ids = left.ids | right.ids
        value = self._fresh(left, right)
        return replace(value, direct=direct - {INPUT}, ids=value.ids | ids)

    # Calls

    def _call(self, node: ast.Call, scope: dict[str, Value]) -> Value:
        arguments = [self._value(a, scope) for a in node.args]
        keywords = {k.arg or "**": self._value(k.value, scope) for k in node.keywords}
        given = self.arguments[id(node)] = [*arguments, *keywords.values()]
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if isinstance(function, ast.Attribute):
            holder = function.value
            parent = isinstance(holder, ast.Call) and getattr(holder.func, "id", "") == "super"
            receiver = EMPTY if parent else self._value(holder, scope)
            if parent or (receiver.module == "" and name in self.methods and not at(self.module, name)):
                level = self.stack[-1][1] + 1 if parent and self.stack and self.stack[-1][0] == name else 0
                return self._method(name, level, arguments, keywords)
            if receiver.module is not None and name in ("forward", "__call__"):
                return self._module_call(receiver.module, given, argument_names(node))
            if (receiver.result or receiver.named) and name in ("items", "get", "pop"):
                if name == "items":
                    return Value(items=(Value(items=(EMPTY, receiver)),))
                if node.args and isinstance(node.args[0], ast.Constant):
                    return self._field(receiver, str(node.args[0].value))
            if receiver.module is not None and name in ("values", "items", "children", "modules", "named_children"):
                held = Value(module=f"{receiver.module}.*".lstrip("."))
                return Value(items=(EMPTY, held)) if name in ("items", "named_children") else held
            target = self._value(function, scope)
            if target.module:
                return self._module_call(target.module, given, argument_names(node))
            if receiver.taint or receiver.direct:
                return self._operation(name, [receiver, *arguments], node, keywords, method=True)
            return self._operation(name, arguments, node, keywords, method=False)
        held = self._value(function, scope)
        if held.function is not None:
            return self._local(held.function, arguments, keywords, scope)
        if held.module:
            return self._module_call(held.module, given, argument_names(node))
        if held.module == "" and "forward" in self.methods:
            return self._method("forward", 0, arguments, keywords)
        if name == "getattr" and len(node.args) > 1 and arguments[0].module is not None:
            path = f"{arguments[0].module}.{glob_of(node.args[1])}".lstrip(".")
            return Value(module=path) if at(self.module, path) else EMPTY
        if name in ("enumerate", "zip", "reversed", "list", "tuple", "sorted", "iter"):
            return self._iterated(name, arguments)
        made = self._operation(
            name, arguments, node, keywords, method=False, foreign=name not in SPLITS | _JOINS | _VIEWS
        )
        if name[:1].isupper() and keywords and not arguments:  # a dataclass
            rest = keywords.pop("**", EMPTY)
            known = [*((k, v) for k, v in rest.named if k not in keywords), *keywords.items()]
            return replace(made, result=rest.result, named=tuple(known))
        return made

    def _local(
        self, node: ast.FunctionDef, arguments: list[Value], keywords: dict[str, Value], scope: dict[str, Value]
    ) -> Value:
        """A function that a method has defined for itself."""
        raise NotImplementedError

    def _method(self, name: str, level: int, arguments: list[Value], keywords: dict[str, Value]) -> Value:
        definitions = self.methods.get(name, [])
        if level >= len(definitions):
            return self._fresh(*map(self._flat, [*arguments, *keywords.values()]))
        node = definitions[level]
        static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
        names = [a.arg for a in [*node.args.posonlyargs, *node.args.args]][0 if static else 1 :]
        bound = dict(zip(names, arguments, strict=False))
        bound |= {k: v for k, v in keywords.items() if k != "**"}
        if node.args.vararg is not None:
            bound[node.args.vararg.arg] = Value(items=tuple(arguments[len(names) :]))
        return self._inline(name, level, bound, static)

    def _module_call(self, path: str, given: list[Value], names: list[str] | None = None) -> Value:
        if all(isinstance(m, nn.ModuleList | nn.ModuleDict) for m in at(self.module, path)):
            path = f"{path}.*"  # a function that is given a list of modules calls each
        self.uses.called.add(path)
        flat = [self._flat(v) for v in given]
        tensors = [v for v in flat if v.taint]
        for value in tensors:
            self.uses.feeds |= {(source, path) for source in value.taint}
            if len(tensors) == 1:
                self.uses.passes |= {(base(source), path) for source in value.direct}
        for name, value in zip(names or (), flat, strict=False):
            self.uses.handed |= {(base(source), path, name) for source in value.direct if len(tensors) > 1}
            if any(value.ids & other.ancestors for other in tensors if other is not value):
                self.related.add((path, name))
            self.uses.separate.add((path, name))
        if path not in self.plain:
            self.plain[path] = not any(has_matrices(m) for m in at(self.module, path))
        if self.plain[path]:
            if len(tensors) == 1 and all(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in at(self.module, path)):
                return self._fresh(tensors[0])  # vectors that are looked up are no longer the input
            if len(tensors) == 1:
                return replace(tensors[0], split=None, module=None, **_OPENED)
            if len(tensors) > 1:
                value = tensors[0]
                for other in tensors[1:]:
                    value = self._combine(value, other, adds=True)
                return replace(value, direct=_NONE)
        here = frozenset({path})
        value = self._fresh(*tensors, direct=here, near=here)
        self.given[path] = self.given.get(path, _NONE).union(*(v.ancestors for v in tensors))
        value = replace(value, taint=value.taint | here, parts=_NONE, result=path)
        self.results[value.ids] = value
        return value

    def _operation(
        self,
        name: str,
        arguments: list[Value],
        node: ast.Call,
        keywords: dict[str, Value],
        *,
        method: bool,
        foreign: bool = False,
    ) -> Value:
        """A tensor method, a torch function, or a function that is not known (`foreign`)."""
        name = name.rstrip("_")
        if (method and name in _NUMBERS) or name.startswith("new_") or name.endswith("_like"):
            return EMPTY
        bound = next((v.method for v in arguments if v.method), None)
        if bound is not None:  # and so does apply_chunking_to_forward(self.feed_forward_chunk, …, x)
            return self._method(bound, 0, [v for v in arguments if v.taint], keywords)
        held = next((v.module for v in [*arguments, *keywords.values()] if v.module and not v.taint), None)
        if held is not None:  # checkpoint(self.block, x) calls what it is given
            return self._module_call(held, [v for v in [*arguments, *keywords.values()] if not v.module])
        if name in _JOINS and arguments:
            self._join(arguments[0])
        values = [self._flat(v) for v in [*arguments, *keywords.values()]]
        # A function that makes a mask reads shapes.
        if not method and name not in _VIEWS and not name.endswith("_mask") and may_cut(self.module, node.func):
            for path in {path for value in values if not value.weight for path in value.direct}:
                self.uses.unsettled.setdefault(base(path), name)
        if name in _WEIGHTED and not method:
            weight = next((v for v in values[1:] if v.weight and v.direct), None)
            if weight is not None and not next(iter(weight.direct)).startswith("<"):
                return self._module_call(next(iter(weight.direct)), values[:1])
            if weight is None and len(values) > 1 and values[1].near:  # a weight that another layer has made
                return replace(self._fresh(*values), near=values[1].near)
        tensors = [v for v in values if v.taint or v.direct]
        if not tensors:
            return self._fresh(*values) if values else EMPTY
        first = tensors[0]
        if name.startswith("masked_") and first.direct and all(v.taint <= {INPUT} for v in tensors[1:]):
            return replace(first, split=None, **_OPENED)  # by a mask that was given
        if name in _SCORES:
            self.uses.scores |= set(map(base, first.direct)) - {INPUT}
        if name in SPLITS or name == "glu":
            return self._cut(name, first, node, method)
        if name in _TAKES and first.direct:
            axis = node.args[0 if method else 1] if len(node.args) > (0 if method else 1) else None
            return first if axis is None or integer(axis) == 0 else self._slice(first, ast.unparse(node))
        if name in _EXTREMES and first.viewed and len(values) + len(node.args) > 1:  # the largest of several rows
            for path in first.direct - {INPUT}:
                self.uses.unsettled.setdefault(base(path), name)
        if name in _VIEWS and first.weight and OWN in first.direct and name != "permute":
            self.cuts.setdefault(("own", name), Cut(frozenset({OWN}), f"{name} of its weight"))
        if name in _VIEWS:
            return replace(first, viewed=True, split=None, **_OPENED)
        if name in _TURNS:
            return replace(first, turned=True, split=None, **_OPENED)
        if name in ("add", "sub"):
            return self._combine(first, tensors[1], True) if len(tensors) > 1 else first
        if len(tensors) == 1 and name not in _MIXES:  # of a function that is not known: soft_cap(x, 15.0)
            # One that is given a dict may give a dict of the same keys.
            return replace(first, split=None, items=None) if foreign else replace(first, split=None, **_OPENED)
        return self._product(values) if name in _MIXES or name in _WEIGHTED else self._fresh(*values)
