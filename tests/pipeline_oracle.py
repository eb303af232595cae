"""A pipeline without a flush, in one process of stock Keras, slot by slot.

Forward of mini-batch m at stage k in slot 2m + k, backward and update in
2m + 2N - 1 - k (SpecTrain, figure 2). With messages ahead, turns of two slots:
forward in turn m + k, backward in the second half of turn m + k + 3(N - 1 - k).
Weights are kept by that definition. Any number of tensors crosses a cut, with
their masks.
"""

import functools

import keras
import numpy as np
import tensorflow as tf

MOMENTUM, RATE, GAMMA = 0.875, 0.125, 0.75  # exact in float32
BETAS, EPSILON = (0.875, 0.96875), 2.0**-10

RULES = {
    "sgd": lambda: keras.optimizers.SGD(RATE),
    "momentum": lambda: keras.optimizers.SGD(RATE, momentum=MOMENTUM),
    "adam": lambda: keras.optimizers.Adam(
        RATE, beta_1=BETAS[0], beta_2=BETAS[1], epsilon=EPSILON
    ),
}


def of_prediction(schedule, target):
    """The arguments of `PipelineStrategy` that a schedule has for it."""
    if schedule != "spectrain":
        return {}
    return {"prediction": target, "decay": GAMMA}


class Stage:
    """Layers of one stage, with its own rule and all it has kept.

    Args:
        layers: the layers, called one after the other; the first one with all
            that comes from the stage before, then what the stage reads.
        rule: the name of its rule.
        reads: the numbers of the model's inputs that the stage reads; None: all
            at the first stage.
    """

    def __init__(self, layers, rule, reads=None):
        self._layers, self._name, self.reads = layers, rule, reads
        self._rule = RULES[rule]()
        self.weights = [v for each in layers for v in each.trainable_weights]
        self._others = [
            v for each in layers for v in each.non_trainable_variables
        ]
        if self.weights:
            self._rule.build(self.weights)
        self._averages = [np.zeros(v.shape) for v in self.weights]
        self.kept = {}

    def predicted(self, num_updates):
        """The weights some updates later, as the smoothed gradient says."""
        return [
            v.numpy() + num_updates * self._smoothed(place)
            for place, v in enumerate(self.weights)
        ]

    def _smoothed(self, place):
        slots = [v.numpy() for v in self._rule.variables[2:]]
        if self._name == "sgd":
            return -RATE * self._averages[place]
        if self._name == "momentum":
            return slots[place]
        step = max(int(self._rule.iterations), 1)
        mean, square = slots[2 * place : 2 * place + 2]
        mean = mean / (1 - BETAS[0] ** step)
        square = square / (1 - BETAS[1] ** step)
        return -RATE * mean / (np.sqrt(square) + EPSILON)

    def run(self, weights, inputs, loss_of, states=None):
        """`(tape, inputs, outputs, own loss)` with other weights.

        Args:
            weights: list of values.
            inputs: list of pairs: a value and its mask, or None.
            loss_of: function of the outputs; the model's loss, or None.
            states: those of random generators and statistics; then nothing
                changes.
        """
        own = [v.numpy() for v in self.weights]
        now = [v.numpy() for v in self._others]
        _assign(self.weights, weights)
        if states is not None:
            _assign(self._others, states)
        inputs = [_masked(*each) for each in inputs]
        with tf.GradientTape() as tape:
            tape.watch([x for x in inputs if x.dtype.is_floating])
            outputs, total = inputs, tf.zeros([], tf.float64)
            for layer in self._layers:
                given = outputs if len(outputs) > 1 else outputs[0]
                outputs = keras.tree.flatten(layer(given, training=True))
                for loss in layer.losses:
                    total += tf.cast(loss, tf.float64)
            if loss_of:
                total += tf.cast(loss_of(outputs), tf.float64)
        _assign(self.weights, own)
        if states is not None:
            _assign(self._others, now)
        return tape, inputs, outputs, total

    def states(self):
        return [v.numpy() for v in self._others]

    def update(self, gradients):
        if self.weights:
            self._rule.apply(
                [tf.convert_to_tensor(g) for g in gradients], self.weights
            )
        for average, gradient in zip(self._averages, gradients, strict=True):
            average *= GAMMA
            average += (1 - GAMMA) * gradient


class Calls:
    """Layers as one, which is called with a list of tensors and gives a list.

    Args:
        network: the model.
        inputs: list of the tensors' names: of the layers that have made them.
        calls: dict from a layer's name to the names of what it is called with.
        outputs: list of names.
    """

    def __init__(self, network, inputs, calls, outputs):
        self._inputs, self._outputs = inputs, outputs
        self._calls = [(network.get_layer(n), calls[n]) for n in calls]

    def __call__(self, inputs, training):
        made = dict(zip(self._inputs, keras.tree.flatten(inputs), strict=True))
        for layer, names in self._calls:
            given = [made[name] for name in names]
            given = given if len(given) > 1 else given[0]
            made[layer.name] = layer(given, training=training)
        return [made[name] for name in self._outputs]

    @property
    def trainable_weights(self):
        return self._all("trainable_weights")

    @property
    def non_trainable_variables(self):
        return self._all("non_trainable_variables")

    @property
    def losses(self):
        return self._all("losses")

    def _all(self, name):
        return [
            each for layer, _ in self._calls for each in getattr(layer, name)
        ]


def stages_of(network, rule, calls, inputs, outputs):
    """List of `Stage`s; what a later one needs is handed on.

    Args:
        network: the model.
        rule: the name of its rule.
        calls: for each stage, those of `Calls`.
        inputs, outputs: lists of the model's names.
    """
    stages, crossing = [], []
    for number, own in enumerate(calls):
        needed = {
            n for each in calls[number + 1 :] for n in sum(each.values(), [])
        }
        made = [n for n in [*crossing, *own] if n in needed or n in outputs]
        if number == len(calls) - 1:
            made = outputs
        reads = [n for n in inputs if n in sum(own.values(), [])]
        layer = Calls(network, [*crossing, *reads], own, made)
        places = [inputs.index(name) for name in reads]
        stages.append(Stage([layer], rule, places))
        crossing = made
    return stages


def squared_error(outputs, batch):
    return tf.reduce_mean(tf.square(outputs[0] - batch[1]))


def train(
    stages,
    batches,
    schedule,
    target,
    messages_ahead=False,
    loss_of=squared_error,
    note=lambda batch, outputs: None,
):
    """Trains until the pipeline is empty; returns each mini-batch's loss.

    Args:
        stages: list of `Stage`.
        batches: list of tuples: an input or a list of them, then what the loss
            needs.
        schedule: `"vanilla"`, `"stash"` or `"spectrain"`.
        target: of predictions, `"paper"` or `"sequential"`.
        messages_ahead: whether messages travel for a turn.
        loss_of: function of the model's outputs, a list, and the mini-batch.
        note: called with each mini-batch and its outputs, lists, in order.
    """
    num_stages = len(stages)
    slots = []
    for k in range(num_stages):
        first, back = _delays(k, num_stages, messages_ahead)
        for m in range(len(batches)):
            slots.append((2 * m + first, k, m, "forward"))
            slots.append((2 * m + back, k, m, "backward"))
    losses = np.zeros(len(batches))
    activations, upstream, versions = {}, {}, {}
    for _, k, m, kind in sorted(slots):
        stage, batch = stages[k], batches[m]

        ahead = _ahead(
            len(batches) - 1, k, m, kind, num_stages, target, messages_ahead
        )
        weights = [v.numpy() for v in stage.weights]
        if schedule == "spectrain":
            weights = stage.predicted(ahead)
        if kind == "backward" and schedule == "stash":
            weights = versions.pop((k, m))
        last = None
        if k == num_stages - 1:
            last = functools.partial(loss_of, batch=batch)
        if kind == "forward":
            given = activations.pop((k, m), [])
            inputs = [*given, *_read(stage, k, batch)]
            stage.kept[m] = inputs, len(given), stage.states()
            versions[k, m] = weights
            _, _, outputs, own = stage.run(weights, inputs, last)
            losses[m] += own
            activations[k + 1, m] = [_with_mask(each) for each in outputs]
            if last:
                note(batch, outputs)
            continue
        inputs, num_given, states = stage.kept.pop(m)
        tape, inputs, outputs, own = stage.run(weights, inputs, last, states)
        targets, given = [own], [tf.ones_like(own)]
        if k < num_stages - 1:
            targets += outputs
            given += map(tf.convert_to_tensor, upstream.pop((k, m)))
        gradients = tape.gradient(
            targets,
            [*stage.weights, *inputs[:num_given]],
            output_gradients=given,
            unconnected_gradients="zero",
        )
        gradients = [tf.convert_to_tensor(g).numpy() for g in gradients]
        num_weights = len(stage.weights)
        upstream[k - 1, m] = gradients[num_weights:]
        stage.update(gradients[:num_weights])
    return losses


def _read(stage, k, batch):
    """The model's inputs that a stage reads."""
    inputs = batch[0] if isinstance(batch[0], list) else [batch[0]]
    reads = stage.reads
    if reads is None:
        reads = range(len(inputs)) if k == 0 else ()
    return [(inputs[number], None) for number in reads]


def _with_mask(tensor):
    mask = getattr(tensor, "_keras_mask", None)
    return tensor.numpy(), None if mask is None else mask.numpy()


def _masked(value, mask):
    """A tensor with the mask that Keras's layers look for."""
    tensor = tf.convert_to_tensor(value)
    if mask is not None:
        tensor._keras_mask = tf.convert_to_tensor(mask)
    return tensor


def _delays(k, num_stages, messages_ahead):
    """The slots of mini-batch 0: forward and backward."""
    if messages_ahead:
        return 4 * k, 2 * (2 * k + 4 * (num_stages - 1 - k)) + 1
    return k, 2 * num_stages - 1 - k


def _ahead(last, k, m, kind, num_stages, target, messages_ahead):
    """The updates of other mini-batches until the weights are as wanted.

    While a stage reads mini-batches, it expects that more will come.
    """
    first, back = _delays(k, num_stages, messages_ahead)
    turn = m
    if messages_ahead:
        turn += 2 * k
    if kind == "backward":
        turn += (4 if messages_ahead else 1) * (num_stages - 1 - k)
    if turn <= last:
        last += 4 * num_stages
    slot = 2 * m + (first if kind == "forward" else back)
    others = [n for n in range(last + 1) if n != m and 2 * n + back > slot]
    if target == "sequential":
        return sum(n < m for n in others)
    _, returned = _delays(0, num_stages, messages_ahead)
    return sum(2 * n + back <= 2 * m + returned for n in others)


def _assign(variables, values):
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
