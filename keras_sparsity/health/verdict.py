"""Decides from all ranks' reports whether they wait for each other forever."""

# A collective in progress moves its journal many times a second; a slow one
# is open on all its ranks, or some have left it, and never suspected. So the
# only thing left to wait for is a rank between two calls.
STALL_SECONDS = 3.0
# Independent calls of one traced function may begin in any order, with
# computation between them.
REORDER_SECONDS = 15.0


def find_deadlock(reports, timeout_seconds):
    """A description of a deadlock, or None.

    Args:
        reports: dict from rank to `Report`.
        timeout_seconds: How long to wait for a rank that may still arrive.
    """
    waiting = [r for r in reports.values() if r.status == "blocked"]
    # A state must last on every rank: one rank leaves a collective, and may
    # end, a moment before the others leave it.
    quiet_seconds = min(r.stalled_seconds for r in reports.values())
    if not waiting or quiet_seconds < STALL_SECONDS:
        return None
    calls = _open(waiting)
    ended = [
        rank
        for rank, report in reports.items()
        if report.status == "ended"
        and any(
            rank in _members(call, reports)
            and not report.has_left(call, number)
            for call, number in calls
        )
    ]
    if ended:
        return f"{_programs(ended)}."
    if any(_may_end(*begun, reports, False) for begun in calls):
        waited = quiet_seconds
    else:
        waited = max(report.stalled_seconds for report in waiting)
        if len(waiting) == len(reports) and _is_hopeless(calls, reports):
            return _difference(calls)
    if waited <= timeout_seconds:
        return None
    return (
        f"a collective has waited for {waited:.0f} s, longer than the timeout "
        f"of {timeout_seconds:g} s (KERAS_SPARSITY_TIMEOUT)."
    )


def _is_hopeless(calls, reports):
    """Whether no call can end, though all ranks are in some call."""
    if not any(_may_end(*begun, reports, True) for begun in calls):
        return True
    return all(
        report.stalled_seconds >= REORDER_SECONDS and not report.busy
        for report in reports.values()
    )


def find_mismatch(reports):
    """A description of how all ranks' calls differ, or None."""
    calls = _open(reports.values())
    if not all(r.open_calls for r in reports.values()) or any(
        _may_end(*begun, reports, True) for begun in calls
    ):
        return None
    return _difference(calls)


def describe(problem, reports):
    """The whole message: the problem and each rank's state."""
    lines = [f"keras_sparsity: {problem}", "What each rank is doing:"]
    lines += [f"  rank {rank}: {reports[rank]}" for rank in sorted(reports)]
    return "\n".join(lines)


def _open(reports):
    """Pairs of an open call, and how often it has begun there."""
    return [
        begun
        for report in reports
        for begun in zip(report.open_calls, report.begun, strict=True)
    ]


def _members(call, reports):
    return reports if call.ranks is None else call.ranks


def _may_end(call, number, reports, with_upcoming):
    """Whether all ranks are in a call, begun so often, or have left it."""
    return all(
        any(map(call.agrees, reports[rank].open_calls))
        or reports[rank].has_left(call, number)
        or (with_upcoming and any(map(call.agrees, reports[rank].upcoming)))
        for rank in _members(call, reports)
    )


def _difference(begun):
    calls = [call for call, _ in begun]
    problems = {
        "name": "call different collectives",
        "op": "call different operations",
        "dtype": "call the same collective with different dtypes",
        "shape": "call the same collective with different shapes",
    }
    differing = [
        problem
        for field, problem in problems.items()
        if len({getattr(call, field) for call in calls}) > 1
    ]
    problem = [*differing, problems["shape"]][0]
    return (
        f"the ranks {problem}, and would wait for each other forever.\n"
        "All ranks must make the same calls: remove calls that one rank makes "
        "alone (`if rank == 0:`)."
    )


def _programs(ranks):
    waits = "ended; others wait in a collective for"
    if len(ranks) == 1:
        return f"the program of rank {ranks[0]} has {waits} it"
    numbers = ", ".join(map(str, ranks))
    return f"the programs of ranks {numbers} have {waits} them"
