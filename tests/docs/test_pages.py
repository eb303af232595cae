"""The Python code of the guides, each page from top to bottom."""

import pathlib
import re

import pytest

from keras_sparsity import launch
from keras_sparsity.stages import schedule
from keras_sparsity.stages.drawing import drawn
from tests import forked

_GUIDES = pathlib.Path(__file__).parents[2] / "docs" / "guides"
_PAGES = {
    page.stem: re.findall(
        r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
    )
    for page in sorted(_GUIDES.glob("*.md"))
}


def test_pages_have_code():
    assert sum(map(bool, _PAGES.values())) >= 6


@pytest.mark.parametrize("page", [p for p, code in _PAGES.items() if code])
def test_the_code_of_a_guide(page, tmp_path, monkeypatch, capfd):
    (tmp_path / "page.py").write_text("\n".join(_PAGES[page]))
    monkeypatch.chdir(tmp_path)
    with forked.ranks():
        code = launch.main(["run", "-n", "1", "page.py"])
    assert code == 0, capfd.readouterr().err


def test_pictures_of_schedules_are_drawn_from_their_tasks():
    page = (_GUIDES / "pipelines.md").read_text()
    assert re.findall(r"^```text\n(stage 0.*?)\n```", page, re.S | re.M) == [
        drawn(schedule.gpipe(4, 4)),
        drawn(schedule.one_forward_one_backward(4, 4)),
        drawn(schedule.without_flush(4, 7)),
        drawn(schedule.without_flush(2, 7, messages_ahead=True)),
    ]
