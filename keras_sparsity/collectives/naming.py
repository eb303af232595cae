"""Names of collectives that agree between processes."""

import collections
import weakref

from keras_sparsity import checks, compat


class Names:
    """Gives each call of a collective a name that all ranks find alike.

    A name is the call's role and, in a traced function, the number of earlier
    calls of that role in the outermost function being traced. Counting starts
    anew with each trace, so a rank that traces once more than the others (its
    batch has another shape) still comes to the same names.
    """

    def __init__(self):
        self._counters = weakref.WeakKeyDictionary()

    def __call__(self, role):
        check_role(role)
        graph = compat.outermost_graph()
        if graph is None:
            return role
        counter = self._counters.setdefault(graph, collections.Counter())
        number = counter[role]
        counter[role] += 1
        return f"{role}#{number}"


def check_role(role):
    checks.check(
        isinstance(role, str),
        "name",
        role,
        "a string, the call's role, the same on all ranks",
    )
