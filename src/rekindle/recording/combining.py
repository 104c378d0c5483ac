"""What operations that multiply no matrices do to traces and parameters: move, join, combine element by element."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

from torch import Tensor

from rekindle.recording import operations as kinds
from rekindle.recording.graph import Graph, Operation, Ref
from rekindle.recording.shadows import reduced, reshaped, resized, rows_in, varies
from rekindle.recording.traces import (
    EMPTY,
    FEW,
    Arrival,
    Content,
    LayerCall,
    RowTrace,
    axes_of,
    axis_of,
    cat,
    changed,
    flags_of,
    joined,
    sources_of,
)
from rekindle.recording.weights import Entry, WeightPart


class Combining:
    """What is known of each value of a recorded pass, and the operations that are no products."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.values: dict[int, Content] = {}
        self.calls: list[LayerCall] = []
        self.pieces: dict[int, list[Arrival]] = defaultdict(list)
        self.entered: dict[str, list[Entry]] = defaultdict(list)  # by parameter: how it was used
        self.selecting: set[int] = set()  # calls whose rows choose among parameters or modules
        self.weighing: dict[int, dict[int, set[Any]]] = defaultdict(lambda: defaultdict(set))
        self.attending: dict[int, int] = {}  # products that a softmax follows, with its axis from the end

    def content(self, number: int) -> Content:
        """What a value holds; a parameter holds itself, an unknown floating value is the model's input."""
        known = self.values.get(number)
        if known is not None:
            return known
        name = self.graph.weights.get(number)
        if name is not None:
            known = Content(parts={name: WeightPart.whole(self.graph.shapes[number])}, data=True)
        elif number in self.graph.buffers:
            known = EMPTY
        else:
            known = Content(data=self.graph.floating[number])
        self.values[number] = known
        return known

    def _arrive(self, key: int, kind: str, place: tuple[int, int], trace: RowTrace) -> None:
        if trace.added and kind in ("weight", "bent"):
            return  # a gate that reads some channels of a residual stream cuts nobody's output
        self.pieces[key].append(Arrival(kind, place, trace.all_rows(), trace.bent))

    def _move(self, operation: Operation, contents: list[Content]) -> list[Content]:
        made = [replace(contents[0], traces={}, parts={}) for _ in operation.outputs]
        indexed = operation.name in ("index", "index_select", "gather") and len(contents) > 1
        if indexed and contents[0].parts and not contents[0].traces:
            table = {n: p for n, p in contents[0].parts.items() if len(self.graph.shape_of(n)) < 3}
            for name in table:
                self.entered[name].append(Entry.plain(self.graph, name, "table"))
            if table:
                return [Content(data=True, before=sources_of(contents))]
        for content in contents[1:]:  # an index that a layer's scores chose
            for each in made:
                each.chosen |= content.chosen
            for key in content.chosen:
                if contents[0].parts:
                    self.selecting.add(key)
        for key, trace in contents[0].traces.items():
            for i, shadows in enumerate(self._moved_all(operation, trace.shadows, len(made))):
                rows = trace.all_rows() if shadows is None else None
                made[i].traces[key] = replace(trace, shadows=shadows, rows=rows)
        for name, part in contents[0].parts.items():
            if indexed:  # one member of a stack per example: the first stands for all
                shape = self.graph.shapes[operation.outputs[0]]
                first = None if part.indices is None else part.indices.narrow(0, 0, 1).squeeze(0)
                fits = first is not None and tuple(first.shape) == shape[len(shape) - first.dim() :]
                made[0].parts[name] = part.with_indices(first.expand(shape) if first is not None and fits else None)
                continue
            moved = part.moved(lambda indices: self._moved(operation, indices, len(made)))
            for i, each in enumerate(made):
                each.parts[name] = moved[min(i, len(moved) - 1)]
        return made

    def _moved_all(
        self, operation: Operation, shadows: tuple[Tensor, ...] | None, count: int
    ) -> list[tuple[Tensor, ...] | None]:
        if shadows is None:
            return [None] * count
        moved: list[list[Tensor | None]] = [self._moved(operation, shadow, count) for shadow in shadows]
        found: list[tuple[Tensor, ...] | None] = []
        for i in range(count):
            column = [m[i] for m in moved]
            found.append(None if any(s is None for s in column) else tuple(s for s in column if s is not None))
        return found

    def _moved(self, operation: Operation, shadow: Tensor, count: int) -> list[Tensor | None]:
        """The shadow after the same operation."""
        shapes = [self.graph.shapes[o] if o >= 0 else () for o in operation.outputs]
        if operation.name in kinds.SAME:
            return [shadow if tuple(shadow.shape) == shape else None for shape in shapes]
        if operation.name in kinds.RESHAPES:
            return [reshaped(shadow, shapes[0])]
        rest = [self._replayed(arg) for arg in operation.args[1:]]
        kwargs = {k: self._replayed(v) for k, v in operation.kwargs.items() if k not in ("dtype", "memory_format")}
        if any(r is NotImplemented for r in (*rest, *kwargs.values())):
            fitting = resized(shadow, shapes[0]) if operation.name != "index" else None
            return [fitting] * count
        if operation.name == "constant_pad_nd":
            rest = [rest[0], -1]
        try:
            result = operation.function(shadow, *rest, **kwargs)
        except (RuntimeError, IndexError, TypeError, NotImplementedError):
            return [None] * count
        result = [result] if isinstance(result, Tensor) else list(result)
        return [r if tuple(r.shape) == shape else None for r, shape in zip(result, shapes, strict=False)]

    def _replayed(self, arg: object) -> object:
        if isinstance(arg, Ref):
            kept = self.graph.kept.get(arg.number)
            return NotImplemented if kept is None or kept.device.type != "cpu" else kept
        if isinstance(arg, tuple) and any(isinstance(a, Ref) for a in arg):
            items = [self._replayed(a) for a in arg]
            return NotImplemented if any(i is NotImplemented for i in items) else items
        return arg

    def _join(self, operation: Operation) -> Content:
        numbers = [arg.number for arg in operation.args[0]]
        contents = [self.content(n) for n in numbers]
        shapes = [self.graph.shapes[n] for n in numbers]
        rest, kwargs = operation.args[1:], operation.kwargs
        made = Content(data=any(c.data for c in contents), before=sources_of(contents))
        made.chosen = frozenset().union(*(c.chosen for c in contents))
        output = self.graph.shapes[operation.outputs[0]]
        only_parts = all(c.parts for c in contents)
        for name in {name for c in contents for name in c.parts}:
            if not only_parts:
                self.entered[name].append(Entry.plain(self.graph, name, "elementwise"))
                continue
            held = [c.parts[name].written_out() if name in c.parts else None for c in contents]
            part = next(c.parts[name] for c in contents if name in c.parts)
            made.parts[name] = part.with_indices(cat(operation, held, shapes, rest, kwargs, output))
        for key in {key for c in contents for key in c.traces}:
            traces = [c.traces.get(key) for c in contents]
            present = [t for t in traces if t is not None]
            flags = flags_of(present)
            if any(t.shadows is None for t in present):
                made.traces[key] = RowTrace(None, frozenset().union(*(t.all_rows() for t in present)), **flags)
                continue
            depth = max(len(t.shadows or ()) for t in present)
            layers = []
            for i in range(depth):
                held = [None if t is None or not t.shadows else t.shadows[min(i, len(t.shadows) - 1)] for t in traces]
                layers.append(cat(operation, held, shapes, rest, kwargs, output))
            whole = tuple(s for s in layers if s is not None)
            lost = len(whole) < depth
            rows = frozenset().union(*(t.all_rows() for t in present)) if lost else None
            made.traces[key] = RowTrace(None if lost else whole, rows, **flags)
        return made

    def _combine(self, number: int, operation: Operation, contents: list[Content]) -> list[Content]:
        """An operation that works element by element, pools, reduces or chooses."""
        name = operation.name
        made = []
        valued = any(c.traces or (c.data and not c.parts) for c in contents)
        for output in operation.outputs:
            shape = self.graph.shapes[output] if output >= 0 else ()
            content = Content(data=any(c.data for c in contents), before=sources_of(contents))
            content.chosen = frozenset().union(*(c.chosen for c in contents))
            content.scores = frozenset().union(*(c.scores for c in contents))
            content.weights = frozenset().union(*(c.weights for c in contents))
            if name in kinds.SOFTMAXES and content.scores:
                axis = axis_of(operation)
                self.attending |= dict.fromkeys(content.scores, axis if axis < 0 else axis - len(shape))
                content.weights = content.scores
            for held in contents:
                for key, trace in held.traces.items():
                    moved = self._through(operation, key, trace, shape, contents)
                    content.traces[key] = joined(content.traces.get(key), moved)
            made.append(content)
        self._meetings(number, operation, contents)
        self._weigh(operation, contents)
        if name in kinds.ADDS:
            self._mark_added(number, made[0], contents)
        if name in kinds.CHOICES:
            self._choose(operation, contents[0], made)
        self._enter(operation, contents, made, valued)
        return made

    def _through(
        self, operation: Operation, key: int, trace: RowTrace, shape: tuple[int, ...], contents: list[Content]
    ) -> RowTrace:
        name = operation.name
        bent = trace.bent or name not in kinds.LINEAR
        if name in kinds.MULTIPLIES and any(
            (c.traces or (c.data and not c.parts)) and key not in c.traces for c in contents
        ):
            bent = True
        scored = trace.scored
        if (
            name in kinds.SCORES
            and trace.shadows
            and any(varies(s, axis_of(operation)) for s in trace.shadows if s.dim())
        ):
            scored = True
        if trace.shadows is None:
            return replace(trace, bent=bent, scored=scored)
        shadows: list[Tensor | None] = []
        for shadow in trace.shadows:
            if name in kinds.SUMS or name in kinds.EXTREMES:
                axes = axes_of(operation, shadow.dim())
                if name in kinds.SUMS and axes is not None and len(axes) == 1 and self._few(shadow, axes[0]):
                    # The sum of a few rows holds each of them.
                    shadows += [reshaped(each, shape) for each in shadow.unbind(axes[0])]
                    continue
                moved = reduced(shadow, axes, len(shape) == shadow.dim()) if axes is not None else shadow
                if moved is None and name in kinds.EXTREMES and axes is not None and len(axes) == 1:
                    self._maximum(operation, key, trace, axes[0])
                shadows.append(None if moved is None else resized(moved, shape))
            elif name == "glu":
                self._gate(operation, key, trace)
                shadows.append(None)
            elif name in kinds.CHOICES or name == "write":
                shadows.append(shadow if name == "write" and tuple(shadow.shape) == shape else None)
            else:
                shadows.append(resized(shadow, shape))
        if any(s is None for s in shadows):
            return replace(trace, shadows=None, rows=trace.all_rows(), bent=bent, scored=scored)
        held = tuple(s for s in shadows if s is not None)
        if len(held) > FEW:
            return replace(trace, shadows=None, rows=trace.all_rows(), bent=bent, scored=scored)
        return replace(trace, shadows=held, bent=bent, scored=scored)

    @staticmethod
    def _few(shadow: Tensor, axis: int) -> bool:
        return 1 < shadow.shape[axis] <= FEW and varies(shadow, axis)

    def _gate(self, operation: Operation, key: int, trace: RowTrace) -> None:
        axis = operation.args[1] if len(operation.args) > 1 else -1
        for shadow in trace.shadows or ():
            for i, half in enumerate(shadow.chunk(2, axis)):
                place = (id(operation), i)
                self.pieces[key].append(Arrival("up" if i == 0 else "gate", place, rows_in([half])))

    def _maximum(self, operation: Operation, key: int, trace: RowTrace, axis: int) -> None:
        for shadow in trace.shadows or ():
            if shadow.shape[axis] <= 16:
                for i, member in enumerate(shadow.unbind(axis)):
                    self.pieces[key].append(Arrival("maximum", (id(operation), i), rows_in([member])))

    def _meetings(self, number: int, operation: Operation, contents: list[Content]) -> None:
        """Two parts of one output that meet: a gate where they are multiplied, a rotation where both are linear."""
        if len(contents) < 2:
            if operation.name not in kinds.LINEAR and operation.name not in kinds.REDUCES:
                for key, trace in contents[0].traces.items():
                    self._arrive(key, "bent", (number, 0), trace)
            return
        if operation.name in ("write", "copy", "index_put", "scatter"):
            return
        if operation.name in kinds.MULTIPLIES:
            self._scale(number, contents)
        for key in {
            k for i, c in enumerate(contents) for k in c.traces if any(k in o.traces for o in contents[i + 1 :])
        }:
            present = [(i, c.traces[key]) for i, c in enumerate(contents) if key in c.traces]
            rows = [t.all_rows() for _, t in present]
            if any(a & b for i, a in enumerate(rows) for b in rows[i + 1 :]) or not all(rows):
                continue
            if operation.name in kinds.ADDS and not any(t.bent for _, t in present):
                continue
            for (i, trace), held in zip(present, rows, strict=True):
                kind = "meeting"
                if operation.name in kinds.MULTIPLIES:
                    others = [t for j, t in present if j != i]
                    kind = "gate" if trace.bent and not any(t.bent for t in others) else "meeting"
                    if not trace.bent and any(t.bent for t in others):
                        kind = "up"
                self.pieces[key].append(Arrival(kind, (number, i), held, trace.bent))

    def _scale(self, number: int, contents: list[Content]) -> None:
        """A function of one output that is multiplied with values of others: a gate."""
        for i, content in enumerate(contents):
            others = [c for j, c in enumerate(contents) if j != i]
            for key, trace in content.traces.items():
                if trace.bent and any(c.data and not c.parts and key not in c.traces for c in others):
                    self._arrive(key, "factor", (number, i), trace)

    def _weigh(self, operation: Operation, contents: list[Content]) -> None:
        """Scores that are multiplied with the output of another layer: one row each, whatever the layer."""
        if operation.name not in kinds.MULTIPLIES or len(contents) < 2:
            return
        for scores in contents:
            for key, trace in scores.traces.items():
                if not trace.scored:
                    continue
                rows = trace.all_rows()
                for others in contents:
                    for other, theirs in others.traces.items() if others is not scores else ():
                        if other == key or key in others.traces:
                            continue
                        call = self.calls[other]
                        if theirs.shadows and trace.shadows:
                            axes = range(-min(s.dim() for s in (*theirs.shadows, *trace.shadows)), 0)
                            mixed = any(
                                call.entry.stack_varies(s, a) and varies(t, a)
                                for a in axes
                                for s in theirs.shadows
                                for t in trace.shadows
                            )
                            if mixed:
                                self.selecting.add(key)
                        if len(rows) == 1:
                            member = (call.weight, call.entry.member)
                            self.weighing[key][next(iter(rows))].add(member)

    def _mark_added(self, number: int, made: Content, contents: list[Content]) -> None:
        """y = x + f(x): what is in f(x) and not in x goes into a residual stream."""
        if len(contents) < 2:
            return
        for stream, branch in ((contents[0], contents[1]), (contents[1], contents[0])):
            sources = 0
            for key in stream.traces:
                sources |= 1 << key
            if not sources:
                continue
            for key in branch.traces:
                if key not in stream.traces and self.calls[key].before & sources:
                    self._arrive(key, "added", (number, 0), branch.traces[key])  # maybe some of its rows alone
                    made.traces[key] = replace(made.traces[key], added=True)

    def _choose(self, operation: Operation, content: Content, made: list[Content]) -> None:
        for key, trace in content.traces.items():
            if trace.shadows and any(s.dim() and varies(s, axis_of(operation)) for s in trace.shadows):
                for i, output in enumerate(operation.outputs):
                    if output >= 0 and not self.graph.floating[output]:
                        made[i].chosen |= {key}
        for i, output in enumerate(operation.outputs):
            if output >= 0 and not self.graph.floating[output]:
                made[i].traces = {}

    def _enter(self, operation: Operation, contents: list[Content], made: list[Content], valued: bool) -> None:
        """Parameters among the arguments: they stay parameters as long as only constants meet them."""
        names = {name for c in contents for name in c.parts}
        if not names:
            return
        if valued and not all(c.parts or not c.data for c in contents):
            modulated = any(
                p.indices is not None
                and p.indices.dim() >= 2
                and len(self.graph.shape_of(n)) > 2
                and sum(s > 1 for s in self.graph.shape_of(n)) > 1
                for c in contents
                for n, p in c.parts.items()
            )
            for name in names:
                if modulated and operation.name in kinds.MULTIPLIES:  # a kernel that a style modulates stays a kernel
                    part = next(c.parts[name] for c in contents if name in c.parts)
                    shape = self.graph.shapes[operation.outputs[0]]
                    held = None if part.indices is None else resized(part.indices, shape)
                    made[0].parts[name] = part.with_indices(held).noted("multiplied by a value")
                else:
                    self.entered[name].append(Entry.plain(self.graph, name, "elementwise"))
            return
        constants = [c for c in contents if not c.parts]
        for i, output in enumerate(operation.outputs):
            shape = self.graph.shapes[output] if output >= 0 else ()
            for name in names:
                parts = [c.parts[name] for c in contents if name in c.parts]
                sized = [i for i in operation.inputs if not self.content(i).parts and self.graph.shapes[i]]
                made[i].parts[name] = changed(operation.name, parts, shape, bool(constants and sized), len(names))
