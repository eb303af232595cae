"""Messages arrive while the pass ahead of their own computes.

That pass waits for the message. If it were asked for later, it would not come.
"""

import pytest

from tests.conftest import covering
from tests.pipeline import arrival_functions

_CASES = [
    ("1f1b", "gradients", False),
    ("1f1b", "activations", False),
    ("vanilla", "gradients", False),
    ("vanilla", "gradients", True),
    ("vanilla", "activations", True),
]


# In turn on each engine.
@pytest.mark.parametrize(
    ("engine", "schedule", "which", "messages_ahead"),
    covering(
        [
            (engine, *case)
            for engine in ("native", "horovod")
            for case in _CASES
        ],
        [("native", *case) for case in _CASES[::2]]
        + [("horovod", *case) for case in _CASES[1::2]],
    ),
)
def test_during_the_pass_ahead(
    cluster, engine, schedule, which, messages_ahead
):
    ranks = cluster(engine, 2).run(
        arrival_functions.waited, schedule, which, messages_ahead
    )
    waiting = ranks[0 if which == "gradients" else 1]
    assert waiting == [True] * arrival_functions.NUM_BATCHES
