"""SAC in one file, in the manner of CleanRL, with `rekindle.attach` around its loop.

The optimizers take turns: two updates of the critics, then two of the actor. A step is an update of the first optimizer
in the list, so 200 updates of each are 200 steps. Target networks follow the critics as mirrors.

    python examples/cleanrl_sac.py --total-timesteps 20000 --every 2000
"""

import argparse

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim

import rekindle


class SoftQNetwork(nn.Module):
    """The value of an action."""

    def __init__(self, seen: int, acted: int, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(seen + acted, width), nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """One value per row."""
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(torch.cat([x, a], 1))))))


class Actor(nn.Module):
    """A Gaussian, squashed into the range of actions."""

    def __init__(self, seen: int, acted: int, width: int, scale: float) -> None:
        super().__init__()
        self.fc1, self.fc2, self.scale = nn.Linear(seen, width), nn.Linear(width, width), scale
        self.fc_mean, self.fc_logstd = nn.Linear(width, acted), nn.Linear(width, acted)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and logarithm of the standard deviation."""
        x = F.relu(self.fc2(F.relu(self.fc1(x))))
        return self.fc_mean(x), -1.5 + 3.5 * torch.tanh(self.fc_logstd(x))

    def get_action(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """An action and its log-probability."""
        mean, log_std = self(x)
        normal = torch.distributions.Normal(mean, log_std.exp())
        drawn = normal.rsample()
        squashed = torch.tanh(drawn)
        log_prob = normal.log_prob(drawn) - torch.log(self.scale * (1 - squashed.pow(2)) + 1e-6)
        return squashed * self.scale, log_prob.sum(1, keepdim=True)


def train(args: argparse.Namespace):
    """The attachment, the critics and their targets."""
    torch.manual_seed(args.seed)
    numbers = np.random.default_rng(args.seed)
    env = gymnasium.make("Pendulum-v1")
    env.action_space.seed(args.seed)
    seen, acted, scale = env.observation_space.shape[0], env.action_space.shape[0], float(env.action_space.high[0])
    actor = Actor(seen, acted, args.width, scale)
    qf1, qf2, qf1_target, qf2_target = (SoftQNetwork(seen, acted, args.width) for _ in range(4))
    qf1_target.load_state_dict(qf1.state_dict())
    qf2_target.load_state_dict(qf2.state_dict())
    q_optimizer = optim.Adam([*qf1.parameters(), *qf2.parameters()], lr=1e-3)
    actor_optimizer = optim.Adam(actor.parameters(), lr=3e-4)
    log_alpha = torch.zeros(1, requires_grad=True)
    a_optimizer = optim.Adam([log_alpha], lr=1e-3)
    rows: list[tuple] = []

    remedy = rekindle.attach(
        nn.ModuleDict({"qf1": qf1, "qf2": qf2, "actor": actor}),
        [q_optimizer, actor_optimizer],
        rekindle.methods.FIRE(targets="auto"),
        every=args.every,
        mirrors={"qf1": qf1_target, "qf2": qf2_target},
        mirrors_copy="everything",
    )
    obs, _ = env.reset(seed=args.seed)
    for global_step in range(args.total_timesteps):
        if global_step < args.learning_starts:
            action = env.action_space.sample()
        else:
            action = actor.get_action(torch.as_tensor(obs)[None])[0][0].detach().numpy()  # gradients are on: no step
        next_obs, reward, terminated, truncated, _ = env.step(action)
        rows.append((obs, action, np.float32(reward), next_obs, np.float32(terminated)))
        obs = env.reset()[0] if terminated or truncated else next_obs
        if global_step < args.learning_starts:
            continue

        drawn = [rows[i] for i in numbers.integers(len(rows), size=args.batch_size)]
        o, a, r, o2, d = (torch.as_tensor(np.stack(column)) for column in zip(*drawn, strict=True))
        alpha = log_alpha.exp().item()
        with torch.no_grad():
            a2, log_pi = actor.get_action(o2)
            least = torch.min(qf1_target(o2, a2), qf2_target(o2, a2)) - alpha * log_pi
            goal = r + (1 - d) * 0.99 * least.view(-1)
        qf_loss = F.mse_loss(qf1(o, a).view(-1), goal) + F.mse_loss(qf2(o, a).view(-1), goal)
        q_optimizer.zero_grad()
        qf_loss.backward()
        q_optimizer.step()

        if global_step % args.policy_frequency == 0:
            for _ in range(args.policy_frequency):
                pi, log_pi = actor.get_action(o)
                actor_loss = (alpha * log_pi - torch.min(qf1(o, pi), qf2(o, pi))).mean()
                actor_optimizer.zero_grad()
                actor_loss.backward()
                actor_optimizer.step()
                alpha_loss = (-log_alpha.exp() * (log_pi.detach() - acted)).mean()
                a_optimizer.zero_grad()
                alpha_loss.backward()
                a_optimizer.step()

        for net, target in ((qf1, qf1_target), (qf2, qf2_target)):
            for param, target_param in zip(net.parameters(), target.parameters(), strict=True):
                target_param.data.copy_(0.005 * param.data + 0.995 * target_param.data)
        remedy.step(qf_loss=qf_loss)
    steps = remedy.steps
    remedy.finish()
    return remedy, steps, {"qf1": (qf1, qf1_target), "qf2": (qf2, qf2_target)}


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"total_timesteps": 20_000, "learning_starts": 1_000, "batch_size": 64, "width": 64, "every": 2_000}
    for name, value in {**defaults, "policy_frequency": 2, "seed": 0}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    for firing in train(options())[0].firings:
        print(firing)
