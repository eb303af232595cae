"""What a real TensorBoard shows of a training, in a real browser."""

import collections
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from typing import NamedTuple

import pytest

from tests import browser
from tests.browser import is_drawn
from tests.logger_functions import DIM, ROWS, STEPS

_WAIT_SECONDS = 60
_PATHS = ("allgather", "allreduce", "other", "pull", "push")
# All that the logger writes, of that training.
SCALARS = [
    *("alpha/of the model", "alpha/sharded/embeddings"),
    "alpha/stock/embeddings",
    *(f"bytes/{path}/{way}" for path in _PATHS for way in ("received", "sent")),
    *(f"seconds/{path}" for path in (*_PATHS, "stall", "step", "update")),
    "search/tables/seconds by partitions",
]
IMAGES = ["search/tables/samples and fit"]
HISTOGRAMS = [
    "owners/sharded/embeddings/share of touches",  # the other has no owners
    "rows/sharded/embeddings/log2 of touches",
    "rows/stock/embeddings/log2 of touches",
]
TEXTS = ["plan", "search/tables/choice"]


class Dashboard(NamedTuple):
    """A page of TensorBoard, and the CSS selectors of what it shows.

    Attributes:
        tab: what it is called in the page's address.
        names: all that is to be in it.
        card: selects what each of them has: a name and a figure.
        figure: selects the figure, of what is in a card.
        is_coloured: whether it has colours: a chart has, once it has a line.
        heading: selects the name.
        closed: selects the groups of cards that are still to be opened.
    """

    tab: str
    names: list
    card: str
    figure: str
    is_coloured: bool = True
    heading: str = "[itemprop=name]"
    closed: str = "button.heading:not([open-button])"


TEXT = Dashboard("text", TEXTS, "tf-text-loader", "tf-markdown-view", False)
CHARTS = [
    Dashboard("scalars", SCALARS, "tf-scalar-card", "vz-line-chart2"),
    Dashboard("images", IMAGES, "tf-image-loader", "img"),
    Dashboard(
        "histograms",
        HISTOGRAMS,
        "tf-histogram-loader",
        "vz-histogram-timeseries",
    ),
    Dashboard(
        "distributions",
        HISTOGRAMS,
        "tf-distribution-loader",
        "vz-distribution-chart",
    ),
    Dashboard(  # what TensorBoard opens with
        "timeseries",
        SCALARS + IMAGES + HISTOGRAMS,
        "card-view",
        "line-chart, tb-histogram, img",
        heading=".tag",
        closed="button.group-toolbar:not(:has([svgicon=expand_less_24px]))",
    ),
]


class Look(NamedTuple):
    """What someone saw in a dashboard."""

    cards: list
    missing: list
    unexpected: list
    empty: list
    png: bytes


@contextlib.contextmanager
def tensorboard(log_dir, folder):
    """Gives the address of a TensorBoard server."""
    log = folder / "tensorboard.log"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", log_dir]
    command += ["--host", "127.0.0.1", "--port", "0", "--reload_interval", "1"]
    with (
        log.open("w") as output,
        subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder)},
        ) as server,
    ):
        try:
            yield last_try(lambda: address(server, log))
        finally:
            server.terminate()


def address(server, log):
    text = log.read_text()
    assert server.poll() is None, f"TensorBoard has ended:\n{text}"
    found = re.search(r"http://127[0-9.:]+/", text)
    return found and found.group()


def last_try(attempt, is_good=bool, seconds=_WAIT_SECONDS):
    """What is good, as soon as it is, or else what was when time was over."""
    deadline = time.monotonic() + seconds
    while not is_good(result := attempt()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return result


def look(page, url, dashboard):
    """Opens a dashboard, and waits until it shows all that it should."""
    page.open(f"{url}#{dashboard.tab}")
    seen = last_try(lambda: glance(page, dashboard), is_complete, 10)
    if not is_complete(seen):
        # The server had not read all when the page came.
        page.reload()
        seen = last_try(lambda: glance(page, dashboard), is_complete)
    return seen


def is_complete(seen):
    return not (seen.missing or seen.unexpected or seen.empty)


def glance(page, dashboard):
    """What there is to be seen at this moment."""
    page.click(dashboard.closed)
    cards = page.cards(dashboard.card, dashboard.heading, dashboard.figure)
    png, pixels = page.screenshot()
    names = collections.Counter(card.name for card in cards)
    expected = collections.Counter(dashboard.names)
    return Look(
        cards,
        missing=sorted((expected - names).elements()),
        unexpected=sorted((names - expected).elements()),
        empty=[
            c.name
            for c in cards
            if not is_drawn(c, pixels, dashboard.is_coloured)
        ],
        png=png,
    )


def test_what_is_not_seen_is_not_found(page, tmp_path):
    """The control of all that follows."""
    card = "<section><b>{}</b>{}</section>".format
    line = "<svg><rect width=99 height=99 fill=none stroke={} /></svg>".format
    (tmp_path / "page.html").write_text(
        card("drawn", line("red"))
        + card("a frame alone", line("gray"))
        + card("no figure", "")
        + f"<div hidden>{card('hidden', line('red'))}</div>"
        + card("no picture", "<img src=none.png width=9 height=9>")
        + "<div id=shadow></div><script>"
        "shadow.attachShadow({mode: 'open'}).innerHTML = "
        f"`{card('in a shadow root', line('red'))}`</script>"
    )
    names = ["drawn", "a frame alone", "no picture", "not written", "hidden"]
    dashboard = Dashboard("", names, "section", "svg, img", True, "b")
    page.open(f"file://{tmp_path}/page.html")
    seen = glance(page, dashboard)
    assert seen.missing == ["hidden", "not written"]
    assert seen.unexpected == ["in a shadow root", "no figure"]
    assert seen.empty == ["a frame alone", "no figure", "no picture"]


def test_every_item_is_shown(page, logged, tmp_path, artifacts, capsys):
    written, results = logged("native")
    log_dir = tmp_path / "logs"
    log_dir.mkdir()
    with tensorboard(log_dir, tmp_path) as url:
        page.open(url)
        nothing = "No dashboards are active"
        assert last_try(lambda: nothing in page.words())
        assert glance(page, TEXT).missing == TEXTS
        shutil.copytree(written, log_dir, dirs_exist_ok=True)
        page.reload()
        seen = {}
        for dashboard in (TEXT, *CHARTS):
            looked = seen[dashboard.tab] = look(page, url, dashboard)
            picture = artifacts / f"tensorboard-{dashboard.tab}.png"
            picture.write_bytes(looked.png)
            assert is_complete(looked), (picture, looked[1:-1])
    with capsys.disabled():
        print(f"\nScreenshots of TensorBoard: {artifacts}")
    check_plan(seen["text"].cards, *results[0]["choice"])
    (image,) = seen["images"].cards
    assert image.pixels == [675, 450]


def check_plan(cards, num_partitions, sampled):
    plan, choice = sorted(cards, key=lambda card: card.name)
    assert f"{num_partitions} partitions: " in choice.words
    assert f"step {2 * STEPS}" in plan.words  # the newest comes first
    head, *rows = plan.rows
    assert head[:6] == [
        *("variable", "shape", "size", "alpha", "architecture", "P")
    ]
    assert [row[0] for row in rows] == [
        *("sharded/embeddings", "stock/embeddings", "out/kernel", "out/bias")
    ]
    rows = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert rows["sharded/embeddings"]["shape"] == f"{ROWS} x {DIM}"
    assert rows["sharded/embeddings"]["P"] == str(num_partitions)
    assert rows["out/bias"]["architecture"] == "allreduce"
    assert all(rows[name]["measured"] for name in rows)


def test_a_missing_browser_is_said(tmp_path, monkeypatch):
    (tmp_path / "bash").symlink_to(shutil.which("bash"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("KERAS_SPARSITY_REQUIRE_BROWSER", raising=False)
    with pytest.raises(pytest.skip.Exception, match="Found: neither"):
        browser.find()
    monkeypatch.setenv("KERAS_SPARSITY_REQUIRE_BROWSER", "1")
    with pytest.raises(pytest.fail.Exception, match="Fix: scripts/install_"):
        browser.find()
    # Without apt-get.
    ended = subprocess.run([browser.INSTALL], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "apt-get install chromium chromium-driver" in ended.stderr
