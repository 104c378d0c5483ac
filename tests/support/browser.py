"""A real Chromium for the tests of pages: one driver a module, and a server that notes what is asked of it."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMEDRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
Driver = Any

# What a reader of the page cannot see without moving it sideways; a table's head that cards replace does not count.
OFF_SCREEN = """
const w = document.documentElement.clientWidth;
const hidden = e => e.closest('thead') && getComputedStyle(e.closest('thead')).position === 'absolute';
return [...document.querySelectorAll('main *')].filter(e => { const r = e.getBoundingClientRect();
  return r.width && !hidden(e) && (r.right > w + 1 || r.left < -1) })
  .map(e => e.tagName + ': ' + e.textContent.slice(0, 40))
"""

# Texts whose contrast to what is behind them is below 4.5, that of WCAG.
CONTRAST = """
const parse = c => c.match(/[\\d.]+/g).map(Number);
const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
const light = c => { const [r, g, b] = parse(c).map(v => linear(v / 255));
  return .2126 * r + .7152 * g + .0722 * b };
const under = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
  if (parse(c).length < 4 || parse(c)[3] > .9) return c; } return 'rgb(255,255,255)' };
const all = [...document.querySelectorAll('p,td,th,dt,dd,summary,b,span,button,label,small,figcaption,a,svg text')];
const texts = e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
return all.filter(e => e.getClientRects().length && texts(e)).map(e => {
  const style = getComputedStyle(e), a = light(e.closest('svg') ? style.fill : style.color), b = light(under(e));
  return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), e.outerHTML.slice(0, 80)] })
  .filter(([ratio]) => ratio < 4.5)
"""

browser_only = pytest.mark.skipif(
    not (CHROMIUM and CHROMEDRIVER), reason="needs a browser: apt-get install chromium chromium-driver"
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(CHROMEDRIVER))
    browser.set_page_load_timeout(30)
    yield browser
    browser.quit()


@contextmanager
def serving(file: Path) -> Iterator[tuple[str, list[str]]]:
    """A page over HTTP: its address, and every request that reached the server, so that a fetch would show."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            asked.append(self.path)

    handler = functools.partial(Handler, directory=str(file.parent))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/{file.name}", asked
    server.shutdown()


@pytest.fixture
def page(driver: Driver, served: tuple[str, list[str]]) -> Driver:
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    driver.get(served[0])
    return driver
