"""What an isometry is multiplied by: the scale rules, parsed from words or numbers.

Rules that depend on shapes alone are known before anything is solved; `nearest`, `norm` and `reference` look at
each matrix. For the shapes see `Block.fans`: one matrix's own, or its parent's after a split per head.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from rekindle.blocks.layouts import Block

_MEASURED = ("nearest", "norm", "reference")
_SCHEMES = ("kaiming", "xavier", "lecun", "torch", "normal", "orthogonal")
_RESIDUAL_ROLES = ("attention-output", "mlp-out")
_PATTERN = re.compile(
    r"(?P<rule>[a-z_]+)(:(?P<scheme>[a-z]+)?(\(?(?P<value>[^()/]+?)\)?)?)?(/depth\((?P<depth>\d+)\))?"
)


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
        """From "paper", "nearest", "norm", "reference", "fan_in", "init:scheme[(value)]" or a number.

        All but the last two take a factor: "norm:0.1" is a tenth of the old norm. The schemes are kaiming(gain),
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
        elif scheme or rule not in ("paper", "fan_in", *_MEASURED):
            raise ValueError(_unknown(spec))
        if number is not None and number <= 0:
            raise ValueError(f"scale={spec!r}: the number must be positive")
        if depth is not None and (int(depth) < 1 or rule in _MEASURED):
            raise ValueError(f"scale={spec!r}: depth is a positive number of layers, for rules that know the shape")
        return cls(rule, scheme, number, int(depth) if depth else None)

    @classmethod
    def _number(cls, value: float, spec: object) -> Scale:
        if not math.isfinite(value) or value <= 0:
            raise ValueError(f"scale={spec!r}: a number must be positive and finite")
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
        """The scale of every matrix of the block where the shape tells it, else None.

        Paper: √(out/in)/taps. A flat convolution is one matrix with in·taps inputs, so there it is √(out/(in·taps)).

        >>> from rekindle.blocks.layouts import matrices
        >>> Scale.parse("init:orthogonal").known(matrices("out in")((8, 4))[0])
        1.0
        """
        out, in_ = block.fans
        if self.rule in _MEASURED:
            return None
        if self.rule == "number":
            assert self.value is not None
            return self.value
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
        f'scale={spec!r} is not known. Choose "paper", "nearest", "norm", "reference" or "fan_in", with a factor as '
        f'"paper:0.3", "init:SCHEME" with a scheme of {", ".join(_SCHEMES)} (as "init:normal(0.02)"), or a positive '
        'number; shape rules take "/depth(L)"'
    )
