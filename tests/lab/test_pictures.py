"""Pictures: what is drawn where, in which colors, and what is said to whoever cannot see it."""

import re
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab_results import compared
from rekindle.lab.settings import Setting
from rekindle.lab.views import page, svg
from rekindle.lab.views.plots import Line, Whisker, curves, forest

EVIL = '"/><script>alert(1)</script>'
SVG = "{http://www.w3.org/2000/svg}"


def elements(picture: svg.Picture, tag: str, kind: str) -> list[ElementTree.Element]:
    """Everything with this class in its class list."""
    root = ElementTree.fromstring(picture.file())
    return [each for each in root.iter(f"{SVG}{tag}") if kind in (each.get("class") or "").split()]


def points(path: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+),([\d.]+)", path.get("d") or "")]


def texts(picture: svg.Picture) -> dict[str, ElementTree.Element]:
    return {each.text or "": each for each in ElementTree.fromstring(picture.file()).iter(f"{SVG}text")}


# Axes


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6), st.integers(3, 8))
def test_ticks_enclose_what_is_shown(low: float, spread: float, about: int) -> None:
    found = svg.ticks(low, low + spread, about)
    assert found[0] <= low + 1e-6 * max(1, abs(low))
    assert found[-1] >= low + spread - 1e-6 * max(1, abs(low + spread))
    assert all(a < b for a, b in pairwise(found))
    assert 2 <= len(found) <= 2 * about + 2


@given(st.lists(st.floats(0, 300), min_size=1, max_size=12))
def test_labels_never_touch(wanted: list[float]) -> None:
    places = svg.apart({str(at): value for at, value in enumerate(wanted)}, 15, 0, 300)
    heights = sorted(places.values())
    assert all(b - a > 15 - 1e-6 for a, b in pairwise(heights))
    assert heights[0] >= -1e-6
    assert heights[-1] <= 300 + 1e-6
    order = sorted(range(len(wanted)), key=lambda at: wanted[at])
    assert [places[str(at)] for at in order] == heights


def test_a_label_with_room_stays_where_it_belongs() -> None:
    assert svg.apart({"a": 40.0, "b": 200.0}, 15, 0, 300) == {"a": 40.0, "b": 200.0}


# Colors


def test_known_arms_keep_their_color_and_gray_comes_last() -> None:
    names = ["redo", "fire", *(f"arm {at}" for at in range(12)), "nothing"]
    found = svg.colors(names)
    assert found["nothing"] == "k0"
    assert found["fire"] == "k1"
    inks = [ink for ink in found.values() if ink != "rest"]
    assert len(inks) == len(set(inks)) == svg.COLORS - 1
    assert found["arm 11"] == "rest"


def linear(color: str) -> list[float]:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def light(color: str) -> float:
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear(color), strict=True))


@pytest.mark.parametrize(("palette", "ground"), [(svg._LIGHT, "#ffffff"), (svg._DARK, "#201c19")])
def test_names_in_color_can_be_read(palette: tuple[str, ...], ground: str) -> None:
    for color in palette:
        above, below = sorted((light(color), light(ground)), reverse=True)
        assert (above + 0.05) / (below + 0.05) >= 4.5, color


# Viénot, Brettel and Mollon (1999): what is left of linear RGB without the middle or the long cones.
BLIND = {
    "deuteranopia": ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0)),
    "protanopia": ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0)),
}


@pytest.mark.parametrize("kind", BLIND)
@pytest.mark.parametrize("palette", [svg._LIGHT, svg._DARK], ids=["light", "dark"])
def test_lines_differ_without_red_and_green(palette: tuple[str, ...], kind: str) -> None:
    seen = []
    for color in palette:
        rgb = linear(color)
        mixed = [max(0.0, sum(w * part for w, part in zip(row, rgb, strict=True))) for row in BLIND[kind]]
        seen.append([part ** (1 / 2.2) for part in mixed])
    for (a, first), (b, second) in combinations(enumerate(seen), 2):
        distance = sum((x - y) ** 2 for x, y in zip(first, second, strict=True)) ** 0.5
        assert distance > 0.12 or svg._DASHES[a] != svg._DASHES[b], (palette[a], palette[b], distance)


# Curves


def test_a_curve_lies_where_the_axis_says() -> None:
    drawn = curves("T", [Line("fire", [1, 2, 3], [0.0, 0.2, 0.4])], x="task", y="accuracy")
    (path,) = elements(drawn, "path", "line")
    heights = [y for _, y in points(path)]
    marks = texts(drawn)
    for value, height in (("0.0", heights[0]), ("0.4", heights[2])):
        assert float(marks[value].get("y") or 0) - 4 == pytest.approx(height, abs=0.2)
    assert heights[1] == pytest.approx((heights[0] + heights[2]) / 2, abs=0.2)
    across = [x for x, _ in points(path)]
    assert across[1] - across[0] == pytest.approx(across[2] - across[1], abs=0.2)
    assert float(marks["2"].get("x") or 0) == pytest.approx(across[1], abs=0.2)


def test_the_band_is_around_the_curve() -> None:
    line = Line("fire", [1, 2], [0.4, 0.5], [0.3, 0.45], [0.5, 0.6])
    drawn = curves("T", [line], x="task", y="accuracy")
    (band,) = elements(drawn, "path", "band")
    (path,) = elements(drawn, "path", "line")
    upper, lower = points(band)[:2], points(band)[2:][::-1]
    for (x, y), (high_x, high), (low_x, low) in zip(points(path), upper, lower, strict=True):
        assert x == high_x == low_x
        assert high < y < low


def test_a_missing_value_is_a_gap() -> None:
    drawn = curves("T", [Line("fire", range(1, 6), [0.1, 0.2, None, 0.3, 0.4])], x="task", y="accuracy")
    (path,) = elements(drawn, "path", "line")
    assert (path.get("d") or "").count("M") == 2
    assert len(points(path)) == 4


def test_every_named_line_has_its_label_and_others_are_gray() -> None:
    lines = [Line(f"arm {at}", [1, 2], [0.5, 0.5 + at / 100]) for at in range(14)]
    drawn = curves("T", lines, x="task", y="accuracy", named=["arm 3", "arm 5"])
    labels = elements(drawn, "text", "name")
    assert {label.text for label in labels} == {"arm 3", "arm 5"}
    assert len(elements(drawn, "path", "rest")) == 12
    assert "12 more in gray" in drawn.note
    heights = sorted(float(label.get("y") or 0) for label in labels)
    assert heights[1] - heights[0] >= 14.9


def test_curves_say_what_they_show() -> None:
    drawn = curves("Accuracy", [Line("fire", [1, 2], [0.5, 0.6]), Line("nothing", [1, 2], [0.5, 0.1])], x="task", y="%")
    assert drawn.described == "Accuracy: fire from 0.5 to 0.6; nothing from 0.5 to 0.1."
    for form in (drawn.figure(), drawn.file()):
        assert f'aria-label="{drawn.described}"' in form
        assert "Accuracy" in form and ">task<" in form and ">%<" in form


# Forest plot


def test_whiskers_lie_around_zero_as_their_numbers_do() -> None:
    rows = [Whisker("fire", 30.0, 20.0, 40.0), Whisker("redo", -10.0, -15.0, 5.0), Whisker("one seed", 3.0)]
    drawn = forest("T", rows, x="points", better="better", worse="worse")
    (zero,) = elements(drawn, "line", "zero")
    at = float(zero.get("x1") or 0)
    dots = [float(dot.get("cx") or 0) - at for dot in elements(drawn, "circle", "dot")]
    assert dots[0] > 0 > dots[1]
    assert dots[0] == pytest.approx(-3 * dots[1], abs=0.3)
    bars = [each for each in elements(drawn, "line", "bar") if each.get("x1") != each.get("x2")]
    assert len(bars) == 2
    assert float(bars[0].get("x1") or 0) - at == pytest.approx(dots[0] * 2 / 3, abs=0.3)
    assert float(bars[1].get("x1") or 0) < at < float(bars[1].get("x2") or 0)
    assert "+30.0 [+20.0, +40.0]" in texts(drawn)
    assert "one seed +3.0" in drawn.described


# Files


@pytest.mark.parametrize(
    "drawn",
    [
        curves(EVIL, [Line(EVIL, [1, 2], [0.1, 0.2])], x=EVIL, y=EVIL, level=(0.1, EVIL)),
        forest(EVIL, [Whisker(EVIL, 1.0, 0.5, 1.5)], x=EVIL, better=EVIL, worse=EVIL),
    ],
    ids=["curves", "forest"],
)
def test_a_file_stands_alone_and_names_stay_text(drawn: svg.Picture) -> None:
    root = ElementTree.fromstring(drawn.file())
    assert not list(root.iter(f"{SVG}script"))
    assert next(each.text for each in root.iter(f"{SVG}title")) == EVIL
    assert "http" not in drawn.file().replace("http://www.w3.org/2000/svg", "")
    assert "prefers-color-scheme:dark" in drawn.file()
    assert "<script" not in drawn.figure()


# Which pictures a study has


def test_a_study_shows_its_curves_differences_retention_and_health() -> None:
    (found,) = compared()
    (learning,) = page.learning(found)  # labels are random: there is no test accuracy to show
    assert learning.described.startswith("Accuracy while learning on each task: nothing from 46")
    assert "chance" in texts(learning)
    (against,) = page.differences(found)
    assert against.described.index("fire") < against.described.index("shrink-perturb")  # best first
    assert len(page.retention(found)) == 2
    assert len(page.health(found)) == 4


def test_a_band_ends_where_its_measure_does() -> None:
    (found,) = compared(ends={"nothing": 0.001, "fire": 0.998}, seeds=3)
    wide = found.curve("fire", "online_accuracy")
    assert wide is not None and max(value for value in wide["high"] if value is not None) > 1
    for line in page._lines(found, "online_accuracy"):
        assert all(0 <= value <= 100 for value in (*line.low, *line.high) if value is not None)


def test_the_band_of_negative_returns_is_around_them() -> None:
    agent = Setting("agent", "observations", "sac", headline="return")
    (found,) = compared(settings=[agent], seeds=3)
    for line in page._lines(found, "return"):
        assert all(low <= y <= high for low, y, high in zip(line.low, line.y, line.high, strict=True))
