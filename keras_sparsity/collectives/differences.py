"""Values of all ranks that must be the same."""


def raise_if_different(values, what, fix=""):
    """As `Collectives.check_equal`, of all ranks' values.

    Example:

    >>> raise_if_different([{"a": 1, "b": 2}, {"a": 1}], "The options")
    Traceback (most recent call last):
        ...
    ValueError: The options must be the same on all ranks. Received:
      rank 0: {'b': 2}
      rank 1: {}
    """
    if all(other == values[0] for other in values):
        return
    if all(isinstance(value, dict) for value in values):
        names = dict.fromkeys(name for value in values for name in value)
        differing = [
            name
            for name in names
            if any(name not in value for value in values)
            or any(value[name] != values[0][name] for value in values)
        ]
        values = [
            {name: value[name] for name in differing if name in value}
            for value in values
        ]
    listed = "\n".join(
        f"  rank {rank}: {value!r}" for rank, value in enumerate(values)
    )
    message = f"{what} must be the same on all ranks. Received:\n{listed}"
    raise ValueError(f"{message}\n{fix}" if fix else message)
