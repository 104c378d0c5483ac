"""Plans inside training rest on the first training step, whatever the source says: here there is none."""

import torch
from torch import nn

import rekindle

SOURCE = """
class Cut(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.value, self.unused = nn.Linear(6, 16), nn.Linear(8, 3), nn.Linear(8, 8)

    def forward(self, x):
        a, b = helper(self.stem(x))
        return self.value(a * torch.sigmoid(b))

def helper(x):
    return x[:, :8], x[:, 8:]

class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.actor, self.critic = nn.Linear(8, 2), nn.Linear(8, 1)

    def losses(self, x):
        hidden = self.trunk(x)
        return self.actor(hidden).square().mean() + self.critic(hidden).square().mean()
"""


def made(name):
    """Classes without readable source, as in a REPL."""
    space = {"nn": nn, "torch": torch}
    exec(SOURCE, space)
    torch.manual_seed(0)
    return space[name]()


def trained(model, loss):
    optimizer = torch.optim.Adam(model.parameters())
    with rekindle.attach(model, optimizer, "fire-body", at=2) as remedy:
        for _ in range(4):
            optimizer.zero_grad()
            loss(model, torch.randn(5, 6)).backward()
            optimizer.step()
            remedy.step()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    return remedy.receipts[0]


def test_the_first_step_shows_cuts_outputs_and_what_never_runs():
    receipt = trained(made("Cut"), lambda model, x: model(x).square().mean())
    assert receipt.changed == ("stem.weight",)
    assert [(record.out, record.in_) for record in receipt.records] == [(8, 6), (8, 6)]  # the halves of a gate
    assert receipt.skipped["value.weight"] == "output head"
    assert "did not run" in receipt.skipped["unused.weight"]


def test_networks_that_are_called_one_by_one_are_one_recording():
    receipt = trained(made("Agent"), lambda model, x: model.losses(x))
    assert set(receipt.changed) == {"trunk.0.weight", "trunk.2.weight"}
    assert receipt.skipped["actor.weight"] == receipt.skipped["critic.weight"] == "output head"


def test_what_did_not_run_may_be_excluded_by_its_name():
    model = made("Cut")
    fire = rekindle.methods.FIRE(exclude="unused*", targets="auto")
    optimizer = torch.optim.Adam(model.parameters())
    with rekindle.attach(model, optimizer, fire, at=1) as remedy:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 6)).square().mean().backward()
            optimizer.step()
            remedy.step()
    assert remedy.receipts[0].changed == ("stem.weight",)
