"""Ranks, machines and groups."""

import pytest

from keras_sparsity.machines import topology


@pytest.mark.parametrize(
    "machines, machine, across",
    [
        ("ab", [[0], [1]], [[0, 1]]),
        ("aabb", [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        ("abab", [[0, 2], [1, 3]], [[0, 1], [2, 3]]),
        ("aab", [[0, 1], [2]], [[0, 2], [1]]),
    ],
)
def test_group_members(machines, machine, across):
    assert topology.groups(machines) == {"machine": machine, "across": across}
    for rank in range(len(machines)):
        place = topology.topologies(machines)[rank]
        own = next(ranks for ranks in machine if rank in ranks)
        assert (own[place.local_rank], len(own)) == (rank, place.local_size)
        peers = next(ranks for ranks in across if rank in ranks)
        assert (peers[place.cross_rank], len(peers)) == (rank, place.cross_size)


def test_a_bad_override_is_explained(monkeypatch):
    monkeypatch.setenv("KERAS_SPARSITY_TOPOLOGY", "0,1")
    with pytest.raises(ValueError, match="Expected four numbers"):
        topology.override(0, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2", "Expected four numbers"),
        ("a,b,c,d", "Expected four numbers"),
        ("2,2,0,1", "KERAS_SPARSITY_TOPOLOGY is '2,2,0,1'.*`local_rank` must"),
        ("0,0,0,1", "KERAS_SPARSITY_TOPOLOGY is '0,0,0,1'.*`local_rank` must"),
        ("0,1,-1,1", "`cross_rank` must be an integer"),
    ],
)
def test_no_topology(text, message, monkeypatch):
    monkeypatch.setenv("KERAS_SPARSITY_TOPOLOGY", text)
    with pytest.raises(ValueError, match=message):
        topology.override(0, 2)
