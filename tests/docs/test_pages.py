"""The Python code of the guides, each page from top to bottom."""

import json
import os
import pathlib
import re
import subprocess

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


# Of two machines. `srun` takes options, and then the command of each task.
_SLURM = {
    "scontrol": "echo node1; echo node2",
    "srun": """while [[ $1 == -* ]]; do shift; done
        for task in $(seq 0 $((2 * SLURM_NTASKS_PER_NODE - 1))); do
          SLURM_PROCID=$task "$@"
        done""",
    "python": 'echo "$TF_CONFIG" | tr -d "\\n"; echo',
}


@pytest.mark.parametrize(("place", "num_tasks"), [(0, 1), (1, 4)])
def test_a_task_of_slurm_gets_its_place(tmp_path, place, num_tasks):
    page = (_GUIDES / "launching.md").read_text()
    scripts = re.findall(r"^```sh\n(#!.*?srun.*?)^```", page, re.S | re.M)
    for name, lines in _SLURM.items():
        command = tmp_path / name
        command.write_text(f"#!/bin/bash\n{lines}\n")
        command.chmod(0o755)
    printed = subprocess.run(
        ["bash", "-c", scripts[place]],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_NTASKS_PER_NODE": str(num_tasks),
        },
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout
    configs = [json.loads(line) for line in printed.splitlines()]
    (workers,) = {tuple(c["cluster"]["worker"]) for c in configs}
    tasks = [config["task"] for config in configs]
    assert tasks == [
        {"type": "worker", "index": index} for index in range(2 * num_tasks)
    ]
    assert len(set(workers)) == len(workers) == 2 * num_tasks
    hosts = [worker.partition(":")[0] for worker in workers]
    assert hosts == ["node1"] * num_tasks + ["node2"] * num_tasks


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
