"""What isometries are multiplied by: scale rules, and the one that a model gets by default.

Rules are parsed from words or numbers. Those that depend on shapes alone are known before anything is solved;
`nearest`, `norm` and `reference` look at each matrix. For the shapes see `Block.fans`: one matrix's own, or its
parent's after a split per head. "auto" looks at the model, once: `settled`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.blocks.configs import meta_model
from rekindle.blocks.evidence import Facts
from rekindle.blocks.layouts import Block
from rekindle.blocks.normalization import normalizes, state_normalizes
from rekindle.spelling import argument

_MEASURED = ("nearest", "norm", "reference")
_SCHEMES = ("kaiming", "xavier", "lecun", "torch", "normal", "orthogonal")
_RESIDUAL_ROLES = ("attention-output", "mlp-out")
_PATTERN = re.compile(
    r"(?P<rule>[a-z_]+)(:(?P<scheme>[a-z]+)?(\(?(?P<value>[^()/]+?)\)?)?)?(/depth\((?P<depth>\d+)\))?"
)

_HE, _PAPER = "init:kaiming", "paper"


@dataclass(frozen=True)
class Scale:
    """One scale rule; `str()` gives back what `parse` understands.

    >>> from rekindle.blocks.layouts import matrices
    >>> block = matrices("out in")((64, 16))[0]
    >>> Scale.parse("paper").known(block), Scale.parse(0.5).known(block), Scale.parse("nearest").known(block)
    (2.0, 0.5, None)
    >>> Scale.parse("paper:0.3").known(block)
    0.6
    >>> Scale.parse("init:normal(0.02)/depth(12)")
    Scale(rule='init', scheme='normal', value=0.02, depth=12)
    """

    rule: str
    scheme: str = ""
    value: float | None = None
    depth: int | None = None

    @classmethod
    def parse(cls, spec: str | float | Scale) -> Scale:
        """From "auto", "paper", "nearest", "norm", "reference", "fan_in", "init:scheme[(value)]" or a number.

        "auto" is settled by the model, see `settled`. The five after it take a factor: "norm:0.1" is a tenth of the old
        norm. The schemes are kaiming(gain),
        xavier(gain), lecun, torch (the library's own default), normal(σ) and orthogonal(gain). A trailing "/depth(L)"
        gives layers that write to the residual stream (attention-output, mlp-out) the factor 1/√(2L).
        """
        if isinstance(spec, Scale):
            return spec
        if isinstance(spec, Real) and not isinstance(spec, bool):
            return cls._number(float(spec), spec)
        if not isinstance(spec, str):
            raise TypeError(f"scale must be a word or a number, got {spec!r}")
        text = spec.strip()
        try:
            return cls._number(float(text), spec)
        except ValueError:
            pass
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(_unknown(spec))
        rule, scheme, value, depth = match["rule"], match["scheme"] or "", match["value"], match["depth"]
        number = _float(value, spec)
        if rule == "init":
            if scheme not in _SCHEMES or (scheme == "normal") > (number is not None):
                raise ValueError(_unknown(spec))
        elif scheme or rule not in ("auto", "paper", "fan_in", *_MEASURED):
            raise ValueError(_unknown(spec))
        if rule == "auto" and (number is not None or depth is not None):
            raise ValueError(f"{argument('scale', spec)}: auto takes no factor and no depth")
        if number is not None and number <= 0:
            raise ValueError(f"{argument('scale', spec)}: the number must be positive")
        if depth is not None and (int(depth) < 1 or rule in _MEASURED):
            raise ValueError(
                f"{argument('scale', spec)}: depth is a positive number of layers, for rules that know the shape"
            )
        return cls(rule, scheme, number, int(depth) if depth else None)

    @classmethod
    def _number(cls, value: float, spec: object) -> Scale:
        if not math.isfinite(value) or value <= 0:
            raise ValueError(f"{argument('scale', spec)}: a number must be positive and finite")
        return cls("number", value=value)

    def __str__(self) -> str:
        if self.rule == "number":
            return f"{self.value:g}"
        number = "" if self.value is None else f"{self.value:g}"
        text = self.rule
        if self.rule == "init":
            text += f":{self.scheme}" + (f"({number})" if number else "")
        elif number:
            text += f":{number}"
        return text + (f"/depth({self.depth})" if self.depth else "")

    def known(self, block: Block) -> float | None:
        """The scale of every matrix of the block where the shape determines it, else None.

        Paper: √(out/in)/taps. A flat convolution is one matrix with in·taps inputs, so there it is √(out/(in·taps)).

        >>> from rekindle.blocks.layouts import matrices
        >>> Scale.parse("init:orthogonal").known(matrices("out in")((8, 4))[0])
        1.0
        """
        if self.rule == "auto":
            raise ValueError('scale="auto" depends on the model: `settled` says which rule it is there')
        if self.rule in _MEASURED:
            return None
        if self.rule == "number":
            assert self.value is not None
            return self.value
        out, in_ = block.fans
        if self.rule == "paper":
            scale = math.sqrt(out / in_) / block.taps * self._factor
        elif self.rule == "fan_in":
            scale = math.sqrt(in_ * block.taps) * self._factor
        else:
            scale = self._initial(out, in_, block.taps)
        residual = self.depth is not None and block.role in _RESIDUAL_ROLES
        return scale / math.sqrt(2 * (self.depth or 1)) if residual else scale

    def values(
        self,
        block: Block,
        *,
        norm: Tensor | None = None,
        nuclear: Tensor | None = None,
        reference: Tensor | Sequence[float] | None = None,
    ) -> Tensor:
        """One scale per matrix (count,), from what the rule needs: ‖W‖_F, ‖W‖_* or the reference's ‖W₀‖_F.

        >>> from rekindle.blocks.layouts import matrices
        >>> block = matrices("out in")((2, 2))[0]
        >>> Scale.parse("nearest").values(block, nuclear=torch.tensor([6.0]))
        tensor([3.])
        """
        known = self.known(block)
        if known is not None:
            like = norm if norm is not None else nuclear
            return torch.full(
                (block.count,), known, dtype=_real(like), device=like.device if like is not None else None
            )
        given = {"nearest": nuclear, "norm": norm, "reference": reference}[self.rule]
        if given is None:
            raise ValueError(f"scale {self.rule!r} needs {'the initial weights' if self.rule == 'reference' else 'W'}")
        given = torch.as_tensor(given)
        if tuple(given.shape) != (block.count,):
            raise ValueError(f"expected one number per matrix ({block.count}), got shape {tuple(given.shape)}")
        divisor = block.smaller if self.rule == "nearest" else math.sqrt(block.smaller)
        return given * (self._factor / divisor)

    @property
    def _factor(self) -> float:
        return 1.0 if self.value is None else self.value

    def _initial(self, out: int, in_: int, taps: int) -> float:
        fan_in, fan_out = in_ * taps, out * taps
        gain = self._factor
        if self.scheme == "orthogonal":
            # torch's orthogonal_ flattens the taps; a tap with the same variance as its slice of that matrix.
            return gain * math.sqrt(max(out, in_) / max(out, in_ * taps))
        sigma = {
            "kaiming": (math.sqrt(2.0) if self.value is None else self.value) / math.sqrt(fan_in),
            "xavier": gain * math.sqrt(2.0 / (fan_in + fan_out)),
            "lecun": gain / math.sqrt(fan_in),
            "torch": gain / math.sqrt(3.0 * fan_in),
            "normal": gain,
        }[self.scheme]
        # An isometry at scale s has entries of variance s²/max(out, in).
        return sigma * math.sqrt(max(out, in_))


def settled(
    rule: Scale,
    model: nn.Module | Mapping[str, Tensor],
    *,
    preset: str | None = None,
    facts: Facts | None = None,
    config: Any = None,
) -> tuple[Scale, str]:
    """The rule that "auto" stands for in this model, and why; other rules stay.

    He's norm, and the paper's scale in a model that normalizes its activations: the best cells of the factorial
    (docs/evidence/fitting.md). Where it is not known whether it does, He's norm costs less if it is wrong: at most 9.2
    points, the paper's scale up to 19.9.

    >>> settled(Scale.parse("auto"), nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)))
    (Scale(rule='paper', scheme='', value=None, depth=None), 'the model normalizes its activations')
    >>> str(settled(Scale.parse("auto"), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))[0])
    'init:kaiming'

    Args:
        rule: any rule.
        model: a module, or a state dict, which never shows that nothing is normalized.
        preset: a target of the paper's, which has its scale.
        facts: what a recorded pass of the module showed.
        config: of a state dict, a module on the meta device or what `rekindle.plan` takes.
    """
    if rule.rule != "auto":
        return rule, ""
    if preset is not None:
        return Scale.parse(_PAPER), f"{preset} is what the paper did"
    if isinstance(model, nn.Module):
        known = normalizes(model, facts)
    else:
        known = state_normalizes(model)
        if known is None and config is not None:
            known = normalizes(config if isinstance(config, nn.Module) else meta_model(config, len(model)))
    if known:
        return Scale.parse(_PAPER), "the model normalizes its activations"
    if known is False:
        return Scale.parse(_HE), "no activation is normalized"
    shown = "the source" if isinstance(model, nn.Module) else "a state dict"
    return Scale.parse(_HE), f"{shown} does not show whether activations are normalized"


def _real(like: Tensor | None) -> torch.dtype:
    return like.dtype if like is not None and like.dtype == torch.float64 else torch.float32


def _float(text: str | None, spec: str) -> float | None:
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise ValueError(_unknown(spec)) from None


def _unknown(spec: object) -> str:
    return (
        f'{argument("scale", spec)} is not known. Choose "auto", "paper", "nearest", "norm", "reference" or "fan_in", '
        f'with a factor as "paper:0.3", "init:SCHEME" with a scheme of {", ".join(_SCHEMES)} (as "init:normal(0.02)"), '
        'or a positive number; shape rules take "/depth(L)"'
    )
