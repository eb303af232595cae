"""A pipeline without a flush, in one process of stock Keras, slot by slot.

Forward of mini-batch m at stage k in slot 2m + k, backward and update in
2m + 2N - 1 - k (SpecTrain, figure 2). With messages ahead, turns of two slots:
forward in turn m + k, backward in the second half of turn m + k + 3(N - 1 - k).
Weights are kept by that definition.
"""

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
        layers: the layers, called one after the other.
        rule: the name of its rule.
    """

    def __init__(self, layers, rule):
        self._layers, self._name = layers, rule
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

    def run(self, weights, x, loss_of, states=None):
        """`(tape, input, output, own loss)` with other weights.

        Args:
            weights: list of values.
            x: the input.
            loss_of: function of the output; the model's loss, or None.
            states: those of random generators and statistics; then nothing
                changes.
        """
        own = [v.numpy() for v in self.weights]
        now = [v.numpy() for v in self._others]
        _assign(self.weights, weights)
        if states is not None:
            _assign(self._others, states)
        x = tf.convert_to_tensor(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y, total = x, tf.zeros([], tf.float64)
            for layer in self._layers:
                y = layer(y, training=True)
                for loss in layer.losses:
                    total += tf.cast(loss, tf.float64)
            if loss_of:
                total += loss_of(y)
        _assign(self.weights, own)
        if states is not None:
            _assign(self._others, now)
        return tape, x, y, total

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


def train(stages, batches, schedule, target, messages_ahead=False):
    """Trains until the pipeline is empty; returns each mini-batch's loss.

    Args:
        stages: list of `Stage`.
        batches: list of `(x, y)`.
        schedule: `"vanilla"`, `"stash"` or `"spectrain"`.
        target: of predictions, `"paper"` or `"sequential"`.
        messages_ahead: whether messages travel for a turn.
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
        stage, y = stages[k], batches[m][1]

        def loss_of(output, y=y):
            return tf.reduce_mean(tf.square(output - y))

        ahead = _ahead(
            len(batches) - 1, k, m, kind, num_stages, target, messages_ahead
        )
        weights = [v.numpy() for v in stage.weights]
        if schedule == "spectrain":
            weights = stage.predicted(ahead)
        if kind == "backward" and schedule == "stash":
            weights = versions.pop((k, m))
        last = loss_of if k == num_stages - 1 else None
        if kind == "forward":
            x = activations.pop((k, m)) if k else batches[m][0]
            stage.kept[m] = x, stage.states()
            versions[k, m] = weights
            _, _, output, own = stage.run(weights, x, last)
            losses[m] += own
            activations[k + 1, m] = output.numpy()
            continue
        x, states = stage.kept.pop(m)
        tape, x, output, own = stage.run(weights, x, last, states)
        targets, given = [own], [tf.ones_like(own)]
        if k < num_stages - 1:
            targets.append(output)
            given.append(tf.convert_to_tensor(upstream.pop((k, m))))
        *gradients, of_x = tape.gradient(
            targets,
            [*stage.weights, x],
            output_gradients=given,
            unconnected_gradients="zero",
        )
        upstream[k - 1, m] = of_x.numpy()
        stage.update([tf.convert_to_tensor(g).numpy() for g in gradients])
    return losses


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
