"""PPO in one file, in the manner of CleanRL, with `rekindle.attach` around its loop.

A rollout stores log-probabilities, so what is due is done before it begins: `remedy.start()`. Give `every` as a
multiple of the updates per iteration, else the method acts between a rollout and its updates.

    python examples/cleanrl_ppo.py --num-iterations 40 --period 8
"""

import argparse

import gymnasium
import numpy as np
import torch
from torch import nn, optim
from torch.distributions import Categorical

import rekindle


def layer_init(layer: nn.Linear, std: float = 2**0.5) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Critic and actor side by side; it has no `forward`."""

    def __init__(self, seen: int, actions: int, width: int) -> None:
        super().__init__()

        def layers(outputs: int, std: float) -> nn.Sequential:
            first, second = layer_init(nn.Linear(seen, width)), layer_init(nn.Linear(width, width))
            return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), layer_init(nn.Linear(width, outputs), std))

        self.critic, self.actor = layers(1, 1.0), layers(actions, 0.01)

    def get_action_and_value(self, x: torch.Tensor, action: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Action, its log-probability, entropy and value."""
        probs = Categorical(logits=self.actor(x))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(x).flatten()


def train(args: argparse.Namespace):
    """The attachment, and how far the ratios of the first minibatch of each iteration were from one."""
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    envs = gymnasium.make_vec("CartPole-v1", num_envs=args.num_envs)
    agent = Agent(envs.single_observation_space.shape[0], int(envs.single_action_space.n), args.width)
    optimizer = optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    updates = args.update_epochs * args.num_minibatches
    remedy = rekindle.attach(agent, optimizer, "fire-body", every=args.period * updates)
    first_ratios = []

    next_obs = torch.as_tensor(envs.reset(seed=args.seed)[0])
    next_done = torch.zeros(args.num_envs)
    for iteration in range(args.num_iterations):
        optimizer.param_groups[0]["lr"] = 2.5e-4 * (1 - iteration / args.num_iterations)
        remedy.start()
        kept = []
        for _ in range(args.num_steps):
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs)
            seen, done = next_obs, next_done
            following, reward, terminated, truncated, _ = envs.step(action.numpy())
            next_obs = torch.as_tensor(following)
            next_done = torch.as_tensor(terminated | truncated).float()
            kept.append((seen, action, logprob, value, torch.as_tensor(reward).float(), done))
        obs, actions, logprobs, values, rewards, dones = (torch.stack(column) for column in zip(*kept, strict=True))

        with torch.no_grad():
            following_value, following_done, advantage = agent.critic(next_obs).flatten(), next_done, 0.0
            advantages = torch.zeros_like(rewards)
            for t in reversed(range(args.num_steps)):
                delta = rewards[t] + 0.99 * following_value * (1 - following_done) - values[t]
                advantages[t] = advantage = delta + 0.99 * 0.95 * (1 - following_done) * advantage
                following_value, following_done = values[t], dones[t]
        b_obs, b_actions, b_logprobs = obs.flatten(0, 1), actions.flatten(), logprobs.flatten()
        b_advantages, b_returns = advantages.flatten(), (advantages + values).flatten()

        for epoch in range(args.update_epochs):
            for number, rows in enumerate(np.array_split(np.random.permutation(len(b_obs)), args.num_minibatches)):
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[rows], b_actions[rows])
                ratio = (newlogprob - b_logprobs[rows]).exp()
                if epoch == number == 0:
                    first_ratios.append((ratio - 1).abs().max().item())
                wanted = b_advantages[rows]
                wanted = (wanted - wanted.mean()) / (wanted.std() + 1e-8)
                pg_loss = torch.max(-wanted * ratio, -wanted * ratio.clamp(0.8, 1.2)).mean()
                loss = pg_loss - 0.01 * entropy.mean() + 0.25 * (newvalue - b_returns[rows]).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                remedy.step(loss=loss)
    remedy.finish()
    return remedy, first_ratios


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"num_iterations": 40, "num_envs": 4, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4}
    for name, value in {**defaults, "period": 8, "width": 64, "seed": 1}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    for firing in train(options())[0].firings:
        print(firing)
