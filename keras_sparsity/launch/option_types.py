"""Types of the command line's options; an error names the option."""

import argparse
import math

from keras_sparsity._tf import checks


def _checked(text, convert, is_valid, expected):
    try:
        value = convert(text)
    except ValueError:
        value = None
    if value is None or not is_valid(value):
        # argparse puts the option's name in front.
        raise argparse.ArgumentTypeError(
            f"must be {expected}. Received: {checks.spell(text)}."
        )
    return value


def positive_integer(text, most=math.inf):
    """The integer that a text says."""
    limit = "" if most == math.inf else f", at most {most:,}"
    return _checked(
        text,
        int,
        lambda value: 1 <= value <= most,
        f"a positive integer{limit}",
    )


def number_from_zero(text):
    """The integer, 0 or more, that a text says."""
    return _checked(text, int, lambda value: value >= 0, "an integer from 0")


def positive_number(text):
    """The finite number above 0 that a text says."""
    return _checked(
        text, float, lambda value: 0 < value < math.inf, "a positive number"
    )


def fraction(text):
    """The number from 0 to 1 that a text says."""
    return _checked(
        text, float, lambda value: 0 <= value <= 1, "a fraction from 0 to 1"
    )


def one_of(text, choices):
    """The text, which is one of some."""
    known = ", ".join(map(repr, choices))
    return _checked(
        text, str, lambda value: value in choices, f"one of {known}"
    )
