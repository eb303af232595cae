"""The common parts of the workloads, for this library and for `peers/`.

A workload is a module with

    SIZES       a dict of the options of `--size small` and `--size large`
    options     a function of `ArgumentParser.add_argument`, for its own
    make        a function from a `Kit`, the arguments, a number of examples and
                a NumPy generator to a `Workload`

This module does not import keras_sparsity.
"""

import importlib
import os
import sys
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import _network
import keras
import numpy as np
import tensorflow as tf
from workloads import _pause

NAMES = ("lm", "nmt", "recommender", "resnet50", "inception_v3")
# Of all processes together: logits of all classes take memory.
HELD_OUT_BATCH = 64
# Every process draws all examples, which takes longer than training on them:
# after these steps the examples repeat.
_DIFFERENT_STEPS = 24
# Epochs of the training that a measured one is the beginning of: tables that
# move early in it have its length to pay for that.
_LONG_TRAINING = 1000


class Kit(NamedTuple):
    """The layers that a workload's model is built of.

    Args:
        embedding: Function of the number of rows, their width and, by the
            keyword `name`, the layer's name. Returns a layer.
        bag: The same for a layer that sums the rows of the ids on the last
            axis.
        softmax: Function of the number of classes and of those in a sample.
            Returns a layer whose method `loss` makes its loss: sampled in
            training, of all classes otherwise.
    """

    embedding: Any
    bag: Any
    softmax: Any


class Workload(NamedTuple):
    """A model with its examples.

    Args:
        model: Keras's, not compiled.
        x, y: NumPy arrays of examples (`x` may be a tuple of them); a run
            that needs more repeats them.
        loss: For `compile`.
        optimizer: Keras's.
        words: Number of words, images or samples of an example.
        least_loss: Function from `x` and `y` to the mean loss of the best
            possible model, where the source is known.
    """

    model: Any
    x: Any
    y: Any
    loss: Any
    optimizer: Any
    words: int = 1
    least_loss: Any = None

    def split(self, num_examples):
        """The first examples, and a workload of the others."""

        def of(part):
            return tf.nest.map_structure(lambda a: a[part], (self.x, self.y))

        x, y = of(slice(num_examples, None))
        return of(slice(num_examples)), self._replace(x=x, y=y)

    def num_parameters(self):
        return sum(
            int(np.prod(v.shape)) for v in self.model.trainable_variables
        )


def module(name):
    """Imports the module of a workload."""
    folder = os.path.dirname(os.path.abspath(__file__))
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def parse(module, parser, arguments=None):
    """Adds a workload's options and those of all; returns the arguments.

    Args:
        module: The workload.
        parser: `argparse.ArgumentParser`.
        arguments: List of strings, by default those of the command line.
    """
    add = parser.add_argument
    add("--size", choices=list(module.SIZES), default="small")
    add("--batch", type=int, help="examples of each process")
    add(
        "--steps",
        type=lambda text: [int(number) for number in text.split(",")],
        default=[40],
        metavar="STEPS[,STEPS...]",
        help="that count, at each of a cluster's rates",
    )
    add("--warm-up", type=int, default=10, help="steps before them")
    add("--learning-rate", type=float, help="by default the workload's own")
    add("--pause", type=float, help="seconds of each step, see _pause.py")
    module.options(add)
    parser.set_defaults(target=None)
    parser.epilog = "Options of --size: " + "; ".join(
        f"{size}: "
        + " ".join(
            f"--{name.replace('_', '-')} {value}"
            for name, value in options.items()
        )
        for size, options in module.SIZES.items()
    )
    chosen = parser.parse_args(arguments)
    parser.set_defaults(**module.SIZES[chosen.size])
    args = parser.parse_args(arguments)
    _check(parser, args)
    return args


def _check(parser, args):
    """Ends the program where the arguments do not fit together."""
    if args.warm_up < 1:
        parser.error(f"--warm-up must be 1 or more. Received: {args.warm_up}.")
    # A program that makes the cluster has an option for the rates.
    rates = getattr(args, "rate", _network.Window().rates)
    if len(args.steps) == 1:
        args.steps *= len(rates)
    if len(args.steps) != len(rates) or min(args.steps) < 1:
        parser.error(
            f"--steps must be 1 or more, at each of {len(rates)} rates. "
            f"Received: {args.steps}."
        )
    if args.target is not None:
        if len(rates) > 1:
            parser.error(f"--target needs one rate. Received: {rates}.")
        if not 2 <= args.every <= args.most_steps:
            parser.error(
                "--every must be from 2 to --most-steps. Received: "
                f"{args.every} of {args.most_steps}."
            )
        if args.held_out < 1 or args.held_out % HELD_OUT_BATCH:
            parser.error(
                f"--held-out must be a multiple of {HELD_OUT_BATCH}. "
                f"Received: {args.held_out}."
            )


def target_options(add):
    """Adds options of training to a held-out loss (EuroSys 6.2)."""
    add(
        "--target",
        type=float,
        help="train to this loss of held-out examples over all classes, in "
        "nats a word, in place of --steps",
    )
    add("--every", type=int, default=50, help="steps between evaluations")
    add("--most-steps", type=int, default=5000, help="steps to give up after")
    add("--held-out", type=int, default=512, help="examples held out")


def num_steps(args):
    """The number of steps that `measured` yields in all."""
    return args.warm_up + sum(_network.SETTLE + steps for steps in args.steps)


def measured(window, args, meet):
    """Yields the number of steps to train next, again and again.

    Limits and measures the network before, between and after them.

    Args:
        window: `_network.Window`.
        args: Of `parse`.
        meet: Function of a name that returns when all processes call it.
    """
    yield args.warm_up
    for rate, steps in zip(window.rates, args.steps, strict=True):
        meet("timed/limit")
        window.limit(rate)
        yield _network.SETTLE
        meet("timed/begin")
        window.begin()
        yield steps
        meet("timed/end")
        window.end(steps)
    window.idle()
    meet("timed/idle")


def made(module, kit, args, size):
    """A workload for `size` processes, and its held-out examples or None."""
    if args.target is None:
        held_out, steps = 0, min(_DIFFERENT_STEPS, num_steps(args))
    else:
        held_out, steps = args.held_out, args.most_steps
    workload = module.make(
        kit,
        args,
        args.batch * size * steps + held_out,
        np.random.default_rng(1),
    )
    if args.learning_rate is not None:
        workload.optimizer.learning_rate = args.learning_rate
    if args.pause:
        workload = _pause.paused(workload, args.pause)
    if args.target is None:
        return workload, None
    held_out, workload = workload.split(held_out)
    return workload, held_out


def zipf(shape, num_rows, generator):
    """Ids as frequent as words: id k in proportion to 1 / (k + 1)."""
    uniform = generator.random(shape)
    ids = np.exp(uniform * np.log(num_rows + 1)).astype("int32") - 1
    return np.minimum(ids, num_rows - 1)


def zipf_probability(ids, num_rows):
    """The probability of each id that `zipf` draws."""
    return np.log1p(1 / (ids + 1.0)) / np.log(num_rows + 1)


def examples(x, y, start, number):
    """Some examples; the first one follows the last."""
    index = np.arange(start, start + number) % len(y)
    return tf.nest.map_structure(lambda array: array[index], (x, y))


def dataset(x, y, batch, num_batches):
    """`tf.data` of batches; the first example follows the last."""
    arrays = tf.nest.map_structure(tf.constant, (x, y))

    def take(number):
        index = number * batch + tf.range(batch, dtype="int64")
        index %= len(y)
        return tf.nest.map_structure(lambda a: tf.gather(a, index), arrays)

    return tf.data.Dataset.range(num_batches).map(take).prefetch(2)


def fit(workload, held_out, args, size, window, meet):
    """Trains a compiled model by `fit`, as the arguments say.

    Args:
        workload: A `Workload`.
        held_out: Its held-out examples, `(x, y)`, or None.
        args: Of `parse`.
        size: The number of processes.
        window: `_network.Window`.
        meet: Function of a name, which returns when all processes call it.

    Returns:
        dict of further figures to report.
    """
    model, batch = workload.model, args.batch * size
    if held_out is None:
        history = model.fit(
            dataset(workload.x, workload.y, batch, num_steps(args)),
            epochs=_LONG_TRAINING,
            callbacks=[Timed(window, args, meet)],
            shuffle=False,
            verbose=0,
        ).history
        return {"loss": history["loss"][-1]}
    until = UntilTarget(Curve(args, workload, held_out), window, meet)
    window.limit(window.rates[0])
    model.fit(
        dataset(workload.x, workload.y, batch, args.most_steps),
        steps_per_epoch=args.every,
        epochs=args.most_steps // args.every,
        validation_data=dataset(
            *held_out, HELD_OUT_BATCH, args.held_out // HELD_OUT_BATCH
        ),
        callbacks=[until],
        shuffle=False,
        verbose=0,
    )
    window.idle()
    meet("timed/idle")
    return until.curve.figures()


class Timed(keras.callbacks.Callback):
    """Measures a `fit` of `num_steps(args)` in an epoch, and ends with it.

    Arguments are those of `measured`.
    """

    def __init__(self, window, args, meet):
        super().__init__()
        self._left = measured(window, args, meet)
        self._next = next(self._left)

    def on_train_batch_end(self, batch, logs=None):
        # It ends a whole execution, which may have more steps.
        if batch + 1 >= self._next:
            self._next = batch + 1 + next(self._left, 0)

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True


class Curve:
    """The loss of held-out examples while a workload trains to a target.

    Args:
        args: Of `parse`.
        workload: A `Workload`.
        held_out: Its held-out examples, `(x, y)`.
    """

    def __init__(self, args, workload, held_out):
        self._target, self._every = args.target, args.every
        self._least = workload.least_loss(*held_out)
        self._points = []

    def add(self, seconds, num_timed, loss):
        """Adds the loss after `--every` more steps.

        Args:
            seconds: Of `num_timed` steps.
            num_timed: Number of timed steps: all but the very first, which
                traces the model and counts as one of mean length.
            loss: Of all held-out examples.

        Returns:
            Whether the target is reached.
        """
        seconds *= self._every / num_timed
        steps = self._every
        if self._points:
            seconds += self._points[-1]["seconds"]
            steps += self._points[-1]["steps"]
        point = {"steps": steps, "seconds": round(seconds, 3), "loss": loss}
        self._points.append(point)
        return loss <= self._target

    def figures(self):
        """Figures to report: seconds of training, without evaluation."""
        last = self._points[-1]
        return {
            "loss": last["loss"],
            "to_target": {
                "target": self._target,
                "least_loss": round(self._least, 4),
                "is_reached": last["loss"] <= self._target,
                "steps": last["steps"],
                "seconds": last["seconds"],
                "curve": self._points,
            },
        }


class UntilTarget(keras.callbacks.Callback):
    """Ends a `fit` whose epochs are `--every` steps at a target.

    Args:
        curve: `Curve`.
        window, meet: See `fit`.
    """

    def __init__(self, curve, window, meet):
        super().__init__()
        self.curve, self.window, self.meet = curve, window, meet

    def on_epoch_begin(self, epoch, logs=None):
        self._is_first = epoch == 0
        if not self._is_first:
            self._begin()

    def on_train_batch_end(self, batch, logs=None):
        if self._is_first and batch == 0:
            self._begin()
        if batch + 1 == self.params["steps"]:
            self.meet("timed/end")
            self.window.end(self.params["steps"] - self._is_first)

    def on_epoch_end(self, epoch, logs=None):
        num_timed = self.params["steps"] - self._is_first
        seconds = self.window.seconds
        if self.curve.add(seconds, num_timed, logs["val_loss"]):
            self.model.stop_training = True

    def _begin(self):
        self.meet("timed/begin")
        self.window.begin()
