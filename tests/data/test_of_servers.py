"""What all workers must have alike, and servers need not."""

from unittest import mock

import pytest

from keras_sparsity.data import of_servers


def _agreed(is_server, everyone):
    collectives = mock.Mock(num_servers=1, num_workers=3, is_server=is_server)
    collectives.gather_objects.return_value = everyone
    return of_servers.agreed("own", "The batches", "Fix it.", collectives)


# After a loss there are fewer workers than at first.
@pytest.mark.parametrize("num_workers", [2, 3])
def test_facts_of_a_server_do_not_count(num_workers):
    workers = [(False, "theirs")] * num_workers
    assert _agreed(True, [*workers, (True, "own")]) == "theirs"
    # As one that comes back alone is told.
    assert _agreed(True, [(True, "own")]) == "own"
    with pytest.raises(ValueError, match="Fix it"):
        _agreed(False, [(False, "own"), *workers, (True, "own")])
