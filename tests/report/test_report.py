"""The page as text: what it says, that it is whole in itself, and that no name in it can do harm."""

import html.parser
import json
import math
import re
from typing import Any

import pytest
import torch
from torch import nn

from rekindle.diagnosis.examination import health
from rekindle.projection.firing import fire
from rekindle.projection.planning import plan
from rekindle.report import charts, render, view, words

EVIL = [
    "<script>alert(1)</script>.weight",
    '"><img src=x onerror=alert(1)>.weight',
    "</script><script>alert(1)</script>",
    "a&lt;b' onmouseover='alert(1)",
    "]]><!--",
    "\u202eevil\x00\ud800",
]


class Reader(html.parser.HTMLParser):
    """Every element with its attributes, and the text of each kind of element."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "input", "wbr", "br", "img"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self._open[-1] if self._open else "", []).append(data)


def made_up(
    layers: int, *, after: bool = False, points: int = 48, name: str = "model.layers.{}.self_attn.{}.weight"
) -> Any:
    """A result as `inspect` or `fire` gives it, for so many layers."""
    generator = torch.Generator().manual_seed(0)
    parts = ("q_proj", "k_proj", "v_proj", "o_proj")
    names = [name.format(i // 4, parts[i % 4]) for i in range(layers)]
    numbers = torch.rand(layers, 12, generator=generator).tolist()
    keys = list(words.MEASURES)[:12]
    weights = {
        n: {**dict(zip(keys, row, strict=True)), "effective_rank": 100.0, "matrices": 1.0}
        for n, row in zip(names, numbers, strict=True)
    }
    curve = {"k": 4096, "count": 1, "mean": [round(x, 4) for x in torch.linspace(5, 0, points).tolist()]}
    side = {
        "weights": weights,
        "about": {n: {"role": parts[i % 4], "shape": "4096×4096"} for i, n in enumerate(names)},
        "verdict": "watch",
        "rule": "zero rows ≥ 0.25",
        "sure": False,
        "unmeasured": [{"name": "norm.weight", "what": "weight", "reason": "a vector"}],
        "findings": [
            {
                "layer": names[0],
                "sign": "dead weights",
                "level": "watch",
                "text": "30 % of the weight's rows are zero",
                "rule": "zero rows ≥ 0.25",
                "remedy": "FIRE",
            }
        ],
    }
    data: dict[str, Any] = {"command": "inspect", "health": side, "spectra": {n: {"before": curve} for n in names}}
    if after:
        data |= {"command": "fire", "after": side, "spectra": {n: {"before": curve, "after": curve} for n in names}}
    return data


def test_verdict_comes_first_and_everything_is_there_without_scripts() -> None:
    page = render(made_up(8))
    order = [
        page.index(text)
        for text in ("Watch" if "Watch" in page else "watch", ">Layers<", "Over depth", "Not measured", "Words")
    ]
    assert order == sorted(order)
    text = " ".join(Reader(page).texts["button"])
    assert "model." in text
    cells = Reader(page).elements
    assert sum(tag == "tr" and "data-row" in attributes for tag, attributes in cells) == 8
    assert "30 % of the weight" in page


def test_nothing_is_fetched() -> None:
    page = render(made_up(4))
    reader = Reader(page)
    assert "//" not in re.sub(r"//# |\s// ", "", page.partition("<script>")[0])
    for tag, attributes in reader.elements:
        assert not attributes.keys() & {"src", "action", "formaction", "srcset", "poster"}, tag
        assert attributes.get("href", "#").startswith(("#", "data:,"))
        assert not any(name.startswith("on") for name in attributes)
    policy = next(a["content"] for t, a in reader.elements if t == "meta" and "http-equiv" in a)
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy


@pytest.mark.parametrize("evil", EVIL)
def test_names_are_only_ever_text(evil: str) -> None:
    data = made_up(2, name=evil + "{}{}")
    finding = dict(data["health"]["findings"][0])
    data["health"]["findings"] = [finding]
    data["source"] = {"name": evil, "format": evil, "tensors": 1, "numbers": 1, "bytes": 1, "dtypes": [evil]}
    data["receipt"] = {"method": evil, "skipped": {evil: evil}, "settings": {evil: evil}, "notes": [evil], "totals": {}}
    data["made"] = {"versions": {"rekindle": evil}, "line": evil, "platform": evil, "threads": 1}
    page = render(data)
    page.encode()
    reader = Reader(page)
    tags = {tag for tag, _ in reader.elements}
    assert "img" not in tags
    assert sum(tag == "script" for tag, _ in reader.elements) == 2
    assert not any(name.startswith("on") for _, attributes in reader.elements for name in attributes)
    packed = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert packed["layers"][0]["name"].startswith(evil[:3])


def test_500_layers_stay_under_five_megabytes() -> None:
    page = render(made_up(500, after=True))
    assert len(page.encode()) < 5e6
    assert "model.layers.124.self_attn.o_proj.weight" in page.replace("<wbr>", "")


def test_the_page_of_real_objects() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    data = {
        "command": "fire",
        "health": health(net).to_dict(),
        "plan": plan(net, targets="auto").to_dict(),
        "receipt": fire(net, measure="full", targets="auto").to_dict(),
        "after": health(net).to_dict(),
    }
    page = render(data)
    assert "2 matrices of 2 parameters replaced by their nearest isometries." in page
    assert "2 of 6 parameters to project" in page
    assert "output head" in page
    assert Reader(page).texts
    rows = view.rows(data)
    assert [row.name for row in rows] == ["0.weight", "2.weight", "4.weight"]
    assert rows[0].rank_share("after") == pytest.approx(1, abs=1e-3)


def test_a_receipt_alone_is_enough() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    page = render({"receipt": fire(net, strength=0.5).to_dict()})
    assert "pulled towards their nearest isometries" in page
    assert "0.<wbr>weight" in page


def test_numbers_that_are_not_finite() -> None:
    data = made_up(2)
    name = next(iter(data["health"]["weights"]))
    data["health"]["weights"][name] |= {"condition_number": math.inf, "dfi_scale_free": math.nan}
    page = render(data)
    assert "∞" in page
    assert "Infinity" not in page.partition('id="data">')[2].partition("</script>")[0]


def test_an_empty_result_is_a_page_too() -> None:
    assert "nothing to show" in render({})


@pytest.mark.parametrize(
    ("names", "columns", "lines"),
    [
        (["layer1.0.conv1.weight", "layer1.1.conv1.weight", "layer2.0.conv1.weight"], 3, 1),
        (["conv1.weight", "conv2.weight", "classifier.weight"], 3, 2),
        (["0.weight", "2.weight"], 2, 1),
        ([f"h.{i}.experts.{e}.up" for i in range(2) for e in range(64)], 2, 1),
    ],
)
def test_layers_are_laid_out_by_depth(names: list[str], columns: int, lines: int) -> None:
    found = charts.grid(names)
    assert (len(found.columns), len(found.lines)) == (columns, lines)
    assert set(found.places) == set(names)


@pytest.mark.parametrize(
    ("value", "worse", "shade"), [(0.001, "high", 0), (1.5, "high", 5), (99.0, "high", 8), (99.0, "low", 0)]
)
def test_the_worse_the_stronger_the_color(value: float, worse: str, shade: int) -> None:
    drawn = charts.heat_map("x", [view.BlockRow("a.0.w")], {"a.0.w": value}, charts.DFI_BOUNDS, worse)
    assert f'<rect class="q{shade}"' in drawn


def test_a_sparkline_falls_as_its_spectrum_does() -> None:
    path = re.findall(r'class="before" d="M([^"]+)"', charts.sparkline({"before": {"mean": [4.0, 2.0, 0.0]}}))[0]
    heights = [float(point.split(",")[1]) for point in path.split()]
    assert heights == sorted(heights)
    assert heights[1] == pytest.approx((heights[0] + heights[2]) / 2, abs=0.1)


def test_reasons_are_counted() -> None:
    data = {
        "receipt": {"skipped": {"a": "bias", "b": "bias", "c": "head"}},
        "differences": {"only_A": ["x"], "shape": []},
    }
    assert view.reasons(data) == [("bias", ["a", "b"]), ("head", ["c"]), ("only in A", ["x"])]


def test_a_sign_of_neurons_is_counted_as_a_layer() -> None:
    """Neurons go by their layer ("0"), weights by their parameter ("0.weight")."""
    health = {
        "weights": {"0.weight": {"norm": 1.0}},
        "units": {"0": {"units": 16, "dormant": 0.6}},
        "verdict": "act",
        "rule": "dormant share ≥ 0.5",
        "findings": [
            {"layer": "0", "level": "act", "sign": "dormancy", "text": "60 %", "rule": "≥ 0.5", "remedy": "recycle"}
        ],
    }
    page = render({"command": "inspect", "health": health})
    assert "1 layer shows signs: dormant share ≥ 0.5." in page
    assert "60\N{NO-BREAK SPACE}%" in page


def test_a_rule_is_said_of_the_layers_that_it_names() -> None:
    """A layer to watch is neither counted nor listed under the rule that another layer broke."""
    found = [
        {"layer": layer, "level": level, "sign": "dormancy", "text": text, "rule": f"≥ {rule}", "remedy": "recycle"}
        for layer, level, text, rule in (("0", "act", "60 %", 0.5), ("2", "watch", "25 %", 0.25))
    ]
    assert [(each["level"], each["layers"], each["rule"]) for each in view.signs(found)] == [
        ("act", ["0"], "≥ 0.5"),
        ("watch", ["2"], "≥ 0.25"),
    ]
    health = {"weights": {}, "units": {"0": {}}, "verdict": "act", "rule": "≥ 0.5", "findings": found}
    assert "1 layer shows signs: ≥ 0.5." in render({"command": "inspect", "health": health})


def test_commands_break_between_their_words() -> None:
    line = "rekindle inspect a.pt --model mine.py:build"
    made = {"versions": {"rekindle": "0.1.0"}, "line": line, "platform": "Linux", "threads": 1}
    page = render({"command": "inspect", "made": made})
    assert "<span>inspect</span> <span>a.pt</span> <span>--model</span> <span>mine.py:build</span>" in page


def test_a_comparison_shows_what_changed_first_and_folds_the_rest() -> None:
    weights = {name: {"norm": 1.0, "matrices": 1.0} for name in ("a", "b", "c")}
    sides = {"weights": weights, "verdict": "unknown", "rule": "no sign"}
    changes = [{"name": name, "sfe": sfe, "frame": 1.0} for name, sfe in (("a", 0.0), ("b", 2.0), ("c", 0.0))]
    page = Reader(render({"command": "compare", "health": sides, "after": sides, "changes": changes}))
    rows = [found for tag, found in page.elements if tag == "tr" and "data-row" in found]
    assert [row["data-changed"] for row in rows] == ["1", "0", "0"]
    assert any(tag == "input" and found.get("id") == "changed" and "checked" in found for tag, found in page.elements)
    assert "frame" in page.texts["b"]  # explained above the table
