"""rekindle: measures whether a network has lost its plasticity, and restores it.

The public verbs, and nothing else. Each is imported when it is first used, so that `import rekindle` costs nothing.

>>> import torch, rekindle
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
>>> optimizer = torch.optim.Adam(model.parameters())
>>> receipt = rekindle.fire(model, optimizer)
>>> receipt.totals()["residual"] <= 1e-6
True
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rekindle import blocks as blocks
    from rekindle import checkpoint as checkpoint
    from rekindle import initial as initial
    from rekindle import lab as lab
    from rekindle import measures as measures
    from rekindle import methods as methods
    from rekindle import optimizers as optimizers
    from rekindle import scales as scales
    from rekindle import sinks as sinks
    from rekindle import triggers as triggers
    from rekindle.advice.advised import Advised
    from rekindle.advice.advising import Advice, advise
    from rekindle.advice.keeping import Keeper
    from rekindle.advice.probing import ProbeResult, probe
    from rekindle.advice.ranking import Ranking, rank
    from rekindle.diagnosis.examination import Health, health
    from rekindle.diagnosis.verdict import Thresholds
    from rekindle.engine.isometry import polar
    from rekindle.engine.solving import Certificate
    from rekindle.integrations.attaching import attach
    from rekindle.monitoring.guard import Guard
    from rekindle.monitoring.monitor import Monitor
    from rekindle.monitoring.schedules import Schedule
    from rekindle.projection.firing import fire
    from rekindle.projection.planning import Plan, plan
    from rekindle.projection.receipt import Receipt
    from rekindle.projection.reinitializer import FIREConfig, FIREReinitializer, ReinitStats

__version__ = "0.1.0"

_HOME = {
    "Certificate": "engine.isometry",
    "FIREConfig": "projection.reinitializer",
    "FIREReinitializer": "projection.reinitializer",
    "Guard": "monitoring.guard",
    "Health": "diagnosis.examination",
    "Monitor": "monitoring.monitor",
    "Plan": "projection.planning",
    "Receipt": "projection.receipt",
    "ReinitStats": "projection.reinitializer",
    "Schedule": "monitoring.schedules",
    "Thresholds": "diagnosis.verdict",
    "attach": "integrations.attaching",
    "fire": "projection.firing",
    "health": "diagnosis.examination",
    "plan": "projection.planning",
    "polar": "engine.isometry",
    "Advice": "advice.advising",
    "Advised": "advice.advised",
    "Keeper": "advice.keeping",
    "advise": "advice.advising",
    "probe": "advice.probing",
    "ProbeResult": "advice.probing",
    "Ranking": "advice.ranking",
    "rank": "advice.ranking",
}
_MODULES = (
    "blocks",
    "checkpoint",
    "initial",
    "lab",
    "measures",
    "methods",
    "optimizers",
    "scales",
    "sinks",
    "triggers",
)
__all__ = [
    "Advice",
    "Advised",
    "Certificate",
    "FIREConfig",
    "FIREReinitializer",
    "Guard",
    "Health",
    "Keeper",
    "Monitor",
    "Plan",
    "ProbeResult",
    "Ranking",
    "Receipt",
    "ReinitStats",
    "Schedule",
    "Thresholds",
    "advise",
    "attach",
    "fire",
    "health",
    "plan",
    "polar",
    "probe",
    "rank",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"rekindle.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'rekindle' has no attribute {name!r}")
    value = getattr(import_module(f"rekindle.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, *_MODULES])
