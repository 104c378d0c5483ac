"""Your own stream, network and method in the laboratory: `rekindle lab run examples/lab_own.py`, about ten seconds.

Each task asks for the parity of three other bits. The method adds a little noise to every weight.
"""

import torch
from torch import nn

from rekindle import Receipt, lab
from rekindle.lab.arms import arms


@lab.stream("parity")
def parity(seed, *, tasks=6, rows=320, bits=12):
    def task(index):
        generator = torch.Generator().manual_seed(seed + index)
        x = torch.randint(2, (rows, bits), generator=generator).float()
        asked = torch.randperm(bits, generator=generator)[:3]
        return lab.Task(f"bits {asked.tolist()}", lab.Examples(2 * x - 1, x[:, asked].sum(1).long() % 2), epochs=20)

    return lab.Stream("parity", classes=2, shape=(bits,), length=tasks, make=task)


@lab.network("narrow")
def narrow(shape, classes, *, width=24):
    hidden = [nn.Linear(*shape, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(width, classes))


@lab.arm("jitter", about="a little noise on every weight")
def jitter(size=0.05):
    def treat(model, optimizer=None, *, generator=None, **_):
        for parameter in model.parameters():
            parameter.data.add_(size * torch.randn(parameter.shape, generator=generator))
        return Receipt("jitter")

    return treat


setting = lab.Setting("parity", "parity", "narrow", batch=32, lr=1e-2)
study = lab.Study("own", [setting], arms(["nothing", "full-reset", "fire", "jitter"]), seeds=[0, 1, 2])
