"""Where a plan's weights are read and written: the protocol, and the store that is a live model.

A store knows one thing: how to read an entry's weight and put matrices back into it. `LiveStore` also knows what else
changes with a live model: the parameters that an optimizer holds, biases, stale gradients, and mirrors
(target or EMA networks) that must keep the same weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from rekindle.blocks import parametrized
from rekindle.blocks.finding import Block, find
from rekindle.blocks.names import is_sharded, locate, locations, partition_of
from rekindle.projection.biases import bias_entries, bias_names, zero
from rekindle.projection.entries import PlanEntry
from rekindle.sharding.spread import Spread
from rekindle.sharding.team import local


class Store(Protocol):
    """What `execute` needs: a live model, shards and a checkpoint file all have it."""

    def read(self, entry: PlanEntry) -> Tensor:
        """The whole weight of an entry, detached; may share memory with it."""
        ...

    def write(self, entry: PlanEntry, block: Block, matrices: Tensor) -> Tensor | None:
        """Put the matrices of one block back, cast to the dtype in which the weight is stored.

        Returns the whole weight as it is now stored, or None if that is what `read` gives. A store whose `read` keeps
        returning the old weight must return it, or the certificate would be wrong.
        """
        ...


@dataclass(frozen=True)
class LiveWeight:
    """Where a weight of a live model is read and written: its entry in the plan, and the module that holds it.

    The entry itself knows no tensors, so that it can be saved and applied elsewhere.

    >>> from rekindle.projection.targets import choose
    >>> net = nn.Sequential(nn.Linear(3, 2))
    >>> weight = LiveWeight.at(net, choose(find(net), "all")[0])
    >>> weight.name, weight.tensor, weight.computed, tuple(weight.read().shape)
    ('0.weight', 'weight', False, (2, 3))
    """

    entry: PlanEntry
    owner: nn.Module
    tensor: str
    computed: bool  # from other parameters, by a parametrization

    @classmethod
    def at(cls, model: nn.Module, entry: PlanEntry, key: str = "") -> LiveWeight:
        """The weight in this model; `key` is its name in `named_parameters()` where that differs from the entry's."""
        place = locate(model, key or entry.key)
        return cls(entry, place.owner, place.tensor, place.computed)

    @property
    def name(self) -> str:
        """The clean name."""
        return self.entry.name

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks to be changed."""
        return self.entry.blocks

    @property
    def whole(self) -> bool:
        """Whether these are all of its blocks."""
        return not self.entry.left

    def read(self) -> Tensor:
        """Its present value."""
        if self.computed:
            return parametrized.read(self.owner, self.tensor).detach()
        value: Tensor = getattr(self.owner, self.tensor).detach()
        return value

    def write(self, block: Block, matrices: Tensor) -> None:
        """Write one block in place; a computed weight is written through its parametrization."""
        value = self.read()
        if self.computed:
            value = value.clone()
        with torch.no_grad():
            block.write(value, matrices)
            if self.computed:
                parametrized.write(self.owner, self.tensor, value)

    def parameters(self) -> dict[str, Parameter]:
        """The parameters behind it, as an optimizer holds them, by the names of errors and receipts."""
        name = self.name
        if not self.computed:
            return {name: getattr(self.owner, self.tensor)}
        held = parametrized.originals(self.owner, self.tensor)
        return {f"{name} (original {i})": parameter for i, parameter in enumerate(held)}

    def bias(self) -> Parameter | None:
        """The bias that is added to this weight's output, if there is one."""
        held = (self.owner._parameters.get(name) for name in bias_names(self.tensor))
        return next((bias for bias in held if bias is not None), None)

    def outputs(self) -> Any:
        """An index to the entries of the bias that belong to its blocks."""
        bias = self.bias()
        assert bias is not None
        return bias_entries(self.tensor, self.blocks, self.read(), bias.numel())


class LiveStore:
    """The weights of a model in memory, and of its mirrors.

    Everything is resolved and checked on creation: each entry must be there with the planned shape, in every mirror
    too. `biases="zero"` zeroes the biases of written blocks as well.

    >>> from rekindle.projection.planning import plan
    >>> model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    >>> store = LiveStore(model, plan(model).selected)
    >>> list(store.parameters())
    ['0.weight', '1.weight']
    """

    def __init__(
        self,
        model: nn.Module,
        entries: Iterable[PlanEntry],
        *,
        mirrors: nn.Module | Iterable[nn.Module] = (),
        biases: Literal["keep", "zero"] = "keep",
    ) -> None:
        if biases not in ("keep", "zero"):
            raise ValueError(f"biases={biases!r} is neither 'keep' nor 'zero'")
        self.mirrors = (mirrors,) if isinstance(mirrors, nn.Module) else tuple(mirrors)
        self.biases_zeroed = 0
        entries = tuple(entries)
        placed = locations(model)
        places = {key: place for key, _, place in placed}
        parameters = self._parameters = {key: parameter for key, parameter, _ in placed}
        keys = {entry.name: entry.key for entry in entries}
        if not parameters.keys() >= set(keys.values()):
            # Planned on the bare model and carried out on a wrapped one, or the other way round.
            keys |= {found.name: found.key for found in find(model, sharded=True) if found.name in keys}
        self._keys = keys
        self._weights: dict[str, LiveWeight] = {}
        for entry in entries:
            if keys[entry.name] not in parameters:
                raise KeyError(f"the plan's parameter {entry.name!r} is not in the model")
            place = places[keys[entry.name]]
            weight = LiveWeight(entry, place.owner, place.tensor, place.computed)
            self._weights[entry.name] = _checked(weight, "the model")
        _check_apart(self._weights)
        self._copies = {entry.name: self._mirrored(entry) for entry in entries}
        self._aliases = {name: _sharing(weight, parameters) for name, weight in self._weights.items()}
        self._outputs = {
            entry.name: self._weights[entry.name].outputs()
            for entry in entries
            if biases == "zero" and _trains(self._weights[entry.name].bias())
        }
        for name in self._outputs:
            for each in (self._weights[name], *self._copies[name]):
                bias = each.bias()
                if bias is not None:
                    _check_writable(f"the bias of {name}", bias)

    def read(self, entry: PlanEntry) -> Tensor:
        """The weight's present value."""
        return self._weights[entry.name].read()

    def write(self, entry: PlanEntry, block: Block, matrices: Tensor) -> Tensor:
        """Write one block to the model, then what the model now holds to the mirrors."""
        weight = self._weights[entry.name]
        weight.write(block, matrices)
        stored = weight.read()
        for copy in self._copies[entry.name]:
            copy.write(block, block.read(stored))
        return stored

    def spreads(self, known: Mapping[str, Spread]) -> dict[str, Spread]:
        """How the entries' weights are distributed over processes, by the entries' names; `known` is by parameter."""
        return {name: known[key] for name, key in self._keys.items() if key in known and name in self._weights}

    def tensors(self) -> dict[str, Tensor]:
        """The parameters of the entries whose weight is one."""
        plain = {name: weight for name, weight in self._weights.items() if not weight.computed}
        return {name: getattr(weight.owner, weight.tensor) for name, weight in plain.items()}

    def copy_to_mirrors(self, entry: PlanEntry, pieces: Iterable[tuple[slice, ...]]) -> None:
        """Give mirrors the parts of this rank's own shard that were written; a whole weight goes block by block."""
        weight = self._weights[entry.name]
        with torch.no_grad():
            for copy in self._copies[entry.name]:
                if not is_sharded(weight.read()):
                    for block in entry.blocks:
                        copy.write(block, block.read(weight.read()))
                    continue
                for piece in pieces:
                    local(copy.read())[piece] = local(weight.read())[piece]

    def zero_biases(self, names: Iterable[str]) -> set[str]:
        """Zero the trainable biases of these entries, in the mirrors too; those of other blocks of a weight stay.

        Returns their names in `named_parameters()`.
        """
        zeroed = set()
        with torch.no_grad():
            for name in names:
                if name in self._outputs:
                    for each in (self._weights[name], *self._copies[name]):
                        bias = each.bias()
                        if bias is not None:
                            zero(bias, self._outputs[name])
                            zeroed |= {key for key, parameter in self._parameters.items() if parameter is bias}
                    self.biases_zeroed += 1
        return zeroed

    def twice(self) -> dict[str, str]:
        """Entries that share memory with an earlier entry, and the name of that entry."""
        first: dict[int, str] = {}
        shared: dict[str, str] = {}
        for name, weight in self._weights.items():
            value = weight.read()
            own = value if type(value) is Tensor else local(value)
            if weight.computed or not own.numel():  # an empty shard lies nowhere
                continue
            owner = first.setdefault(own.data_ptr(), name)
            shared |= {name: owner} if owner != name else {}
        return shared

    def trial(self, entry: PlanEntry, value: Tensor) -> str | None:
        """Why a parametrized weight, here or in a mirror, could not hold this value; None if it can."""
        each = (self._weights[entry.name], *self._copies[entry.name])
        reasons = [parametrized.trial(weight.owner, weight.tensor, value) for weight in each if weight.computed]
        return next((reason for reason in reasons if reason is not None), None)

    def parameters(self, names: Iterable[str] | None = None) -> dict[str, Parameter]:
        """The parameters of the model that change with these entries (all by default), zeroed biases included."""
        found: dict[str, Parameter] = {}
        for name in self._weights if names is None else names:
            weight = self._weights[name]
            found |= weight.parameters() | self._aliases[name]
            bias = weight.bias() if name in self._outputs else None
            if bias is not None and not any(bias is p for p in found.values()):
                found[f"the bias of {name}"] = bias
        return found

    def tidy(self, names: Iterable[str]) -> tuple[dict[str, Parameter], set[str], int]:
        """After these entries were written: zero the biases, and drop gradients, which belong to weights that are gone.

        Returns the parameters that changed, the names of zeroed biases, and how many gradients were dropped.
        """
        names = tuple(names)
        zeroed, changed = self.zero_biases(names), self.parameters(names)
        stale = [p for p in changed.values() if p.grad is not None]
        for parameter in stale:
            parameter.grad = None
        return changed, zeroed, len(stale)

    def written(self) -> Iterator[Tensor]:
        """Every tensor that may be written, in the mirrors too, and every parameter that changes with them."""
        yield from self.parameters().values()
        for name, weight in self._weights.items():
            for each in (weight, *self._copies[name]):
                yield from each.parameters().values()
                if each.computed:
                    yield from each.owner.buffers()  # the vectors of spectral_norm
                bias = each.bias() if name in self._outputs else None
                if bias is not None:
                    yield bias

    def _mirrored(self, entry: PlanEntry) -> tuple[LiveWeight, ...]:
        copies = []
        for number, mirror in enumerate(self.mirrors):
            key = self._mirror_keys(number).get(entry.name)
            if key is None:
                raise KeyError(f"mirror {number} ({type(mirror).__name__}) has no parameter {entry.name!r}")
            weight = _checked(LiveWeight.at(mirror, entry, key), f"mirror {number}")
            own = self._weights[entry.name]
            _check_alike(own, weight, f"mirror {number}")
            if weight.computed or not _same_memory(weight.read(), own.read()):
                copies.append(weight)
        return tuple(copies)

    def _mirror_keys(self, number: int) -> Mapping[str, str]:
        known: dict[int, Mapping[str, str]] = self.__dict__.setdefault("_mirror_names", {})
        if number not in known:
            known[number] = {found.name: found.key for found in find(self.mirrors[number], sharded=True)}
        return known[number]


def _check_alike(own: LiveWeight, other: LiveWeight, where: str) -> None:
    a, b = own.read(), other.read()
    if is_sharded(a) != is_sharded(b) or (is_sharded(a) and Spread.of(a) != Spread.of(b)):
        raise ValueError(f"{own.name!r} is distributed differently in {where}: shard both networks the same way")


def _checked(weight: LiveWeight, where: str) -> LiveWeight:
    shape, entry = tuple(weight.read().shape), weight.entry
    if shape != tuple(entry.shape):
        raise ValueError(f"{entry.name!r} has shape {shape} in {where}, the plan was made for {tuple(entry.shape)}")
    for parameter in weight.parameters().values():
        _check_writable(entry.name, parameter)
    return weight


def _check_writable(name: str, tensor: Tensor) -> None:
    """Raise for what torch would refuse to write in place, or would write wrongly."""
    if partition_of(tensor) is not None:
        return  # written through DeepSpeed's accessors
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name!r} was made under torch.inference_mode() and cannot be changed outside it: build or load the model "
            "outside, or give it parameters that are clones; nothing was changed"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(
            f"{name!r} is an expanded tensor: several of its entries are one number in memory. Give it memory of its "
            "own (parameter.data = parameter.data.clone()); nothing was changed"
        )
    if tensor.is_meta:
        raise ValueError(f"{name!r} is on the meta device: load the weights first; nothing was changed")
    if _reach(tensor) < tensor.numel() and not is_sharded(tensor):
        raise ValueError(
            f"{name!r} lies over itself in memory (strides {tuple(tensor.stride())}). Give it memory of its own "
            "(parameter.data = parameter.data.clone()); nothing was changed"
        )


def _reach(tensor: Tensor) -> int:
    """How many numbers lie between the first and the last entry, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _check_apart(weights: Mapping[str, LiveWeight]) -> None:
    """Raise where two weights lie partly in the same memory: writing one would undo what was done to the other."""
    held: dict[Any, list[tuple[int, int, str]]] = {}
    for name, weight in weights.items():
        tensor = None if weight.computed else weight.read()
        if tensor is not None and type(tensor.data) is Tensor and tensor.is_contiguous():  # plain, and no shard
            begin = int(tensor.storage_offset()) * tensor.itemsize
            place = (begin, begin + tensor.numel() * tensor.itemsize, name)
            held.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), []).append(place)
    for places in held.values():
        places.sort()
        for (begin, end, one), (start, stop, other) in pairwise(places):
            if begin < stop and start < end and (begin, end) != (start, stop):  # identical: tied, handled already
                raise ValueError(
                    f"{one!r} and {other!r} lie partly in the same memory: give one of them its own "
                    "(parameter.data = parameter.data.clone()); nothing was changed"
                )


def _sharing(weight: LiveWeight, parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Other parameters in the same memory: they change along with this one, and so must their optimizer state."""
    if weight.computed:
        return {}
    own = getattr(weight.owner, weight.tensor)
    return {
        name: other
        for name, other in parameters.items()
        if other is not own and other.layout == own.layout and other.numel() == own.numel() and _same_memory(other, own)
    }


def _same_memory(one: Tensor, other: Tensor) -> bool:
    try:
        mine, its = local(one), local(other)
        return mine.numel() > 0 and mine.data_ptr() == its.data_ptr()  # an empty shard lies nowhere
    except RuntimeError:  # a tensor subclass without memory of its own
        return False


def _trains(bias: Parameter | None) -> bool:
    return bias is not None and bias.requires_grad
