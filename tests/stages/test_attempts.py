"""Work that fails on one rank is told to all."""

import pytest

from keras_sparsity import collectives
from keras_sparsity.stages.attempts import AttemptError, attempted
from tests.conftest import engines


def attempts():
    """Of three works, the results or errors of this rank."""
    communicator = collectives.start()
    rank = communicator.rank

    def fail_on_one():
        if rank == 1:
            raise ValueError("No\n  memory.")
        return rank

    works = [lambda: 10 * rank, fail_on_one, None if rank else lambda: "first"]
    found = []
    for work in works:
        try:
            found.append(attempted(communicator, work, "test/attempt"))
        except AttemptError as error:
            found.append((str(error), type(error.__cause__)))
    return found


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_all_ranks_hear_of_an_error(cluster, engine):
    found = cluster(engine, 2).run(attempts)
    text = "On rank 1: ValueError: No memory."
    for rank, cause in enumerate((type(None), ValueError)):
        assert found[rank] == [[0, 10], (text, cause), ["first", None]]
