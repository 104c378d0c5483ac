"""What is recorded of the outputs of layers while a class's source is read: paths, values, cuts, uses."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn


def at(module: nn.Module, path: str) -> list[nn.Module]:
    """The modules that a path means, every element for a `*`, every name that fits for `head_*`.

    >>> net = nn.ModuleDict({"a": nn.Sequential(nn.ReLU(), nn.Tanh())})
    >>> [type(m).__name__ for m in at(net, "a.*")]
    ['ReLU', 'Tanh']
    """
    found = [module]
    for name in filter(None, base(path).split(".")):
        if "*" in name:
            found = [child for m in found for key, child in m.named_children() if fnmatchcase(key, name)]
        else:
            found = [child for m in found if (child := m._modules.get(name)) is not None]
    return found


def base(label: str) -> str:
    """The path of a label: `encoder` of `encoder#states`, which is one of the outputs of `encoder`.

    >>> base("encoder#states"), base("encoder")
    ('encoder', 'encoder')
    """
    return label.partition("#")[0]


def by_path(labels: Iterable[str]) -> dict[str, set[str]]:
    """Labels by their paths.

    >>> sorted(by_path(["encoder#states", "encoder"])["encoder"])
    ['encoder', 'encoder#states']
    """
    found: dict[str, set[str]] = {}
    for label in labels:
        found.setdefault(base(label), set()).add(label)
    return found


def key_of(label: str) -> str:
    """Which of several outputs a label means, empty for all of them.

    >>> key_of("encoder#states"), key_of("encoder")
    ('states', '')
    """
    return label.partition("#")[2]


@dataclass(frozen=True)
class Split:
    """One place where an output is cut: by which operation, and into how many equal last-axis parts if known."""

    how: str
    equal: int | None = None
    names: tuple[str, ...] = ()


@dataclass
class Uses:
    """What a class does with the outputs of its submodules, by path.

    In `feeds`, `added`, `corrects`, `joins`, `drafts`, `leaves`, `outputs` and `shown` a path may carry the key of one
    of several outputs: `decoder#0`, `trunk#angles` (`base`, `key_of`).

    `splits` and `splits_input`: what is cut into parts that do not come together again. `feeds`: (a, b) where b reads
    something computed from a; `passes`: the same with nothing but elementwise functions and reshapes between.
    `added`: a is added to what it was computed from (a residual connection), `corrects`: to the class's input as it
    came. `outside`: what only methods that `forward` does not reach call. `scores`: a's output is turned into
    scores (softmax, top-k). `returns`: a's output leaves, unchanged in kind; `leaves`: something computed from it and
    from no later matrix leaves. `own` says how the class cuts its own weight.

    `outputs`: by the key of a tuple, dict or dataclass that the class returns, from what it was computed without
    another matrix between (`**`: the outputs of that submodule as they are); `shown`: what it is, element by element.
    `joins`: (a, argument) where a is added to an input from which it was not computed; `separate`: (submodule,
    argument) given something from which its other arguments were not computed, so that what joins it is no residual
    stream. `drafts`: (a, b) where a is added to b. `arguments`: the names of those of `forward`.
    `handed`: (a, b, argument) where b is given a's output besides others; `cut_arguments`: how the class cuts each of
    its arguments; `unsettled`: the functions that are given a's output and may cut it.
    """

    called: set[str] = field(default_factory=set)
    splits: dict[str, Split] = field(default_factory=dict)
    splits_input: Split | None = None
    feeds: set[tuple[str, str]] = field(default_factory=set)
    passes: set[tuple[str, str]] = field(default_factory=set)
    added: set[str] = field(default_factory=set)
    corrects: set[str] = field(default_factory=set)
    outside: set[str] = field(default_factory=set)
    scores: set[str] = field(default_factory=set)
    returns: set[str] = field(default_factory=set)
    leaves: set[str] = field(default_factory=set)
    own: Split | None = None
    outputs: dict[str, frozenset[str]] = field(default_factory=dict)
    shown: dict[str, str] = field(default_factory=dict)
    joins: set[tuple[str, str]] = field(default_factory=set)
    separate: set[tuple[str, str]] = field(default_factory=set)
    drafts: set[tuple[str, str]] = field(default_factory=set)
    arguments: tuple[str, ...] = ()
    handed: set[tuple[str, str, str]] = field(default_factory=set)
    cut_arguments: dict[str, Split] = field(default_factory=dict)
    unsettled: dict[str, str] = field(default_factory=dict)


_NONE: frozenset[Any] = frozenset()


@dataclass(frozen=True)
class Value:
    """What is known of one expression.

    `ids` are the values that it is or has as addends, `ancestors` all values it was computed from; `direct` the
    submodules whose output it still is, element by element; `near` those from whose output it was computed without
    another matrix between; `taint` all of them. `viewed`: reshaped, `turned`: its axes are in another order. `parts`
    are (split, index) pairs; `split` is a sequence of parts. `result`: all that a call of this submodule returned;
    `named`: what is known by key of a dict or dataclass; `function`: one that is defined inside a method.
    """

    ids: frozenset[int] = _NONE
    ancestors: frozenset[int] = _NONE
    direct: frozenset[str] = _NONE
    near: frozenset[str] = _NONE
    taint: frozenset[str] = _NONE
    parts: frozenset[tuple[Any, str]] = _NONE
    viewed: bool = False
    turned: bool = False
    split: object = None
    module: str | None = None
    weight: bool = False
    items: tuple[Value, ...] | None = None
    method: str | None = None
    result: str | None = None
    named: tuple[tuple[str, Value], ...] = ()
    function: ast.FunctionDef | None = None


EMPTY = Value()
INPUT = "<input>"
OWN = "<weight>"


@dataclass
class Cut:
    """A place where a value is cut, and which of its parts were joined again."""

    direct: frozenset[str]
    how: str
    count: int | None = None
    equal: int | None = None
    parts: set[str] = field(default_factory=set)
    joined: set[str] = field(default_factory=set)
    names: tuple[str, ...] = ()
    sliced: bool = False
    arguments: set[str] = field(default_factory=set)

    @property
    def harmless(self) -> bool:
        """Whether the parts come together again, or there is only one."""
        if self.sliced and len(self.parts) < 2:
            return True
        count = len(self.parts) if self.sliced else self.count
        return count is not None and len(self.joined) >= count > 1
