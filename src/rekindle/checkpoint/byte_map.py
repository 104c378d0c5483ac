"""Which bytes of a file belong to which tensor: every tensor inside its storage, and no byte in two of them.

Tensors that are the same view of one storage are tied, which is one weight with several names. Any other overlap
(`base` and `base[:16]`) means that writing one changes the other, so neither is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from rekindle.checkpoint.trees import TorchTree, tensors_in


class _Extent(NamedTuple):
    start: int
    stop: int
    name: str


def overlapping(tree: TorchTree, tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> dict[str, str]:
    """Each of the tensors that shares bytes with another one that is not the same view of them, and which; or itself.

    Everything that the file holds counts: also an optimizer's slot may share bytes with a weight.

    >>> import io, torch
    >>> base, buffer = torch.zeros(8, 4), io.BytesIO()
    >>> torch.save({"full": base, "part": base[:2], "other": torch.zeros(2)}, buffer)
    >>> tree = TorchTree("a.pt", buffer)
    >>> overlapping(tree, tree.value, {})
    {'full': 'part', 'part': 'full'}
    """
    views = {tree.view(tensor) for tensor in tensors.values()}
    # The same view under another key (a copy of the state dict) is the same weight.
    stored = [(place, tensor) for place, tensor in tensors_in(tree.value) if tree.storage(tensor) is not None]
    others = [(place, tensor) for place, tensor in stored if tree.view(tensor) not in views]
    extents = []
    for name, tensor in (*((n, t) for n, t in tensors.items() if n not in tied), *others):
        place = tree.place(tensor)
        if place is not None and place.size:
            extents.append(_Extent(place.start, place.start + place.size, name))
    shared = {name: "itself" for name, tensor in tensors.items() if _overlaps_itself(tensor)}
    reach: _Extent | None = None
    for one in sorted(extents):
        if reach is not None and one.start < reach.stop:
            shared.setdefault(one.name, reach.name)
            shared.setdefault(reach.name, one.name)
        if reach is None or one.stop > reach.stop:
            reach = one
    return {name: other for name, other in shared.items() if name in tensors}


def _overlaps_itself(tensor: Tensor) -> bool:
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False
