"""What is known about neurons while a graph is walked, and the wiring that follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import nn

from rekindle.consumers.operations import RECURRENT
from rekindle.consumers.wiring import Consumer, Group, Layer, Order, Reading, Wiring, as_layer


@dataclass(frozen=True)
class Flow:
    """Neurons on their way: whose they are, how the tensor is laid out, and where they can be read next."""

    sources: frozenset[str]
    width: int
    order: Order
    pending: bool = True  # the next module that takes this value shows the neurons' activity
    active: bool = False  # a nonlinearity has been passed
    spatial: int = 0  # how many axes follow the channels


@dataclass
class Trace:
    """What walking one or more graphs has found; layer names are those of the whole model."""

    how: str
    consumed: dict[str, list[tuple[frozenset[str], Order]]] = field(default_factory=dict)
    norms: dict[str, dict[str, nn.Module]] = field(default_factory=dict)
    readings: dict[frozenset[str], Reading] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    unreached: dict[str, str] = field(default_factory=dict)

    def refuse(self, flow: Flow, reason: str) -> None:
        """No layer of this flow can be wired."""
        for source in flow.sources:
            self.refused.setdefault(source, reason)

    def joined(self, other: Trace) -> Trace:
        """This trace, and the other's findings about layers that this one did not reach."""
        new = set(self.unreached) - set(other.unreached)
        if not new:
            return replace(self, unreached={n: f"{r}; {other.unreached.get(n, '')}" for n, r in self.unreached.items()})
        merged = replace(self, how=f"{self.how} and {other.how}", unreached=dict(other.unreached))
        for name, uses in other.consumed.items():
            if any(sources & new for sources, _ in uses):
                merged.consumed[name] = uses  # the other saw the whole model, this one perhaps a part
        merged.norms.update({k: v for k, v in other.norms.items() if k in new})
        merged.late.update(other.late & new)
        merged.refused.update({k: v for k, v in other.refused.items() if k in new})
        merged.readings.update({k: v for k, v in other.readings.items() if k <= new})
        return merged

    def wiring(self, model: nn.Module) -> Wiring:
        """The groups that survived, and the reasons for all other layers."""
        layers = {n: layer for n, m in model.named_modules() if (layer := as_layer(n, m)) is not None}
        refused = {**self.unreached, **self.refused}
        for name, module in model.named_modules():
            if isinstance(module, RECURRENT):
                refused[name] = "its neurons feed back into its own gates"
        self._refuse_shared(model, layers, refused)
        unions = _unions([sources for uses in self.consumed.values() for sources, _ in uses])
        groups = []
        for union in unions:
            bad = [s for s in union if s in refused]
            if bad:
                refused.update({s: refused[bad[0]] for s in union if s not in refused})
                continue
            groups.append(self._group(union, layers))
        taken = {maker.name for group in groups for maker in group.makers}
        for name in layers:
            if name not in taken:
                refused.setdefault(name, "its output reaches no layer")
        order = list(layers)
        groups.sort(key=lambda group: order.index(group.name))
        kept = {n: r for n, r in refused.items() if n not in taken}
        return Wiring(tuple(groups), dict(sorted(kept.items(), key=lambda i: _place(order, i[0]))), self.how)

    def _refuse_shared(self, model: nn.Module, layers: dict[str, Layer], refused: dict[str, str]) -> None:
        owners: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            for parameter in module._parameters.values():
                if parameter is not None:
                    owners.setdefault(id(parameter), []).append(name)
        for name, layer in layers.items():
            reason = None
            if layer.module._parameters.get("weight") is None:
                reason = "its weight is parametrized"
            elif len(owners[id(layer.weight)]) > 1:
                reason = f"its weight is shared by {', '.join(owners[id(layer.weight)])}"
            if reason is not None:
                refused[name] = reason
            for sources, _ in self.consumed.get(name, []):
                if reason is not None:
                    refused.update({s: f"it feeds {name}, but {reason}" for s in sources if s not in refused})
        for name, uses in self.consumed.items():
            if len({sources for sources, _ in uses}) > 1:
                for sources, _ in uses:
                    refused.update(dict.fromkeys(sources, f"it feeds {name}, which reads several layers"))

    def _group(self, union: frozenset[str], layers: dict[str, Layer]) -> Group:
        makers = tuple(layers[name] for name in layers if name in union)
        consumers, norms = {}, {}
        for name, uses in self.consumed.items():
            for sources, order in uses:
                if sources & union:
                    consumers[name] = Consumer(layers[name], makers[0].out_size, order)
        for source in union:
            norms.update(self.norms.get(source, {}))
        reading = self.readings.get(union)
        if reading is None:
            first = next(iter(consumers.values()))
            reading = Reading(first.layer.name, "input", first.order)
        return Group(makers, tuple(consumers.values()), tuple(norms.items()), reading, bool(self.late & union))


def _place(order: list[str], name: str) -> int:
    return order.index(name) if name in order else len(order)


def _unions(sets: list[frozenset[str]]) -> list[frozenset[str]]:
    """Sources that ever met elementwise belong together."""
    whole: list[frozenset[str]] = []
    for one in filter(None, sets):
        meeting = [other for other in whole if other & one]
        whole = [other for other in whole if not other & one] + [one.union(*meeting)]
    return whole
