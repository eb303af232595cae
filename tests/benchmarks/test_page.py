"""The Markdown pages of `benchmarks/`."""

import pathlib
import re

import _page
import _report
import pytest
import scaling

_FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"
_PAGES = sorted(_FOLDER.rglob("*.md"))


def _anchors(page):
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }


@pytest.mark.parametrize("page", _PAGES, ids=lambda p: p.stem)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8"))
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        assert not anchor or anchor in _anchors(target), link


def test_every_program_is_in_the_readme():
    readme = (_FOLDER / "README.md").read_text("utf-8")
    programs = [p for p in _FOLDER.glob("*.py") if p.name[0] != "_"]
    programs += [p for p in _FOLDER.glob("[pw]*/*.py") if p.name[0] != "_"]
    for program in programs:
        assert program.name in readme


def test_the_page_of_results_is_up_to_date():
    page = pathlib.Path(_page.PATH).read_text("utf-8")
    expected = _page.text(scaling.parse_arguments, _report.Plots(None))
    assert page == expected, "Run python benchmarks/scaling.py --publish"
