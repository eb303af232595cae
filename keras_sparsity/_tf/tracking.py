"""How Keras and TensorFlow find the variables and layers among attributes.

Checked on TensorFlow 2.16 to 2.21 and Keras 3.5 to 3.15.
"""

import tensorflow as tf


def is_tracker(value):
    """Whether a value is a `keras.src.utils.tracking.Tracker`."""
    from keras.src.utils import tracking

    return isinstance(value, tracking.Tracker)


def replace_held(layer, old, new):
    """Has a layer hold another sublayer or weight in place of its own.

    `Layer._tracker`, `Tracker.config`.
    """
    stores = [store for _, store in layer._tracker.config.values()]
    stack = [vars(layer), *stores]
    while stack:
        holder = stack.pop()
        items = holder.items() if isinstance(holder, dict) else None
        for key, value in list(items or enumerate(holder)):
            if value is old:
                kind = dict if isinstance(holder, dict) else list
                kind.__setitem__(holder, key, new)
            elif isinstance(value, (list, dict)):
                stack.append(value)
    renew_ids(layer._tracker, None)


def renew_ids(copied, new_id):
    """Gives the copy of a Keras object the ids of copies.

    `Tracker.stored_ids`, and `Function._nodes`, whose keys
    `keras.src.ops.function.make_node_key` makes.

    Args:
        copied: any copy.
        new_id: function from the id of an object to that of its copy.
    """
    if is_tracker(copied):
        copied.stored_ids = {
            kind: {id(value) for value in store}
            for kind, (_, store) in copied.config.items()
        }
    if hasattr(copied, "_nodes_by_depth"):
        parts = [key.partition("_ib-") for key in copied._nodes]
        vars(copied)["_nodes"] = {
            f"{new_id(int(known))}{middle}{index}"
            for known, middle, index in parts
        }


def tracked_by_tensorflow(container):
    """The plain container in one that TensorFlow tracks; None of others.

    `tensorflow.python.trackable.data_structures`.
    """
    from tensorflow.python.trackable import data_structures

    if isinstance(container, data_structures.ListWrapper):
        return list(container)
    if isinstance(container, data_structures.TrackableDataStructure):
        return getattr(container, "__wrapped__", None)
    return None


def track_by_tensorflow(container):
    """The inverse: a container as TensorFlow's modules hold it.

    `tf.__internal__.tracking.wrap`.
    """
    return tf.__internal__.tracking.wrap(container)


def is_dependency_of_tensorflow(name):
    """Whether an attribute of this name lists a TensorFlow file's contents.

    `Trackable._self_unconditional_checkpoint_dependencies` and
    `..._dependency_names`.
    """
    return name.startswith("_self_unconditional")
