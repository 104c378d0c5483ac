"""skrl: FIRE in a PPO agent. The trainer owns the loop, so the optimizer says when a step was taken.

PPO stores log-probabilities while it plays. So what is due is done before the first action of the next rollout.

    python examples/skrl_ppo.py --timesteps 20000
"""

import argparse

import gymnasium
import torch
from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
from skrl.trainers.torch import SequentialTrainer
from torch import nn

import rekindle


def layers(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


class Policy(CategoricalMixin, Model):
    """The probabilities of actions."""

    def __init__(self, observation_space, action_space, device):
        Model.__init__(self, observation_space=observation_space, action_space=action_space, device=device)
        CategoricalMixin.__init__(self)
        self.net = layers(self.num_observations, self.num_actions)

    def compute(self, inputs, role):
        """As skrl wants it."""
        return self.net(inputs["observations"]), {}


class Value(DeterministicMixin, Model):
    """The value of a state."""

    def __init__(self, observation_space, action_space, device):
        Model.__init__(self, observation_space=observation_space, action_space=action_space, device=device)
        DeterministicMixin.__init__(self)
        self.net = layers(self.num_observations, 1)

    def compute(self, inputs, role):
        """As skrl wants it."""
        return self.net(inputs["observations"]), {}


class Agent(PPO):
    """PPO whose rollouts begin with what is due."""

    remedy: rekindle.attach

    def pre_interaction(self, *, timestep, timesteps):
        """Before each action."""
        self.remedy.start()
        super().pre_interaction(timestep=timestep, timesteps=timesteps)


def train(timesteps: int, rollouts: int = 128, iterations: int = 4):
    """FIRE after every `iterations` rollouts; the attachment."""
    env = wrap_env(gymnasium.make_vec("CartPole-v1", num_envs=4), verbose=False)
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space, "device": env.device}
    models = {"policy": Policy(**spaces), "value": Value(**spaces)}
    options = PPO_CFG(rollouts=rollouts, learning_epochs=4, mini_batches=4)
    options.experiment.write_interval = options.experiment.checkpoint_interval = 0
    memory = RandomMemory(memory_size=rollouts, num_envs=env.num_envs, device=env.device)
    agent = Agent(models=models, memory=memory, cfg=options, **spaces)

    updates = options.learning_epochs * options.mini_batches  # of the optimizer per rollout
    with rekindle.attach(nn.ModuleDict(models), agent.optimizer, "fire-body", every=iterations * updates) as remedy:
        agent.remedy = remedy
        agent.optimizer.register_step_post_hook(lambda *_: remedy.step())
        quiet = {"headless": True, "disable_progressbar": True, "close_environment_at_exit": False}
        SequentialTrainer(env=env, agents=agent, cfg={"timesteps": timesteps, **quiet}).train()
    env.close()
    return remedy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timesteps", type=int, default=20_000)
    torch.manual_seed(0)
    for firing in train(parser.parse_args().timesteps).firings:
        print(firing)
