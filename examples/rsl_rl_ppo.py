"""rsl-rl: FIRE in a PPO agent. The runner owns the loop, so the optimizer says when a step was taken.

PPO stores log-probabilities while it plays. So what is due is done before the first action of the next rollout.

    python examples/rsl_rl_ppo.py --iterations 40
"""

import argparse

import gymnasium
import numpy as np
import torch
from rsl_rl.algorithms import PPO
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict
from torch import nn

import rekindle


class Pendulums(VecEnv):
    """Gymnasium's pendulum several times, as rsl-rl wants an environment."""

    def __init__(self, count: int) -> None:
        self.envs = gymnasium.make_vec("Pendulum-v1", num_envs=count)
        self.num_envs, self.num_actions, self.max_episode_length = count, 1, 200
        self.episode_length_buf, self.device, self.cfg = torch.zeros(count, dtype=torch.long), "cpu", {}
        self.seen, _ = self.envs.reset(seed=0)

    def get_observations(self) -> TensorDict:
        """What is seen now."""
        return TensorDict({"policy": torch.as_tensor(self.seen, dtype=torch.float32)}, batch_size=[self.num_envs])

    def step(self, actions: torch.Tensor) -> tuple[TensorDict, torch.Tensor, torch.Tensor, dict]:
        """One step of all."""
        self.seen, rewards, final, late, _ = self.envs.step(actions.clamp(-2, 2).numpy().astype(np.float32))
        done = torch.as_tensor(final | late)
        return self.get_observations(), torch.as_tensor(rewards).float(), done, {"time_outs": torch.as_tensor(late)}


class Algorithm(PPO):
    """PPO whose rollouts begin with what is due."""

    remedy: rekindle.attach

    def act(self, obs: TensorDict) -> torch.Tensor:
        """Before each action."""
        self.remedy.start()
        return super().act(obs)


def train(iterations: int, period: int = 8, envs: int = 8, steps: int = 32):
    """FIRE after every `period` iterations; the attachment."""
    network = {"class_name": "MLPModel", "hidden_dims": [64, 64], "activation": "elu"}
    options = {
        "num_steps_per_env": steps,
        "save_interval": 1000,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "algorithm": {"class_name": Algorithm, "num_learning_epochs": 4, "num_mini_batches": 2},
        "actor": {**network, "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 1.0}},
        "critic": network,
    }
    algorithm = OnPolicyRunner(Pendulums(envs), options, log_dir=None)
    agent = algorithm.alg
    networks = nn.ModuleDict({"actor": agent.actor, "critic": agent.critic})
    updates = agent.num_learning_epochs * agent.num_mini_batches  # of the optimizer per iteration
    with rekindle.attach(networks, agent.optimizer, "fire-body", every=period * updates) as remedy:
        agent.remedy = remedy
        agent.optimizer.register_step_post_hook(lambda *_: remedy.step())
        algorithm.learn(iterations)
    return remedy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=40)
    torch.manual_seed(0)
    for firing in train(parser.parse_args().iterations).firings:
        print(firing)
