"""Following values through a recorded pass: which rows of which weights each one comes from, and where they go.

A product with a weight ends the traces of what it reads and begins one of its own.
"""

from __future__ import annotations

from dataclasses import replace

from rekindle.recording import operations as kinds
from rekindle.recording.combining import Combining
from rekindle.recording.graph import Graph, Operation
from rekindle.recording.shadows import varies
from rekindle.recording.traces import EMPTY, Content, LayerCall, RowTrace, joined, sources_of
from rekindle.recording.weights import Entry, WeightPart, entries_of


class Following(Combining):
    """The recorded pass gone through once, in order."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        for number, operation in enumerate(graph.operations):
            self._step(number, operation)

    def _step(self, number: int, operation: Operation) -> None:
        name = operation.name
        contents = [self.content(i) for i in operation.inputs]
        if name in kinds.SHAPES:
            made = [EMPTY]
        elif name in kinds.PRODUCTS:
            made = [self._product(number, operation)]
        elif name in kinds.WEIGHT_NORMS and contents[0].parts:  # a direction and a magnitude are one weight
            made = [Content(parts={n: WeightPart.whole(self.graph.shape_of(n)) for n in contents[0].parts}, data=True)]
        elif name in kinds.ATTENTION:
            made = [self._attend(number, operation, contents[:3])]
        elif name in kinds.OPAQUE and any(c.parts for c in contents):
            made = [self._meet_inside(number, operation, contents)]
        elif name in kinds.TABLES:
            made = [self._look_up(operation, contents)]
        elif not any(c.traces or c.parts or c.chosen for c in contents):
            data = any(c.data for c in contents)
            made = [Content(data=data, before=sources_of(contents))]
        elif name in kinds.MOVES or name in kinds.RESHAPES or name in kinds.SAME:
            made = self._move(operation, contents)
        elif name in kinds.JOINS:
            made = [self._join(operation)]
        else:
            made = self._combine(number, operation, contents)
        for i, output in enumerate(operation.outputs):
            if output >= 0:
                self.values[output] = made[min(i, len(made) - 1)]

    def _product(self, number: int, operation: Operation) -> Content:
        first, second = (operation.args[i] for i in kinds.PRODUCTS[operation.name])
        left, right = self.content(first.number), self.content(second.number)
        extra = [self.content(i) for i in operation.inputs if i not in (first.number, second.number)]
        weight, data, position = self._which(operation, left, right)
        if position is None:
            return self._meet_as_matrices(number, operation, left, right, extra)
        entries = entries_of(self.graph, operation, position, weight.parts)
        if data.parts and not data.traces and self._own(operation) >= {*data.parts, *weight.parts}:
            # W = U @ V, of one module: neither is the matrix that is used.
            why = "multiplied by another parameter"
            entries = {name: replace(entry, notes=(*entry.notes, why)) for name, entry in entries.items()}
        for name, entry in entries.items():
            self.entered[name].append(entry)
        read = {**data.traces, **weight.traces}
        for trace_of, trace in read.items():
            self._arrive(trace_of, "weight", (number, 0), trace)
        if data.chosen or weight.chosen:
            self.selecting |= data.chosen | weight.chosen
        before = sources_of([left, right])
        output = self.graph.shapes[operation.outputs[0]]
        made = Content(data=True, before=before)
        for name, entry in entries.items():
            call = LayerCall(len(self.calls), number, name, entry, data.traces, before, 0, operation.caller)
            self.calls.append(call)
            shadow = entry.shadow_of_output(operation, output)
            rows = None if shadow is not None else frozenset(entry.rows())
            made.traces[call.number] = RowTrace(None if shadow is None else (shadow,), rows)
            made.before |= 1 << call.number
        for addend in extra:  # a bias that is computed from values is a value like any other
            for key, trace in addend.traces.items():
                made.traces[key] = replace(trace, shadows=None, rows=trace.all_rows())
        return made

    def _which(self, operation: Operation, left: Content, right: Content) -> tuple[Content, Content, int | None]:
        """(weight, data, position of the weight); the module that is running holds its own weight."""
        if left.parts and right.parts:
            own = self._own(operation)
            if own & right.parts.keys() or not own & left.parts.keys():
                return right, left, 1
            return left, right, 0
        if right.parts:
            return right, left, 1
        if left.parts:
            return left, right, 0
        return left, right, None

    def _own(self, operation: Operation) -> set[str]:
        """The parameters that the running module holds itself."""
        caller = operation.caller
        held = set() if caller is None else {id(p) for p in caller._parameters.values() if p is not None}
        return {name for name, parameter in self.graph.parameters.items() if id(parameter) in held} if held else set()

    def _meet_as_matrices(
        self, number: int, operation: Operation, left: Content, right: Content, extra: list[Content]
    ) -> Content:
        """A product of two values: scores of an attention, or their use; a mixture of experts."""
        made = Content(data=True, before=sources_of([left, right, *extra]))
        made.chosen, made.scores = left.chosen | right.chosen, frozenset({number})
        for position, content in enumerate((left, right)):
            for key, trace in content.traces.items():
                kind = "value" if (right, left)[position].weights else "product"
                self._arrive(key, kind, (number, position), trace)
                kept = RowTrace(None, trace.all_rows(), bent=True, scored=trace.scored, added=False, attended=True)
                made.traces[key] = joined(made.traces.get(key), kept)
        self._weigh_sum(left, right)
        for addend in extra:
            for key, trace in addend.traces.items():
                made.traces.setdefault(key, replace(trace, shadows=None, rows=trace.all_rows()))
        return made

    def _weigh_sum(self, left: Content, right: Content) -> None:
        """Scores of a layer that are summed with the outputs of a stack, one score per member of the stack."""
        for scores, others, axis in ((left, right, -2), (right, left, -1)):
            for key, trace in scores.traces.items():
                if not trace.scored or trace.shadows is None:
                    continue
                if not any(varies(s, -1 if axis == -2 else -2) for s in trace.shadows if s.dim() > 1):
                    continue
                for other, theirs in others.traces.items():
                    entry = self.calls[other].entry
                    if other != key and theirs.shadows and any(entry.stack_varies(s, axis) for s in theirs.shadows):
                        self.selecting.add(key)

    def _attend(self, number: int, operation: Operation, contents: list[Content]) -> Content:
        made = Content(data=True, before=sources_of(contents))
        for position, content in enumerate(contents):
            for key, trace in content.traces.items():
                self._arrive(key, ("query", "key", "value")[position], (number, position), trace)
                made.traces[key] = joined(made.traces.get(key), RowTrace(None, trace.all_rows(), True, attended=True))
        return made

    def _meet_inside(self, number: int, operation: Operation, contents: list[Content]) -> Content:
        """One operator that is a layer of its own: what it does with its weights is inside."""
        before = sources_of(contents)
        made = Content(data=True, before=before)
        read = {key: trace for content in contents for key, trace in content.traces.items()}
        for key, trace in read.items():
            self._arrive(key, "weight", (number, 0), trace)
        for content in contents:
            for name in content.parts:
                entry = Entry.plain(self.graph, name, kinds.OPAQUE[operation.name], operation.name)
                self.entered[name].append(entry)
                if entry.shape and len(entry.shape) > 1:
                    call = LayerCall(len(self.calls), number, name, entry, read, before, 0, operation.caller)
                    self.calls.append(call)
                    made.traces[call.number] = RowTrace(None, frozenset())
                    made.before |= 1 << call.number
        return made

    def _look_up(self, operation: Operation, contents: list[Content]) -> Content:
        for content in contents:
            for name in content.parts:
                self.entered[name].append(Entry.plain(self.graph, name, "table"))
        return Content(data=True, before=sources_of(contents))
