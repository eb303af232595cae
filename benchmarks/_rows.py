"""The overlap of rows between processes and steps, counted in the ids.

NumPy alone, independent of the measured library.
"""

import numpy as np


def count(ids, num_machines, num_rows):
    """Counts the overlap of the rows that processes need.

    With T_rs the set of rows that process r needs in step s, and U_s the union
    over r:

        alpha          = mean over r, s of |T_rs| / num_rows
        alpha_machine  = the same, of the union over a machine's processes
        changed_pulls  = share of T_rs that lies in U_(s-1): changed by the
                         step before, so not to be pulled before its update
        needed_pushes  = share of T_rs that lies in U_(s+1): pulled by the next
                         step, which waits for their gradients

    Args:
        ids: integer array `(steps, processes, ids)`; processes machine by
            machine.
        num_machines: with as many processes each.
        num_rows: of the table.

    Returns:
        dict of the four shares.
    """
    steps, processes, _ = ids.shape
    needs = np.zeros((steps, processes, num_rows), bool)
    step, process, _ = np.indices(ids.shape, sparse=True)
    needs[step, process, ids] = True
    together = needs.reshape(steps, num_machines, -1, num_rows).any(axis=2)
    by_any = needs.any(axis=1, keepdims=True)
    return {
        "alpha": float(needs.mean()),
        "alpha_machine": float(together.mean()),
        "changed_pulls": _share(needs[1:] & by_any[:-1], needs[1:]),
        "needed_pushes": _share(needs[:-1] & by_any[1:], needs[:-1]),
    }


def _share(part, whole):
    return float(part.sum() / max(1, whole.sum()))
