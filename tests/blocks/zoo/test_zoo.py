"""Real families: heads, routers, weights in parts, fused weights, weights of unknown layout.

The JSON files were written from the sources of transformers 5.22 and timm 1.0.30, not from the planner. One entry per
family: `heads` end in the model's output, `routers` choose experts, `parts` hold several matrices in a layout that the
library knows (with the parts in order), `fused` hold several in one that it does not (skipped), `unknown` are bare
tensors or weights of classes that are not known. `careful` are single matrices that are skipped since their name looks
fused; `missed` are heads that the planner does not find today. Everything else is projected, or skipped for an
ordinary reason (embedding, depthwise, norm, token or position vector).
"""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent
EXPECTED: dict[str, dict[str, Any]] = {}
for file in sorted(HERE.glob("*.json")):
    EXPECTED |= json.loads(file.read_text("utf-8"))


def _families() -> ModuleType:
    spec = importlib.util.spec_from_file_location("zoo_families", HERE / "families.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


families = _families()


def test_there_are_more_than_a_hundred_families_each_with_its_reason() -> None:
    assert len(EXPECTED) >= 100
    assert all(entry["because"] for entry in EXPECTED.values())


@pytest.mark.parametrize("name", EXPECTED)
def test_a_family_is_classified_as_its_source_says(name: str) -> None:
    entry = EXPECTED[name]
    package, _, model = name.rpartition("/")
    if importlib.util.find_spec(package or "transformers") is None:  # timm itself imports only with the stubs
        pytest.skip(f"{package or 'transformers'} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if package:
            built = families.build_timm(model)
        else:
            built = families.build(model.split()[0], entry.get("config", {}), entry.get("module", "transformers"))
    assert families.disagreements(built, entry) == []
