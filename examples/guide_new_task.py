"""A new task: before each relabeling of the digits, every hidden layer is made an isometry again.

Random labels are the plainest test of plasticity: nothing carries over from task to task, so a network that learns
the tenth labeling more slowly than the first has lost the ability to learn. Run: python examples/guide_new_task.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from rekindle import FIREConfig, FIREReinitializer

TASKS, EPOCHS, IMAGES = 8, 20, 320


def learn(fire: FIREReinitializer | None) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    images = torch.tensor(load_digits().data[:IMAGES] / 16, dtype=torch.float32)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    accuracies = []
    for task in range(TASKS):
        labels = torch.randint(0, 10, (IMAGES,), generator=generator)
        if fire is not None and task > 0:
            for layer in (model[0], model[2]):
                fire.reinitialize(layer.weight, optimizer=optimizer)
        for _ in range(EPOCHS):
            for rows in torch.randperm(IMAGES, generator=generator).split(32):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
                optimizer.step()
        accuracies.append(float((model(images).argmax(1) == labels).float().mean()))
    return accuracies


def main() -> None:
    torch.set_num_threads(1)
    fire = FIREReinitializer(FIREConfig(scale="paper"))
    print("accuracy on the labels of each task, right after it")
    for name, method in (("nothing", None), ("FIRE", fire)):
        print(f"{name:>8}", *(f"{value:.2f}" for value in learn(method)))


if __name__ == "__main__":
    main()
