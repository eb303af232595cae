"""Starts the processes of lost ranks anew, and says so."""

import collections
import json
import sys

from keras_sparsity.machines.door import JOINS_VARIABLE

# The number of earlier attempts, for the script.
RESTARTS_VARIABLE = "KERAS_SPARSITY_RESTARTS"


class Again:
    """Says which ranks are lost, and starts them anew.

    Args:
        listener: The `Listener`, which knows how a new process joins.
        restart: The number of earlier attempts of all ranks.

    Attributes:
        is_used_up: Whether a rank is lost for good that the others wait for.
    """

    def __init__(self, listener, restart):
        self._listener, self._restart, self._starts = listener, restart, {}
        self._numbers = collections.Counter()
        self._needed = set()
        self.is_used_up = False

    def add(self, rank, start, variables, most, is_needed=False):
        """Has a rank started anew, up to `most` times.

        Without one that is needed, a server, the others do not go on.
        """
        self._starts[rank] = start, variables, most
        if is_needed:
            self._needed.add(rank)

    def needs(self, rank):
        return rank in self._needed

    def __call__(self, lost, goes_on):
        """The new process of a lost rank's `RankProcess`, or None.

        None also if the run does not go on, for a new process to join.
        """
        rank, then, new = lost.rank, "", None
        if lost.we_ended_it and not goes_on:
            return None  # The launcher ends all.
        start, variables, most = self._starts.get(rank, (None, None, 0))
        facts = self._listener.facts
        is_due = self._numbers[rank] < most and facts is not None
        # One that has left by itself is not to come back.
        is_due &= goes_on and lost.returncode != 0
        if is_due:
            self._numbers[rank] += 1
            then = f", and it starts anew: {self._numbers[rank]} of {most}"
        elif self.needs(rank) and self._numbers[rank] == most:
            self.is_used_up = True
        output = f" (its output: {lost.log_path})" if lost.log_path else ""
        goes = f"others go on{then}"
        if self.needs(rank) and not is_due:
            goes = "it does not start anew, and others wait for it"
        say(f"rank {rank} {lost.describe_end()}{output}; {goes}.")
        if is_due:
            lost.end()  # it may be stopped, and has the port
            restarts = str(self._restart + self._numbers[rank])
            joins = {
                RESTARTS_VARIABLE: restarts,
                JOINS_VARIABLE: json.dumps(facts),
            }
            new = start({**variables, **joins})
        return new


def say(text):
    """Prints a line of the launcher in one piece: ranks print, too."""
    sys.stderr.write(f"keras-sparsity: {text}\n")
    sys.stderr.flush()
