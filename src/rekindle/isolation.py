"""Running a model without leaving a trace.

A batch is a tensor, a tuple or list (its first item is the input) or a dict (`model(**batch)`). Whatever happens
inside `isolated`, an exception included, modes, gradients, buffers and random numbers are afterwards what they were
before.

>>> import torch
>>> layer = torch.nn.Linear(2, 1)
>>> with isolated(layer):
...     shape = call(layer, (torch.zeros(3, 2), torch.zeros(3))).shape
>>> shape, layer.training
(torch.Size([3, 1]), True)
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Batch: TypeAlias = "Tensor | Sequence[Any] | Mapping[str, Any] | Recorded"
Batches: TypeAlias = "Iterable[Batch]"
Loss: TypeAlias = "Callable[[nn.Module, Any], Tensor]"

_REGISTRIES = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules", "_forward_hooks")
_TORCHS_OWN = frozenset(vars(nn.Module()))  # attributes of every module


@dataclass(frozen=True, eq=False)
class Recorded:
    """A batch as a forward pass got it: positional and keyword arguments.

    `part` is the module that was called, where that was not the model itself: a LightningModule is never called, but
    the network that it holds.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    part: nn.Module | None = None
    run: Callable[[nn.Module, Any], Any] | None = None  # how the first argument is run, for a model without forward


def call(model: nn.Module, batch: Batch, device: torch.device | None = None) -> object:
    """The model's output for one batch, whose tensors are moved to `device` if one is given.

    >>> call(torch.nn.Flatten(), {"input": torch.zeros(2, 3, 4)}).shape
    torch.Size([2, 12])
    """
    with explained(model, batch):
        return _call(model, batch, device)


def _call(model: nn.Module, batch: Batch, device: torch.device | None) -> object:
    if isinstance(batch, Recorded):
        if batch.run is not None:
            return batch.run(model, batch.args[0])
        return (model if batch.part is None else batch.part)(*batch.args, **batch.kwargs)
    if isinstance(batch, Tensor):
        return model(_moved(batch, device))
    if hasattr(batch, "to_tensordict"):  # a TensorDict is one argument, and modules write into it
        whole: Any = batch
        return model(whole.copy() if device is None else whole.copy().to(device))
    if isinstance(batch, Mapping):
        return model(**{key: _moved(value, device) for key, value in batch.items()})
    if isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch):
        return _call(model, batch[0], device)
    raise TypeError(
        f"a batch is a tensor, a tuple whose first item is the input, or a dict; got {type(batch).__name__}"
    )


# What torch and Python say where a batch is of another kind than the model or the loss takes, and what to do then.
_KINDS = (
    "a batch is a tensor, a tuple whose first item is the input, or a dict of the model's arguments, and batches is a "
    "list of them"
)
_ORDER = "loss is called as loss(model, batch), as in lambda model, batch: criterion(model(batch[0]), batch[1])"
_LABELS = "class labels are integers (labels.long()), targets of a regression have the shape of the outputs"
_MISFITS = {
    "same dtype": _KINDS,
    "scalar type": _KINDS,
    "unexpected keyword argument": _KINDS,
    "required positional argument": _KINDS,
    "cannot be multiplied": _KINDS,
    "at least 1D": _KINDS,
    "channels, but got": _KINDS,
    "must be Tensor, not": _ORDER,
    "expected target dtype": _LABELS,
    "D target": _LABELS,
}


@contextmanager
def explained(model: nn.Module, batch: Batch) -> Iterator[None]:
    """Inside, an error of torch about the kind of a batch becomes one in the user's words.

    >>> with explained(nn.Linear(2, 1), torch.ones(1, 3)):
    ...     nn.Linear(2, 1)(torch.ones(1, 3))
    Traceback (most recent call last):
    ValueError: the model does not run on a batch of float32 (1, 3), its weights are float32 ...
    """
    try:
        yield
    except (RuntimeError, TypeError) as error:
        hints = [hint for words, hint in _MISFITS.items() if words in str(error)]
        if hints:
            raise ValueError(_misfit(model, batch, error, hints[0])) from error
        raise


def _misfit(model: nn.Module, batch: Batch, error: Exception, hint: str = _KINDS) -> str:
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    weights = f", its weights are {' and '.join(dtypes)}" if dtypes else ""
    said = (str(error).splitlines() or [""])[0]
    what = "the model does not run on" if hint is _KINDS else "the loss cannot be computed on"
    return f"{what} {_described(batch)}{weights} ({said}): {hint}"


def run_batch(model: nn.Module, batch: Batch, name: str) -> object:
    """The model's output, or an error in the user's words where the batch does not fit the model.

    >>> run_batch(torch.nn.Linear(2, 1).double(), torch.zeros(3, 2), "batches")
    Traceback (most recent call last):
    ValueError: batches: the model does not run on a batch of float32 (3, 2), its weights are float64 ...
    """
    try:
        return _call(model, batch, None)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AttributeError) as error:
        text = _misfit(model, batch, error)
        raise ValueError(f"{name}: {text}; or give run=lambda model, batch: ... with how it is called") from error


def _described(batch: object) -> str:
    """A batch in a few words."""
    if isinstance(batch, Recorded):
        return f"a batch of {len(batch.args)} arguments"
    if isinstance(batch, Tensor):
        return f"a batch of {str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return f"a dict with {', '.join(map(str, batch))}"
    if isinstance(batch, Sequence) and batch:
        return _described(batch[0])
    return f"a batch of type {type(batch).__name__}"


def padding_mask(batch: Batch) -> Tensor | None:
    """Which tokens are real: `attention_mask` (batch, tokens) of a dict batch, None where nothing is masked.

    >>> padding_mask({"input_ids": torch.ones(1, 2), "attention_mask": torch.tensor([[1, 0]])})
    tensor([[ True, False]])
    """
    if isinstance(batch, Recorded):
        batch = batch.kwargs
    elif isinstance(batch, Sequence) and not isinstance(batch, Tensor) and len(batch):
        batch = batch[0]
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    return mask.bool()


def check_asked(verb: str, model: object, batches: object) -> None:
    """Raise if there is no model to copy or no batches to learn, with what to pass instead.

    >>> check_asked("probe", nn.Linear(1, 1).state_dict(), [])
    Traceback (most recent call last):
    TypeError: probe() needs an nn.Module, got OrderedDict: load a state dict into its model first (load_state_dict)
    """
    if not isinstance(model, nn.Module):
        hint = ": load a state dict into its model first (load_state_dict)" if isinstance(model, Mapping) else ""
        if hasattr(model, "policy") and hasattr(model, "learn"):  # stable-baselines3
            way = "advise_agent of rekindle.integrations.agent_advice, or trained and value_regression of …sb3"
            hint = f": for an agent take {way}"
        raise TypeError(f"{verb}() needs an nn.Module, got {type(model).__name__}{hint}")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"{verb}(): {name} has no shape yet (a lazy module): run the model on a batch once, first")
        if parameter.is_meta:
            raise ValueError(f"{verb}(): {name} is on the meta device, without values: load the weights first")
        if parameter.is_inference():
            raise ValueError(
                f"{verb}(): {name} was made under torch.inference_mode() and cannot be trained: build or load the "
                "model outside of it"
            )
    check_batches(batches, f"{verb}() needs")


def check_batches(batches: object, needs: str = "batches is") -> None:
    """Raise for what is no iterable of batches, or is a single batch.

    >>> check_batches((torch.zeros(8, 2), torch.zeros(8).long()))
    Traceback (most recent call last):
    TypeError: batches is an iterable of batches, such as [(inputs, targets), …], got one batch: wrap it in a list...
    """
    iterable = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    single = isinstance(batches, Tensor | Mapping)
    if isinstance(batches, tuple) and batches and all(isinstance(item, Tensor) and item.dim() for item in batches):
        single = len({(item.dtype, item.shape[1:]) for item in batches}) > 1  # inputs and targets; X.split(8) is alike
    if single or not iterable or isinstance(batches, str):
        got = "one batch: wrap it in a list, [batch]" if single else f"a {type(batches).__name__}"
        raise TypeError(f"{needs} an iterable of batches, such as [(inputs, targets), …], got {got}")


def check_loss(loss: Any) -> None:
    """Raise unless this is a `loss(model, batch)`, with what to pass instead.

    >>> check_loss(nn.CrossEntropyLoss())
    Traceback (most recent call last):
    TypeError: loss is called as loss(model, batch) and returns a scalar; CrossEntropyLoss compares outputs...
    """
    functional = getattr(loss, "__module__", "").startswith("torch.nn.functional")
    if isinstance(loss, nn.Module) or functional:
        name = type(loss).__name__ if isinstance(loss, nn.Module) else loss.__name__
        raise TypeError(
            f"loss is called as loss(model, batch) and returns a scalar; {name} compares outputs with targets. "
            "Pass for example loss=lambda model, batch: criterion(model(batch[0]), batch[1])"
        )
    if loss is not None and not callable(loss):
        raise TypeError(f"loss is a function loss(model, batch) that returns a scalar, got {type(loss).__name__}")


def outputs(model: nn.Module, batches: Iterable[Batch]) -> list[Tensor]:
    """The model's output for each batch, in evaluation mode and isolated: the first floating tensor of each.

    >>> outputs(nn.Flatten(), [torch.ones(1, 2, 2)])
    [tensor([[1., 1., 1., 1.]])]
    """
    found = []
    with isolated(model), torch.no_grad():
        for batch in batches:
            answer = _first_tensor(call(model, batch))
            if answer is None:
                raise TypeError("the model's output holds no floating-point tensor, so no change of it can be measured")
            found.append(answer.detach().float().cpu())
    return found


def relative_change(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """‖after − before‖ ÷ ‖before‖ over all batches; infinite where there was nothing before.

    >>> relative_change([torch.ones(4)], [torch.zeros(4)])
    1.0
    """
    moved = sum(float((a - b).square().sum()) for a, b in zip(after, before, strict=True))
    size = sum(float(b.square().sum()) for b in before)
    return (moved / size) ** 0.5 if size else (float("inf") if moved else 0.0)


def _first_tensor(value: object) -> Tensor | None:
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, Mapping):
        value = [value["logits"]] if "logits" in value else list(value.values())
    found = (
        (_first_tensor(each) for each in value) if isinstance(value, Sequence) and not isinstance(value, str) else ()
    )
    return next((each for each in found if each is not None), None)


class Kept:
    """The value of a tensor now, to be put back into it; who watches versions of tensors is told.

    >>> weight = torch.ones(2)
    >>> kept = Kept(weight)
    >>> _ = weight.zero_()
    >>> kept.put_back(); weight
    tensor([1., 1.])
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self._value, self._version = tensor, tensor.detach().clone(), version_of(tensor)

    def put_back(self) -> None:
        """Copy the value back, where it is another."""
        if not same_values(self.tensor.detach(), self._value):
            with torch.no_grad():
                self.tensor.copy_(self._value)
        for told in WATCHERS.get():
            told(self.tensor, self._version)


Watcher: TypeAlias = "Callable[[Tensor, int | None], None]"
# Called with each tensor that has the value again which it had at that version.
WATCHERS: ContextVar[tuple[Watcher, ...]] = ContextVar("watchers", default=())


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was written in place, as torch counts it; None where it does not."""
    own: Any = tensor
    if type(tensor) not in (Tensor, nn.Parameter) and hasattr(own, "to_local"):
        own = own.detach().to_local()  # of a shard: its own memory is written
    version: int | None = None if own.is_inference() else own._version
    return version


def surely(restore: Callable[..., object], *arguments: object) -> None:
    """Put back, and once more from the beginning if an error or Ctrl-C comes meanwhile: doing it twice does no harm."""
    try:
        restore(*arguments)
    except BaseException:
        restore(*arguments)
        raise


class _Undoing(ExitStack):
    """A stack that remembers its callbacks: one that an error has cut short is gone from the stack itself."""

    def __init__(self) -> None:
        super().__init__()
        self._remembered: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def callback(self, callback: Callable[..., Any], /, *arguments: object) -> Callable[..., Any]:  # type: ignore[override]
        self._remembered.append((callback, arguments))
        return super().callback(callback, *arguments)

    def again(self) -> None:
        """What is still on the stack, then every callback once more."""
        try:
            self.close()
        finally:
            for callback, arguments in reversed(self._remembered):
                with suppress(Exception):  # the first error is the one to tell
                    callback(*arguments)


@contextmanager
def undone() -> Iterator[ExitStack]:
    """Runs the callbacks of the stack at the end: all of them, also if one fails or an interrupt comes meanwhile.

    After an error all callbacks run once more, so each must be one that may run twice.

    >>> with undone() as stack:
    ...     _ = stack.callback(print, "as it was")
    as it was
    """
    stack = _Undoing()
    try:
        try:
            yield stack
        finally:
            stack.close()
    except BaseException:
        stack.again()
        raise


@contextmanager
def isolated(
    model: nn.Module, *, training: bool | Collection[nn.Module] = False, keep_buffers: bool = True
) -> Iterator[None]:
    """Evaluation mode, empty gradients and eager execution inside; everything as it was afterwards.

    `training` puts all modules, or only those given, into training mode instead. `keep_buffers=False` keeps what the
    forward passes do to buffers, for callers that want that. Mode flags are set directly rather than by
    `eval()`, because some models do work there (merging adapters).

    >>> norm = torch.nn.BatchNorm1d(2)
    >>> with isolated(norm, training=True):
    ...     _ = norm(torch.ones(4, 2))
    >>> norm.running_mean
    tensor([0., 0.])
    """
    modules = list(model.modules())
    chosen = None if isinstance(training, bool) else {id(module) for module in training}
    with random_states_kept(), gradients_kept(model), undone() as stack:
        if "torch._dynamo" in sys.modules:
            # A graph compiled before the hooks were added, or in another mode, would run without them.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in modules if keep_buffers else ():
            for name, buffer in module._buffers.items():
                stack.callback(module._buffers.__setitem__, name, buffer)
                if buffer is not None:
                    stack.callback(Kept(buffer).put_back)
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        for module in modules:
            stack.callback(setattr, module, "training", module.training)
            module.training = bool(training) if chosen is None else id(module) in chosen
        yield


@contextmanager
def gradients_kept(model: nn.Module) -> Iterator[None]:
    """The model has no gradients inside; afterwards those that it had.

    >>> layer = nn.Linear(1, 1)
    >>> with gradients_kept(layer):
    ...     layer(torch.ones(1, 1)).sum().backward()
    >>> layer.weight.grad is None
    True
    """
    with undone() as stack:
        for parameter in model.parameters():
            stack.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        yield


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """What a forward pass writes into its module beside buffers (a carried state, a counter) is undone.

    Also what it adds to lists, dicts and sets that are attributes, and buffers, modules and hooks that it makes when it
    runs first; not what it changes deeper inside.

    >>> layer = nn.Linear(1, 1)
    >>> with attributes_kept(layer):
    ...     layer.calls = 3
    >>> hasattr(layer, "calls")
    False
    """
    with undone() as stack:
        for module in (m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)):
            values = {
                name: (value, Kept(value) if isinstance(value, Tensor) else None)
                for name, value in vars(module).items()
                if name not in _TORCHS_OWN
            }
            containers = [v for v, _ in values.values() if type(v) in (list, dict, set)]
            containers += [held for name, held in vars(module).items() if name in _REGISTRIES]
            inside = [(held, copy.copy(held)) for held in containers]
            stack.callback(_put_attributes, module, values)
            stack.callback(_refill, inside)
        yield


def _refill(containers: Sequence[tuple[Any, Any]]) -> None:
    for container, content in containers:
        container.clear()
        (container.extend if isinstance(container, list) else container.update)(content)


def _put_attributes(module: nn.Module, values: Mapping[str, tuple[Any, Kept | None]]) -> None:
    for name in [name for name in vars(module) if name not in _TORCHS_OWN and name not in values]:
        delattr(module, name)
    for name, (value, kept) in values.items():
        if kept is not None:
            kept.put_back()
        if vars(module).get(name) is not value:
            setattr(module, name, value)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """The random states of Python, numpy and torch are afterwards what they were before.

    A DataLoader draws its base seed and a sampler its order from these global states.

    >>> before = torch.get_rng_state()
    >>> with random_states_kept():
    ...     _ = torch.rand(3)
    >>> torch.equal(before, torch.get_rng_state())
    True
    """
    numpy = sys.modules.get("numpy")
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices=devices), undone() as stack:
        stack.callback(random.setstate, random.getstate())
        if numpy:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        yield


@contextmanager
def forked_rng(generator: torch.Generator, model: nn.Module | None = None) -> Iterator[None]:
    """Seed torch's global random state from `generator` inside the block and restore it after.

    >>> before = torch.get_rng_state()
    >>> with forked_rng(torch.Generator().manual_seed(0)):
    ...     first = torch.rand(2)
    >>> with forked_rng(torch.Generator().manual_seed(0)):
    ...     torch.equal(first, torch.rand(2))
    True
    >>> torch.equal(before, torch.get_rng_state())
    True
    """
    tensors = [] if model is None else [*model.parameters(), *model.buffers()]
    devices = sorted({t.device.index or 0 for t in tensors if t.device.type == "cuda"})
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed also seeds devices that are not forked, slowly
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield


def _moved(value: object, device: torch.device | None) -> object:
    return value.to(device) if device is not None and isinstance(value, Tensor) else value


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether nothing has changed; sparse tensors cannot be compared, and count as changed."""
    if a.is_meta:
        return True
    if a.layout != torch.strided or a.shape != b.shape:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())
