"""The page of a study in a real browser: content, sorting, light and dark, phones, hostile names."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from browser import CONTRAST, OFF_SCREEN, Driver, browser_only, driver, page, serving
from lab_results import ENDS, LABELS, compared, results
from rekindle.lab.settings import Setting
from rekindle.lab.views.page import learning, render

__all__ = ["driver", "page"]  # fixtures
EVIL = "<script>window.hacked=1</script><img src=x onerror=window.hacked=1>"
TEXT = Setting("text", "alphabet", "gpt", headline="online_loss")
GENERAL = Setting("permuted", "permuted-inputs", "mlp", headline="test_accuracy")


# Without a browser


def words(page: str) -> str:
    return re.sub(r"<[^>]+>", " ", page.partition("<main")[2])


def test_the_sentence_comes_first_and_is_computed() -> None:
    said = words(render(results()))
    assert said.index("FIRE was best of 5 with 50.5") < said.index("full-reset")
    lost = words(render(results(ends={**ENDS, "redo": 0.9})))
    assert "FIRE did not win: redo came first with 89.9" in lost
    assert "FIRE second of 5" in lost


def test_a_study_without_results_says_so() -> None:
    assert "No run has finished yet." in render(results(ends={}))
    only = render(results(ends={}, refused={"fire-qk": "no attention"}))
    assert "no attention" in only


def test_refused_and_failed_arms_have_their_reasons() -> None:
    said = words(render(results(refused={"fire-qk": "targets match nothing"}, failed={"muon": "ValueError: broke"})))
    assert "targets match nothing" in said
    assert "ValueError: broke" in said


def test_losses_tuned_arms_and_one_seed_are_shown() -> None:
    said = words(render(results(settings=(TEXT,), seeds=1, tuned=("nothing", "fire"))))
    assert "fire (tuned)" in said
    assert "loss while learning, nats" in said
    assert "One seed only" in said


def test_each_arm_is_shown_as_a_call() -> None:
    said = words(render(results()))
    assert "FIRE(" in said and "at the start of every task but the first" in said
    assert "no remedy" in said


def test_two_seeds_show_their_values_and_no_interval() -> None:
    said = words(render(results(seeds=2)))
    table = said[said.index("against nothing") : said.index("What the columns mean")]
    assert "[" not in table and "(" in table.replace("(Holm)", "")
    assert "Two seeds only" in said


def test_how_to_reproduce_is_there() -> None:
    page = re.sub("</?span>", "", render(results(), "rekindle lab run labels --seeds 5"))
    assert "rekindle lab run labels --seeds 5" in page
    assert "torch 2.13.0" in page


def test_nothing_is_fetched() -> None:
    page = render(results(settings=(LABELS, TEXT, GENERAL)))
    assert "http://" not in page and "https://" not in page
    assert len(page) < 1_500_000


# In a browser

selenium = pytest.importorskip("selenium", reason="pip install selenium")

from selenium.webdriver.common.by import By  # noqa: E402


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    folder = tmp_path_factory.mktemp("page")
    data = results(ends={**ENDS, EVIL: 0.4}, settings=(LABELS, GENERAL), refused={"fire-qk": EVIL})
    data = replace(data, study={**data.study, "name": EVIL})
    (folder / "study.html").write_text(render(data, EVIL), "utf-8")
    with serving(folder / "study.html") as found:
        yield found


def column(page: Driver, at: int) -> list[str]:
    script = "return [...document.querySelector('table.sortable').tBodies[0].rows].map(r => r.cells[arguments[0]]"
    found: list[str] = page.execute_script(f"{script}.dataset.v ?? r.cells[arguments[0]].textContent)", at)
    return found


@browser_only
def test_loads_without_a_message_or_a_request(page: Driver, served: tuple[str, list[str]]) -> None:
    assert page.get_log("browser") == []
    assert set(served[1]) == {"/study.html"}
    sent = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    urls = {m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"}
    assert {url for url in urls if not url.startswith(("data:", "chrome:"))} == {served[0]}


@browser_only
def test_names_are_harmless(page: Driver) -> None:
    assert page.execute_script("return window.hacked") is None
    assert page.find_elements(By.TAG_NAME, "img") == []
    assert len(page.find_elements(By.TAG_NAME, "script")) == 2
    assert EVIL in column(page, 0)


@browser_only
def test_sorts_by_number_and_back(page: Driver) -> None:
    heading = page.find_elements(By.CSS_SELECTOR, "table.sortable thead th")[2]
    button = heading.find_element(By.TAG_NAME, "button")
    first = column(page, 0)
    button.click()
    values = column(page, 2)
    assert heading.get_attribute("aria-sort") == "descending"
    assert values[-1] == "–"  # doing nothing has no difference to itself, and stays last either way
    numbers = [float(value) for value in values[:-1]]
    assert numbers == sorted(numbers, reverse=True)
    assert len(set(numbers)) == len(numbers)
    button.click()
    assert [float(value) for value in column(page, 2)[:-1]] == sorted(numbers)
    assert column(page, 0)[-1] == "nothing"
    button.click()
    assert column(page, 0) == first
    assert heading.get_attribute("aria-sort") == "none"


def brightness(page: Driver, script: str) -> float:
    color = page.execute_script(f"return {script}")
    return sum(float(part) for part in re.findall(r"[\d.]+", color)[:3]) / 3


@browser_only
def test_pictures_follow_light_and_dark(page: Driver) -> None:
    ground, ink = (
        "getComputedStyle(document.body).backgroundColor",
        "getComputedStyle(document.querySelector('.k1.line')).stroke",
    )
    light = brightness(page, ground), brightness(page, ink)
    page.find_element(By.ID, "theme").click()
    dark = brightness(page, ground), brightness(page, ink)
    assert light[0] > 200 > 60 > dark[0]
    assert dark[1] > light[1] + 20


@browser_only
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable(page: Driver, scheme: str) -> None:
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    assert page.execute_script(CONTRAST) == []


@browser_only
@pytest.mark.parametrize("width", [390, 1280])
def test_every_picture_has_words_and_no_label_is_cut_off(page: Driver, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.refresh()
    pictures = page.find_elements(By.CSS_SELECTOR, "figure.picture svg")
    assert len(pictures) >= 2 * 6
    for picture in pictures:
        assert len(picture.get_attribute("aria-label")) > 40
    cut = page.execute_script(
        "return [...document.querySelectorAll('figure.picture svg')].flatMap(s => { const b = s.viewBox.baseVal;"
        "return [...s.querySelectorAll('text:not([transform])')].filter(t => { const r = t.getBBox();"
        "return r.x < -1 || r.y < -1 || r.x + r.width > b.width + 1 || r.y + r.height > b.height + 1 })"
        ".map(t => t.textContent) })"
    )
    assert [label for label in cut if label != EVIL] == []
    turned = page.execute_script(
        "const all = [...document.querySelectorAll('figure.picture svg')];"
        "return all.flatMap(s => { const b = s.getBoundingClientRect();"
        "return [...s.querySelectorAll('text[transform]')].filter(t => { const r = t.getBoundingClientRect();"
        "return r.top < b.top - 1 || r.bottom > b.bottom + 1 }).map(t => t.textContent) })"
    )
    assert turned == []
    overlaps = page.execute_script(
        "return [...document.querySelectorAll('figure.picture svg')].flatMap(s => { "
        "const n = [...s.querySelectorAll('text.name')].map(t => [t.textContent, t.getBBox()]);"
        "return n.flatMap(([a, r], i) => n.slice(i + 1).filter(([, q]) => r.x < q.x + q.width && q.x < r.x + r.width "
        "&& r.y + 3 < q.y + q.height - 3 && q.y + 3 < r.y + r.height - 3).map(([b]) => a + ' / ' + b)) })"
    )
    assert overlaps == []


@browser_only
@pytest.mark.parametrize("width", [320, 390, 768])
def test_nothing_sticks_out_on_a_phone(page: Driver, width: int) -> None:
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 700},
    )
    page.refresh()
    assert page.execute_script("return document.documentElement.scrollWidth") <= width


@browser_only
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_off_screen(driver: Driver, tmp_path: Path, width: int, scheme: str) -> None:
    """Labels, the forest plot's own points, and every column of the table."""
    names = {**ENDS, "random-isometry": 0.41, "self-normalized-reset": 0.33, "shrink-perturb-fresh": 0.38}
    (tmp_path / "a.html").write_text(render(results(ends=names, settings=(LABELS, TEXT, GENERAL))), "utf-8")
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700},
    )
    driver.get((tmp_path / "a.html").as_uri())
    assert driver.execute_script(OFF_SCREEN) == []
    meanings = driver.find_elements(By.CSS_SELECTOR, ".meanings dd")
    assert meanings and all(each.is_displayed() for each in meanings)  # without hover


@browser_only
def test_every_control_has_a_name(page: Driver) -> None:
    page.execute_cdp_cmd("Accessibility.enable", {})
    nodes = page.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    for node in nodes:
        if not node["ignored"] and node["role"]["value"] in ("button", "img", "link"):
            assert node.get("name", {}).get("value", "").strip(), node
    kinds = {node["role"]["value"] for node in nodes if not node["ignored"]}
    assert {"columnheader", "rowheader", "row", "cell", "heading", "main", "figure"} <= kinds


@browser_only
def test_prints(page: Driver) -> None:
    assert len(page.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]) > 20_000


@browser_only
def test_a_picture_file_opens(driver: Driver, tmp_path: Path) -> None:

    file = tmp_path / "curves.svg"
    file.write_text(learning(compared()[0])[0].file(), "utf-8")
    driver.get_log("browser")
    driver.get(file.as_uri())
    assert driver.get_log("browser") == []
    assert driver.execute_script("return document.querySelectorAll('path.line').length") == 5
    stroke = driver.execute_script("return getComputedStyle(document.querySelector('.k1.line')).stroke")
    assert stroke == "rgb(179, 69, 10)"
