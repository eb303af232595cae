"""A rank's report of its collectives, which travels to rank 0."""

import dataclasses

_MOST_SHAPES = 6


@dataclasses.dataclass(frozen=True)
class Call:
    """One collective call, by the properties that must agree among ranks.

    Args:
        op: The operation, `"all_reduce"`.
        name: The role, `"table/embedding/pull/ids"`.
        dtype: The names of the dtypes.
        shape: The dimensions that must agree, None for others; a tuple of
            such shapes for several tensors; None if nothing has to agree.
        ranks: The ranks that take part, None for all.
    """

    op: str
    name: str
    dtype: str = ""
    shape: tuple | None = None
    ranks: tuple | None = None

    @classmethod
    def from_list(cls, fields):
        """The call of `dataclasses.astuple`, also after JSON."""
        return cls(*map(_as_tuple, fields))

    def agrees(self, other):
        """Whether two ranks' calls are one collective."""
        same = self.without_shape() == other.without_shape()
        return same and _shapes_agree(self.shape, other.shape)

    def without_shape(self):
        """The same call of any shape."""
        return dataclasses.replace(self, shape=None)

    def __str__(self):
        text = f'{self.op} "{self.name}"'
        if self.dtype:
            text += f" of {self.dtype}"
        if self.shape is not None:
            text += f" with {_spell_shape(self.shape)}"
        return text


@dataclasses.dataclass
class Report:
    """The state of one rank.

    Args:
        status: "working" (in no collective), "blocked" (in some), "ended"
            (its program has ended) or "gone" (its process).
        open_calls: The calls that it is in.
        upcoming: Calls that may begin before those end.
        stalled_seconds: Time since a call began or ended.
        busy: Whether it computes.
        place: The current line of the user's program.
        note: Further information.
        begun: For each open call, how often it has begun, of any shape.
        left: Pairs of a call that another rank is in, without its shape, and
            how often it has ended here: a rank may leave a call before the
            others, such as the one from which a broadcast goes out.
    """

    status: str = "working"
    open_calls: tuple = ()
    upcoming: tuple = ()
    stalled_seconds: float = 0.0
    busy: bool = False
    place: str = ""
    note: str = ""
    begun: tuple = ()
    left: tuple = ()

    def has_left(self, call, number):
        """Whether a call has ended here as often as it has begun elsewhere."""
        call = call.without_shape()
        return any(number <= times for each, times in self.left if each == call)

    def to_json(self):
        return dataclasses.asdict(self) | {
            "open_calls": to_lists(self.open_calls),
            "upcoming": to_lists(self.upcoming),
            "left": [[dataclasses.astuple(c), times] for c, times in self.left],
        }

    @classmethod
    def from_json(cls, fields):
        return cls(
            **fields
            | {
                "open_calls": from_lists(fields["open_calls"]),
                "upcoming": from_lists(fields["upcoming"]),
                "begun": tuple(fields["begun"]),
                "left": tuple(
                    (Call.from_list(call), times)
                    for call, times in fields["left"]
                ),
            }
        )

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


def to_lists(calls):
    """Calls, for JSON."""
    return list(map(dataclasses.astuple, calls))


def from_lists(lists):
    """The calls of `to_lists`, also after JSON."""
    return tuple(map(Call.from_list, lists))


def _as_tuple(value):
    if isinstance(value, list | tuple):
        return tuple(map(_as_tuple, value))
    return value


def _shapes_agree(first, second):
    if first is None or second is None or first == second:
        return True
    if not (isinstance(first, tuple) and isinstance(second, tuple)):
        return False
    return len(first) == len(second) and all(map(_shapes_agree, first, second))


def _spell_shape(shape):
    if not any(isinstance(part, tuple) for part in shape):
        return f"shape {_spell(shape)}"
    shown = ", ".join(map(_spell, shape[:_MOST_SHAPES]))
    if len(shape) > _MOST_SHAPES:
        return f"{len(shape)} tensors of shapes {shown}, ..."
    return f"shapes {shown}"


def _spell(value):
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_spell, value)) + "]"
    return "?" if value is None else str(value)
