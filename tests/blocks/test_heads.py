"""Heads: whatever ends in the model's output, however many there are."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import rekindle
from rekindle.blocks.finding import find


def heads(model: nn.Module) -> list[str]:
    return [f.name.removesuffix(".weight") for f in find(model) if "head" in f.marks]


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Agent(nn.Module):
    """CleanRL's PPO agent: no forward at all."""

    def __init__(self) -> None:
        super().__init__()
        self.critic, self.actor = mlp(4, 8, 8, 1), mlp(4, 8, 8, 2)

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        logits = self.actor(x)
        probs = torch.distributions.Categorical(logits=logits)
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


class TwoHeads(nn.Module):
    def __init__(self, residual: bool = False) -> None:
        super().__init__()
        self.body, self.policy, self.extra = mlp(4, 8, 8), nn.Linear(8, 2), nn.Linear(8, 8 if residual else 1)
        self.residual = residual

    def forward(self, x):
        hidden = self.body(x)
        return self.policy(hidden), self.extra(hidden)


class Dueling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features, self.value, self.advantage = mlp(4, 8, 8), mlp(8, 8, 1), mlp(8, 8, 3)

    def forward(self, x):
        hidden = self.features(x)
        value, advantage = self.value(hidden), self.advantage(hidden)
        return value + advantage - advantage.mean(1, keepdim=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Encoder(nn.Module):
    def __init__(self, out: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.out = nn.Linear(8, 3) if out else nn.Identity()
        self.late = nn.Linear(8, 8)  # registered last, used in the middle

    def forward(self, x):
        x = self.late(torch.relu(self.embed(x)))
        for block in self.blocks:
            x = block(x)
        return self.out(x)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (mlp(4, 8, 2), ["2"]),
        (Agent(), ["critic.4", "actor.4"]),
        (TwoHeads(), ["policy", "extra"]),
        (Dueling(), ["value.2", "advantage.2"]),
        (Encoder(out=True), ["out"]),
        (nn.ModuleDict({"actor": mlp(4, 8, 2), "q1": mlp(6, 8, 1), "q2": mlp(6, 8, 1)}), ["actor.2", "q1.2", "q2.2"]),
        (nn.ModuleDict({"encoder": mlp(4, 8, 2), "decoder": mlp(2, 8, 4)}), ["decoder.2"]),
    ],
    ids=["mlp", "cleanrl", "two outputs", "dueling", "not the last registered", "agent in a dict", "autoencoder"],
)
def test_every_output_is_a_head(model: nn.Module, expected: list[str]) -> None:
    assert heads(model) == expected


def test_what_writes_into_the_residual_stream_is_no_head() -> None:
    assert not any("blocks" in name for name in heads(Encoder(out=False)))


def test_heads_of_stable_baselines_policies_are_not_projected() -> None:
    gym = pytest.importorskip("gymnasium")
    sb3 = pytest.importorskip("stable_baselines3")
    discrete, continuous = gym.make("CartPole-v1"), gym.make("Pendulum-v1")
    assert heads(sb3.PPO("MlpPolicy", discrete, device="cpu").policy) == ["action_net", "value_net"]
    assert heads(sb3.DQN("MlpPolicy", discrete, device="cpu").q_net) == ["q_net.4"]
    sac = sb3.SAC("MlpPolicy", continuous, device="cpu")
    assert heads(sac.actor) == ["mu", "log_std"]
    assert heads(sac.critic) == ["qf0.4", "qf1.4"]
    targets = {f"critic_target.qf{i}.4" for i in (0, 1)}
    assert set(heads(sac.policy)) == {"actor.mu", "actor.log_std", "critic.qf0.4", "critic.qf1.4"} | targets
    before = sac.actor.mu.weight.detach().clone()
    rekindle.fire(sac.policy, targets="auto")
    assert torch.equal(sac.actor.mu.weight, before)


def test_named_heads_inside_a_language_model_with_a_value_head() -> None:
    class WithValueHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pretrained_model = Encoder(out=True)
            self.v_head = nn.ModuleDict({"summary": nn.Linear(8, 1)})

        def forward(self, x):
            hidden = self.pretrained_model.embed(x)
            return self.pretrained_model(x), self.v_head["summary"](hidden)

    assert {"pretrained_model.out", "v_head.summary"} <= set(heads(WithValueHead()))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.projection = nn.Linear(4, 4), nn.Linear(4, 9)

    def forward(self, x, memory):
        return self.projection(x + self.inner(memory))


class Translator(nn.Module):
    """FSMT returns its outputs as one tuple: a sum of tuples is no residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.spare = nn.Linear(4, 4), Decoder(), nn.Linear(4, 4)

    def forward(self, x):
        encoder_outputs = self.encoder(x)
        decoder_outputs = self.decoder(x, self.spare(encoder_outputs))
        return decoder_outputs + encoder_outputs


def test_joined_tuples_of_outputs_are_no_residual() -> None:
    assert [f.name for f in find(Translator()) if f.role == "head"] == ["decoder.projection.weight"]


def test_networks_apart_with_a_parametrized_layer() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))
    model = nn.ModuleDict({"actor": nn.Sequential(nn.Linear(3, 4), layer), "critic": nn.Sequential(nn.Linear(3, 4))})
    assert "actor.1.weight" in {f.name for f in find(model) if "head" in f.marks}


class Ending(nn.Module):
    """Two instances of one class whose direct children have the same types, and whose output layers differ."""

    def __init__(self, deep: bool) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(4, 8), nn.Linear(8, 8)
        self.out = nn.Sequential(nn.Linear(8, 3)) if deep else nn.Sequential()

    def forward(self, x):
        return self.out(torch.relu(self.last(torch.relu(self.body(x)))))


def test_what_is_an_output_does_not_depend_on_what_was_planned_before() -> None:
    for deep in (True, False, True, False):
        assert heads(Ending(deep)) == (["out.0"] if deep else ["last"])
