"""The overlap of rows, against Python's sets."""

import _rows
import numpy as np
import pytest


def test_rows_against_sets_of_python():
    generator = np.random.default_rng(1)
    ids = generator.zipf(1.3, (5, 4, 12)) % 30
    needs = [[set(part.tolist()) for part in step] for step in ids]
    by_any = [set.union(*step) for step in needs]
    machines = [[a | b, c | d] for a, b, c, d in needs]
    pulls = [(t, u) for s, u in zip(needs[1:], by_any, strict=False) for t in s]
    pushes = [
        (t, u) for s, u in zip(needs, by_any[1:], strict=False) for t in s
    ]
    assert _rows.count(ids, num_machines=2, num_rows=30) == pytest.approx(
        {
            "alpha": np.mean([[len(t) / 30 for t in s] for s in needs]),
            "alpha_machine": np.mean(
                [[len(t) / 30 for t in s] for s in machines]
            ),
            "changed_pulls": _share(pulls),
            "needed_pushes": _share(pushes),
        }
    )


def _share(pairs):
    return sum(len(t & u) for t, u in pairs) / sum(len(t) for t, _ in pairs)
