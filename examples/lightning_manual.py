"""Lightning with manual optimization: FIRE in a GAN and in a DDPG agent, each with two optimizers.

`trainer.global_step` counts the updates of all optimizers; here a step is an update of the first one that
`configure_optimizers` returns, or of `clock=1`. Generator and actor feed a critic, so their last layers do not look
like output layers: `heads=` names them. DDPG's targets are mirrors, by the name of what they follow.

    python examples/lightning_manual.py gan --epochs 20
"""

import argparse
import copy
import itertools
import warnings

import gymnasium
import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import rekindle
from rekindle.integrations.lightning import RekindleCallback


def layers(*widths: int) -> nn.Sequential:
    made: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        made += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*made[:-1])


class GAN(pl.LightningModule):
    """A generator of points on a circle."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.generator, self.critic = layers(4, width, width, 2), layers(2, width, width, 1)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        """The critic first, then the generator."""
        critic, generator = self.optimizers()
        real, noise = batch[0], torch.randn(len(batch[0]), 4)
        ones = torch.ones(len(real), 1)
        fake = self.generator(noise)
        loss = F.binary_cross_entropy_with_logits(self.critic(real), ones)
        loss = loss + F.binary_cross_entropy_with_logits(self.critic(fake.detach()), 1 - ones)
        critic.zero_grad()
        self.manual_backward(loss)
        critic.step()
        fooled = F.binary_cross_entropy_with_logits(self.critic(fake), ones)
        generator.zero_grad()
        self.manual_backward(fooled)
        generator.step()
        self.log_dict({"critic_loss": loss, "generator_loss": fooled})

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Critic and generator."""
        return [torch.optim.Adam(self.critic.parameters(), 1e-3), torch.optim.Adam(self.generator.parameters(), 1e-3)]


class Experience(IterableDataset):
    """Each batch: a step of the environment, then a draw from everything that was seen."""

    def __init__(self, agent: "DDPG", count: int, batch: int) -> None:
        self.agent, self.count, self.batch = agent, count, batch
        self.env, self.rows = gymnasium.make("Pendulum-v1"), []
        self.numbers = np.random.default_rng(0)

    def __iter__(self):
        obs, _ = self.env.reset(seed=0)
        for _ in range(self.count):
            with torch.no_grad():
                action = 2 * torch.tanh(self.agent.actor(torch.as_tensor(obs))) + 0.2 * torch.randn(1)
            action = action.clamp(-2, 2).numpy()
            following, reward, final, late, _ = self.env.step(action)
            self.rows.append((obs, action, np.float32([reward]), following, np.float32([final])))
            obs = self.env.reset()[0] if final or late else following
            drawn = [self.rows[i] for i in self.numbers.integers(len(self.rows), size=self.batch)]
            yield tuple(torch.as_tensor(np.stack(column)) for column in zip(*drawn, strict=True))


class DDPG(pl.LightningModule):
    """Actor and critic with their targets."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.critic, self.actor = layers(4, width, width, 1), layers(3, width, width, 1)
        self.critic_target, self.actor_target = copy.deepcopy(self.critic), copy.deepcopy(self.actor)
        self.critic_target.requires_grad_(False), self.actor_target.requires_grad_(False)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, ...], index: int) -> None:
        """One update of each, then the targets."""
        obs, action, reward, following, final = batch
        critic, actor = self.optimizers()
        with torch.no_grad():
            next_action = 2 * torch.tanh(self.actor_target(following))
            goal = reward + 0.99 * (1 - final) * self.critic_target(torch.cat([following, next_action], 1))
        critic.zero_grad()
        self.manual_backward(F.mse_loss(self.critic(torch.cat([obs, action], 1)), goal))
        critic.step()
        actor.zero_grad()
        self.manual_backward(-self.critic(torch.cat([obs, 2 * torch.tanh(self.actor(obs))], 1)).mean())
        actor.step()
        with torch.no_grad():
            for net, target in ((self.critic, self.critic_target), (self.actor, self.actor_target)):
                for own, other in zip(net.parameters(), target.parameters(), strict=True):
                    other.lerp_(own, 0.005)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Critic and actor."""
        return [torch.optim.Adam(self.critic.parameters(), 1e-3), torch.optim.Adam(self.actor.parameters(), 1e-4)]


def train(kind: str, epochs: int, every: int, width: int = 64, batches: int = 16):
    """The callback and the module after `epochs` of so many batches."""
    module = GAN(width) if kind == "gan" else DDPG(width)
    if kind == "gan":
        angles = torch.rand(batches * 32) * 6.2832
        loader = DataLoader(TensorDataset(torch.stack([angles.cos(), angles.sin()], 1)), batch_size=32)
        callback = RekindleCallback(
            rekindle.methods.FIRE(targets="auto", heads=["generator.4", "critic.4"]), every=every
        )
    else:
        loader = DataLoader(Experience(module, batches, 32), batch_size=None)
        callback = RekindleCallback(
            rekindle.methods.FIRE(targets="auto", heads=["actor.4", "critic.4"], exclude=["*_target.*"]),
            every=every,
            mirrors={"critic": module.critic_target, "actor": module.actor_target},
            mirrors_copy="everything",
        )
    pl.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, callbacks=[callback], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, loader)  # fmt: skip
    return callback, module


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["gan", "ddpg"])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--every", type=int, default=100)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="lightning")
    torch.manual_seed(0)
    for firing in train(arguments.kind, arguments.epochs, arguments.every)[0].firings:
        print(firing)
