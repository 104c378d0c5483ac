"""Resolving a request: which of the found blocks are its targets.

Targets are presets, roles, names, globs, module types or a predicate.

What is skipped by default stays so unless it is asked for by its own name or role, or through `include`: a
wildcard, a module type or a predicate alone never adds an embedding, a head or a frozen weight.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from rekindle.blocks.finding import Found
from rekindle.blocks.layouts import ROLES, Block, Recipe, matrices
from rekindle.projection.entries import PlanEntry
from rekindle.spelling import argument


@runtime_checkable
class Report(Protocol):
    """Something that names layers, such as a `Health`: as targets it means the layers that it names."""

    def layers_named(self) -> Iterable[str]:
        """Names of weights, of modules, or of parts of fused weights (`qkv.weight[query]`)."""
        ...


@dataclass(frozen=True)
class Named:
    """Names that a report gave. They choose among the layers before the output: a named head stays as it is."""

    names: tuple[str, ...]

    def accepts(self, f: Found, block: Block) -> bool:
        """Whether one of the names is this block, its weight, or a module around it."""
        whole = _names(f)
        parts = {f"{name}[{block.part}]" for name in whole} if block.part else set()
        return any(n in parts or any(w == n or w.startswith(f"{n}.") for w in whole) for n in self.names)

    def __str__(self) -> str:
        return f"named by a report ({', '.join(self.names[:6])}{', …' if len(self.names) > 6 else ''})"


Term = str | type | Callable[[Found], bool] | Named
Targets = Term | Iterable[Term] | Report

_ATTENTION = ("query", "key", "value", "attention-output")
_MLP = ("mlp-in", "mlp-gate", "mlp-out")
_ROLE_MARKS = frozenset({"embedding", "head", "depthwise", "router"})
_ASSUMED = frozenset({"assumed"})  # a reading of a bare file that must be asked for
_EVERY_MARK = _ROLE_MARKS | {"adapter", "frozen"} | _ASSUMED

PRESETS = ("auto", "layers", "all", "attention", "attention.qk", "mlp", "conv", "paper-cnn", "paper-vit", "paper-gpt")


@dataclass(frozen=True)
class _Matcher:
    """One term: which blocks it means, and which default reasons it overrules."""

    term: object
    accepts: Callable[[Found, Block], bool]
    overrules: frozenset[str] = frozenset()


def choose(
    found: Sequence[Found],
    targets: Targets = "auto",
    *,
    include: Targets = (),
    exclude: Targets = (),
    allow_empty: bool = False,
) -> list[PlanEntry]:
    """The same parameters with the blocks to project, or the `refusal` that says why not; an error if none is left.

    >>> from rekindle.blocks.finding import find
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> [(f.name, f.refusal) for f in choose(find(net), exclude="0")]
    Traceback (most recent call last):
    ...
    ValueError: targets='auto', exclude='0' leaves nothing to project. The model has 2 weights with matrices...
    >>> [f.refusal for f in choose(find(net), include="2.weight") if f.blocks]
    [None, None]
    """
    wanted = [_matcher(t, found, "targets") for t in terms(targets)]
    added = [_matcher(t, found, "include") for t in terms(include)]
    removed = [_matcher(t, found, "exclude") for t in terms(exclude)]
    chosen = [_chosen(f, wanted, added, removed) for f in found]
    if targets == "layers" and not added:
        chosen = _never_heads_alone(found, chosen)
    if not allow_empty and not any(f.refusal is None for f in chosen):
        asked = ", ".join(
            argument(name, value)
            for name, value in (("targets", targets), ("include", include), ("exclude", exclude))
            if value != ()
        )
        raise ValueError(f"{asked} leaves nothing to project. {_what_there_was(chosen)}")
    return chosen


def terms(targets: Targets) -> list[Term]:
    """A request as a list of terms.

    >>> terms("auto"), terms((nn.Linear, "query"))
    (['auto'], [<class 'torch.nn.modules.linear.Linear'>, 'query'])
    """
    if isinstance(targets, str | type | Named) or callable(targets):
        return [targets]
    if isinstance(targets, list | tuple):
        return list(targets)
    if isinstance(targets, Report):
        names = tuple(dict.fromkeys(targets.layers_named()))
        if not names:
            raise ValueError("targets= is a report that names no layer: it found nothing to treat")
        return [Named(names)]
    return list(targets)


def describe(targets: Targets, include: Targets = (), exclude: Targets = ()) -> str:
    """A request in one line.

    >>> describe("auto", include=nn.Embedding, exclude=["*.0.*", "mlp"])
    'auto + Embedding − *.0.*, mlp'
    """

    def word(term: Term) -> str:
        return str(term) if isinstance(term, str | Named) else getattr(term, "__name__", repr(term))

    def words(value: Targets) -> str:
        return ", ".join(map(word, terms(value)))

    signed = ((" + ", include), (" − ", exclude))
    return words(targets) + "".join(sign + words(value) for sign, value in signed if terms(value))


def preset_layouts(found: Sequence[Found], targets: Targets) -> dict[str, Recipe]:
    """Layouts that a preset states: "paper-gpt" says that a Linear called c_attn is q | k | v, as in the paper's GPT.

    >>> preset_layouts([], "paper-gpt")
    {}
    """
    if "paper-gpt" not in terms(targets):
        return {}
    thirds = matrices("(part out) in", part=("query", "key", "value"))
    refused = (f for f in found if f.refusal and f.name.endswith("c_attn.weight") and _is_a(f, ("Linear",)))
    return {f.name: thirds for f in refused if len(f.shape) == 2 and f.shape[0] == 3 * f.shape[1]}


def _chosen(f: Found, wanted: list[_Matcher], added: list[_Matcher], removed: list[_Matcher]) -> PlanEntry:
    if f.refusal or not f.blocks:
        return _entry(f, refusal=f.refusal or "no matrix")
    blocks, reason = [], None
    for block in f.blocks:
        if any(m.accepts(f, block) for m in removed):
            reason = reason or "excluded"
            continue
        if any(m.accepts(f, block) for m in added):
            left = {mark: why for mark, why in f.marks.items() if mark not in _EVERY_MARK}
        else:
            asked = [m for m in wanted if m.accepts(f, block)]
            if not asked:
                reason = reason or f.reason or f"not among the targets ({block.role})"
                continue
            # One request must overrule every mark itself: "head" alone does not release a tied embedding.
            best = min(asked, key=lambda m: len(f.marks.keys() - m.overrules))
            left = {mark: why for mark, why in f.marks.items() if mark not in best.overrules}
        if left:
            reason = reason or next(iter(left.values()))
            continue
        blocks.append(block)
    if not blocks:
        return _entry(f, refusal=reason)
    rest = tuple(block.part or block.role for block in f.blocks if block not in blocks)
    return _entry(f, blocks=tuple(blocks), left=rest)


def _never_heads_alone(found: Sequence[Found], chosen: list[PlanEntry]) -> list[PlanEntry]:
    """Output layers are skipped where they are all that could be read: the layers before them are what was meant."""
    taken = [f for f, entry in zip(found, chosen, strict=True) if entry.refusal is None]
    unread = any(len(f.shape) > 1 and (f.refusal or "assumed" in f.marks) for f in found)
    if not unread or any("head" not in f.marks for f in taken):
        return chosen
    why = "output head, and the layers before it were not read"
    return [_entry(f, refusal=entry.refusal or why) for f, entry in zip(found, chosen, strict=True)]


def _entry(f: Found, **decided: Any) -> PlanEntry:
    """What was found with what is decided: marks and classes, which the decision rests on, are used up."""
    return PlanEntry(**{**vars(f), "marks": {}, "classes": (), "before": replace(f, classes=()), **decided})


def _matcher(term: Term, found: Sequence[Found], place: str) -> _Matcher:
    matcher = _understand(term, found)
    if term not in ("auto", "layers", "all") and not any(matcher.accepts(f, b) for f in found for b in f.blocks):
        refused = [f.name for f in found if f.refusal and len(f.shape) > 1]
        if place == "exclude" and isinstance(term, str) and fnmatch.filter(refused, term):
            return matcher  # it is skipped already: a target network that did not run in the recorded step
        raise ValueError(f"{argument(place, term)} matches no weight with matrices. {_hint(term, found)}")
    return matcher


def _understand(term: Term, found: Sequence[Found]) -> _Matcher:
    if isinstance(term, str):
        return _words(term, found)
    if isinstance(term, Named):
        return _Matcher(term, term.accepts)
    if isinstance(term, type):
        overrules = frozenset({"embedding"}) if issubclass(term, nn.Embedding | nn.EmbeddingBag) else frozenset()
        return _Matcher(term, lambda f, b: term in f.classes or term.__name__ == f.module_type, overrules)
    if isinstance(term, nn.Module | Tensor):
        kind = "a layer" if isinstance(term, nn.Module) else "a tensor"
        names = ", ".join(f.name for f in found[:3])
        raise TypeError(f"a target is named, got {kind} ({type(term).__name__}): write its name, as in {names}")
    if callable(term):
        predicate = term
        return _Matcher(term, lambda f, b: bool(predicate(f)))
    raise TypeError(f"a target is a preset, role, name, glob, module type or predicate, not {term!r}")


def _words(term: str, found: Sequence[Found]) -> _Matcher:
    roles = {"attention": _ATTENTION, "attention.qk": _ATTENTION[:2], "paper-vit": _ATTENTION[:2], "mlp": _MLP}
    if term == "auto":
        return _Matcher(term, lambda f, b: True)
    if term == "layers":  # what papers call every layer
        return _Matcher(term, lambda f, b: True, frozenset({"head"}))
    if term == "all":
        return _Matcher(term, lambda f, b: True, _ROLE_MARKS)
    if term == "mlp" and not any(b.role in _MLP + _ATTENTION for f in found for b in f.blocks):
        # A plain network: nothing around its Linear layers says what they do.
        return _Matcher(term, lambda f, b: b.role == "other" and _is_a(f, ("Linear",)))
    if term in roles:
        return _Matcher(term, lambda f, b: b.role in roles[term])
    if term == "paper-cnn":
        kinds = ("Conv2d", "Linear")
        return _Matcher(term, lambda f, b: _is_a(f, kinds), frozenset({"head", "depthwise"}))
    if term == "paper-gpt":
        kinds = ("Linear", "Conv1D")
        tied = {alias for f in found if _is_a(f, kinds) for alias in (f.name, *f.also)}
        # A head that is tied to the embedding is a Linear too: it adds the embedding, as in the paper.
        return _Matcher(
            term, lambda f, b: _is_a(f, kinds) or bool(tied & set(f.also)), frozenset({"head", "embedding"})
        )
    if term in ROLES:
        # Of a fused weight each part has its own role; the weight's is that of its first.
        return _Matcher(term, lambda f, b: term == b.role or term in f.marks, frozenset({term}) | _ASSUMED)
    if any(c in term for c in "*?["):
        return _Matcher(term, lambda f, b: any(fnmatch.fnmatchcase(n, term) for n in _names(f)))
    return _Matcher(
        term, lambda f, b: any(n == term or n.startswith(f"{term}.") for n in _names(f)), _exactly(term, found)
    )


def _exactly(term: str, found: Sequence[Found]) -> frozenset[str]:
    # Naming one weight (or the layer that holds it) asks for it; naming a whole stage does not.
    named = [f for f in found if f.blocks and any(n == term or n.startswith(f"{term}.") for n in _names(f))]
    single = len(named) == 1 and term in (*_names(named[0]), named[0].module)
    return _ROLE_MARKS | _ASSUMED if single else frozenset()


def _names(f: Found) -> tuple[str, ...]:
    return (f.name, f.key, *f.also)


def _is_a(f: Found, names: tuple[str, ...]) -> bool:
    return any(c.__name__ in names for c in f.classes) or f.module_type in names


def _hint(term: object, found: Sequence[Found]) -> str:
    weights = [f for f in found if f.blocks]
    roles = sorted({b.role for f in weights for b in f.blocks})
    text = f"Presets: {', '.join(PRESETS)}. Roles here: {', '.join(roles) or 'none'}."
    if isinstance(term, str):
        others = [name for name in (*PRESETS, *ROLES, *(f.name for f in weights)) if name != term]
        close = difflib.get_close_matches(term, others, 3)
        text += f" Did you mean {' or '.join(map(repr, dict.fromkeys(close)))}?" if close else ""
    names = [f.name for f in weights]
    shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    refused = Counter(f.refusal for f in found if f.refusal and not f.blocks and len(f.shape) > 1)
    why = "".join(f" Not read: {n} × {reason}." for reason, n in refused.most_common(2))
    return f"{text}{why} Weights with matrices: {shown or 'none'}."


def _what_there_was(found: Sequence[Found]) -> str:
    weights = [f for f in found if f.blocks]
    reasons = Counter(f.refusal for f in weights)
    lines = [f"{n} × {reason}" for reason, n in reasons.most_common()]
    refused = Counter(f.refusal for f in found if not f.blocks and len(f.shape) > 1)
    lines += [f"{n} × {reason}" for reason, n in refused.most_common(5)]
    return f"The model has {len(weights)} weights with matrices, all skipped: {'; '.join(lines) or 'none'}. \
{argument('include')} asks for them by name"
