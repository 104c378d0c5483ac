"""The README's first five minutes: look at a network, plan, repair, look again. Needs torch alone; a few seconds.

python examples/quickstart.py
"""

import torch
from torch import nn

import rekindle

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
optimizer = torch.optim.Adam(model.parameters())
with torch.no_grad():  # a network that has seen better days: most of a layer never fires, the rest points one way
    model[2].bias[:40] = -10.0
    model[2].weight[40:] = torch.randn(1, 64) + 0.01 * torch.randn(24, 64)
batches = [torch.randn(128, 20) for _ in range(4)]

print(rekindle.health(model, batches))
print(rekindle.plan(model))
receipt = rekindle.fire(model, optimizer, biases="zero")
print(receipt)
print(rekindle.health(model, batches))
