"""Real families: heads, routers, weights in parts, weights skipped as fused.

`expected.json` was recorded from the planner. The entries of the families in READ were then compared by hand with the
lines of the installed sources that make and use these layers; the others only show that a plan has changed.
"""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
READ = [
    "AfmoeForCausalLM",
    "BarkModel",
    "BertForPreTraining",
    "ClvpModelForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration",
    "FocalNetForImageClassification",
    "GPTNeoXForCausalLM",
    "JetMoeForCausalLM",
    "KyutaiSpeechToTextForConditionalGeneration",
    "LongcatFlashForCausalLM",
    "MoonshineForConditionalGeneration",
    "NllbMoeForConditionalGeneration",
    "PerceiverForSequenceClassification",
    "Qwen3NextForCausalLM",
    "SwitchTransformersForConditionalGeneration",
    "UperNetForSemanticSegmentation",
    "YolosForObjectDetection",
    "ZayaForCausalLM",
    "timm/convit_tiny",
    "timm/deit_tiny_distilled_patch16_224",
    "timm/mambaout_femto",
    "timm/tnt_s_legacy_patch16_224",
]
EXPECTED = json.loads((HERE / "expected.json").read_text())


def _families() -> ModuleType:
    spec = importlib.util.spec_from_file_location("zoo_families", HERE / "families.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


families = _families()


def test_there_are_sixty_families() -> None:
    assert len(EXPECTED) >= 60
    assert set(READ) <= set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_family_is_classified_as_expected(name: str) -> None:
    package, _, model = name.rpartition("/")
    if importlib.util.find_spec(package or "transformers") is None:  # timm itself imports only with the stubs
        pytest.skip(f"{package or 'transformers'} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = families.build_timm(model) if package else families.build(model)
    assert {kind: names for kind, names in families.summary(built).items() if names} == EXPECTED[name]
