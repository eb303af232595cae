"""Connections to rank 0 are made by those who know the secret only."""

import concurrent.futures
import socket
import threading

import pytest

from keras_sparsity.collectives import channel


class Gathering:
    """`gather_objects` among threads."""

    def __init__(self, size):
        self._barrier = threading.Barrier(size)
        self._values = [None] * size
        self.seen = {}

    def of(self, rank):
        def gather_objects(value, name):
            self._values[rank] = value
            self._barrier.wait(10)
            values = list(self._values)
            self.seen[name] = values
            self._barrier.wait(10)
            return values

        return gather_objects


def connect_all(size, before=lambda gathering: None):
    gathering = Gathering(size)
    with concurrent.futures.ThreadPoolExecutor(size + 1) as pool:
        pool.submit(before, gathering)
        ends = [
            pool.submit(channel.connect, rank, size, gathering.of(rank))
            for rank in range(size)
        ]
        return [end.result(30) for end in ends]


def test_messages_pass_both_ways():
    ends = connect_all(3)
    by_rank = ends[0][1]
    assert sorted(by_rank) == [0, 1, 2]
    for rank, (own, others) in enumerate(ends):
        assert (others is None) == (rank != 0)
        own.send(kind="hello", rank=rank)
        assert by_rank[rank].receive() == {"kind": "hello", "rank": rank}
        assert by_rank[rank].send(kind="answer")
        assert own.receive() == {"kind": "answer"}


def test_an_end_is_noticed():
    (_, by_rank), (own, _) = connect_all(2)
    own.close()
    assert by_rank[1].poll(5)
    assert by_rank[1].receive() is None
    assert not own.send(kind="late")


@pytest.mark.parametrize("says", [b"", b"GET / HTTP/1.1\r\n\r\n"])
def test_a_stranger_is_not_listened_to(says):
    def disturb(gathering):
        while "watch/address" not in gathering.seen:
            pass
        _, port, _ = gathering.seen["watch/address"][0]
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(says)

    (_, by_rank), _, _ = connect_all(3, disturb)
    assert sorted(by_rank) == [0, 1, 2]
