"""The page in a real Chromium: loads in silence, sorts, filters, opens a layer, follows dark mode, runs no name."""

import json
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from browser import CONTRAST, OFF_SCREEN, Driver, browser_only, driver, page, serving
from rekindle import fire, health, plan
from rekindle.report import render, words

selenium = pytest.importorskip("selenium", reason="pip install selenium")

from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

EVIL = "model.layers.0.<script>window.hacked=1</script><img src=x onerror=window.hacked=1>.weight"

__all__ = ["driver", "page"]  # fixtures
pytestmark = browser_only


def result(layers: int) -> dict[str, Any]:
    """Made-up numbers in the form of `rekindle fire --html`; the first layer has a hostile name and a finding."""
    generator = torch.Generator().manual_seed(0)
    parts = ("q_proj", "k_proj", "v_proj", "o_proj")
    names = [EVIL] + [f"model.layers.{i // 4}.self_attn.{parts[i % 4]}.weight" for i in range(1, layers)]
    values = torch.rand(layers, len(words.MEASURES), generator=generator)
    curve = {"k": 64, "count": 1, "mean": torch.linspace(3, 0, 48).tolist()}
    flat = {"k": 64, "count": 4, "mean": [1.0] * 48, "low": [0.9] * 48, "high": [1.1] * 48}
    finding = {"layer": EVIL, "sign": "dead weights", "level": "watch", "text": EVIL, "rule": EVIL, "remedy": EVIL}
    health = {
        "weights": {
            n: dict(zip(words.MEASURES, row, strict=True)) for n, row in zip(names, values.tolist(), strict=True)
        },
        "about": {
            n: {"role": ("query", "key", "value", "attention-output")[i % 4], "shape": "64×64"}
            for i, n in enumerate(names)
        },
        "verdict": "watch",
        "rule": EVIL,
        "sure": False,
        "findings": [finding],
        "unmeasured": [{"name": EVIL, "what": "weight", "reason": EVIL}],
    }
    return {
        "command": "inspect",
        "source": {"name": EVIL, "format": EVIL, "tensors": 9, "numbers": 9, "bytes": 9, "dtypes": [EVIL]},
        "health": health,
        "after": {**health, "findings": []},
        "spectra": {n: {"before": curve, "after": flat} for n in names},
        "made": {"versions": {"rekindle": EVIL}, "line": EVIL, "platform": EVIL, "threads": 1},
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """The page over HTTP, with every request that reached the server: a fetch of anything else would show."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "report.html").write_text(render(result(40)), "utf-8")
    with serving(folder / "report.html") as found:
        yield found


def names(page: Driver) -> list[str]:
    script = "return [...document.querySelectorAll('tr[data-row]:not(.gone) .open')].map(b => b.textContent)"
    found: list[str] = page.execute_script(script)
    return found


def column(page: Driver, heading: str) -> list[float]:
    return [
        float(value)
        for value in page.execute_script(
            "const heads = [...document.querySelectorAll('#table>thead th')];"
            "const at = heads.findIndex(h => h.textContent === arguments[0]);"
            "return [...document.querySelectorAll('tr[data-row]')].map(r => r.cells[at].dataset.v)",
            heading,
        )
    ]


def sort_button(page: Driver, heading: str) -> Any:
    return next(
        b for b in page.find_elements(By.CSS_SELECTOR, "th button[data-sort]") if b.text.strip(" ↑↓") == heading
    )


def test_loads_without_a_message_or_a_request(page: Driver, served: tuple[str, list[str]]) -> None:
    assert page.get_log("browser") == []
    assert set(served[1]) == {"/report.html"}
    sent = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    urls = {m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"}
    assert {url for url in urls if not url.startswith(("data:", "chrome:"))} == {served[0]}


def test_opens_from_a_file(driver: Driver, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(render(result(4)), "utf-8")
    driver.get_log("browser")
    driver.get((tmp_path / "report.html").as_uri())
    assert len(names(driver)) == 4
    assert driver.get_log("browser") == []


def test_names_are_harmless(page: Driver) -> None:
    for button in page.find_elements(By.CSS_SELECTOR, ".open")[:2]:
        page.execute_script("arguments[0].click()", button)
    assert page.execute_script("return window.hacked") is None
    assert page.find_elements(By.TAG_NAME, "img") == []
    assert len(page.find_elements(By.TAG_NAME, "script")) == 2
    assert names(page)[0] == EVIL
    # Even markup that got in would not run: the policy of the page allows one script.
    page.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.hacked = 2'; document.body.append(s)"
    )
    assert page.execute_script("return window.hacked") is None
    page.get_log("browser")


def test_sorts_by_a_column_and_back(page: Driver) -> None:
    stored = names(page)
    sort_button(page, "scale-free").click()
    values = column(page, "scale-free")
    assert values == sorted(values, reverse=True)
    assert len(set(values)) > 30
    head = sort_button(page, "scale-free").find_element(By.XPATH, "..")
    assert head.get_attribute("aria-sort") == "descending"
    sort_button(page, "scale-free").click()
    assert column(page, "scale-free") == sorted(values)
    sort_button(page, "scale-free").click()
    assert names(page) == stored
    assert head.get_attribute("aria-sort") == "none"


def test_names_sort_by_number(page: Driver) -> None:
    sort_button(page, "Layer").click()
    layers = [int(name.split(".")[2]) for name in names(page)]
    assert layers == sorted(layers)


def test_filters_by_name_glob_role_and_finding(page: Driver) -> None:
    box = page.find_element(By.ID, "filter")
    box.send_keys("layers.3.")
    assert len(names(page)) == 4
    assert page.find_element(By.ID, "count").text == "4 of 40 layers"
    box.clear()
    box.send_keys("*.q_proj.weight")
    assert len(names(page)) == 9
    box.clear()
    box.send_keys("no such layer")
    assert names(page) == []
    box.clear()
    box.send_keys(" ")
    page.find_element(By.CSS_SELECTOR, "#role option:nth-child(2)").click()
    assert len(names(page)) == 10
    page.find_element(By.CSS_SELECTOR, "#role option:nth-child(1)").click()
    page.find_element(By.ID, "marked").click()
    assert names(page) == [EVIL]


def test_opens_a_layer_by_keyboard(page: Driver) -> None:
    assert page.find_elements(By.CSS_SELECTOR, "tr.detail") == []
    button = page.find_elements(By.CSS_SELECTOR, ".open")[1]
    page.execute_script("arguments[0].focus()", button)
    button.send_keys(Keys.ENTER)
    assert button.get_attribute("aria-expanded") == "true"
    detail = page.find_element(By.ID, button.get_attribute("aria-controls"))
    chart = detail.find_element(By.CSS_SELECTOR, ".chart svg")
    assert "before from 3 down to 0, after from 1 down to 1" in chart.get_attribute("aria-label")
    assert {p.get_attribute("class") for p in chart.find_elements(By.TAG_NAME, "path")} == {
        "before",
        "band after",
        "after",
    }
    assert "effective rank" in detail.text
    linear = chart.find_element(By.CSS_SELECTOR, "path.before").get_attribute("d")
    detail.find_element(By.CSS_SELECTOR, ".chart button").click()
    assert detail.find_element(By.CSS_SELECTOR, "path.before").get_attribute("d") != linear
    button.send_keys(Keys.SPACE)
    assert button.get_attribute("aria-expanded") == "false"
    assert not detail.is_displayed()


def test_a_cell_of_the_heat_map_leads_to_its_layer(page: Driver) -> None:
    page.find_element(By.ID, "filter").send_keys("nothing")
    cell = page.find_element(By.CSS_SELECTOR, 'rect[data-layer="model.layers.7.self_attn.k_proj.weight"]')
    page.execute_script("arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))", cell)
    active = page.switch_to.active_element
    assert active.text.replace("\n", "") == "model.layers.7.self_attn.k_proj.weight"
    assert active.get_attribute("aria-expanded") == "true"


def brightness(page: Driver) -> float:
    color = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    return sum(int(part) for part in color.strip("rgb()").split(",")) / 3


def test_dark_mode_follows_the_system_and_the_button(page: Driver) -> None:
    assert brightness(page) > 200
    page.find_element(By.ID, "theme").click()
    assert brightness(page) < 50
    page.refresh()
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    assert brightness(page) < 50
    page.find_element(By.ID, "theme").click()
    assert brightness(page) > 200


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable(page: Driver, scheme: str) -> None:
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    page.execute_script("document.querySelector('.open').click()")
    assert page.execute_script(CONTRAST) == []


def test_every_control_has_a_name(page: Driver) -> None:
    page.execute_cdp_cmd("Accessibility.enable", {})
    nodes = page.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    for node in nodes:
        if not node["ignored"] and node["role"]["value"] in (
            "button",
            "searchbox",
            "combobox",
            "checkbox",
            "img",
            "table",
        ):
            named = node.get("name", {}).get("value", "").strip()
            assert named or node["role"]["value"] == "table", node
    kinds = {node["role"]["value"] for node in nodes if not node["ignored"]}
    assert {"columnheader", "rowheader", "row", "cell", "heading", "main"} <= kinds


@pytest.mark.parametrize("width", [320, 390, 768])
def test_nothing_sticks_out_on_a_phone(page: Driver, width: int) -> None:
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 700},
    )
    page.refresh()
    page.execute_script("document.querySelectorAll('.open')[1].click()")
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    assert page.find_element(By.CSS_SELECTOR, "tr.detail svg").is_displayed()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_off_screen(driver: Driver, tmp_path: Path, width: int, scheme: str) -> None:
    """Layers, neurons, plan and receipt of a real network with long names, everything open, read without moving."""
    torch.manual_seed(0)
    net = nn.Sequential(OrderedDict((f"encoder_layer_{i}_intermediate", nn.Linear(24, 24)) for i in range(3)))
    net = nn.Sequential(OrderedDict(backbone=net, activation=nn.ReLU(), classification_head=nn.Linear(24, 4)))
    found = {"health": health(net, [torch.randn(32, 24)]).to_dict(), "plan": plan(net).to_dict()}
    found |= {"receipt": fire(net).to_dict(), "after": health(net, [torch.randn(32, 24)]).to_dict()}
    made = {"versions": {"rekindle": "0.1.0"}, "line": "rekindle fire a -o b", "platform": "Linux", "threads": 1}
    (tmp_path / "a.html").write_text(render({"command": "fire", **found, "made": made}), "utf-8")
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get((tmp_path / "a.html").as_uri())
    driver.execute_script("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert driver.execute_script(OFF_SCREEN) == []
    code = driver.find_element(By.TAG_NAME, "pre").text
    assert code.splitlines() == ['pip install "torch-rekindle[cli]==0.1.0"', "rekindle fire a -o b"]


@pytest.mark.parametrize("width", [390, 1280])
def test_the_answers_of_probe_and_advise_are_on_the_screen(driver: Driver, tmp_path: Path, width: int) -> None:
    """Every column of the candidates with its interval, and labels of the curves large enough to read."""
    around = {"rise": 1.2e-4, "old_rise": -0.0123, "old_end": 0.0456, "drift": 3.7e-7, "difference": -0.00388}
    numbers = around | {f"{name}_interval": [-0.00831, 0.00617] for name in around}
    curve = [[step, 2.0 / step] for step in range(1, 20)]
    tried = [
        {"name": name, "level": 0.4763, "share": share, "ranks": [4, 3, 3], "expected": -1.02, "expected_error": 0.014}
        | {"error": "", "curve": curve, **numbers}
        for name, share in (("nothing", 1.0), ("self-normalized-reset", 1.0), ("shrink-perturb-fresh", 0.25))
    ]
    answer = {"answer": "cannot tell", "sentence": "Cannot tell.", "judged_on": "new data", "seeds": 3, "steps": 1783}
    call = "rekindle.methods.ReDo(targets='auto', second_moment='mean', tau=0.025, period=1000)(model, optimizer)"
    answer |= {"horizon": 1783, "call": call, "rows": tried}
    (tmp_path / "a.html").write_text(render({"command": "advise", "advice": answer}), "utf-8")
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get((tmp_path / "a.html").as_uri())
    assert driver.execute_script(OFF_SCREEN) == []
    heights = (
        "return [...document.querySelectorAll('.lines text')].map(t => t.getBoundingClientRect().height)"
        ".filter(height => height > 0)"
    )
    assert min(driver.execute_script(heights)) > 10
    names = [each.text for each in driver.find_elements(By.CSS_SELECTOR, ".lines li")]
    assert names == ["nothing", "self-normalized-reset", "shrink-perturb-fresh"]


def test_prints_with_everything_open(page: Driver) -> None:
    printed = page.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]
    assert len(printed) > 20_000
    page.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert page.find_elements(By.CSS_SELECTOR, "details:not([open])") == []
    page.execute_script("dispatchEvent(new Event('afterprint'))")
    assert page.find_elements(By.CSS_SELECTOR, "details[open]:not(.meanings)") == []


def test_layers_print_as_a_table(page: Driver) -> None:
    """A sheet of paper is narrower than many a window; cards as on a phone would take a hundred sheets."""
    size = {"width": 700, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    shown = "return getComputedStyle(document.querySelector('#table tr[data-row]')).display"
    assert page.execute_script(shown) == "grid"
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert page.execute_script(shown) == "table-row"
        assert page.execute_script("return document.documentElement.scrollWidth") <= 700  # no column beyond the paper
    finally:
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_500_layers_stay_light(driver: Driver, tmp_path: Path) -> None:
    """Bytes, elements and passes over the table: what makes a page slow on any machine, without a clock."""
    file = tmp_path / "large.html"
    file.write_text(render(result(500)), "utf-8")
    assert file.stat().st_size < 5e6
    driver.get(file.as_uri())
    elements, moved, shown = driver.execute_script(
        "const rows = () => [...document.querySelectorAll('tbody tr')]; let moved = 0;"
        "const body = document.querySelector('th button[data-sort=\"4\"]').closest('table').tBodies[0];"
        "const watch = new MutationObserver(() => 0); watch.observe(body, {childList: true});"
        "document.querySelector('th button[data-sort=\"4\"]').click();"
        "watch.takeRecords().forEach(record => moved += record.addedNodes.length);"
        "const f = document.getElementById('filter'); f.value = 'q_proj'; f.dispatchEvent(new Event('input'));"
        "return [document.querySelectorAll('*').length, moved, rows().filter(row => row.offsetParent).length]"
    )
    assert elements < 500 * 150
    assert 0 < moved <= 2 * 500  # each row is put in its place once, twice at most
    assert 0 < shown < 500
