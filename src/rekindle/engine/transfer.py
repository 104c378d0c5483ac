"""Small tensors to the host: one wait per device, however many there are.

On an accelerator every `float(tensor)` lets the host wait until all work before it is done. What is asked of many
matrices is therefore kept as tensors, and fetched together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors on the CPU, in their dtypes; those of an accelerator come in one copy per device.

    They travel as float64, which holds integers up to 2⁵³ exactly.

    >>> to_host([torch.tensor([1, 2]), torch.tensor(True)])
    [tensor([1, 2]), tensor(True)]
    """
    found = list(tensors)
    devices: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if tensor.device.type != "cpu":
            devices.setdefault(tensor.device, []).append(i)
    for members in devices.values():
        together = torch.cat([tensors[i].detach().double().flatten() for i in members]).cpu()
        for i, part in zip(members, torch.split(together, [tensors[i].numel() for i in members]), strict=True):
            found[i] = part.reshape(tensors[i].shape).to(tensors[i].dtype)
    return found
