"""Ends all ranks, with the reason, when the ranks cannot go on.

The engines do not notice that ranks wait in different collectives, and their
errors after the death of a rank do not give its reason. So each rank has a
thread that reads its journal twice a second and, if no call begins or ends,
reports its open calls to rank 0, or to the first dedicated server, or to a
process that is no rank (`move`). There `coordinator.py` decides, by the rules
of `verdict.py`, and informs all ranks.
"""

from keras_sparsity.health import channel as channels
from keras_sparsity.health.coordinator import Coordinator
from keras_sparsity.health.rank_watch import RankWatch
from keras_sparsity.health.stops import Stops

_watch = None
_alone = Stops(lambda **message: False)
_one_machine = None  # whether the ranks that started together are on one


def start(collectives, journal, abort, close, timeout_seconds):
    """Starts to watch this rank. A collective call, once per process.

    Args:
        abort: `Engine.abort`, called from a thread.
        close: `Engine.close`, called at exit when all ranks have ended.
        timeout_seconds: How long a living rank may keep others waiting.
    """
    global _one_machine
    # Training may go on without a worker, but not without a server.
    root = collectives.num_workers % collectives.size
    channel, all_channels, _one_machine = channels.connect(
        collectives.rank, collectives.size, collectives.gather_objects, root
    )
    stop = abort, close
    _begin(collectives.rank, root, channel, journal, stop, timeout_seconds)
    if all_channels:
        coordinator = Coordinator(all_channels, timeout_seconds, root)
        coordinator.start()
        _watch.coordinator = coordinator


def _begin(*arguments, **named):
    global _watch
    _watch = RankWatch(*arguments, **named)
    _watch.start()


def facts():
    """Facts for a process that is to decide, of the types of JSON."""
    return {
        "one_machine": _one_machine,
        "timeout": _watch.timeout_seconds,
    }


def move(facts, meet):
    """From now on, a process decides that is no rank. A collective call.

    Args:
        facts: How ranks reach it.
        meet: Function that returns once all ranks have called it.
    """
    channel = channels.call(facts, _watch.rank, channels.NO_RANK)
    # Until all are connected, the rank before decides.
    meet()
    if _watch.coordinator is not None:
        _watch.coordinator.retire()
    _watch.move(channel)


def join(rank, facts, journal):
    """Starts to watch a rank that was lost, in its new process.

    Args:
        facts: As for `move`.
    """
    channel = channels.call(facts, rank, channels.NO_RANK)
    stop = (lambda message: None), (lambda: None)
    told = rank, None, channel, journal, stop, facts["timeout"]
    _begin(*told, is_new=True)


def joined():
    """This rank, which was lost, takes part again."""
    if _watch is not None:
        _watch.joined()


def set_timeout(seconds):
    """Changes the timeout; every rank calls it with the same value."""
    if _watch is not None:
        _watch.set_timeout(seconds)


def go_on_without(ranks, on_change):
    """From now on, the loss of one of some ranks does not end the others.

    A rank that is lost is told so, and ends. If all of them are, all ranks end.

    Args:
        on_change: Function of a rank that is lost, or that was awaited and is
            back, and of whether it is lost; called in a thread.
    """
    if _watch is not None:
        _watch.go_on_without(ranks, on_change)


def report_exception(error):
    """Informs all ranks that `error` ends this rank's program.

    For callers that catch an error that would otherwise end the process.
    """
    if _watch is not None:
        _watch.report_exception(error)


def leave(error):
    """An error ends this rank's `fit`, and perhaps not its program.

    Returns when it is decided whether the others go on without this rank (see
    `go_on_without`). Then it is lost, and ends. If all leave together, none is.
    Without dedicated servers a rank that leaves alone by `sys.exit` ends all.
    """
    if _watch is not None:
        _watch.leave(error)


def stops():
    """The `Stops` of this rank."""
    return _alone if _watch is None else _watch.stops
