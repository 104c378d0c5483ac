"""The decision table: the page shows the one of the code, and the verbs say which of them stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

import rekindle
from rekindle.advice.judging import Answer
from rekindle.diagnosis.agreement import DECISIONS, STANDING, conclusion
from rekindle.diagnosis.verdict import Level

PAGE = Path(__file__).parents[2] / "docs" / "advice.md"


def test_the_page_shows_the_table_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\w ]+) \| (.+) \|$", PAGE.read_text("utf-8"), flags=re.M)
    assert {(verb, word): answer for verb, word, answer in rows} == DECISIONS


def test_every_word_of_a_verb_has_its_row() -> None:
    words = {verb: {word for one, word in DECISIONS if one == verb} for verb in STANDING}
    assert words["health"] == set(get_args(Level)) and words["advise"] == set(get_args(Answer))
    assert words["probe"] == {"lost", "as fresh", "better than fresh", "unknown"}


@pytest.mark.parametrize(
    ("words", "stands"),
    [
        ({"health": "act"}, "health"),
        ({"health": "act", "probe": "as fresh"}, "probe"),
        ({"health": "healthy", "probe": "unknown"}, "health"),
        ({"health": "healthy", "probe": "lost", "advise": "cannot tell"}, "probe"),
        ({"health": "watch", "probe": "as fresh", "advise": "apply"}, "advise"),
        ({"probe": "unknown"}, "probe"),
    ],
)
def test_the_last_verb_that_could_tell_stands(words: dict[str, str], stands: str) -> None:
    assert conclusion(**words)[0] == stands
    with pytest.raises(ValueError, match="no verb"):
        conclusion()


def test_each_text_says_what_stands() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    data = [(torch.randn(16, 4), torch.randint(3, (16,))) for _ in range(4)]
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    said = {
        "health": rekindle.health(net, data),
        "probe": rekindle.probe(net, data, optimizer=optimizer, steps=60, progress=False),
        "advise": rekindle.advise(net, data, candidates=["fire"], steps=20, workers=1, progress=False),
    }
    for verb, text in said.items():
        assert STANDING[verb] in " ".join(str(text).split())
