"""Agents in the laboratory: stable-baselines3 agents that learn environments which change from task to task.

- `streams`: which environment each task has, by name (`observations`, `offsets`, `games`, …), without Gymnasium;
- `environments`: the Gymnasium wrappers behind them;
- `building`: the agent of a setting, and what a later continuation of it needs;
- `learning`: one run, the counterpart of `rekindle.lab.train` for networks;
- `presets`: the named settings.

A setting is one of agents when its stream is one of `streams.STREAMS`; its network is then "dqn", "sac", "td3", "ppo"
or "a2c", and `network_options` go to SB3. Needs the extra `rl`.
"""
