"""Controls for FIRE, each of which differs from it in one thing, and singular value clipping, which generalizes it.

They have FIRE's targets and scales, and change matrices block by block as it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn

from rekindle.blocks.finding import Block
from rekindle.engine.devices import for_lapack
from rekindle.initial import orthogonal_
from rekindle.methods.call import Call
from rekindle.methods.remedy import FromStart, Remedy
from rekindle.methods.selection import chosen_weights
from rekindle.methods.writing import isometry_scale, rewrite
from rekindle.projection.receipt import Receipt
from rekindle.projection.scales import Scale, settled
from rekindle.projection.targets import Targets


class MatrixOptions(TypedDict, total=False):
    """What every matrix remedy takes: targets, the optimizer's state afterwards, the seed of its own generator."""

    targets: Targets
    optimizer_state: str
    seed: int


class MatrixRemedy(Remedy):
    """A remedy that makes new matrices from old ones; subclasses implement `change`."""

    def __init__(
        self,
        scale: str | float = "auto",
        *,
        targets: Targets = "layers",
        optimizer_state: str = "fresh",
        seed: int = 0,
    ) -> None:
        super().__init__(seed=seed)
        self._scale = Scale.parse(scale)
        self.scale, self.targets, self.optimizer_state = str(scale), targets, optimizer_state

    def change(self, call: Call, block: Block, old: Tensor, scale: Tensor) -> Tensor:
        """The matrices (count, out, in) that replace `old`; scale: what FIRE would multiply its isometries by."""
        raise NotImplementedError

    def apply(self, call: Call) -> Receipt:
        """Change every targeted matrix."""
        rule, _ = settled(self._scale, call.model)

        def change(name: str, block: Block, old: Tensor) -> Tensor:
            return self.change(call, block, old, isometry_scale(rule, block, old))

        return rewrite(self.name, call, change, targets=self.targets, policy=self.optimizer_state)


class RandomIsometry(MatrixRemedy):
    """W ← s·Q with Q drawn uniformly from the isometries, at the scale that FIRE would use.

    FIRE minus this control is what *nearness* to the old weights is worth. Matrices that are all zero are
    skipped, as by FIRE.

    >>> model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> _ = RandomIsometry("paper")(model)
    >>> w = model[0].weight
    >>> torch.allclose(w @ w.T, 4 / 6 * torch.eye(4), atol=1e-5)
    True

    Args:
        scale: as in `rekindle.fire`.
        targets: as in `rekindle.fire`.
        optimizer_state: what happens to the state of changed weights, see `rekindle.optimizers.reset`.
        seed: of its own generator.
    """

    name = "random-isometry"

    def change(self, call: Call, block: Block, old: Tensor, scale: Tensor) -> Tensor:
        """A drawn isometry at FIRE's scale."""
        new = orthogonal_(torch.empty_like(old), generator=call.generator) * scale
        return torch.where(old.any(-1).any(-1)[:, None, None], new, old)


class Gaussian(MatrixRemedy):
    """W ← N(0, σ²) with the σ that gives it, on average, the norm of FIRE's result: s·√k, k = min(out, in).

    At the scale "init:kaiming" these are He's weights. Random isometry minus this control is what an even spectrum is
    worth. Matrices that are all zero are skipped, as by FIRE.

    >>> model = nn.Sequential(nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 2))
    >>> _ = Gaussian("init:kaiming")(model)
    >>> round(model[0].weight.std().item(), 2)  # √(2/200)
    0.1

    Args:
        scale: as in `rekindle.fire`.
        targets: as in `rekindle.fire`.
        optimizer_state: what happens to the state of changed weights, see `rekindle.optimizers.reset`.
        seed: of its own generator.
    """

    name = "gaussian"

    def change(self, call: Call, block: Block, old: Tensor, scale: Tensor) -> Tensor:
        """Drawn entries at FIRE's norm."""
        drawn = torch.randn(old.shape, generator=call.generator, device=call.generator.device).to(old)
        new = drawn * (scale / max(block.out, block.in_) ** 0.5)
        return torch.where(old.any(-1).any(-1)[:, None, None], new, old)


class Rescale(MatrixRemedy):
    """W ← W·(s·√k/‖W‖_F): the old weights with the norm that FIRE's result has, k = min(out, in).

    FIRE minus this control is what changing the *directions* is worth.

    >>> model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> _ = Rescale(scale=0.5)(model)
    >>> round(model[0].weight.norm().item(), 4)
    1.0

    Args:
        scale: as in `rekindle.fire`.
        targets: as in `rekindle.fire`.
        optimizer_state: what happens to the state of changed weights, see `rekindle.optimizers.reset`.
        seed: of its own generator; nothing is drawn here.
    """

    name = "rescale"

    def change(self, call: Call, block: Block, old: Tensor, scale: Tensor) -> Tensor:
        """The old matrices with FIRE's norm."""
        norm = torch.linalg.matrix_norm(old)[:, None, None]
        wanted = scale * block.smaller**0.5
        return torch.where(norm > 0, old * (wanted / norm.clamp_min(torch.finfo(old.dtype).tiny)), old)


class SingularClip(MatrixRemedy):
    """W = UΣVᵀ ← U·clip(Σ, low·s, high·s)·Vᵀ, s the value of the scale rule.

    With low = 0 and s = 1 this is the clipping of Saito, Matsumoto & Saito (2017), but tap by tap where they flatten
    a convolution, and without their bound on BatchNorm's scales. A positive `low` also lifts directions that have died
    out, and low = high = 1 is FIRE. The singular vectors stay. The optimizer's state is kept, since weights inside the
    bounds do not move.

    >>> model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 1))
    >>> _ = model[0].weight.data.copy_(torch.diag(torch.tensor([3.0, 1.0, 0.1])))
    >>> _ = SingularClip(low=0.5, high=2.0, scale=1.0)(model)
    >>> [round(v, 4) for v in torch.linalg.svdvals(model[0].weight).tolist()]
    [2.0, 1.0, 0.5]

    Args:
        low: the least singular value, in units of the scale.
        high: the largest one.
        scale: the scale rule, as for `rekindle.fire`.
        options: targets, optimizer_state and seed.
    """

    name = "singular-clip"

    def __init__(
        self, low: float = 0.0, high: float = 1.0, scale: str | float = 1.0, **options: Unpack[MatrixOptions]
    ) -> None:
        if not 0 <= low <= high:
            raise ValueError(f"low={low} and high={high}: need 0 ≤ low ≤ high")
        options.setdefault("optimizer_state", "none")
        super().__init__(scale, **options)
        self.low, self.high = low, high

    def change(self, call: Call, block: Block, old: Tensor, scale: Tensor) -> Tensor:
        """The same singular vectors with clipped values."""
        u, values, v = (part.to(old.device) for part in torch.linalg.svd(for_lapack(old), full_matrices=False))
        s = scale[:, :, 0]
        clipped = values.clamp(self.low * s, self.high * s)
        # A matrix inside the bounds keeps its bits.
        inside = (clipped == values).all(-1)[:, None, None]
        return torch.where(inside, old, (u * clipped[:, None, :]) @ v)


class FreshAtNorm(FromStart):
    """W ← D·(‖W‖_F/‖D‖_F) for each matrix, D drawn anew by the layer's own scheme.

    Its difference to a full reset is what the *norm* that training gave the weights is worth.

    >>> model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> before = model[0].weight.detach().clone()
    >>> _ = FreshAtNorm()(model)
    >>> torch.allclose(before, model[0].weight), torch.allclose(before.norm(), model[0].weight.norm())
    (False, True)

    Args:
        targets: which parameters, as for `rekindle.plan`.
        fresh: a function that returns a new model, where modules' own schemes are not how the model starts.
        optimizer_state: what becomes of the state of changed parameters: "fresh", "moments", "step" or "none".
        seed: what its own random numbers start from, when the call gives no generator.
    """

    name = "fresh-at-norm"

    def __init__(
        self,
        *,
        targets: Targets = "layers",
        fresh: Callable[[], nn.Module] | None = None,
        optimizer_state: str = "fresh",
        seed: int = 0,
    ) -> None:
        super().__init__(fresh=fresh, seed=seed)
        self.targets, self.optimizer_state = targets, optimizer_state

    def apply(self, call: Call) -> Receipt:
        """Draw every targeted matrix anew at its old norm."""
        picked, _ = chosen_weights(call.model, self.targets)
        if computed := [each.name for each in picked if each.computed]:
            raise ValueError(f"{computed[0]!r} is parametrized: leave it out with targets=")
        drawn = self.drawn(call, [each.name for each in picked])

        def change(name: str, block: Block, old: Tensor) -> Tensor:
            new = block.read(drawn[name]).to(old)
            ratio: Tensor = torch.linalg.matrix_norm(old) / torch.linalg.matrix_norm(new)
            return new * ratio.nan_to_num(0.0, 0.0, 0.0)[:, None, None]

        return rewrite(self.name, call, change, targets=self.targets, policy=self.optimizer_state)
