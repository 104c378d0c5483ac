"""A plateau: the loss has stopped falling, so the layers that look worn are reinitialized, and training goes on.

The network starts from a bad place, hidden weights of nearly rank one, where plain SGD soon stands still.
Run: python examples/guide_plateau.py
"""

import itertools

import torch
from sklearn.datasets import load_digits
from torch import nn

from rekindle import FIREConfig, FIREReinitializer

EPOCHS, PATIENCE, HIDDEN = 30, 3, (0, 2, 4)


def bad_start(generator: torch.Generator) -> nn.Sequential:
    widths = (64, 48, 48, 48)
    hidden = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(48, 10))
    with torch.no_grad():
        for layer in (model[number] for number in HIDDEN):
            out, in_ = layer.weight.shape
            one = torch.outer(torch.randn(out, generator=generator), torch.randn(in_, generator=generator))
            layer.weight.copy_(0.03 * one + 1e-4 * torch.randn(out, in_, generator=generator))
            layer.bias.zero_()
    return model


def train(fire: FIREReinitializer | None) -> tuple[float, list[int]]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    model = bad_start(generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    best, waited, changed = float("inf"), 0, []
    for epoch in range(EPOCHS):
        total = 0.0
        for rows in torch.randperm(1500, generator=generator).split(64):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
            loss.backward()
            optimizer.step()
            total += float(loss.detach())
        improved = total < 0.98 * best
        best, waited = min(best, total), 0 if improved else waited + 1
        if fire is not None and waited >= PATIENCE and not changed:
            for number in HIDDEN:
                if fire.should_reinitialize(model[number].weight):
                    fire.reinitialize(model[number].weight, optimizer=optimizer)
                    changed.append(epoch)
            best, waited = float("inf"), 0
    with torch.no_grad():
        accuracy = float((model(images[1500:]).argmax(1) == labels[1500:]).float().mean())
    return accuracy, changed


def main() -> None:
    torch.set_num_threads(1)
    fire = FIREReinitializer(FIREConfig(scale="paper", max_condition=1e3))
    for name, method in (("waiting", None), ("FIRE", fire)):
        accuracy, changed = train(method)
        print(f"{name:>8}: test accuracy {accuracy:.3f}, layers reinitialized after epochs {changed}")


if __name__ == "__main__":
    main()
