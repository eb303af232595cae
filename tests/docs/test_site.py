"""The documentation's site in a real browser: each page, each link."""

import contextlib
import functools
import http.server
import os
import pathlib
import re
import subprocess
import threading
import urllib.parse

import pytest

ROOT = pathlib.Path(__file__).parents[2]
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
# Width and height: a telephone, a laptop.
SIZES = {"narrow": (360, 2000), "wide": (1280, 2000)}
# What pages may refer to; nothing is loaded from there.
ELSEWHERE = {"arxiv.org", "doi.org", "semver.org"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    if not MKDOCS.exists():
        reason = "The site's generator is not installed. Fix: make docs"
        if os.environ.get("KERAS_SPARSITY_REQUIRE_DOCS"):
            pytest.fail(reason)
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [MKDOCS, "build", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert built.returncode == 0, built.stderr
    return folder


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving(folder):
    """Gives the address of a server of a folder."""
    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def layouts(site, page, artifacts):
    """`Layout` of each page that a link leads to, by size and address."""
    found = {name: {} for name in SIZES}
    with serving(site) as url:
        for name, size in SIZES.items():
            page.resize(*size)
            waiting, seen = [f"{url}index.html"], found[name]
            while waiting:
                address = waiting.pop()
                if address in seen:
                    continue
                page.open(address)
                seen[address] = layout = page.layout()
                path = address.removeprefix(url)
                picture = f"{name}-{path.replace('/', '-')}.png"
                (artifacts / picture).write_bytes(page.screenshot()[0])
                waiting += [
                    link.partition("#")[0]
                    for link in layout.links
                    if link.startswith(url)
                ]
        yield url, found


def test_links_lead_to_every_page(site, layouts):
    url, found = layouts
    built = {
        url + path.relative_to(site).as_posix() for path in site.rglob("*.html")
    } - {f"{url}404.html"}
    for seen in found.values():
        assert {address for address in seen if address != url} == built


@pytest.mark.parametrize("size", SIZES)
def test_every_page_is_whole(layouts, size):
    url, found = layouts
    faults = []
    for address, layout in found[size].items():
        elsewhere = [r for r in layout.resources if not r.startswith(url)]
        faults += [
            f"{address.removeprefix(url)}: {fault}"
            for is_so, fault in (
                (layout.title in ("", "404 - Not found"), "has no heading"),
                (layout.overflow > 0, f"is too wide: {layout.widest}"),
                (bool(layout.blank), f"has no picture: {layout.blank}"),
                (bool(elsewhere), f"loads {elsewhere}"),
            )
            if is_so
        ]
    assert not faults, "\n".join(faults)


def test_every_link_has_its_aim(layouts):
    url, found = layouts
    pages = found["wide"]
    broken = []
    for address, layout in pages.items():
        for link in layout.links:
            aim, _, anchor = link.partition("#")
            if aim.startswith(url):
                is_there = not anchor or (
                    urllib.parse.unquote(anchor) in pages[aim].ids
                )
            else:
                host = urllib.parse.urlsplit(link).hostname
                is_there = link.startswith("https://") and host in ELSEWHERE
            if not is_there:
                broken.append(f"{address.removeprefix(url)}: {link}")
    assert not broken, "\n".join(broken)


def test_pages_load_nothing_from_elsewhere(site):
    """Not even what a script would load later, or a style sheet."""
    loads = re.compile(
        r"""(?:<(?:script|img|link|iframe)[^>]*(?:src|href)=|url\()"""
        r"""["']?((?:https?:)?//[^"')\s>]+)"""
    )
    for path in site.rglob("*.*"):
        if path.suffix in (".html", ".css"):
            text = path.read_text(encoding="utf-8")
            found = [
                address
                for address in loads.findall(text)
                if "w3.org" not in address  # names, not places
            ]
            assert not found, path


def test_the_search_finds_a_name(site, page):
    with serving(site) as url:
        page.resize(*SIZES["wide"])
        page.open(f"{url}index.html?q=ShardedEmbeddingBag")
        assert page.waits_for("ShardedEmbeddingBag", ".md-search-result__item")
