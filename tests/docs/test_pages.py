"""The Python code of the guides, each page from top to bottom."""

import pathlib
import re

import pytest

from keras_sparsity import launch
from keras_sparsity.stages import schedule
from keras_sparsity.stages.schedule import Kind
from keras_sparsity.stages.simulation import simulate
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


def _drawn(schedule):
    """A line for each stage, a column for each unit of time: `F2`, a pass."""
    letters = {Kind.FORWARD: "F", Kind.BACKWARD: "B"}
    timeline = simulate(schedule)
    lines = []
    for stage, starts in enumerate(timeline.starts):
        cells = [".."] * timeline.seconds
        for task, start in starts.items():
            if task.kind in letters:
                cells[start] = f"{letters[task.kind]}{task.batch}"
        lines.append(f"stage {stage}  {' '.join(cells)}")
    return "\n".join(lines)


def test_pictures_of_schedules_are_drawn_from_their_tasks():
    page = (_GUIDES / "pipelines.md").read_text()
    assert re.findall(r"^```text\n(stage 0.*?)\n```", page, re.S | re.M) == [
        _drawn(schedule.gpipe(4, 4)),
        _drawn(schedule.one_forward_one_backward(4, 4)),
        _drawn(schedule.without_flush(4, 7)),
        _drawn(schedule.without_flush(2, 7, messages_ahead=True)),
    ]
