"""Tables that are used in a loop or a branch of a step, as in an RNN's cell.

Messages of all ranks in it would need as many iterations on every rank, and
its gradient adds up tensors of the shape of the table's anchor. The whole table
is read before it instead, and one dense gradient is pushed behind it.
"""

import tensorflow as tf

from keras_sparsity._tf import tf_graphs

_ENTERED = "_keras_sparsity_entered"
_WHOLE = "keras_sparsity/whole"


def begin_step(replica_context):
    """Notes in which graph a step begins."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    setattr(replica_context, _ENTERED, graph)


def surroundings():
    """The loop or branch of a step that is traced, and the graph around it.

    Returns:
        Two graphs; None outside of loops and branches.
    """
    context = tf.distribute.get_replica_context()
    if not hasattr(context, _ENTERED):
        return None
    return tf_graphs.around_control_flow(getattr(context, _ENTERED))


def read_before(table):
    """The whole of a spread table, read before the loop that is traced.

    Once for a loop, whatever it uses of the table.
    """
    inside, around = surroundings()
    known = inside.get_collection_ref(_WHOLE)
    for of_table, whole in known:
        # Loops within this one are given its list.
        if of_table is table and whole.graph is around:
            return whole
    with around.as_default():
        whole = table.gather(tf.range(table.num_rows))
    known.append((table, whole))
    return whole


def check_no_update(variables):
    """Raises where a loop would go on with rows from before an update."""
    found = surroundings()
    if found is None:
        return
    inside, _ = found
    tables = [table for table, _ in inside.get_collection(_WHOLE)]
    for variable in variables:
        if any(table.variable is variable for table in tables):
            raise ValueError(
                f"The table of {variable.path} is trained inside of a loop or "
                "a branch of a step (`tf.while_loop`, `tf.range`, `tf.cond`), "
                "which reads it once, before. Loop over a Python `range`, or "
                "over calls of `strategy.run`."
            )
