"""A dormant layer: its gradient has vanished, `should_reinitialize` sees it, and the layer learns again.

A large step has pushed the biases of one hidden layer so far down that none of its ReLUs fires. FIRE changes weights,
not biases, and a ReLU that is dead by its bias survives it: so the example zeroes the bias too (as
`rekindle.fire(..., biases="zero")` does). Run: python examples/guide_dormant_layer.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from rekindle import FIREConfig, FIREReinitializer


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def epochs(count: int) -> float:
        for _ in range(count):
            for rows in torch.randperm(1500, generator=generator).split(64):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
                optimizer.step()
        with torch.no_grad():
            return float((model(images[1500:]).argmax(1) == labels[1500:]).float().mean())

    print(f"test accuracy after 5 epochs       {epochs(5):.3f}")
    with torch.no_grad():
        model[2].bias.fill_(-20.0)
    print(f"test accuracy with a dormant layer {epochs(5):.3f}")

    fire = FIREReinitializer(FIREConfig(scale="paper"))
    for name, layer in (("first", model[0]), ("second", model[2])):
        if fire.should_reinitialize(layer.weight, layer.weight.grad):
            with torch.no_grad():
                layer.bias.zero_()
            stats = fire.reinitialize(layer.weight, optimizer=optimizer)
            print(f"{name} layer reinitialized: norm {stats.initial_norm:.2f} → {stats.final_norm:.2f}")
    print(f"test accuracy after 5 more epochs  {epochs(5):.3f}")


if __name__ == "__main__":
    main()
