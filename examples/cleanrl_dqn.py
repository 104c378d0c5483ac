"""DQN in one file, in the manner of CleanRL: `rekindle.fire` at each task switch, and nothing else of rekindle.

CartPole's four observations come in a new order and with new signs in each task, so what was learned is of no use and
only the ability to learn counts. At a switch all three layers become isometries, their optimizer slots start again,
the target network follows with `load_state_dict` (biases too), and the replay, which holds the old
observations, is emptied.

    python examples/cleanrl_dqn.py --tasks 6 --steps 8000 --remedy fire      # or: --remedy nothing
"""

import argparse
import random
from dataclasses import dataclass

import gymnasium
import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss

import rekindle


@dataclass
class Options:
    """What the command line may change."""

    tasks: int = 6
    steps: int = 8_000
    remedy: str = "fire"
    seed: int = 0
    width: int = 64
    rate: float = 1e-3
    batch: int = 64
    gamma: float = 0.99
    starts: int = 200
    target_every: int = 250
    explore: float = 0.2  # the share of a task in which exploration falls from 1 to 0.05


class Task(gymnasium.ObservationWrapper):
    """CartPole whose observations are permuted and sign-flipped; task 0 is CartPole itself."""

    def __init__(self, index: int, seed: int) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        numbers = np.random.default_rng([seed, index])
        self.order = numbers.permutation(4) if index else np.arange(4)
        self.signs = numbers.choice(np.array([-1, 1], np.float32), 4) if index else np.ones(4, np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """The observation as this task shows it."""
        return observation[self.order] * self.signs


class Replay:
    """Transitions in arrays, the oldest overwritten."""

    def __init__(self, size: int) -> None:
        self.size, self.count = size, 0
        self.seen, self.after = np.zeros((size, 4), np.float32), np.zeros((size, 4), np.float32)
        self.action, self.reward = np.zeros(size, np.int64), np.zeros(size, np.float32)
        self.final = np.zeros(size, bool)

    def add(self, *transition: object) -> None:
        """Store one transition."""
        row = self.count % self.size
        for array, value in zip((self.seen, self.action, self.reward, self.after, self.final), transition, strict=True):
            array[row] = value
        self.count += 1

    def sample(self, batch: int, numbers: np.random.Generator) -> list[torch.Tensor]:
        """Rows drawn with replacement."""
        rows = numbers.integers(min(self.count, self.size), size=batch)
        stored = (self.seen, self.action, self.reward, self.after, self.final)
        return [torch.from_numpy(array[rows]) for array in stored]


def network(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))


def learn(options: Options) -> list[float]:
    """The mean return over the second half of each task."""
    random.seed(options.seed), torch.manual_seed(options.seed)
    numbers = np.random.default_rng(options.seed)
    online, target = network(options.width), network(options.width)
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=options.rate)
    found = []
    for index in range(options.tasks):
        if index and options.remedy == "fire":
            receipt = rekindle.fire(online, optimizer)  # all layers; "auto" as targets keeps the output layer
            target.load_state_dict(online.state_dict())
            print(f"task {index}: {len(receipt.changed)} matrices projected")
        found.append(one_task(Task(index, options.seed), online, target, optimizer, numbers, options))
        print(f"task {index}: mean return {found[-1]:.0f}")
    return found


def one_task(
    env: gymnasium.Env,
    online: nn.Module,
    target: nn.Module,
    optimizer: torch.optim.Optimizer,
    numbers: np.random.Generator,
    options: Options,
) -> float:
    replay, returns, total = Replay(options.steps), [], 0.0
    seen, _ = env.reset(seed=int(numbers.integers(2**31)))
    for step in range(options.steps):
        chance = max(0.05, 1 - 0.95 * step / (options.explore * options.steps))
        if step < options.starts or numbers.random() < chance:
            action = int(numbers.integers(2))
        else:
            with torch.no_grad():
                action = int(online(torch.from_numpy(seen)).argmax())
        after, reward, terminated, truncated, _ = env.step(action)
        replay.add(seen, action, reward, after, terminated)
        total, seen = total + float(reward), after
        if terminated or truncated:
            if step >= options.steps // 2:
                returns.append(total)
            total, (seen, _) = 0.0, env.reset()
        if step < options.starts:
            continue
        before, actions, rewards, following, final = replay.sample(options.batch, numbers)
        with torch.no_grad():
            goal = rewards + options.gamma * target(following).max(1).values * ~final
        loss = mse_loss(online(before).gather(1, actions[:, None]).flatten(), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % options.target_every == 0:
            target.load_state_dict(online.state_dict())
    return float(np.mean(returns)) if returns else total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Options()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    learn(Options(**vars(parser.parse_args())))
