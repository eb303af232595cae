"""What one process computes: stock Keras, fed the dense gradient."""

import keras
import numpy as np
import tensorflow as tf


@keras.saving.register_keras_serializable(package="tests")
class DenseGradients(keras.optimizers.Optimizer):
    """A stock optimizer that gets every gradient as a dense tensor.

    Stock Keras never adds the duplicate rows of `IndexedSlices` before the
    rule is applied; the dense tensor is the mathematical gradient.
    """

    def __init__(self, inner):
        super().__init__(learning_rate=0.0, name="dense_gradients")
        self.inner = inner

    def build(self, variables):
        self.inner.build(variables)
        super().build(variables)

    def apply(self, grads, trainable_variables=None):
        if not self.built:
            self.build(list(trainable_variables))
        grads = [
            tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g
            for g in grads
        ]
        self.inner.apply(grads, trainable_variables)

    def scale_loss(self, loss):
        return self.inner.scale_loss(loss)

    @property
    def inner_optimizer(self):
        """The rule, which keeps the averages that `SwapEMAWeights` takes."""
        return getattr(self.inner, "inner_optimizer", self.inner)

    @property
    def learning_rate(self):
        return self.inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, value):
        self.inner.learning_rate = value

    def finalize_variable_values(self, var_list):
        self.inner.finalize_variable_values(var_list)


@keras.saving.register_keras_serializable(package="tests")
class TouchedRows(DenseGradients):
    """The rule on the rows of each embedding that a batch touches, in NumPy.

    Rows that were not touched, and their slots, stay as they are. Other
    variables are the inner optimizer's.
    """

    def build(self, variables):
        super().build(variables)
        self.slots = {}

    def apply(self, grads, trainable_variables=None):
        config = self.inner.get_config()
        step = int(self.inner.iterations) + 1
        config["learning_rate"] = float(self.inner.learning_rate)
        dense = []
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            if not isinstance(gradient, tf.IndexedSlices):
                dense.append((gradient, variable))
                continue
            ids, values = gradient.indices.numpy(), gradient.values.numpy()
            rows, index = np.unique(ids, return_inverse=True)
            summed = np.zeros((len(rows), values.shape[1]), values.dtype)
            np.add.at(summed, index.reshape(-1), values)
            slots = self.slots.setdefault(id(variable), {})
            whole = variable.numpy()
            whole[rows] = _ROW_RULES[type(self.inner).__name__](
                whole[rows],
                summed,
                _Rows(slots, whole.shape, rows, config),
                step,
                **config,
            )
            if variable.constraint is not None:  # of each row by itself
                whole[rows] = variable.constraint(whole[rows])
            variable.assign(whole)
        self.inner.apply(*map(list, zip(*dense, strict=True)))


class _Rows:
    """Some rows of slots, which start at a value."""

    def __init__(self, slots, shape, rows, config):
        self._slots = slots
        self._shape = shape
        self._rows = rows
        self._start = config.get("initial_accumulator_value", 0.0)

    def __getitem__(self, name):
        if name not in self._slots:
            start = np.full(self._shape, self._start, "float32")
            self._slots[name] = start
        return self._slots[name][self._rows]

    def __setitem__(self, name, value):
        self._slots[name][self._rows] = value


def _decayed(rows, learning_rate, weight_decay):
    return rows - rows * learning_rate * (weight_decay or 0.0)


def _sgd(rows, g, slots, step, learning_rate, momentum, nesterov, **_):
    velocity = slots["velocity"] * momentum - learning_rate * g
    slots["velocity"] = velocity
    if nesterov:
        return rows + momentum * velocity - learning_rate * g
    return rows + velocity


def _adagrad(rows, g, slots, step, learning_rate, epsilon, **_):
    squares = slots["squares"] + g**2
    slots["squares"] = squares
    return rows - learning_rate * g / np.sqrt(squares + epsilon)


def _rmsprop(rows, g, slots, step, learning_rate, rho, epsilon, **_):
    squares = rho * slots["squares"] + (1 - rho) * g**2
    slots["squares"] = squares
    return rows - learning_rate * g / np.sqrt(squares + epsilon)


def _adadelta(rows, g, slots, step, learning_rate, rho, epsilon, **_):
    squares = rho * slots["squares"] + (1 - rho) * g**2
    moves = slots["moves"]
    move = g * np.sqrt(moves + epsilon) / np.sqrt(squares + epsilon)
    slots["squares"] = squares
    slots["moves"] = rho * moves + (1 - rho) * move**2
    return rows - learning_rate * move


def _adam(
    rows, g, slots, step, learning_rate, beta_1, beta_2, epsilon, amsgrad,
    weight_decay, **_,
):  # fmt: skip
    rows = _decayed(rows, learning_rate, weight_decay)
    mean = beta_1 * slots["mean"] + (1 - beta_1) * g
    squares = beta_2 * slots["squares"] + (1 - beta_2) * g**2
    slots["mean"], slots["squares"] = mean, squares
    if amsgrad:
        squares = np.maximum(slots["largest"], squares)
        slots["largest"] = squares
    rate = learning_rate * np.sqrt(1 - beta_2**step) / (1 - beta_1**step)
    return rows - rate * mean / (np.sqrt(squares) + epsilon)


def _adamax(rows, g, slots, step, learning_rate, beta_1, beta_2, epsilon, **_):
    mean = beta_1 * slots["mean"] + (1 - beta_1) * g
    largest = np.maximum(beta_2 * slots["largest"], np.abs(g))
    slots["mean"], slots["largest"] = mean, largest
    rate = learning_rate / (1 - beta_1**step)
    return rows - rate * mean / (largest + epsilon)


def _lion(rows, g, slots, step, learning_rate, beta_1, beta_2, **_):
    mean = slots["mean"]
    slots["mean"] = beta_2 * mean + (1 - beta_2) * g
    return rows - learning_rate * np.sign(beta_1 * mean + (1 - beta_1) * g)


_ROW_RULES = {
    "SGD": _sgd,
    "Adagrad": _adagrad,
    "RMSprop": _rmsprop,
    "Adadelta": _adadelta,
    "Adam": _adam,
    "AdamW": _adam,
    "Adamax": _adamax,
    "Lion": _lion,
}


class NormalizationOfParts(keras.layers.BatchNormalization):
    """Normalizes each of `size` parts of a batch by the part's statistics.

    The moving statistics go towards the mean of the parts', weighted by their
    numbers of examples.
    """

    def __init__(self, size, **kwargs):
        super().__init__(**kwargs)
        self.size = size

    def call(self, inputs, training=None):
        if not training:
            return super().call(inputs)
        count = inputs.shape[0]
        ends = [rank * count // self.size for rank in range(self.size + 1)]
        outputs, mean, variance = [], 0.0, 0.0
        for start, end in zip(ends[:-1], ends[1:], strict=True):
            part = inputs[start:end]
            part_mean, part_variance = tf.nn.moments(part, [0])
            mean += part_mean * (end - start) / count
            variance += part_variance * (end - start) / count
            scale = self.gamma / tf.sqrt(part_variance + self.epsilon)
            outputs.append((part - part_mean) * scale + self.beta)
        for moving, new in (
            (self.moving_mean, mean),
            (self.moving_variance, variance),
        ):
            moving.assign(moving * self.momentum + new * (1 - self.momentum))
        return tf.concat(outputs, axis=0)


def dense_reference(model, optimizer, **compile_arguments):
    """Compiles a stock model with an optimizer fed dense gradients."""
    model.compile(optimizer=DenseGradients(optimizer), **compile_arguments)


def zipf_ids(rng, high, shape):
    """Ids below `high`, frequent ones repeated, as words of a text are."""
    ids = rng.zipf(1.3, size=shape) - 1
    return np.where(ids < high, ids, rng.integers(0, high, size=shape))


def relative_difference(start, end, other):
    """Largest difference of each variable, in distances it has moved.

    Args:
        start: list of arrays, the weights before training.
        end: the reference's weights after training.
        other: the weights to judge.

    Returns:
        List of floats, one for each variable.
    """
    return [
        float(np.abs(b - c).max() / max(np.abs(b - a).max(), 1e-12))
        for a, b, c in zip(start, end, other, strict=True)
    ]


# What waits for what.


def ancestors(tensor):
    """All operations of its graph that a symbolic tensor waits for."""
    found, left = set(), [tensor.op]
    while left:
        operation = left.pop()
        if operation not in found:
            found.add(operation)
            left += operation.control_inputs
            left += [of_input.op for of_input in operation.inputs]
    return found


def messages(tensor):
    """Those of them that are an engine's."""
    return {op for op in ancestors(tensor) if _is_message(op.type)}


def _is_message(kind):
    return kind.startswith(("Collective", "Horovod"))


def under_way(graph, name):
    """Which messages may be under way at an operation, in a graph.

    Args:
        graph: `tf.Graph`, also of a function, with the functions it calls.
        name: a part of the operation's name, of one or several.

    Returns:
        Set of `(operation, message)`, of which neither waits for the other;
        and the number of the operations.
    """
    definition = graph.as_graph_def()
    functions = {of.signature.name: of for of in definition.library.function}

    def bodies(node):
        names = [node.attr[key].func.name for key in node.attr]
        return [functions[name].node_def for name in names if name in functions]

    def some(node, is_one):
        return is_one(node) or any(
            some(inner, is_one) for body in bodies(node) for inner in body
        )

    found, number = set(), 0

    def look(nodes):
        nonlocal number
        waits = {
            node.name: {i.lstrip("^").partition(":")[0] for i in node.input}
            for node in nodes
        }

        def behind(node):
            seen, left = set(), [node.name]
            while left:
                of_node = waits.get(left.pop(), set()) - seen
                seen |= of_node
                left += of_node
            return seen

        sent = [n for n in nodes if some(n, lambda n: _is_message(n.op))]
        for node in nodes:
            if not some(node, lambda n: n.op == "Assert" and name in n.name):
                continue
            number += not bodies(node)
            before = behind(node)
            found.update(
                (node.name, message.name)
                for message in sent
                if message.name not in {node.name, *before}
                and node.name not in behind(message)
            )
            for body in bodies(node):
                look(body)

    look(definition.node)
    return found, number
