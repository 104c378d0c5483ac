"""A transaction: from the first write of a call to its receipt.

It ends with a true receipt, or with everything as it was. `Marks` notes how every tensor of a model and its optimizers
is marked before the first write, by torch's own version counters, so that a call that fails can name exactly what it
has changed. With a copy (`snapshots`) everything is put back instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from rekindle.blocks.names import cleaner
from rekindle.isolation import WATCHERS, same_values, surely, version_of
from rekindle.optimizers import unwrap
from rekindle.projection.method import MethodError, MethodInterrupt
from rekindle.projection.receipt import BlockRecord, Receipt
from rekindle.projection.snapshots import Restore

SoFar = Callable[[BaseException], Receipt | None]
_MOST_NAMED = 5


class Transaction:
    """Wraps everything from the first write to the receipt; an error or Ctrl-C inside cannot leave a false picture.

    With `restore` (from `snapshots`) everything is put back. Without it the error becomes a `MethodError` whose receipt
    names what differs in `differs`; an error before the first write stays as it is.

    Transactions inside one another are one: an inner one that ended well leaves its `restore` to the outer one, so that
    a later error puts back what is atomic, and one on the same models and optimizers leaves the report to it too.

    models: the model first, then its mirrors; or a function that returns them.
    so_far: makes the receipt of what has been done when an error comes; None if nothing was.
    waits: nothing is marked before a transaction inside this one begins: for what writes inside of such ones only, as
        methods of every step do, most of whose calls write nothing.

    >>> layer = nn.Linear(2, 1)
    >>> try:
    ...     with Transaction("halve", [layer]), torch.no_grad():
    ...         _ = layer.bias.mul_(0.5)
    ...         raise OSError("the disk is full")
    ... except MethodError as error:
    ...     error.receipt.differs
    ('bias',)
    """

    def __init__(
        self,
        method: str,
        models: Iterable[nn.Module] | Callable[[], Iterable[nn.Module]],
        optimizer: Any = None,
        *,
        restore: Restore | None = None,
        so_far: SoFar | None = None,
        waits: bool = False,
    ) -> None:
        self._method, self._restore, self._so_far, self._waits = method, restore, so_far, waits
        self._models, self._optimizer = models if callable(models) else tuple(models), optimizer
        self._around = _INNERMOST.get()
        self._marks: Marks | None = None
        self._part = False  # of the one around, whose marks it shares
        self._with_gradients = torch.is_grad_enabled()
        self._inside: list[Restore] = []  # of transactions inside this one that have ended well

    def settle(self, receipt: Receipt) -> Receipt:
        """What the call returns: the receipt as it is, or what a guard makes of it."""
        return receipt

    def __enter__(self) -> Self:
        try:
            if not self._waits:
                self._mark()
            _INNERMOST.set(self)
            return self
        except BaseException:  # nobody will call __exit__
            self._leave()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            told = self._ended(error)
            if told is error:
                return
        except BaseException as late:  # Ctrl-C while this ends: nobody gets the receipt of what ended well
            told = self._ended(error or late)
            if told is None or told is late:
                raise
        assert told is not None
        raise told from error

    def _mark(self) -> Marks:
        """The marks of this transaction, made now unless they are there."""
        if self._marks is None:
            models = tuple(self._models()) if callable(self._models) else self._models
            optimizers = unwrap(self._optimizer)
            marks = None if self._around is None else self._around._mark()  # in any case: it may have to put back more
            reports = self._restore is None and self._so_far is None
            self._part = reports and marks is not None and marks.cover(models, optimizers)
            self._marks = marks if marks is not None and self._part else Marks(models, optimizers)
            if not self._part:
                self._marks.__enter__()
        return self._marks

    def _leave(self) -> None:
        _INNERMOST.set(self._around)
        if self._marks is not None and not self._part:
            self._marks.__exit__()

    def _ended(self, error: BaseException | None) -> BaseException | None:
        """Put back or report; the error to raise, which is this one or says more. May be done twice."""
        restores = [*reversed(self._inside), *([] if self._restore is None else [self._restore])]
        told = error
        if error is not None and not self._part and self._marks is not None:
            torch.set_grad_enabled(self._with_gradients)
            self._marks.__enter__()  # again, where Ctrl-C came after it had left
            written = bool(restores and self._marks.differences())
            for restore in restores:
                surely(restore)
            report = self._report(error, self._marks) if self._restore is None else None
            half = written or (self._restore is not None and isinstance(error, MethodError))
            if report is not None:
                told = report
            elif half and isinstance(error, Exception):
                told = MethodError(f"{error}; everything was put back", Receipt(self._method))
        self._leave()
        if self._around is not None and (error is None or self._part):
            self._around._inside.extend(reversed(restores))
        return told

    def _report(self, error: BaseException, marks: Marks) -> BaseException | None:
        """The error with a receipt of what differs; None if nothing does."""
        receipt = None
        if self._so_far is not None:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                receipt = self._so_far(error)
        if isinstance(error, MethodError):
            receipt = receipt or error.receipt
        differs = marks.differences()
        if not differs and receipt is None:
            return None
        receipt = _completed(receipt or Receipt(self._method), differs, marks.parameters())
        if isinstance(error, MethodError):
            error.receipt = receipt  # a transaction inside this one has told the rest
            return error
        named = ", ".join(differs[:_MOST_NAMED]) + (", …" if len(differs) > _MOST_NAMED else "")
        said = f"{self._method} stopped: {str(error) or type(error).__name__}; it had changed {named}"
        if isinstance(error, KeyboardInterrupt):
            return MethodInterrupt(said, receipt)
        if not isinstance(error, Exception):  # a process that ends must end
            error.add_note(said)
            return error
        return MethodError(said, receipt)


_INNERMOST: ContextVar[Transaction | None] = ContextVar("transaction", default=None)


def _completed(receipt: Receipt, differs: tuple[str, ...], parameters: set[str]) -> Receipt:
    """A receipt of a call that failed: every parameter that differs has a record, measured or not."""
    more = [BlockRecord(name) for name in differs if name in parameters - {record.name for record in receipt.records}]
    return replace(receipt, records=(*receipt.records, *more), differs=differs)


class Marks:
    """How every tensor of some models and optimizers is marked now; `differences` names those written since.

    The marks are torch's version counters, which every write in place raises: no value is copied or read. Only the
    running statistics of BatchNorm are copied: a forward pass changes them without raising their counters. Inside
    `with marks:` what is put back (`isolation.Kept`) counts as not written.
    """

    def __init__(self, models: Iterable[nn.Module], optimizer: object = None) -> None:
        self._models, self._optimizers = tuple(models), unwrap(optimizer)
        modules = [module for model in self._models for module in model.modules()]
        tensors = [
            t for module in modules for t in (*module._parameters.values(), *module._buffers.values()) if t is not None
        ]
        self._gradients = [(t, t.grad) for t in tensors if isinstance(t, Parameter)]
        self._slots = [_slots(each) for each in self._optimizers]
        # Held, so that ids stay theirs.
        self._all = [*tensors, *(grad for _, grad in self._gradients if grad is not None)]
        for states, groups in self._slots:
            for held in (*(state for _, state in states), *groups):
                self._all += [value for value in held.values() if isinstance(value, Tensor)]
        self._versions = {
            id(t): version_of(t) if t.is_inference() or type(t) not in _PLAIN else t._version for t in self._all
        }
        self._statistics = {
            id(buffer): buffer.detach().clone()
            for module in modules
            if isinstance(module, _NormBase)
            for buffer in module._buffers.values()
            if buffer is not None
        }
        self._hooks = [(table, set(table)) for each in self._optimizers for table in _step_hooks(each)]

    def cover(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> bool:
        """Whether these are among the models and optimizers that are marked."""
        marked = {id(each) for each in (*self._models, *self._optimizers)}
        return all(id(each) in marked for each in (*models, *optimizers))

    def __enter__(self) -> Marks:
        self.__exit__()  # it may be entered already, and is left once
        WATCHERS.set((*WATCHERS.get(), self._put_back))
        return self

    def __exit__(self, *error: object) -> None:
        WATCHERS.set(tuple(watcher for watcher in WATCHERS.get() if watcher != self._put_back))

    def _put_back(self, tensor: Tensor, version: int | None) -> None:
        if self._versions.get(id(tensor)) == version:
            self._versions[id(tensor)] = version_of(tensor)

    def parameters(self) -> set[str]:
        """The clean names of all parameters."""
        return {name for name, tensor in self._named() if isinstance(tensor, Parameter)}

    def differences(self) -> tuple[str, ...]:
        """Parameters and buffers by their names, slots as "name: slot", groups of an optimizer as "group 0: key".

        Gradients of parameters that were not written are put back where they were, new hooks of optimizers removed.

        >>> layer = nn.Linear(1, 1)
        >>> marks = Marks([layer])
        >>> _ = nn.init.zeros_(layer.weight)
        >>> marks.differences()
        ('weight',)
        """
        for table, hooks in self._hooks:
            for hook in table.keys() - hooks:
                del table[hook]
        names: dict[int, str] = {}
        written: dict[str, None] = {}
        for name, tensor in self._named():
            names.setdefault(id(tensor), name)
            if self._is_written(tensor):
                written[name] = None
        for parameter, gradient in self._gradients:
            name = names.get(id(parameter), "parameter")
            if gradient is not None and self._is_written(gradient):
                written[f"{name}: gradient"] = None
            elif name not in written:
                parameter.grad = gradient
        for each, held in zip(self._optimizers, self._slots, strict=True):
            before, after = _by_name(held), _by_name(_slots(each))
            for owner, slot in {**before, **after}:
                old, new = before.get((owner, slot), _MISSING), after.get((owner, slot), _MISSING)
                if self._is_written(new) if isinstance(new, Tensor) and new is old else not _same(old, new):
                    label = names.get(owner, "parameter") if owner >= len(each.param_groups) else f"group {owner}"
                    written[f"{label}: {slot}"] = None
        return tuple(written)

    def _is_written(self, tensor: Tensor) -> bool:
        if id(tensor) not in self._versions or version_of(tensor) != self._versions[id(tensor)]:
            return True
        value = self._statistics.get(id(tensor))
        return value is not None and not same_values(tensor.detach(), value)

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for number, model in enumerate(self._models):
            clean = cleaner(model)
            prefix = f"mirror {number - 1}: " if number else ""
            for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
                yield prefix + clean(name), tensor


_MISSING = object()
_PLAIN = (Tensor, Parameter)


def _step_hooks(optimizer: Optimizer) -> Iterator[dict[int, Any]]:
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        yield vars(optimizer).get(name, {})  # an optimizer of another package may have none


_Slots = tuple[list[tuple[Any, dict[Any, Any]]], list[dict[str, Any]]]


def _slots(optimizer: Optimizer) -> _Slots:
    """What an optimizer holds now: of each parameter, and of each group."""
    states = [(owner, dict(state)) for owner, state in optimizer.state.items() if isinstance(state, dict)]
    return states, [dict(group) for group in optimizer.param_groups]


def _by_name(slots: _Slots) -> dict[tuple[int, str], Any]:
    """The same by (id of a parameter or number of a group, name)."""
    held = {(id(owner), str(name)): value for owner, state in slots[0] for name, value in state.items()}
    for number, group in enumerate(slots[1]):
        held |= {(number, name): value for name, value in group.items() if name != "params"}
    return held


def _same(old: object, new: object) -> bool:
    plain = (bool, int, float, str, tuple, type(None))
    return old is new or (isinstance(old, plain) and isinstance(new, plain) and old == new)
