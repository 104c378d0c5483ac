"""Whether a model normalizes its activations, as far as that is known; and which modules do that.

A normalization counts where a weight reads what was normalized: by a BatchNorm, LayerNorm, RMSNorm, GroupNorm, a
function of these names, or a hand-written division of activations by their own root mean square or standard deviation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import FunctionType

from torch import Tensor, nn

from rekindle.blocks.evidence import Facts, known_of
from rekindle.blocks.functions import names_used
from rekindle.blocks.names import unwrapped

CHANNEL_NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
_FUNCTIONS = frozenset({"layer_norm", "rms_norm", "batch_norm", "group_norm", "instance_norm", "local_response_norm"})
# What a hand-written normalization cannot do without; other code uses it too.
_PARTS = frozenset({"normalize", "norm", "vector_norm", "sqrt", "rsqrt", "std", "var", "var_mean", "std_mean", "pow"})
_NAMES = re.compile(r"(^|[._\d])((layer|batch|group|instance|rms)?_?norms?|ln|bn|gn)(_|\d|\.|$)|Norm", re.I)


def is_norm(module: nn.Module) -> bool:
    """Whether it divides by a measured size: torch's own norms, or a class named like one that holds vectors only.

    >>> is_norm(nn.BatchNorm2d(3)), is_norm(nn.ReLU())
    (True, False)
    """
    if isinstance(module, (*CHANNEL_NORMS, nn.LayerNorm, nn.RMSNorm)):
        return True
    called = type(module).__name__
    return "Norm" in called and "Frozen" not in called and all(p.ndim <= 1 for p in module.parameters())


def normalizes(model: nn.Module, facts: Facts | None = None) -> bool | None:
    """Whether the model normalizes its activations: by a recording where there is one, else by its classes.

    None where that is not known: classes of the user's own that may do it by hand.

    Args:
        model: any module, wrapped or not.
        facts: what a recorded pass showed; by default that of `evidence.using`.

    >>> normalizes(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.ReLU(), nn.Linear(3, 1)))
    True
    >>> normalizes(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    False
    """
    core = unwrapped(model)
    facts = known_of(core) if facts is None else facts
    if facts is not None and facts.normalizes is not None:
        return facts.normalizes
    if any(map(is_norm, core.modules())):
        return True
    used: set[str] = set()
    classes = {cls for module in core.modules() for cls in type(module).__mro__}
    for kind in classes:
        # The base classes of transformers hold thousands of lines about loading and generation.
        package, _, rest = kind.__module__.partition(".")
        if package not in ("torch", "builtins") and (package != "transformers" or rest.startswith("models.")):
            used |= names_used(kind)
    for held in (value for module in core.modules() for value in vars(module).values()):
        used |= names_used(held) if isinstance(held, FunctionType) else set()  # self.norm = lambda x: …
    if used & _FUNCTIONS:
        return True
    return None if used & _PARTS else False


def state_normalizes(tensors: Mapping[str, Tensor]) -> bool | None:
    """Whether the model of a state dict normalizes its activations: True, or None: keys never show that none does.

    >>> import torch
    >>> state_normalizes({"0.weight": torch.zeros(4, 3), "1.weight": torch.ones(4), "1.bias": torch.zeros(4)})
    True
    >>> state_normalizes({"0.weight": torch.zeros(4, 3), "0.bias": torch.zeros(4)})
    """
    for key, tensor in tensors.items():
        module, _, leaf = key.rpartition(".")
        if leaf == "running_mean":
            return True
        if leaf not in ("weight", "gamma", "scale", "g") or tensor.dim() != 1 or not tensor.numel():
            continue
        # A vector with a bias of its size is a norm's; without one it may be a PReLU's.
        bias = next((tensors[name] for end in ("bias", "beta") if (name := f"{module}.{end}") in tensors), None)
        if (bias is not None and bias.shape == tensor.shape) or _NAMES.search(module):
            return True
    return None
