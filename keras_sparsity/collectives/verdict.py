"""Decides from what each rank is doing whether they wait for ever."""

import dataclasses

from keras_sparsity.collectives.journal import Call

# A collective in progress moves its journal many times a second; a slow one
# is open on all its ranks and therefore never suspected. What is left to wait
# for is a rank that is between two calls.
STALL_SECONDS = 3.0
# Calls of one traced function that do not depend on each other may begin in
# any order, and computing may lie between them.
REORDER_SECONDS = 15.0


@dataclasses.dataclass
class Report:
    """What one rank says of itself.

    Attributes:
        status: "working" (in no collective), "blocked" (in one or more),
            "ended" (its program has ended) or "gone".
        open_calls: The calls it is in.
        upcoming: Calls that may yet begin while those are open.
        stalled_seconds: Time since a call began or ended.
        busy: Whether it computes meanwhile.
        place: The line of the user's program it is at.
        note: What else is known.
    """

    status: str = "working"
    open_calls: tuple = ()
    upcoming: tuple = ()
    stalled_seconds: float = 0.0
    busy: bool = False
    place: str = ""
    note: str = ""

    def to_json(self):
        fields = dataclasses.asdict(self)
        fields["open_calls"] = [call.to_list() for call in self.open_calls]
        fields["upcoming"] = [call.to_list() for call in self.upcoming]
        return fields

    @classmethod
    def from_json(cls, fields):
        fields["open_calls"] = tuple(map(Call.from_list, fields["open_calls"]))
        fields["upcoming"] = tuple(map(Call.from_list, fields["upcoming"]))
        return cls(**fields)

    def __str__(self):
        if self.status == "gone" and self.note:
            return self.note
        calls = ", ".join(map(str, self.open_calls))
        text = {
            "working": "in no collective",
            "blocked": f"waiting {self.stalled_seconds:.0f} s in {calls}",
            "ended": "its program has ended",
            "gone": "gone",
        }[self.status]
        if self.place and self.status in ("working", "blocked"):
            text += f" ({self.place})"
        return f"{text}; {self.note}" if self.note else text


def find_deadlock(reports, timeout_seconds):
    """What is wrong between the ranks, or None.

    Args:
        reports: The `Report` of each rank.
        timeout_seconds: How long a rank may be waited for that may still
            come.
    """
    waiting = [r for r in reports.values() if r.status == "blocked"]
    # Only what has lasted on every rank is no passing state: one rank leaves
    # a collective, and may end, a moment before the others leave it.
    quiet_seconds = min(r.stalled_seconds for r in reports.values())
    if not waiting or quiet_seconds < STALL_SECONDS:
        return None
    calls = _open(waiting)
    ended = [rank for rank, r in reports.items() if r.status == "ended"]
    if any(set(_members(call, reports)) & set(ended) for call in calls):
        return f"{_programs(ended)} ended; others wait in a collective for it."
    if any(_may_end(call, reports, False) for call in calls):
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
    if not any(_may_end(call, reports, True) for call in calls):
        return True
    return all(
        report.stalled_seconds >= REORDER_SECONDS and not report.busy
        for report in reports.values()
    )


def find_mismatch(reports):
    """How the calls of all ranks differ, or None."""
    calls = _open(reports.values())
    if not all(r.open_calls for r in reports.values()) or any(
        _may_end(call, reports, True) for call in calls
    ):
        return None
    return _difference(calls)


def describe(what, reports):
    """The whole message: what happened, and what each rank is doing."""
    lines = [f"keras_sparsity: {what}", "What each rank is doing:"]
    lines += [f"  rank {rank}: {reports[rank]}" for rank in sorted(reports)]
    return "\n".join(lines)


def agree(first, second):
    """Whether two ranks' calls are one collective."""
    return (
        dataclasses.replace(first, shape=None)
        == dataclasses.replace(second, shape=None)
    ) and _shapes_agree(first.shape, second.shape)


def _shapes_agree(first, second):
    if first is None or second is None or first == second:
        return True
    if not (isinstance(first, tuple) and isinstance(second, tuple)):
        return False
    return len(first) == len(second) and all(map(_shapes_agree, first, second))


def _open(reports):
    return [call for report in reports for call in report.open_calls]


def _members(call, reports):
    return reports if call.ranks is None else call.ranks


def _may_end(call, reports, with_upcoming):
    return all(
        any(agree(call, other) for other in reports[rank].open_calls)
        or with_upcoming
        and any(agree(call, other) for other in reports[rank].upcoming)
        for rank in _members(call, reports)
    )


def _difference(calls):
    if len({call.name for call in calls}) > 1:
        what = "call different collectives"
    elif len({call.op for call in calls}) > 1:
        what = "call different operations"
    elif len({call.dtype for call in calls}) > 1:
        what = "call the same collective with different dtypes"
    else:
        what = "call the same collective with different shapes"
    return (
        f"the ranks {what}, and would wait for each other for ever.\n"
        "All ranks must make the same calls: what one rank alone calls (`if "
        "rank == 0:`) must go."
    )


def _programs(ranks):
    if len(ranks) == 1:
        return f"the program of rank {ranks[0]} has"
    return f"the programs of ranks {', '.join(map(str, ranks))} have"
