"""A browser without a window: what a page shows, not what its server sends."""

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import subprocess
import time

import numpy as np
import pytest
import tensorflow as tf

INSTALL = pathlib.Path(__file__).parents[1] / "scripts" / "install_browser.sh"
# High, for what is scrolled out of sight is not drawn.
_WIDTH, _HEIGHT = 2400, 4500
# By so much the channels of a colour differ; black is less than dark.
_COLOURED, _DARK = 25, 128
_FEWEST_PIXELS = 20

_SCRIPT = """
// All elements below one, those in shadow roots too: of web components.
function* below(root) {
  if (root.shadowRoot) yield* below(root.shadowRoot);
  for (const child of root.children) {
    yield child;
    yield* below(child);
  }
}
const shown = (root, selector) => [...below(root)].filter(
  (element) => element.matches(selector) && element.checkVisibility());
// What can be read in a node, from its first word to its last.
function words(node) {
  if (node.nodeType === Node.TEXT_NODE) return node.data.trim();
  const isSlot = node.localName === "slot";  // which has no box of its own
  if (!isSlot && !node.checkVisibility?.()) return "";
  const parts = isSlot
    ? node.assignedNodes() : (node.shadowRoot ?? node).childNodes;
  return [...parts].map(words).filter(Boolean).join(" ");
}
"""
_WORDS = "return words(document.body);"
_LAYOUT = """
const width = document.documentElement.clientWidth;
const wide = shown(document.body, "*").filter(
  (element) => element.getBoundingClientRect().right > width + 1);
return {
  title: shown(document.body, "h1")[0]?.textContent.trim() ?? "",
  overflow: document.documentElement.scrollWidth - width,
  widest: wide.slice(-1).map((element) => element.outerHTML.slice(0, 200)),
  links: [...document.links].map((link) => link.href),
  ids: [...document.querySelectorAll("[id]")].map((element) => element.id),
  blank: shown(document.body, "img")
    .filter((image) => !(image.complete && image.naturalWidth))
    .map((image) => image.src),
  resources: performance.getEntriesByType("resource").map(({name}) => name),
};
"""
_SEEN = """
return shown(document.body, arguments[0]).map(words).join(" ");
"""
_CLICK = """
const found = shown(document.body, arguments[0]);
found.forEach((element) => element.click());
return found.length;
"""
_CARDS = """
const [card, heading, selector] = arguments;
return shown(document.body, card).map((element) => {
  const figure = shown(element, selector)[0];
  const table = shown(element, "table")[0];
  const {x, y, width, height} = figure?.getBoundingClientRect() ?? {};
  return {
    name: shown(element, heading)[0]?.textContent.trim() ?? "",
    words: words(element),
    box: figure ? [x, y, width, height].map(Math.round) : null,
    pixels: figure?.complete
      ? [figure.naturalWidth, figure.naturalHeight] : null,
    rows: [...(table?.rows ?? [])].map((row) => [...row.cells].map(words)),
  };
});
"""


@dataclasses.dataclass(frozen=True)
class Card:
    """A figure of a page, with its name, as they are shown.

    Attributes:
        name: what stands above it.
        words: all that can be read in it.
        box: left, top, width and height of the figure in the window, or None.
        pixels: width and height of an image that was loaded, or None.
        rows: the cells of its first table, row by row.
    """

    name: str
    words: str
    box: list
    pixels: list
    rows: list


@dataclasses.dataclass(frozen=True)
class Layout:
    """A page as it is laid out in the window.

    Attributes:
        title: its first heading.
        overflow: by how many pixels it is wider than the window.
        widest: the last element that reaches beyond the window.
        links: the addresses that it links to.
        ids: those of its elements.
        blank: addresses of pictures that were not loaded.
        resources: addresses of all that it has loaded.
    """

    title: str
    overflow: int
    widest: list
    links: list
    ids: list
    blank: list
    resources: list


class Browser:
    """A page, as someone sees it who looks at it."""

    def __init__(self, driver):
        self._driver = driver

    def open(self, url):
        """Goes to a page, or to another part of the page where it is."""
        self._driver.get(url)

    def reload(self):
        self._driver.refresh()

    def resize(self, width, height):
        """Sets the size of the window, which may be that of a telephone."""
        self._driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {
                **{"width": width, "height": height},
                **{"deviceScaleFactor": 1, "mobile": False},
            },
        )

    def layout(self):
        return Layout(**self._run(_LAYOUT))

    def words(self):
        return self._run(_WORDS)

    def click(self, selector):
        """Clicks on all that can be seen; returns how many these are."""
        return self._run(_CLICK, selector)

    def waits_for(self, words, selector, seconds=20):
        """Whether what can be seen of a selector comes to have words."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if words in self._run(_SEEN, selector):
                return True
            time.sleep(0.1)
        return False

    def cards(self, card, heading, figure):
        """All that can be seen of what these three selectors find."""
        return [Card(**c) for c in self._run(_CARDS, card, heading, figure)]

    def screenshot(self):
        """The window: `(bytes of a PNG, array (height, width, 3))`."""
        png = self._driver.get_screenshot_as_png()
        return png, tf.io.decode_png(png, channels=3).numpy()

    def _run(self, script, *arguments):
        return self._driver.execute_script(_SCRIPT + script, *arguments)


def is_drawn(card, pixels, is_coloured):
    """Whether a screenshot has a card's figure, and that is more than blank.

    Args:
        card: a `Card`.
        pixels: the screenshot.
        is_coloured: whether it must have colours: lines of a chart have, its
            frame and letters have not.
    """
    if not card.box or card.pixels == [0, 0]:  # an image that was not loaded
        return False
    left, top, width, height = card.box
    figure = pixels[top : top + height, left : left + width].astype(int)
    if is_coloured:
        return np.sum(np.ptp(figure, axis=-1) > _COLOURED) >= _FEWEST_PIXELS
    return np.sum(figure.mean(axis=-1) < _DARK) >= _FEWEST_PIXELS


def find():
    """Paths of browser and driver.

    Without them the test is skipped, or fails where
    KERAS_SPARSITY_REQUIRE_BROWSER is set.
    """
    found = subprocess.run(
        [INSTALL, "--find"], capture_output=True, text=True, timeout=20
    )
    missing = found.stderr
    if importlib.util.find_spec("selenium") is None:
        missing += "selenium is not installed. Fix: pip install selenium"
    if not missing:
        return found.stdout.split()
    if os.environ.get("KERAS_SPARSITY_REQUIRE_BROWSER"):
        pytest.fail(missing)
    pytest.skip(missing)


@contextlib.contextmanager
def browsing(folder):
    """Gives a `Browser` that reaches this machine alone.

    Args:
        folder: for what it writes.
    """
    browser, driver = find()
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in (
        "--headless=new",
        f"--window-size={_WIDTH},{_HEIGHT}",
        "--force-device-scale-factor=1",
        f"--user-data-dir={folder}",
        "--no-sandbox",  # which root's Chromium asks for
        "--disable-dev-shm-usage",  # small in containers
        "--no-first-run",
        # Curves as SVG: without a graphics card WebGL leaves them out.
        "--disable-3d-apis",
        # Nothing leaves the machine.
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-proxy-server",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(argument)
    service = webdriver.ChromeService(
        # Given, so that Selenium does not download one.
        executable_path=driver,
        env={**os.environ, "HOME": str(folder)},
    )
    driver = webdriver.Chrome(options, service)
    try:
        yield Browser(driver)
    finally:
        driver.quit()
