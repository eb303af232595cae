"""The limits of `benchmarks/partition_search.py`."""

import partition_search


def test_a_search_that_finds_nothing_new_is_a_miss():
    shapes = {name: {"best": 2} for name in partition_search.SHAPES}
    assert list(partition_search.missed_together(shapes))
    shapes["wide"]["best"] = 32
    assert not list(partition_search.missed_together(shapes))
