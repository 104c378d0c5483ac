"""What a recorded pass showed about the parameters of a model; `rekindle.recording` makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from torch import nn

from rekindle.blocks.entries import Found
from rekindle.blocks.layouts import Block, Layout


@dataclass(frozen=True)
class Fact:
    """What the recording shows about one parameter.

    `use` says how it entered: "matrix", "convolution", "bilinear", "table", "elementwise", "distance", "opaque" or ""
    where it did not run.
    `parts` are (name, start, length) within `period` rows, empty where the output is not cut; `refusal` says why the
    matrices cannot be told although it is used.
    """

    use: str = ""
    layout: Layout | None = None
    taps: int = 1
    parts: tuple[tuple[str, int, int], ...] = ()
    period: int = 0
    refusal: str = ""
    output: bool = False
    router: bool = False
    role: str = ""

    @property
    def cut(self) -> bool:
        """Whether its output is cut into parts that go different ways."""
        return bool(self.parts) or self.refusal.startswith("cut")

    def role_of(self, named: str) -> str:
        """The role that its name suggests, where what ran does not say otherwise."""
        if self.router:
            return "router"
        if named == "adapter":
            return named
        if self.role in _ROLES:
            return self.role
        if self.role == "gate" and named in ("other", *_ROLES):
            return "gate"
        return "other" if self.role == "not attention" and named in _ROLES else named

    def blocks(self, role: str) -> tuple[Block, ...]:
        """The blocks that follow from it."""
        layout = self.layout
        assert layout is not None
        if not self.parts:
            count, out, in_ = layout.sizes
            return (Block(role, "", out, in_, count, layout, self.taps),)
        (factor,) = layout.out
        outer, split = layout.split[factor] // self.period, list(layout.split)
        split[factor : factor + 1] = [outer, self.period]

        def shift(group: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(i + (i > factor) for i in group)

        made = []
        for name, start, length in self.parts:
            whole = Layout(
                layout.shape,
                tuple(split),
                shift(layout.count),
                (factor, factor + 1),
                shift(layout.in_),
                ((factor + 1, start, length),),
            )
            count, out, in_ = whole.sizes
            does = {"gate": "mlp-gate", "up": "mlp-in"}.get(name, name if name in _ROLES else role)
            made.append(Block(does, name, out, in_, count, whole, self.taps))
        return tuple(made)


UNREAD = "its source cannot be read"  # a reason that an example settles

_ROLES = ("query", "key", "value")


@dataclass(eq=False)
class Facts:
    """What one recorded pass, or several, show about a model, by the names of its parameters."""

    by_name: dict[str, Fact] = field(default_factory=dict)
    normalizes: bool | None = None  # a weight read what a normalization made

    def __getitem__(self, name: str) -> Fact:
        return self.by_name.get(name, Fact())

    def __contains__(self, name: str) -> bool:
        return name in self.by_name


# Models of which a pass was recorded for what runs now, each with how to get what it showed.
_RECORDED: ContextVar[tuple[tuple[nn.Module, Callable[[], Facts | None]], ...]] = ContextVar("recorded", default=())


@contextmanager
def using(model: nn.Module, facts: Callable[[], Facts | None]) -> Iterator[None]:
    """Inside, whoever looks for the matrices of this very model knows what its recording shows.

    >>> net = nn.Linear(1, 1)
    >>> with using(net, lambda: Facts({"weight": Fact("matrix")})):
    ...     "weight" in known_of(net), known_of(nn.Linear(1, 1))
    (True, None)
    """
    token = _RECORDED.set((*_RECORDED.get(), (model, facts)))
    try:
        yield
    finally:
        _RECORDED.reset(token)


def known_of(model: nn.Module) -> Facts | None:
    """What a recording shows about this model, None if there is none; the outermost of several goes on."""
    seen = (facts() for known, facts in _RECORDED.get() if known is model)
    return next((facts for facts in seen if facts is not None), None)


def compared(found: list[Found], otherwise: list[Found]) -> list[Found]:
    """What a recording shows, with a note where what was found without one is another decision, not a lack of one."""
    others = {f.name: f for f in otherwise}
    return [replace(f, overruled=_other(f, others[f.name])) if f.name in others else f for f in found]


def _other(f: Found, other: Found) -> str:
    if not f.blocks or not other.blocks or f.evidence == "user":
        return ""
    for mark in ("head", "router"):
        if (mark in f.marks) != (mark in other.marks):
            return mark if mark in other.marks else f"no {mark}"
    if (f.count, len(f.blocks)) != (other.count, len(other.blocks)):
        sizes = ", ".join(f"{block.count} × {block.out}×{block.in_}" for block in other.blocks)
        return f"matrices {sizes}"
    return ""
