"""Noting one pass of a model: every operation with the parameters and values that it reads, every call of a module.

`record` runs the model on one batch in isolation. A `Recorder` is put around a training step that runs anyway:

>>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
>>> with Recorder(net) as recorder:
...     net(torch.zeros(4, 2)).sum().backward()
>>> [operation.name for operation in recorder.graph.operations if operation.caller is net[2]]
['t', 'addmm']
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from rekindle.blocks.names import Location, locations, unwrapped
from rekindle.isolation import attributes_kept, call, isolated, surely
from rekindle.recording.graph import Graph, ModuleCall, Operation, Ref

_DEEP = 6  # how far results are opened: a list in a dict in a dataclass, a distribution's fields


class RecordingError(ValueError):
    """The model did not run on the example; the message says why, and what to do."""


def record(
    model: nn.Module,
    batch: object,
    call_model: Callable[[nn.Module, Any], Any] | None = None,
    *,
    training: bool | Collection[nn.Module] = False,
    recorder: Recorder | None = None,
) -> Graph:
    """Run the model once on one batch, noting everything; nothing of it is left behind.

    On the meta device, where there are no values, a check of them (`if mask.all():`) is answered by no.
    `training` puts the model, or these of its modules, into training mode. `call_model(model, batch)` runs something
    else than `model(batch)`: a `training_step`, an agent's `get_value`. `recorder` goes on with what it has.

    >>> graph = record(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.zeros(4, 2))
    >>> [operation.name for operation in graph.operations]
    ['t', 'addmm', 'relu']
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise RecordingError(f"{name} has no shape yet (a lazy module): run the model on the batch once, first")
    device = next((parameter.device for parameter in model.parameters()), None)
    first = recorder is None
    recorder = Recorder(model) if recorder is None else recorder
    try:
        with isolated(model, training=training), attributes_kept(model), torch.no_grad(), recorder, _quiet():
            runs = call if call_model is None else call_model
            # Tensors that a forward makes are where the weights are, if those are nowhere.
            with torch.device("meta") if device is not None and device.type == "meta" else nullcontext():
                result = runs(model, to_device(batch, device))
                if first:
                    recorder.leave(result)
    except RecordingError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        why = f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
        raise RecordingError(
            f"{type(unwrapped(model)).__name__} does not run on the example ({why}); give a batch that "
            "model(batch), or model(**batch) for a dict, takes, on the device of the model"
        ) from error
    return recorder.graph


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning that a compiled part meets the recorder's hooks twice."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*global hooks on modules")
        yield


def to_device(batch: object, device: torch.device | None) -> Any:
    """The batch for a model on the meta device; any other model gets what it was given."""
    if device is None or device.type != "meta":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)([to_device(value, device) for value in batch])
    return batch


class PassMode(TorchDispatchMode):
    """A dispatch mode that also notices when a module is entered and left, as subclasses define it."""

    _handles: tuple[RemovableHandle, ...] = ()
    _inside = False

    def __enter__(self) -> Self:
        try:
            self._handles += (register_module_forward_pre_hook(self._enter_module),)
            self._handles += (register_module_forward_hook(self._leave_module, always_call=True),)
            self._inside = super().__enter__() is self  # type: ignore[no-untyped-call]
            return self
        except BaseException:  # nobody will call __exit__
            surely(self._close)
            raise

    def __exit__(self, *error: object) -> None:
        try:
            self._close()
        except BaseException:  # Ctrl-C on the way out: every module of the program would go on calling these hooks
            self._close()
            raise

    def _close(self) -> None:
        """What `__enter__` did is undone; a second time there is nothing left to do."""
        for handle in self._handles:
            handle.remove()
        if self._inside:
            self._inside = super().__exit__(None, None, None) is not None  # type: ignore[no-untyped-call]

    def _enter_module(self, module: nn.Module, args: Sequence[Any]) -> None:
        raise NotImplementedError

    def _leave_module(self, module: nn.Module, args: Sequence[Any], result: Any) -> None:
        raise NotImplementedError


class Recorder(PassMode):
    """Notes what runs inside the `with` block in `graph`; changes neither the results nor the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        named: dict[str, nn.Parameter] = {}
        computed: list[Location] = []
        self._names: dict[int, str] = {}
        self._owners: dict[int, dict[str, str]] = {}  # id(module) -> its own parameters, by their attribute
        self._computed: dict[int, str] = {}
        for _, parameter, place in locations(model):
            name = self._names.setdefault(id(parameter), place.name)
            named.setdefault(name, parameter)
            computed += [place] * place.computed
            self._owners.setdefault(id(place.owner), {}).setdefault(place.tensor, name)
        for path, module in model.named_modules():
            if isinstance(module, ParametrizationList):
                self._computed[id(module)] = path.replace("parametrizations.", "")
        self._memory = {p.untyped_storage()._cdata: n for n, p in named.items() if _has_memory(p)}
        self._fixed = {id(buffer): name for name, buffer in model.named_buffers()}
        self.graph = Graph(named)
        for place in computed:  # by a hook: the weight is an attribute
            if isinstance(held := place.owner.__dict__.get(place.tensor), Tensor):
                self.graph.computed[place.name] = tuple(held.shape)
        self._numbers: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._stack: list[ModuleCall] = []

    def _close(self) -> None:
        self._stack.clear()
        super()._close()

    def leave(self, result: object) -> None:
        """Note what the caller of the pass gets."""
        for place, tensor in tensors_in(result):
            self.graph.returned[place] = self._number(tensor)

    def link(self, call: ModuleCall, result: object) -> None:
        """What a module returned in another pass stands for what it returned in the recorded one."""
        for (_, tensor), number in zip(tensors_in(result, deep=3), call.outputs, strict=False):
            self._numbers[id(tensor)] = weakref.ref(tensor), number

    def _enter_module(self, module: nn.Module, args: Sequence[Any]) -> None:
        given = tuple(self._number(t) for _, t in tensors_in(args, deep=3))
        entered = ModuleCall(module, len(self._stack), len(self.graph.operations), given)
        self.graph.calls.append(entered)
        self._stack.append(entered)

    def _leave_module(self, module: nn.Module, args: object, result: object) -> None:
        while self._stack:  # a module that raised inside is left without having returned
            left = self._stack.pop()
            left.last = len(self.graph.operations)
            if left.module is module:
                break
        else:
            return
        if id(module) in self._computed and isinstance(result, Tensor):
            name = self._computed[id(module)]
            self.graph.weights[self._new(result)], self.graph.computed[name] = name, tuple(result.shape)
        if result is not None:
            left.outputs = tuple(self._number(t) for _, t in tensors_in(result, deep=3))

    def __torch_dispatch__(self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if torch._C._current_graph_task_id() != -1:  # a backward pass is no part of the recording
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense" and args[0].is_meta and args[0].dtype == torch.bool:
            # A check of values (is this mask all ones?) has no answer without values: no. Numbers stay an error.
            return False
        inputs: list[int] = []
        noted = tuple(self._noted(arg, inputs) for arg in args)
        named = {key: self._noted(value, inputs) for key, value in kwargs.items()}
        result = func(*args, **kwargs)
        schema = func._schema
        if schema.is_mutable and args and isinstance(args[0], Tensor) and inputs:
            if inputs[0] in self.graph.weights:  # an optimizer's step
                return result
            name = name.rstrip("_")
        made = [result] if isinstance(result, Tensor) else result if isinstance(result, list | tuple) else ()
        outputs = tuple(self._new(t) if isinstance(t, Tensor) else -1 for t in made)
        if outputs:
            caller, depth = (self._stack[-1].module, len(self._stack)) if self._stack else (None, 0)
            self.graph.operations.append(Operation(name, func, noted, named, tuple(inputs), outputs, caller, depth))
            if schema.is_mutable and isinstance(args[0], Tensor):
                self._write_through(args[0])
        return result

    def _noted(self, arg: object, inputs: list[int]) -> object:
        if isinstance(arg, Tensor):
            number = self._number(arg)
            inputs.append(number)
            return Ref(number)
        if isinstance(arg, list | tuple) and arg and not isinstance(arg[0], int | float):
            return tuple(self._noted(a, inputs) for a in arg)
        return arg

    def _number(self, tensor: Tensor) -> int:
        entry = self._numbers.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            return entry[1]
        number = self._new(tensor)
        name = self._name_of(tensor)
        if name is not None:
            self.graph.weights[number] = name
        elif id(tensor) in self._fixed:
            self.graph.buffers[number] = self._fixed[id(tensor)]
        return number

    def _new(self, tensor: Tensor) -> int:
        graph = self.graph
        number = len(graph.shapes)
        graph.shapes.append(tuple(tensor.shape))
        floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        graph.floating.append(floating)
        if not floating and not tensor.is_meta and type(tensor) is Tensor:
            graph.kept[number] = tensor
        self._numbers[id(tensor)] = weakref.ref(tensor), number
        return number

    def _name_of(self, tensor: Tensor) -> str | None:
        """The parameter that this tensor is, also where a wrapper has put another object in its place (FSDP2)."""
        name = self._names.get(id(tensor))
        if name is not None:
            return name
        for entered in reversed(self._stack[-2:]):
            for attribute, parameter in entered.module._parameters.items():
                if parameter is tensor:
                    return self._owners.get(id(entered.module), {}).get(attribute)
        if not _has_memory(tensor) or not tensor.dtype.is_floating_point:
            return None
        name = self._memory.get(tensor.untyped_storage()._cdata)  # `.data`, a scripted module's own object
        return name if name is not None and self.graph.parameters[name].shape == tensor.shape else None

    def _write_through(self, tensor: Tensor) -> None:
        """A write into a view changes what it is a view of: that is a new value, made of both."""
        base = tensor._base
        if base is None or base is tensor or id(base) in self._names:
            return
        read = self._number(base), self._number(tensor)
        caller = self._stack[-1].module if self._stack else None
        made = self._new(base)
        arguments = (Ref(read[0]), Ref(read[1]))
        written = Operation("write", None, arguments, {}, read, (made,), caller, len(self._stack))
        self.graph.operations.append(written)


def called_parts(model: nn.Module) -> Iterator[nn.Module]:
    """What a model that is not called itself calls: its children, and those in lists and dicts of modules."""
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from called_parts(child)
        else:
            yield child


def _has_memory(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided


def tensors_in(result: object, place: str = "", deep: int = _DEEP) -> Iterator[tuple[str, Tensor]]:
    """The tensors inside a result of any kind, each with its place.

    >>> [place for place, _ in tensors_in({"logits": torch.zeros(1), "states": (torch.zeros(1),)})]
    ['logits', 'states.0']
    """
    if isinstance(result, Tensor):
        yield place, result
        return
    if deep == 0 or result is None or isinstance(result, str | int | float | nn.Module | type):
        return
    if isinstance(result, Mapping) or (hasattr(result, "keys") and hasattr(result, "__getitem__")):
        items = [(str(key), result[key]) for key in list(result.keys())]
    elif isinstance(result, list | tuple | set):
        names = getattr(result, "_fields", None) or range(len(result))
        items = [(str(name), value) for name, value in zip(names, result, strict=False)]
    elif is_dataclass(result) or hasattr(result, "__dict__"):
        items = [(name, value) for name, value in vars(result).items() if not callable(value)]
    else:
        return
    for name, value in items:
        yield from tensors_in(value, f"{place}.{name}" if place else name, deep - 1)
