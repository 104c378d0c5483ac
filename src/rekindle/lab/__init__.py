"""The laboratory: streams, networks, training and studies that compare remedies fairly.

    from rekindle import lab

    study = lab.Study.load("random-labels", methods=["main", "controls"], seeds=5)
    study.run()
    print(study.results().table())

`lab.stream`, `lab.network` and `lab.arm` register your own. Each name is imported when it is first used.

`study` is the grid of runs: `settings` (named in `protocols`, listed by `catalog`) times `arms` times seeds, and
`tuning`. `execution` does the runs: `train` is the loop for networks, `together` the same for many of them at once
(stacked), `agents` the one for agents; `streams` makes tasks of `data` (`sources` gives them in batches), `networks`
builds what learns (`dawn` is one with its losses and analysis), `evaluation` measures it; `boundaries` stops between
two tasks. `results` compares, `views` shows. May import everything up to `checkpoint`, and of that only
what users may import. Start reading at `study.Study`, or at `train.execute` for one run.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rekindle.lab.arms import ARMS, GROUPS, Arm
    from rekindle.lab.arms import register as arm
    from rekindle.lab.execution.workers import execute
    from rekindle.lab.networks import register as network
    from rekindle.lab.results import Results
    from rekindle.lab.settings import SETTINGS, Run, Setting, setting
    from rekindle.lab.sources import Examples, Stream, Task, Text, replay
    from rekindle.lab.streams import STREAMS
    from rekindle.lab.streams import register as stream
    from rekindle.lab.study import Study

_HOME = {
    "ARMS": "arms.ARMS",
    "GROUPS": "arms.GROUPS",
    "SETTINGS": "settings.SETTINGS",
    "STREAMS": "streams.STREAMS",
    "Arm": "arms.Arm",
    "Examples": "sources.Examples",
    "Results": "results.Results",
    "Run": "settings.Run",
    "Setting": "settings.Setting",
    "Stream": "sources.Stream",
    "Study": "study.Study",
    "Task": "sources.Task",
    "Text": "sources.Text",
    "arm": "arms.register",
    "execute": "execution.workers.execute",
    "network": "networks.register",
    "replay": "sources.replay",
    "setting": "settings.setting",
    "stream": "streams.register",
}
__all__ = [
    "ARMS",
    "GROUPS",
    "SETTINGS",
    "STREAMS",
    "Arm",
    "Examples",
    "Results",
    "Run",
    "Setting",
    "Stream",
    "Study",
    "Task",
    "Text",
    "arm",
    "execute",
    "network",
    "replay",
    "setting",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rekindle.lab' has no attribute {name!r}")
    home, _, attribute = _HOME[name].rpartition(".")
    found = getattr(import_module(f"rekindle.lab.{home}"), attribute)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
