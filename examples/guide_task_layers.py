"""Layers of a task: a shared trunk keeps what it knows, only the branch of the returning task is renewed.

Two tasks share a trunk: even or odd, and small or large. The second task's labels change their meaning halfway, so
its branch is reinitialized and trained on the frozen trunk, so the first task loses nothing.
Run: python examples/guide_task_layers.py
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from rekindle import FIREConfig, FIREReinitializer


def branch() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    digits = load_digits()
    images, digit = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    trunk = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    branches = nn.ModuleDict({"parity": branch(), "size": branch()})
    optimizer = torch.optim.Adam([*trunk.parameters(), *branches.parameters()], lr=2e-3)

    def train(task: str, labels: Tensor, count: int) -> None:
        for _ in range(count):
            for rows in torch.randperm(1500, generator=generator).split(64):
                optimizer.zero_grad()
                nn.functional.cross_entropy(branches[task](trunk(images[rows])), labels[rows]).backward()
                optimizer.step()

    def accuracy(task: str, labels: Tensor) -> float:
        with torch.no_grad():
            return float((branches[task](trunk(images[1500:])).argmax(1) == labels[1500:]).float().mean())

    parity, size, changed = digit % 2, (digit >= 5).long(), (digit % 3 == 0).long()
    train("parity", parity, 6)
    train("size", size, 6)
    print(f"accuracy: parity {accuracy('parity', parity):.3f}, size {accuracy('size', size):.3f}")

    fire = FIREReinitializer(FIREConfig(scale="paper"))
    before = trunk[0].weight.detach().clone()
    stats = fire.reinitialize(branches["size"][0].weight, optimizer=optimizer)
    same = torch.equal(before, trunk[0].weight)
    print(f"branch renewed (norm × {stats.norm_preservation():.2f}), trunk unchanged: {same}")
    trunk.requires_grad_(False)
    train("size", changed, 6)
    print(f"accuracy: parity {accuracy('parity', parity):.3f}, multiples of three {accuracy('size', changed):.3f}")


if __name__ == "__main__":
    main()
