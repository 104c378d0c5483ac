"""torchrl: FIRE in a DQN with `DQNLoss`, a `QValueActor` and a target that `SoftUpdate` moves.

The loss runs the actor's own module with the parameters that it holds: attach the actor. The target's parameters are a
module too and have the actor's names, so they are a mirror. torchrl's actor wraps the network, so the name of its
output layer is given.

    python examples/torchrl_dqn.py --frames 20000
"""

import argparse

import torch
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import GymEnv
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

import rekindle


def train(frames: int, every: int = 500, batch: int = 32, width: int = 64):
    """FIRE after every `every` updates; the attachment, the actor and the target's parameters."""
    env = GymEnv("CartPole-v1", categorical_action_encoding=False)
    network = MLP(in_features=4, out_features=2, num_cells=[width, width], activation_class=nn.ReLU)
    actor = QValueActor(network, in_keys=["observation"], spec=env.action_spec)
    explore = EGreedyModule(spec=env.action_spec, annealing_num_steps=max(frames // 4, 1))
    loss_module = DQNLoss(actor, action_space=env.action_spec, delay_value=True)
    target = loss_module.target_value_network_params
    updater = SoftUpdate(loss_module, eps=0.99)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
    replay = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=batch)
    collector = Collector(env, TensorDictSequential(actor, explore), frames_per_batch=batch, total_frames=frames)

    method = rekindle.methods.FIRE(targets="auto", heads="module.0.module.4.weight")
    with rekindle.attach(actor, optimizer, method, every=every, mirrors=target, mirrors_copy="everything") as remedy:
        for data in collector:
            replay.extend(data)
            explore.step(data.numel())
            for _ in range(4):
                loss = loss_module(replay.sample())["loss"]
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                updater.step()
                remedy.step(loss=loss)
    collector.shutdown()
    return remedy, actor, target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=20_000)
    torch.manual_seed(0)
    for firing in train(parser.parse_args().frames)[0].firings:
        print(firing)
