"""Running the methods of one class on stand-ins for tensors, to see what becomes of its submodules' outputs.

`Reader` walks the syntax tree: assignments, branches (both), loops (twice), calls of the class's own methods and
`super()` are followed. What an expression holds is in `expressions`.
"""

from __future__ import annotations

import ast
from dataclasses import replace

from rekindle.blocks.cutting import SPLITS
from rekindle.blocks.expressions import Expressions
from rekindle.blocks.layers import has_matrices
from rekindle.blocks.values import EMPTY, INPUT, OWN, Cut, Split, Uses, Value, base

_DEPTH, _STEPS = 6, 20_000


class TooLong(Exception):
    """The methods are too long to read."""


class Reader(Expressions):
    """Runs the methods of one class on `Value`s instead of tensors."""

    def run(self) -> None:
        """Read `forward`, then other methods that call submodules which it does not."""
        if "forward" in self.methods:
            self._enter("forward")
        called, feeds = set(self.uses.called), set(self.uses.feeds)
        for name, definitions in self.methods.items():
            if name.startswith("__") or name in self.reached:
                continue
            missing = {
                child
                for child, inner in self.module.named_children()
                if has_matrices(inner) and not any(c.split(".")[0] == child for c in self.uses.called)
            }
            if missing and any(isinstance(n, ast.Attribute) and n.attr in missing for n in ast.walk(definitions[0])):
                self._enter(name)
        if "forward" in self.methods:
            # A generator's images leave by `forward`, whatever a training step has a discriminator say of them.
            self.uses.outside = self.uses.called - called
            self.uses.feeds = {(a, b) for a, b in self.uses.feeds if (a, b) in feeds or a not in self.uses.leaves}

    def _enter(self, name: str) -> None:
        node = self.methods[name][0]
        values = []
        arguments = [a.arg for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
        for argument in arguments:
            values.append(self._fresh(taint=frozenset({INPUT}), direct=frozenset({INPUT})))
            self.inputs |= dict.fromkeys(values[-1].ids, argument)
        static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
        bound = dict(zip(arguments, values, strict=True))
        result = self._flat(self._inline(name, 0, bound, static))
        if name == "forward" or "forward" not in self.methods:
            self.uses.returns |= set(map(base, result.direct)) - {INPUT, OWN}
            self.uses.leaves |= result.near
        if name == "forward":
            self.uses.arguments = tuple(arguments[0 if static else 1 :])
            self._outputs(self.returned)

    def _outputs(self, returned: list[Value]) -> None:
        """What the class returns by key, where its returns agree on the keys; a dataclass says more than a tuple."""
        named = [v for v in returned if v.named] or [v for v in returned if v.result]
        tuples = [v for v in returned if v.items is not None]
        by_key: dict[str, Value] = {}
        if named:
            for key in dict.fromkeys(key for value in named for key, _ in value.named):
                by_key[key] = self._merged(*(self._field(v, key) for v in named))
            rest = {v.result for v in named if v.result}
            if len(rest) == 1:
                self.uses.outputs["**"] = frozenset(map(str, rest))
        elif tuples:
            others = [v for v in returned if v.items is None]
            by_key = {str(i): self._merged(v, *others) for i, v in enumerate(self._merged(*tuples).items or ())}
        for key, held in by_key.items():
            value = self._flat(held)
            self.uses.outputs[key] = value.near
            if len(value.direct - {INPUT}) == 1:
                self.uses.shown[key] = next(iter(value.direct))

    def finish(self) -> Uses:
        """What was found."""
        if self.uses.leaves:  # what is stored on the module can be read elsewhere
            self.uses.leaves |= frozenset().union(*(self._flat(v).near for v in self.attributes.values()))
        for cut in self.cuts.values():
            if cut.harmless:
                continue
            how = Split(cut.how, cut.equal, cut.names)
            for path in cut.direct:
                if path == INPUT:
                    self.uses.splits_input = how
                    self.uses.cut_arguments |= dict.fromkeys(cut.arguments or self.uses.arguments, how)
                elif path == OWN:
                    self.uses.own = how
                else:
                    self.uses.splits.setdefault(path, how)
        self.uses.feeds = {(a, b) for a, b in self.uses.feeds if a != INPUT}
        self.uses.joins = {(path, argument) for path, argument in self.uses.joins if path not in self.residual}
        self.uses.separate -= self.related
        return self.uses

    # Statements

    def _inline(self, name: str, level: int, bound: dict[str, Value], static: bool = False) -> Value:
        if level >= len(self.methods.get(name, ())) or (name, level) in self.stack or len(self.stack) > _DEPTH:
            return self._fresh(*map(self._flat, bound.values()))
        node = self.methods[name][level]
        self.reached.add(name)
        self.stack.append((name, level))
        scope = dict(bound)
        first = (node.args.posonlyargs + node.args.args)[:1]
        if first and not static:
            scope[first[0].arg] = Value(module="")
        returned: list[Value] = []
        self._body(node.body, scope, returned)
        self.stack.pop()
        self.returned = returned
        if len({value.items is None for value in returned}) > 1:
            returned = [self._flat(value) for value in returned]
        return self._merged(*returned)

    def _local(
        self, node: ast.FunctionDef, arguments: list[Value], keywords: dict[str, Value], scope: dict[str, Value]
    ) -> Value:
        if ("", id(node)) in self.stack or len(self.stack) > _DEPTH:
            return self._fresh(*map(self._flat, [*arguments, *keywords.values()]))
        self.stack.append(("", id(node)))
        inner = scope | dict(zip([a.arg for a in node.args.args], arguments, strict=False))
        inner |= {k: v for k, v in keywords.items() if k != "**"}
        returned: list[Value] = []
        self._body(node.body, inner, returned)
        self.stack.pop()
        if len({value.items is None for value in returned}) > 1:
            returned = [self._flat(value) for value in returned]
        return self._merged(*returned)

    def _body(self, statements: list[ast.stmt], scope: dict[str, Value], returned: list[Value]) -> None:
        for statement in statements:
            self.steps += 1
            if self.steps > _STEPS:
                raise TooLong
            self._statement(statement, scope, returned)

    def _statement(self, node: ast.stmt, scope: dict[str, Value], returned: list[Value]) -> None:
        if isinstance(node, ast.Assign):
            value = self._value(node.value, scope)
            for target in node.targets:
                if isinstance(target, ast.Tuple) and value.items is None and self._gives_several(node.value, scope):
                    held = [self._field(value, str(i)) if value.result else value for i in range(len(target.elts))]
                    each = Value(items=tuple(held))  # one value per name: nothing is cut
                    self._assign(target, each, scope)
                    continue
                self._assign(target, value, scope)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, self._value(node.value, scope), scope)
        elif isinstance(node, ast.AugAssign):
            whole = node.target.value if isinstance(node.target, ast.Subscript) else node.target  # written, not cut
            now, other = self._value(whole, scope), self._value(node.value, scope)
            if now.items is not None or other.items is not None:  # outputs += (x,)
                joined = self._merged(self._flat(now), self._flat(other))
                if now.items is not None and other.items is not None and not self.loops:
                    joined = Value(items=now.items + other.items)
                self._assign(node.target, joined, scope)
                return
            self._assign(node.target, self._combine(now, other, isinstance(node.op, ast.Add | ast.Sub)), scope)
        elif isinstance(node, ast.Return):
            if node.value is not None:
                returned.append(self._value(node.value, scope))
        elif isinstance(node, ast.If):
            self._value(node.test, scope)
            branches = [dict(scope), dict(scope)]
            self._body(node.body, branches[0], returned)
            self._body(node.orelse, branches[1], returned)
            for name in {*branches[0], *branches[1]}:
                scope[name] = self._merged(branches[0].get(name, EMPTY), branches[1].get(name, EMPTY))
        elif isinstance(node, ast.For):
            self.loops += 1
            for _ in range(2):  # twice: what the body makes is what it reads the next time
                elements = self._elements(self._value(node.iter, scope))
                for element in elements:
                    self._assign(node.target, element, scope)
                    self._body(node.body, scope, returned)
                if len(elements) > 1:
                    break
            self.loops -= 1
            self._body(node.orelse, scope, returned)
        elif isinstance(node, ast.While):
            for _ in range(2):
                self._value(node.test, scope)
                self._body(node.body, scope, returned)
        elif isinstance(node, ast.With):
            self._body(node.body, scope, returned)
        elif isinstance(node, ast.Try):
            self._body(node.body, scope, returned)
            for handler in node.handlers:
                self._body(handler.body, scope, returned)
            self._body(node.finalbody, scope, returned)
        elif isinstance(node, ast.FunctionDef):
            scope[node.name] = Value(function=node)
        elif isinstance(node, ast.Expr):
            self._value(node.value, scope)
            self._mutate(node.value, scope)

    def _mutate(self, node: ast.expr, scope: dict[str, Value]) -> None:
        """A method whose result is not used changes its receiver: `outputs.append(x)`, `sums.index_add_(0, i, x)`."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return
        holder = node.func.value
        while isinstance(holder, ast.Subscript):
            holder = holder.value
        held = self._value(holder, scope)
        if held.module is not None or not isinstance(holder, ast.Name | ast.Attribute):
            return
        given = [self._flat(v) for v in self.arguments.get(id(node), ())]
        given = [v for v in given if v.taint]
        if held.result or held.named:
            self._assign(holder, self._holding(held, *given), scope)
            return
        changed = self._merged(held, *given)
        if node.func.attr.endswith("_"):
            changed = self._fresh(changed)
        self._assign(holder, changed, scope)

    def _gives_several(self, node: ast.expr, scope: dict[str, Value]) -> bool:
        """Whether an expression makes several values itself: a comprehension, a call of an own method or submodule."""
        if isinstance(node, ast.GeneratorExp | ast.ListComp):
            return True
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Name):
            return self._value(called, scope).module is not None
        if not isinstance(called, ast.Attribute) or called.attr in SPLITS:
            return False
        return called.attr in self.methods or (
            isinstance(called.value, ast.Name) and self._value(called.value, scope).module == ""
        )

    def _assign(self, target: ast.expr, value: Value, scope: dict[str, Value]) -> None:
        if isinstance(target, ast.Name):
            scope[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            count = len(target.elts)
            if value.split is None and value.items is None and value.viewed and value.direct:
                # `q, k, v = x.view(…).permute(…)` cuts the first axis, which the view made of the features.
                key = ("unpacked", target.lineno, target.col_offset, value.direct)
                self._cut_at(key, value, Cut(value.direct, "unpacking", count))
                value = replace(self._fresh(value), split=key, viewed=True)
            if value.split is not None:
                cut = self.cuts[value.split]
                starred = any(isinstance(e, ast.Starred) for e in target.elts)
                cut.count = None if starred else max(count, cut.count or 0)
                cut.names = tuple(e.id if isinstance(e, ast.Name) else "" for e in target.elts)
            for i, each in enumerate(target.elts):
                if value.items is not None and len(value.items) == count:
                    part = value.items[i]
                elif value.result is not None and not isinstance(each, ast.Starred):
                    part = self._field(value, str(i))
                else:
                    part = self._part(value, str(i))
                self._assign(each, part, scope)
        elif isinstance(target, ast.Starred):
            self._assign(target.value, value, scope)
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            held = self._value(target.value, scope)
            if held.module == "":
                self.attributes[target.attr] = value
            elif held.module is None and (held.result or held.named):
                scope[target.value.id] = self._with_field(held, target.attr, value)
            elif held.module is None:  # outputs.pooler_output = self.projection(x)
                scope[target.value.id] = self._merged(held, self._flat(value))
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            held = scope.get(target.value.id, EMPTY)
            named = isinstance(target.slice, ast.Constant) and isinstance(target.slice.value, str)
            if named and held.module is None:
                scope[target.value.id] = self._with_field(held, str(target.slice.value), value)  # type: ignore[attr-defined]
                return
            if held.result or held.named:
                scope[target.value.id] = self._holding(held, value)
                return
            scope[target.value.id] = self._merged(held, self._fresh(held, self._flat(value)))
