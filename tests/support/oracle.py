"""The judge of plans: what the autograd graph of a real run says about output layers, cut weights and routers.

`Truth.of(model, calls)` runs the model and reads the graph; `mistakes(plan, truth)` compares. Where the graph does not
settle a question (an encoder's features that are returned besides the logits) either answer is right.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autograd_graph import ATTENTION, CUT, JOIN, KEEPS, LINEAR, MOVE, PRODUCT, Graph, Node, Place, tensors_in

MOST_PLACES = 40
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
SCORES = re.compile(r"(Softmax|Sigmoid|Softplus|LogSoftmax|Topk)Backward\d*")


@dataclass
class Truth:
    """What a run showed. `heads` end in an output, `near` reach one (features, streams): these may be heads too.

    `parts` gives for a cut weight a number for each of its elements, 0 where the run does not tell; `whole` are weights
    of which every place uses all rows (what is used in parts, but in the same way, is in neither); `used` are the
    parameters behind what was returned.
    """

    heads: set[str] = field(default_factory=set)
    near: set[str] = field(default_factory=set)
    routers: set[str] = field(default_factory=set)
    parts: dict[str, Tensor] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    matrices: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    looked_up: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, model: nn.Module, *calls: Callable[[], Any], backbone: bool = False) -> Truth:
        """Run the calls (each returns tensors) and read their graphs; a backbone has no sure output layers."""
        truth, frozen = cls(), [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
        parameters = dict(model.named_parameters())
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            with torch.random.fork_rng(), torch.enable_grad():
                torch.manual_seed(0)
                for call in calls:
                    graph = Graph(tensors_in(call()), parameters)
                    truth._add(graph, parameters, {id(m): m for m in model.modules()}, backbone)
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
        for name in truth.routers & truth.parts.keys():  # which of its rows arrive somewhere is up to the data
            del truth.parts[name]
        cut = {NUMBER.sub("*", name) for name in truth.parts}  # one layer of a network is cut as the others are
        truth.whole = {name for name in truth.whole if NUMBER.sub("*", name) not in cut}
        return truth

    def _add(self, graph: Graph, parameters: dict[str, Tensor], modules: dict[int, nn.Module], backbone: bool) -> None:
        self.used |= {name for node in graph.nodes if (name := graph.parameter(node)) is not None}
        self.matrices |= {n for weights in graph.products.values() for names in weights.values() for n in names}
        for node in graph.nodes:
            if node.name().startswith("Embedding"):
                self.looked_up |= {n for s, _ in node.next_functions if s is not None and (n := graph.parameter(s))}
        heads, near = output_layers(graph)
        self.heads |= set() if backbone else heads
        self.near |= near | heads
        stacks = {p.shape[0] for p in parameters.values() if p.dim() > 2}
        stacks |= {len(m) for m in modules.values() if isinstance(m, nn.ModuleList) and len(m) > 1}
        self.routers |= routers(graph, parameters, stacks)
        for name, labels in cuts(graph).items():
            if labels is None:
                continue
            if len(labels.unique()) - int((labels == 0).any()) > 1:
                self.parts[name] = labels
            else:
                self.whole.add(name)


def output_layers(graph: Graph) -> tuple[set[str], set[str]]:
    """(sure, possible): matrices that reach a returned tensor first; sure are those that no other of them reads."""
    sure: set[str] = set()
    possible: set[str] = set()
    behind = [_behind_matrices(graph, t.grad_fn) for t in graph.returned]
    for i, tensor in enumerate(graph.returned):
        plain, mixed = _first_products(graph, tensor.grad_fn)
        names = {n for node in plain | mixed for ns in graph.products[node].values() for n in ns}
        possible |= names
        base = _unmoved(tensor.grad_fn)
        if any(base & behind[j] for j in range(len(behind)) if j != i):
            continue  # read again inside: features that are returned as well
        inner = {node for other in plain for node in plain & _behind(graph, other) if node is not other}
        streams = {n for node in inner for ns in graph.products[node].values() for n in ns}
        last = {node for node in plain - inner if "Rnn" not in node.name()}
        sure |= {n for node in last for ns in graph.products[node].values() for n in ns} - streams
    return sure, possible


def _first_products(graph: Graph, root: Node) -> tuple[set[Node], set[Node]]:
    """Products with a parameter that are met first on the way back, apart those behind an attention."""
    plain: set[Node] = set()
    mixed: set[Node] = set()
    seen: set[tuple[Node, bool]] = set()
    stack = [(root, False)]
    while stack:
        node, attended = stack.pop()
        if (node, attended) in seen:
            continue
        seen.add((node, attended))
        weights = graph.products.get(node)
        if weights:
            (mixed if attended else plain).add(node)
        through = [
            s for i, (s, _) in enumerate(node.next_functions) if s is not None and (not weights or _adds(node, i))
        ]
        softmax = PRODUCT.fullmatch(node.name()) and (
            ATTENTION.match(node.name()) or any("Softmax" in n.name() for s in through for n in _unmoved(s, True))
        )
        stack += [(s, attended or bool(softmax)) for s in through]
    return plain, mixed - plain


def _adds(node: Node, operand: int) -> bool:
    return operand == 0 and node.name().startswith(("Addmm", "Baddbmm", "Addbmm", "Addmv"))


def _unmoved(node: Node, dropout: bool = False) -> set[Node]:
    """The nodes before everything that only moves elements, or normalizes them."""
    found, stack = {node}, [node]
    while stack:
        name = (node := stack.pop()).name()
        if MOVE.fullmatch(name) or "Norm" in name or (dropout and ("Mul" in name or "Dropout" in name)):
            sources = [s for s, _ in node.next_functions if s is not None and s not in found]
            fresh = [s for s in sources if s.next_functions]  # a norm's own weight is no value that is read again
            found.update(fresh)
            stack += fresh
    return found


def _behind(graph: Graph, product: Node) -> set[Node]:
    return set(graph._sorted([s for s, _ in product.next_functions if s is not None]))


def _behind_matrices(graph: Graph, root: Node) -> set[Node]:
    plain, mixed = _first_products(graph, root)
    starts = [s for node in plain | mixed for s, _ in node.next_functions if s is not None]
    return set(graph._sorted(starts))


def cuts(graph: Graph) -> dict[str, Tensor | None]:
    """For each matrix: which of its elements go the same way, as numbers from 1; None where that is not known."""
    signatures: dict[str, dict[Any, Tensor]] = defaultdict(dict)
    unsure: set[str] = set()
    partial: set[str] = set()
    names: set[str] = set()
    for product, weights in graph.products.items():
        mine = {n for group in weights.values() for n in group}
        names |= mine
        region = graph.region(product)
        for operand in weights:
            if any(CUT.fullmatch(n.name()) for n in graph._sorted([product.next_functions[operand][0]])):
                # A product with a slice of a parameter: the other slices are other matrices.
                for name, mask in (graph.elements(product, (product, None, 0), region) or {}).items():
                    signatures[name]["slice", product] = mask
        if not any(CUT.fullmatch(r.name()) for places in region.values() for r, _ in places):
            continue
        whole = graph.elements(product, (product, None, 0), region)
        if whole is None or not _cuts_rows(graph, product, region, whole):
            continue
        ends = _ends(graph, product, region)
        # Where one matrix reads all rows, another that reads some of them as well may just look at them.
        read = [masks for kind, masks in ends if kind[0] == "matrix" and masks]
        seen = {n for masks in read for n, mask in masks.items() if not (whole[n] & ~mask).any()}
        for kind, masks in ends:
            if masks is None:
                (partial if kind == "more" else unsure).update(mine)
                continue
            for name, mask in masks.items():
                if kind[0] == "matrix" and name in seen and (whole[name] & ~mask).any():
                    partial.add(name)
                    continue
                held = signatures[name].get(kind)
                signatures[name][kind] = mask if held is None else held | mask
                if (whole[name] & ~mask).any():
                    partial.add(name)
    labels: dict[str, Tensor | None] = {}
    for name in names:
        if name in unsure:
            labels[name] = None
        elif name not in signatures:
            labels[name] = torch.ones(1, dtype=torch.long)
        else:
            numbers = _numbered(list(signatures[name].values()))
            # Places of one kind that each use some of the rows: whether those are one matrix is not to be told.
            labels[name] = None if name in partial and numbers.max() < 2 else numbers
    return labels


def _numbered(masks: list[Tensor]) -> Tensor:
    stacked = torch.stack(masks, -1).reshape(-1, len(masks)).long()
    _, labels = stacked.unique(dim=0, return_inverse=True)
    labels = labels + 1
    labels[stacked.sum(1) == 0] = 0
    return labels.reshape(masks[0].shape)


def _cuts_rows(graph: Graph, product: Node, region: dict[Node, list[Place]], whole: dict[str, Tensor]) -> bool:
    """Whether some split or slice in the region leaves out elements of the weight that the whole value depends on."""
    for node in [n for n in region if CUT.fullmatch(n.name()) and n is not product]:
        for output in range(len(node._input_metadata)):
            masks = graph.elements(product, (node, None, output), region)
            if masks and any((whole[n] & ~mask).any() for n, mask in masks.items()):
                return True
    return any(r.name().startswith("Glu") for places in region.values() for r, _ in places)


def _ends(graph: Graph, product: Node, region: dict[Node, list[Place]]) -> list[tuple[Any, Any]]:
    """(kind, elements) of every place where rows of this product are used, until the next matrix."""
    ends: list[tuple[Any, Any]] = []
    returned = {t.grad_fn for t in graph.returned}
    nodes = sorted(region, key=lambda n: -graph.order[n])
    for node in nodes:
        if node in returned:
            ends.append((("returned",), graph.elements(product, (node, None, 0), region)))
        for reader, operand in region[node]:
            if len(ends) > MOST_PLACES:
                return [*ends, ("more", None)]
            kind = _kind(graph, reader, operand)
            if reader.name().startswith("Glu"):
                ends += _halves(graph, product, region, reader)
            elif kind is not None:
                ends.append((kind, graph.elements(product, (reader, operand), region)))
    return ends


def _kind(graph: Graph, reader: Node, operand: int) -> Any:
    """What a place does with the value that it reads; None if it only hands it on."""
    name = reader.name()
    if PRODUCT.fullmatch(name):
        weights = graph.products.get(reader)
        if weights:
            return None if _adds(reader, operand) else ("matrix", frozenset().union(*weights.values()))
        return name, operand, _before_softmax(graph, reader)
    if JOIN.fullmatch(name):
        others = [s for i, (s, _) in enumerate(reader.next_functions) if i != operand and s is not None]
        return (name, operand) if any(graph.source(s)[1] for s in others) else None
    if KEEPS.fullmatch(name):
        return None if "Norm" in name else ("activation", name)
    return None if MOVE.fullmatch(name) or LINEAR.fullmatch(name) else (name, operand)


def _before_softmax(graph: Graph, product: Node) -> bool:
    region = graph.region(product)
    return any("Softmax" in r.name() for places in region.values() for r, _ in places)


def _halves(graph: Graph, product: Node, region: dict[Node, list[Place]], glu: Node) -> list[tuple[Any, Any]]:
    source, index = glu.next_functions[0]
    shape = tuple(source._input_metadata[index].shape)
    axis = glu._saved_dim if glu._saved_dim < len(shape) else glu._saved_dim - 2**64
    ends = []
    for half in range(2):
        seed = torch.zeros(shape)
        seed.narrow(axis, half * shape[axis] // 2, shape[axis] // 2).copy_(torch.rand(1) + 0.5)
        ends.append((("Glu", half), graph._back(product, source, index, seed, region)))
    return ends


def routers(graph: Graph, parameters: dict[str, Tensor], stacks: set[int]) -> set[str]:
    """Matrices with as many outputs as some stack has members, whose scores are selected and multiply other values."""
    chosen = set()
    ends = graph.products.get  # a product with a parameter
    for product, weights in graph.products.items():
        names = {n for group in weights.values() for n in group}
        if not any(min(parameters[n].shape[:2]) in stacks or parameters[n].shape[0] in stacks for n in names):
            continue
        places = [place for read in graph.region(product).values() for place in read]
        readers = [r.name() for r, _ in places]
        scored = any(SCORES.fullmatch(name) for name in readers)
        picked = any(name.startswith(("Topk", "Gather", "Sort", "Max")) for name in readers)
        meets = [(r, i) for r, i in places if JOIN.fullmatch(r.name()) or (PRODUCT.fullmatch(r.name()) and not ends(r))]
        weighs = any(_kind(graph, r, i) is not None for r, i in meets)
        if scored and picked and weighs:
            chosen |= names
    return chosen


@dataclass(frozen=True)
class Mistake:
    """One decision of a plan that the run contradicts."""

    kind: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}: {self.text}"


def mistakes(entries: Iterable[Any], truth: Truth, *, example: bool = False) -> list[Mistake]:
    """Where a plan's entries (`plan.entries`) disagree with what the run showed.

    Without an example only changes count: a weight that is projected and must not be. With one, refusals count too.
    """
    wrong = []
    for entry in entries:
        names = {entry.name, entry.key, *entry.also}
        projected = entry.refusal is None
        if projected and names & truth.heads:
            wrong.append(Mistake("output", entry.name, "reaches an output and is projected"))
        if projected and names & truth.routers:
            wrong.append(Mistake("router", entry.name, "selects experts and is projected"))
        labels = next((truth.parts[n] for n in names if n in truth.parts), None)
        if projected and labels is not None and not names & truth.heads and _crosses(entry, labels):
            parts = [int((labels == i).sum()) for i in labels.unique() if i]
            wrong.append(Mistake("cut", entry.name, f"parts of {parts} elements are projected as one"))
        if not example:
            continue
        reason = entry.refusal or ""
        used = names & truth.matrices
        if used and "output head" in reason and not names & (truth.near | truth.heads):
            wrong.append(Mistake("false head", entry.name, reason))
        if projected and not names & truth.used:
            wrong.append(
                Mistake("unreached", entry.name, "is projected; it may have run, but no returned value depends on it")
            )
        if projected and len(entry.blocks) > 1 and names & truth.whole:
            wrong.append(Mistake("cut", entry.name, f"{len(entry.blocks)} blocks, but all rows go the same way"))
    return wrong


def _crosses(entry: Any, labels: Tensor) -> bool:
    """Whether one matrix of the plan holds elements of two parts."""
    for block in entry.blocks:
        inside = block.read(labels.expand(block.layout.shape)).reshape(block.count, -1)  # a magnitude's: of each row
        for matrix in inside:
            if len(matrix[matrix > 0].unique()) > 1:
                return True
    return False


def projectable(truth: Truth, parameters: dict[str, Tensor]) -> set[str]:
    """Matrices that could be projected: met in a product, no output layer, no router, no table, wider than one."""
    names = truth.matrices - truth.heads - truth.near - truth.routers - truth.looked_up
    return {n for n in names if parameters[n].dim() > 1 and min(parameters[n].shape[:2]) > 1}
