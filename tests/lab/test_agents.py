"""Agents in the laboratory: streams, one run of each kind, and runs that go on where others ended."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("stable_baselines3", reason='pip install "torch-rekindle[rl]"')
pytest.importorskip("gymnasium", reason='pip install "torch-rekindle[rl]"')

from rekindle.integrations.sb3 import trained
from rekindle.lab import ARMS, Arm, Run, Setting, Study, execute
from rekindle.lab.agents import AgentStream, learning, stream
from rekindle.lab.agents.building import build
from rekindle.lab.arms import arms
from rekindle.lab.results import metrics
from rekindle.lab.settings import SETTINGS
from rekindle.lab.views import columns, sentences

SIZES: dict[str, dict[str, Any]] = {
    "dqn": {"learning_starts": 16, "train_freq": 8, "buffer_size": 200, "target_update_interval": 30},
    "sac": {"learning_starts": 16, "train_freq": 32, "gradient_steps": 1, "buffer_size": 500},
    "ppo": {"n_steps": 32, "n_epochs": 1},
}


def tiny(agent: str = "dqn", tasks: int = 3, **fields: Any) -> Setting:
    env, steps = ("Pendulum-v1", 416) if agent == "sac" else ("CartPole-v1", 96)
    given: dict[str, Any] = {"batch": 8, "headline": "return", "new_optimizer": False, "last": 1, **fields}
    where = {"env": env, "tasks": tasks, "steps": steps, **given.pop("stream_options", {})}
    return Setting(f"tiny-{agent}", "observations", agent, where, {"width": [8, 8], **SIZES[agent]}, **given)


def known(rows: Any) -> list[dict[str, Any]]:
    """The rows of tasks without what differs between two machines."""
    found = []
    for row in rows:
        if row["kind"] == "task":
            kept = {name: value for name, value in row.items() if not name.endswith("seconds")}
            kept["remedy"] = row["remedy"] and {**row["remedy"], "seconds": 0}
            found.append(kept)
    return found


def test_orders_and_signs_are_new_in_each_task_and_the_same_for_each_run() -> None:
    made = stream("observations", 5, env="CartPole-v1", tasks=3, steps=10)
    seen = [made.environment(index).reset(seed=0)[0] for index in range(3)]
    again = stream("observations", 5, env="CartPole-v1", tasks=3, steps=10).environment(2).reset(seed=0)[0]
    assert np.array_equal(seen[2], again)
    assert not np.array_equal(seen[0], seen[1]) and not np.array_equal(seen[1], seen[2])
    assert all(np.array_equal(np.sort(np.abs(each)), np.sort(np.abs(seen[0]))) for each in seen)


def test_offsets_are_constant_within_a_task() -> None:
    made = stream("offsets", 5, env="Acrobot-v1", tasks=2, steps=10)
    env = made.environment(1)
    plain = env.unwrapped
    shift = env.reset(seed=0)[0] - plain._get_ob()
    moved = env.step(1)[0] - plain._get_ob()
    assert np.allclose(shift, moved, atol=1e-5)
    assert np.abs(shift).max() > 0.5


def test_games_share_one_space_of_small_integers() -> None:
    pytest.importorskip("minatar", reason='pip install "torch-rekindle[rl]"')
    made = stream("games", 0, games=["Breakout", "Freeway"], rounds=2, steps=10)
    assert list(made.names) == ["Breakout", "Freeway", "Breakout", "Freeway"]
    spaces = [made.environment(index) for index in range(2)]
    assert spaces[0].observation_space == spaces[1].observation_space
    assert spaces[0].action_space == spaces[1].action_space
    shown = spaces[1].reset(seed=0)[0]
    assert shown.dtype == np.uint8 and shown.shape == (10, 10, 10) and shown[7:].sum() == 0
    with pytest.raises(ValueError, match="no game 'Pong'"):
        stream("games", 0, games=["Pong"])


def test_dynamics_change_friction_and_gravity_for_good() -> None:
    pytest.importorskip("mujoco", reason='pip install "torch-rekindle[rl]"')
    made = stream("dynamics", 1, env="Hopper-v5", tasks=2, steps=10, friction=(0.1, 0.5), gravity=(2.0, 3.0))
    plain, changed = (made.environment(index) for index in range(2))
    changed.reset(seed=0)
    before, after = plain.unwrapped.model, changed.unwrapped.model
    share = after.geom_friction[:, 0] / before.geom_friction[:, 0]
    assert np.allclose(share, share[0]) and 0.1 <= share[0] <= 0.5
    assert 2.0 <= after.opt.gravity[2] / before.opt.gravity[2] <= 3.0


def test_a_midpoint_is_one_training_in_two_parts() -> None:
    made = stream("midpoint", 0, env="CartPole-v1", steps=101)
    assert made.steps == (50, 51) and made.continuing and made.buffer == "keep"


def test_wrong_words_are_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'offsets'"):
        stream("offset", 0)
    with pytest.raises(ValueError, match="buffer='burn'"):
        stream("observations", 0, env="CartPole-v1", tasks=1, steps=1, buffer="burn")
    with pytest.raises(ValueError, match="does not take"):
        stream("observations", 0, env="CartPole-v1", tasks=1, steps=1, color="red")
    with pytest.raises(ValueError, match="at least one task"):
        AgentStream([], [], lambda index: None)


@pytest.mark.parametrize("agent", SIZES)
def test_a_run_gives_the_rows_of_a_study(agent: str) -> None:
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    rows = list(execute(Run(tiny(agent, 2), ARMS["fire"], 0)))
    assert [row["kind"] for row in rows] == ["start", "task", "task", "end"]
    start, first, second, end = rows
    assert start["stream"]["tasks"] == 2 and start["parameters"] > 0 and "refused" not in end
    assert first["remedy"] is None and second["remedy"]["changed"] > 0
    assert first["return"] is not None and first["online_return"] is not None and first["chance_return"] is not None
    assert first["curve"][-1][0] == first["steps"] >= 96
    assert set(first["health"]) == {"dormant", "dormant_worst", "dead", "effective_rank", "dfi", "norm"}
    after = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    assert torch.equal(before[0], after[0]) and np.array_equal(before[1], after[1]) and before[2] == after[2]


@pytest.mark.parametrize("agent", SIZES)
@pytest.mark.parametrize("name", ["fire", "l2-init"])
def test_a_killed_run_goes_on_bit_for_bit(agent: str, name: str, tmp_path: Path) -> None:
    run = Run(tiny(agent), ARMS[name], 1)
    whole = known(execute(run))
    killed = execute(run, starts=tmp_path)
    begun = known(islice(killed, 3))  # the start and two tasks
    killed.close()  # type: ignore[attr-defined]
    torch.manual_seed(99), np.random.seed(99)  # whatever came between
    resumed = known(execute(run, starts=tmp_path))
    assert begun == whole[:2] and resumed == whole
    assert len(list(tmp_path.iterdir())) == (name == "fire")  # the shared first task; its own state is gone


def test_arms_share_the_first_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = known(execute(Run(tiny(), ARMS["shrink-perturb-fresh"], 0)))
    list(execute(Run(tiny(), ARMS["nothing"], 0), starts=tmp_path))
    trained_tasks = []
    real = learning.AgentLearner.train_task
    monkeypatch.setattr(
        learning.AgentLearner, "train_task", lambda self, index: trained_tasks.append(index) or real(self, index)
    )
    shared = known(execute(Run(tiny(), ARMS["shrink-perturb-fresh"], 0), starts=tmp_path))
    assert shared == alone and trained_tasks == [1, 2]


def learner(setting: Setting, arm: str | Arm) -> learning.AgentLearner:
    run = Run(setting, ARMS[arm] if isinstance(arm, str) else arm, 0)
    return learning.AgentLearner(run, setting.make_agent_stream(0))


@pytest.mark.parametrize("name", ["nothing", "full-reset", "fire"])
def test_a_boundary_treats_the_rest_of_every_arm_alike(name: str) -> None:
    made = learner(tiny("sac"), name)
    made.train_task(0)
    agent = made.agent
    made.boundary(1)
    assert agent.replay_buffer.size() == 0
    assert agent.log_ent_coef.item() == 0 and not agent.ent_coef_optimizer.state
    pairs = zip(agent.critic.state_dict().values(), agent.critic_target.state_dict().values(), strict=True)
    assert all(torch.equal(network, target) for network, target in pairs)


def test_replay_temperature_and_optimizer_are_kept_or_not_as_the_setting_says() -> None:
    setting = tiny("sac", stream_options={"buffer": "keep", "temperature": "keep"}, new_optimizer=True)
    made = learner(setting, "nothing")
    made.train_task(0)
    temperature = made.agent.log_ent_coef.item()
    made.boundary(1)
    assert made.agent.replay_buffer.size() == 416 and made.agent.log_ent_coef.item() == temperature != 0
    assert not any(optimizer.state for optimizer in trained(made.agent)[1])


@pytest.mark.parametrize(
    "name", ["weight-clip", "upgd", "continual-backprop", "redo", "weight-decay", "dash", "hare-tortoise"]
)
def test_arms_of_every_moment_run(name: str) -> None:
    rows = list(execute(Run(tiny("dqn", 2), ARMS[name], 0)))
    assert rows[-1]["kind"] == "end" and "refused" not in rows[-1], rows[-1]
    assert not any(row["diverged"] for row in rows if row["kind"] == "task")
    if name == "hare-tortoise":
        assert all(row["applied"] == 1 for row in rows if row["kind"] == "task")
    if name == "redo":
        assert all(5 <= row["applied"] <= 10 for row in rows if row["kind"] == "task")


@pytest.mark.parametrize(
    ("agent", "name", "why"), [("dqn", "muon", "optimizer is"), ("sac", "injection", "which module is the head")]
)
def test_what_an_agent_cannot_follow_is_refused(agent: str, name: str, why: str) -> None:
    assert why in list(execute(Run(tiny(agent), ARMS[name], 0)))[-1]["refused"]


def test_a_rollout_that_a_method_looks_at_is_shared_too(tmp_path: Path) -> None:
    run = Run(tiny("ppo", 2), ARMS["dash"], 1)
    list(execute(Run(tiny("ppo", 2), ARMS["nothing"], 1), starts=tmp_path))
    alone = known(execute(run))
    assert len(alone) == 2 and known(execute(run, starts=tmp_path)) == alone


@pytest.mark.parametrize("name", ["fire-paper-cnn", "shrink-reset", "injection", "fire"])
def test_the_papers_arms_on_a_convolutional_agent(name: str) -> None:
    pytest.importorskip("minatar", reason='pip install "torch-rekindle[rl]"')
    small = {"buffer_size": 300, "learning_starts": 16, "train_freq": 8}
    midpoint = SETTINGS["dqn-midpoint-breakout"]
    options = {**midpoint.network_options, **small}
    setting = replace(midpoint, stream_options={**midpoint.stream_options, "steps": 120}, network_options=options)
    made = learner(setting, name)
    made.train_task(0)
    net, x = made.agent.q_net, torch.rand(3, 10, 10, 10)
    said, old = net(x).detach(), {key: value.clone() for key, value in net.state_dict().items()}
    made.boundary(1)
    new = net.state_dict()
    assert torch.equal(net(x), made.agent.q_net_target(x))
    if name == "injection":
        assert torch.allclose(net(x), said, atol=1e-6) and "q_net.minus.0.weight" in new
        return
    kernel = new["features_extractor.convolution.weight"]
    taps = kernel.permute(2, 3, 0, 1).flatten(0, 1)
    isometry = all(torch.allclose(m.mT @ m, (m.mT @ m)[0, 0] * torch.eye(10), atol=1e-4) for m in taps)
    assert isometry == name.startswith("fire")
    drawn = ["features_extractor.hidden.bias", "q_net.0.bias", "q_net.2.bias"]
    assert all(torch.equal(new[each], old[each]) == (name == "fire") for each in drawn)


def test_a_study_of_agents_has_results_in_returns(tmp_path: Path) -> None:
    study = Study("agents", [tiny("dqn", 2)], arms(["nothing", "fire"]), [0], folder=tmp_path)
    for run in study.runs():
        claim = study.store.claim(run.identity)
        assert claim is not None
        for row in execute(run, starts=study.store.starts):
            claim.append(row)
        claim.release()
    found = study.results()
    assert "tiny-dqn" in str(found) and found.table()[0]["metric"] == "return"
    (shown,) = found.comparisons.values()
    assert shown.curve("nothing", "return")
    assert columns(shown)[0].heading.startswith("mean return")


def test_a_return_is_judged_against_random_actions() -> None:
    setting = tiny("sac", 2)
    rows = [{"task": index, "return": value, "chance_return": -1200.0} for index, value in enumerate((-300.0, -900.0))]
    assert metrics.share_lost([rows], setting) == pytest.approx(600 / 900)
    assert metrics.share_lost([[rows[0], {**rows[1], "return": -500.0}]], setting) == pytest.approx(200 / 900)
    assert metrics.share_lost([[{**rows[0], "return": -1300.0}, rows[1]]], setting) is None


def test_a_page_of_agents_whose_first_task_ended_no_episode() -> None:
    from lab_results import results

    found = results(settings=[tiny("sac", 8)], seeds=2)
    for entry in found.entries:
        entry.record.rows[1]["return"] = None
    data = found.to_dict()
    assert data["validity"]["tiny-sac"]["valid"] is None and "first task" in data["validity"]["tiny-sac"]["note"]
    (shown,) = found.comparisons.values()
    assert "FIRE was best of 5" in " ".join(sentences(shown))


@pytest.mark.parametrize("name", [name for name, setting in SETTINGS.items() if setting.agents])
def test_every_preset_builds(name: str) -> None:
    setting = SETTINGS[name]
    needs = {"minatar": "minatar", "ale_py": "atari", "cv2": "atari", "mujoco": "v5", "Box2D": "lunar"}
    for package, word in {**needs, "pygame": "lunar", "shimmy": "dm_control", "dm_control": "dm_control"}.items():
        if word in str(setting.stream_options).lower() + setting.name:
            pytest.importorskip(package, reason='pip install "torch-rekindle[rl,rl-more]"')
    small = {"buffer_size": 100} if "buffer_size" in setting.network_options else {}
    setting = replace(setting, network_options={**setting.network_options, **small})
    made = setting.make_agent_stream(0)
    agent = build(setting, ARMS["nothing"], made.environment(0), 0)
    assert agent.predict(agent.env.reset())[0] is not None
    assert "per run" in setting.about or "days" in setting.about
