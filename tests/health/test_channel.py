"""Connections to rank 0 are made by those who know the secret only."""

import concurrent.futures
import contextlib
import json
import queue
import socket
import threading
import time

import pytest

from keras_sparsity.health import channel


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
        assert all(end.result(30)[2] for end in ends)  # are on one machine
        return [end.result(30)[:2] for end in ends]


def test_the_root_offers_its_own_address(monkeypatch):
    """A dedicated server may be on another machine than rank 0."""
    cluster = {"worker": ["10.0.0.1:5"], "ps": ["10.0.0.3:7"]}
    config = {"cluster": cluster, "task": {"type": "ps", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert channel._own_addresses(1)[0] == "10.0.0.3"


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
        port = gathering.seen["watch/address"][0]["port"]
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(says)

    (_, by_rank), _, _ = connect_all(3, disturb)
    assert sorted(by_rank) == [0, 1, 2]


class Strangers:
    """Connections to rank 0 that are there before the ranks'.

    Args:
        number: How many.
        drips: Whether they send a byte now and then, of a long message.
    """

    def __init__(self, number, drips):
        self._number = number
        self._drips = drips
        self._ended = threading.Event()
        self.sockets = []

    def come(self, port):
        for _ in range(self._number):
            stranger = socket.create_connection(("127.0.0.1", port), 30)
            self.sockets.append(stranger)
            if self._drips:
                # A message of so many bytes, which come one by one.
                stranger.sendall((200).to_bytes(4, "big"))
        if self._drips:
            threading.Thread(target=self._drip, daemon=True).start()

    def _drip(self):
        while not self._ended.wait(0.1):
            for stranger in self.sockets:
                with contextlib.suppress(OSError):
                    stranger.send(b"\0")

    def leave(self):
        self._ended.set()
        for stranger in self.sockets:
            stranger.close()


def connect_behind(strangers, size, until=lambda: None):
    """As `connect_all`, of ranks that come when the strangers have.

    Args:
        strangers: `Strangers`.
        size: Number of ranks.
        until: Function that returns when the ranks may come.
    """
    have_come = threading.Event()

    class Late(Gathering):
        def of(self, rank):
            gather = super().of(rank)

            def gather_objects(value, name):
                values = gather(value, name)
                if rank > 0 and name == "watch/address":
                    assert have_come.wait(60)
                return values

            return gather_objects

    gathering = Late(size)
    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        ends = [
            pool.submit(channel.connect, rank, size, gathering.of(rank))
            for rank in range(size)
        ]
        try:
            while "watch/address" not in gathering.seen:
                time.sleep(0.01)
            strangers.come(gathering.seen["watch/address"][0]["port"])
            until()
        finally:
            have_come.set()
        return [end.result(30)[:2] for end in ends]


@pytest.fixture
def strangers():
    with contextlib.ExitStack() as stack:

        def make(*args):
            made = Strangers(*args)
            stack.callback(made.leave)
            return made

        yield make


@pytest.mark.parametrize(("machines", "drips"), [(1, False), (2, True)])
def test_slow_strangers_keep_nobody_waiting(
    machines, drips, strangers, monkeypatch
):
    if machines == 2:  # All addresses are listened to, then.
        monkeypatch.setattr(channel, "_place", lambda: (threading.get_ident(),))
    # One after the other, at 10 s each, they would take all of the time.
    some = strangers(20, drips)
    begin = time.monotonic()
    (_, by_rank), (own, _), _ = connect_behind(some, 3)
    assert time.monotonic() - begin < 2 * channel._CONNECT_SECONDS / 3
    assert sorted(by_rank) == [0, 1, 2]
    by_rank[1].send(kind="hello")
    assert own.receive() == {"kind": "hello"}
    for stranger in some.sockets:
        assert _has_ended(stranger, 5)


def test_more_strangers_than_rank_zero_listens_to(strangers):
    some = strangers(channel._MOST_HANDSHAKES + 50, False)
    (_, by_rank), *_ = connect_behind(
        some,
        3,
        # The oldest have to go, or nobody else would come in.
        lambda: [_has_ended(some.sockets[i], 30) for i in range(50)],
    )
    assert sorted(by_rank) == [0, 1, 2]


def test_a_handshake_has_one_deadline(strangers, monkeypatch):
    monkeypatch.setattr(channel, "_HANDSHAKE_SECONDS", 1.0)
    some = strangers(2, True)
    ended = []
    connect_behind(
        some, 2, lambda: ended.extend(_has_ended(s, 30) for s in some.sockets)
    )
    # Each of their bytes came soon enough, and the ranks came later.
    assert ended == [True, True]


def _has_ended(stranger, seconds):
    """Whether the other end closes a connection within so long."""
    stranger.settimeout(seconds)
    try:
        while stranger.recv(1000):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_a_door_is_open_until_it_is_closed():
    admitted = queue.SimpleQueue()
    server, hosts = channel.listen(True, 2, 0)
    door = channel.Door(server, hosts, lambda *given: admitted.put(given))
    for rank in (1, 0):
        own = channel.call(door.facts, rank, "The other one")
        found, far = admitted.get(timeout=10)
        assert found == rank
        own.send(kind="hello")
        assert far.receive() == {"kind": "hello"}
    door.close()
    own.send(kind="later")  # on a connection that was made before
    assert far.receive() == {"kind": "later"}
    for facts in (door.facts, {**door.facts, "secret": "00"}):
        with pytest.raises(RuntimeError, match="The other one could not be"):
            channel.call(facts, 1, "The other one", 0.1)


def test_a_wrong_secret_is_not_admitted():
    server, hosts = channel.listen(True, 2, 0)
    door = channel.Door(server, hosts, lambda *given: pytest.fail())
    with pytest.raises(RuntimeError, match="could not be reached"):
        channel.call({**door.facts, "secret": "00" * 32}, 1, "It", 0.1)
    door.close()
