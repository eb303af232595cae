"""Wrong arguments of the public API, and what their errors say.

Each case is a callable, by its name in `tests.public_calls.VALID`, wrong
arguments, and the message, a regular expression; a TypeError where it says so,
else a ValueError.
"""

from tests.bad_arguments import collectives, launch, models, planning, tables

BAD = [
    *models.BAD,
    *tables.BAD,
    *collectives.BAD,
    *planning.BAD,
    *launch.BAD,
]
