"""What a recorded pass shows about each parameter: layout, parts, output, router, role, whether it ran."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from rekindle.blocks.evidence import Fact, Facts
from rekindle.recording.following import Following
from rekindle.recording.graph import Graph, ModuleCall
from rekindle.recording.normalization import normalizes_in
from rekindle.recording.traces import Arrival, LayerCall, RowTrace
from rekindle.recording.weights import Entry

_MOST_PARTS = 16


def facts_of(graph: Graph) -> Facts:
    """What this pass shows about each parameter.

    >>> import torch
    >>> from torch import nn
    >>> from rekindle.recording.recorder import record
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.GLU(), nn.Linear(4, 2))
    >>> facts = facts_of(record(net, torch.zeros(3, 4)))
    >>> facts["2.weight"].output, [part for part, _, _ in facts["0.weight"].parts]
    (True, ['up', 'gate'])
    """
    followed = Following(graph)
    sinks = _sinks(graph)
    outputs = _outputs(sinks, followed)
    routers = _routers(followed)
    calls: dict[str, list[LayerCall]] = defaultdict(list)
    for call in followed.calls:
        calls[call.weight].append(call)
    facts = {}
    needed = _needed(graph, sinks)
    for name, entries in followed.entered.items():
        held = calls.get(name, [])
        if held and needed and not any(call.operation in needed for call in held):
            facts[name] = Fact(refusal="it ran, but what the model returns for the example does not depend on it")
            continue  # a pooler whose value nobody asked for
        fact = _used(entries)
        # Used transposed somewhere else (a tied decoder), its rows there are the columns here.
        alike = [call for call in held if fact.layout is None or call.entry.layout == fact.layout]
        pieces = [_named(piece, followed) for call in alike for piece in followed.pieces[call.number]]
        fact = _cut(fact, entries, pieces)
        numbers = {call.number for call in held}
        role = "" if fact.parts else _role(pieces, graph)
        fact = replace(fact, output=bool(numbers & outputs), router=bool(numbers & routers), role=role)
        facts[name] = fact
    return Facts(facts, normalizes_in(graph))


def _used(entries: list[Entry]) -> Fact:
    """How a parameter enters: as a matrix if it does so anywhere."""
    solid = [e for e in entries if e.kind in ("matrix", "convolution")]
    if not solid:
        return Fact(entries[0].kind)
    first = next((e for e in solid if e.layout is not None), solid[0])
    notes = tuple(dict.fromkeys(note for entry in solid for note in entry.notes))
    refusal = f"{notes[0]} before it is used: a projection of it is not one of what is used" if notes else first.refusal
    return Fact(first.kind, first.layout if not notes else None, first.taps, refusal=refusal)


def _cut(fact: Fact, entries: list[Entry], pieces: list[Arrival]) -> Fact:
    """The parts into which the rows go."""
    if len({piece.rows for piece in pieces}) < 2:
        return fact
    places: dict[int, set[tuple[str, tuple[int, int]]]] = defaultdict(set)
    kinds_of: dict[tuple[str, tuple[int, int]], str] = {}
    for piece in pieces:
        for row in piece.rows if piece.kind != "factor" else ():
            places[row].add((piece.kind, piece.place))
        kinds_of[piece.kind, piece.place] = piece.kind
    if len({frozenset(held) for held in places.values()}) < 2:
        return fact
    entry = next((e for e in entries if e.layout is not None), None)
    if entry is None or len(entry.out) != 1:
        return replace(fact, layout=None, refusal="cut into parts that go different ways, along several of its axes")
    (factor,) = entry.out
    size, unit = entry.split[factor], entry.units[factor]
    labels: list[set[tuple[str, tuple[int, int]]]] = [set() for _ in range(size)]
    for row, held in places.items():
        labels[(row // unit) % size] |= held
    names = [frozenset(label) for label in labels]
    if len(set(names)) < 2:
        return fact
    period = next(p for p in range(1, size + 1) if size % p == 0 and all(names[i] == names[i % p] for i in range(size)))
    runs: list[tuple[frozenset[tuple[str, tuple[int, int]]], int, int]] = []
    for i, label in enumerate(names[:period]):
        if runs and runs[-1][0] == label:
            runs[-1] = (label, runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((label, i, 1))
    if len(runs) > _MOST_PARTS or len({run[0] for run in runs}) < len(runs):
        return replace(fact, layout=None, refusal="cut into parts that go different ways and lie irregularly")
    parts = []
    taken: set[str] = set()
    for i, (label, start, length) in enumerate(runs):
        name = _name_of({kind for kind, _ in label}) or f"part {i}"
        name = f"part {i}" if name in taken else name
        taken.add(name)
        parts.append((name, start, length))
    if fact.refusal:
        return replace(fact, layout=None, refusal=f"cut into parts, and {fact.refusal}")
    return replace(fact, parts=tuple(parts), period=period)


def _name_of(kinds: set[str]) -> str:
    for name in ("query", "key", "value", "gate", "up"):
        if name in kinds:
            return name
    return ""


def _named(piece: Arrival, followed: Following) -> Arrival:
    """A factor of attention scores by its name: what the softmax goes along are the keys."""
    axis = followed.attending.get(piece.place[0]) if piece.kind == "product" else None
    if axis not in (-1, -2):
        return piece
    return replace(piece, kind=("query", "key")[(piece.place[1] + (axis == -2)) % 2])


def _role(pieces: list[Arrival], graph: Graph) -> str:
    """What the rows of an uncut weight do, where the recording shows it."""
    held = {piece.kind for piece in pieces}
    attends = {piece.kind for piece in pieces if piece.kind in ("query", "key", "value") and not piece.bent}
    if len(attends) == 1:
        return attends.pop()
    passed = {graph.operations[piece.place[0]].name for piece in pieces if piece.kind == "bent"}
    if "factor" in held and passed & {"sigmoid", "hardsigmoid"}:
        return "gate"
    return "not attention" if "weight" in held and not held & {"query", "key", "value", "product"} else ""


def _routers(followed: Following) -> set[int]:
    chosen = set(followed.selecting)
    for key, members in followed.weighing.items():
        weights = list(members.values())
        if len(weights) > 1 and not frozenset.intersection(*map(frozenset, weights)):
            chosen.add(key)
    return chosen


def _sinks(graph: Graph) -> set[int]:
    """The values that a caller gets, of the pass or of a network that is called by itself."""
    sinks = set(graph.returned.values())
    top = [call for call in graph.calls if call.depth == 0]
    for call in top:
        if not _feeds_only(graph, call, top):
            sinks |= set(call.outputs)
    if not graph.returned:
        for operation in graph.operations:
            if operation.depth == 0:
                sinks |= {o for o in operation.outputs if o >= 0 and graph.shapes[o] == () and graph.floating[o]}
    return sinks


def _needed(graph: Graph, sinks: set[int]) -> set[int]:
    """The operations that some sink depends on."""
    wanted, needed = set(sinks), set()
    for number in reversed(range(len(graph.operations))):
        operation = graph.operations[number]
        if not wanted.isdisjoint(operation.outputs):
            needed.add(number)
            wanted.update(operation.inputs)
    return needed


def _outputs(sinks: set[int], followed: Following) -> set[int]:
    """The calls whose value reaches a sink without passing another matrix."""
    found: set[int] = set()
    for place, number in enumerate(sorted(sinks)):
        traces = followed.content(number).traces
        ends = _ends(traces, followed)
        for key, trace in traces.items():
            followed.pieces[key].append(Arrival("output", (-1, place), trace.all_rows()))
        found |= ends
    return found


def _ends(traces: Mapping[int, RowTrace], followed: Following) -> set[int]:
    """Those of the traces in a returned value that are outputs: not the members of a residual stream, not keys and
    values that are kept for later."""
    stream = {key for key, trace in traces.items() if trace.added}
    if stream:
        stems = [followed.calls[key].entry for key in traces.keys() - stream]
        if not stems or not all(_narrows(entry) for entry in stems):
            return set()
    kept = {
        key
        for key in traces
        if not (traces[key].attended or traces[key].bent)  # scores that are returned as well are no keys
        and any(p.kind in ("query", "key", "value", "product") for p in followed.pieces[key])
    }
    return {key for key in traces.keys() - kept if followed.calls[key].entry.kind != "opaque"}


def _narrows(entry: Entry) -> bool:
    layout = entry.layout
    return layout is not None and layout.sizes[1] < layout.sizes[2]


def _feeds_only(graph: Graph, call: ModuleCall, top: list[ModuleCall]) -> bool:
    """Whether some other network reads what this one returned whenever it runs: a trunk before its heads.

    A critic that also reads actions of others does not make the actor its trunk.
    """
    reached = set(call.outputs)
    for operation in graph.operations[call.last :]:
        if reached.intersection(operation.inputs):
            reached.update(operation.outputs)
    readers: dict[int, list[bool]] = defaultdict(list)
    for other in top:
        if other is not call and other.first >= call.last >= 0:
            readers[id(other.module)].append(bool(reached.intersection(other.inputs)))
    for other in top:
        if other is not call and 0 <= other.last <= call.first and id(other.module) in readers:
            readers[id(other.module)].append(False)
    return any(all(reads) for reads in readers.values())
