"""Models that are trained in several ways on an emulated cluster."""

import argparse
import importlib.util

import _network
import _program
import cluster
import keras
import numpy as np
from workloads import _common

import keras_sparsity as ks


def parser(description, models, ways, machines, steps):
    """The command line of a program that compares ways.

    Args:
        description: the program's docstring.
        models: the names of its models.
        ways: the names of its ways.
        machines: the number of machines by default.
        steps: the number of counted steps by default.
    """
    found = _program.parser(description)
    found.add_argument(
        "--models", nargs="+", choices=list(models), default=list(models)
    )
    found.add_argument("--ways", nargs="+", choices=ways, default=ways)
    found.add_argument("--machines", type=int, default=machines)
    found.add_argument(
        "--rates", nargs="+", type=float, default=[50, 200, 1000]
    )
    found.add_argument(
        "--steps",
        nargs="+",
        type=int,
        default=[steps],
        help="counted, of all rates or of each",
    )
    found.add_argument(
        "--steps-per-execution",
        type=int,
        default=1,
        metavar="K",
        help="of `compile`; counted steps are rounded up to a multiple of it",
    )
    found.add_argument("--inside", help=argparse.SUPPRESS)
    found.add_argument("--way", help=argparse.SUPPRESS)
    return found


def compare(args, limits, on_cluster, spelled, missed):
    """Measures all models in all ways, and prints the figures.

    Args:
        args: the command line.
        limits: dict, the first figures.
        on_cluster: function of a model's name and a way; it gives figures.
        spelled: function of these figures; it gives a line.
        missed: function of a model's name and the figures of its ways; it
            gives sentences, one for each figure outside its limit.
    """
    figures, misses = dict(limits), []
    for name in args.models:
        figures[name] = {}
        for way in args.ways:
            figures[name][way] = found = on_cluster(name, way)
            print(f"{name}, {way}: {spelled(found)}", flush=True)
        misses += [f"{name}: {miss}" for miss in missed(name, figures[name])]
    _program.finish(figures, misses)


def measured(
    program,
    args,
    name,
    way,
    machines,
    *options,
    engine="native",
    rates=None,
):
    """A list of figures, one for each rate, of a training on a cluster.

    Args:
        program: path of the program, which `--inside` makes train.
        args: the command line.
        name, way: those of the model, and of its training.
        machines: their number.
        options: more arguments of the program.
        engine: see `cluster.measure`.
        rates: some of the command line's; by default all.
    """
    rates, steps = rates or args.rates, args.steps
    if len(steps) > 1:  # of each rate
        steps = [steps[args.rates.index(rate)] for rate in rates]
    return cluster.measure(
        program,
        [
            *("--inside", name, "--way", way),
            *("--steps", *map(str, steps)),
            *("--steps-per-execution", str(args.steps_per_execution)),
            *options,
        ],
        engine,
        machines=machines,
        rate=rates,
    )


def trained(args, window, strategy, model, batch, num_classes, warm_up):
    """Trains on data drawn at random, while a window counts.

    Args:
        args: the command line.
        window: `_network.Window`.
        strategy: the strategy.
        model: the model; it classifies.
        batch: the number of examples of a mini-batch.
        num_classes: the number of classes.
        warm_up: the number of steps before those that count.

    Returns:
        `tf.data.Dataset` of the mini-batches.
    """
    workload = made(model, batch, num_classes)
    whole = args.steps_per_execution
    with strategy.scope():
        model.compile(
            workload.optimizer, workload.loss, steps_per_execution=whole
        )
    _spread_steps(args, window, warm_up)
    args.steps = [-(-number // whole) * whole for number in args.steps]
    # Steps before counted ones may be fewer than a whole execution.
    num_steps = _common.num_steps(args) + (1 + len(args.steps)) * (whole - 1)
    batches = _common.dataset(workload.x, workload.y, batch, num_steps)
    train_again(args, window, strategy, model, batches)
    return batches


def train_again(args, window, strategy, model, batches):
    """Trains as `trained` does, with the mini-batches that it returned."""
    timed = _common.Timed(window, args, strategy.collectives.barrier)
    model.fit(batches, callbacks=[timed], shuffle=False, verbose=0)


def trained_by_horovod(args, make, num_classes, warm_up, **figures):
    """Trains by a tape of Horovod, without this library, and reports.

    Args:
        args: the command line.
        make: function of the number of processes. It makes a model and gives
            the number of examples of a mini-batch.
        num_classes, warm_up: as for `trained`.
        figures: more of them to report.
    """
    import horovod.tensorflow as hvd
    from peers import horovod_tape

    hvd.init()
    window = _network.Window(is_first=hvd.rank() == 0)
    window.open()
    model, batch = make(hvd.size())
    workload = made(model, batch, num_classes)
    trainer = horovod_tape.Trainer(workload, batch // hvd.size())
    _spread_steps(args, window, warm_up)
    for num_steps in _common.measured(window, args, horovod_tape.meet):
        trainer.train(num_steps)
    # As many as its processes have together.
    batch = batch // hvd.size() * hvd.size()
    window.report(batch, batch=batch, planned_bytes=0, **figures)


def without_horovod(ways, horovod):
    """These ways, but Horovod's own where it is not installed."""
    if importlib.util.find_spec("horovod"):
        return list(ways)
    return [way for way in ways if way != horovod]


def engine(way, *of_horovod):
    """The engine of a way of training: Horovod's for some, where it is.

    Naive servers need it: each gradient goes to one server, and the native
    engine pads such a message to one of equal parts for all, whose memory
    eight processes do not have.
    """
    is_there = importlib.util.find_spec("horovod") is not None
    return "horovod" if is_there and way in of_horovod else "native"


def _spread_steps(args, window, warm_up):
    """Makes the command line's steps those of each rate."""
    args.warm_up = warm_up
    if len(args.steps) == 1:
        args.steps *= len(window.rates)


def made(model, batch, num_classes):
    """A `_common.Workload` of data drawn at random.

    Of a model that ends in a `ks.layers.SampledSoftmax`, words and those behind
    them; of any other one, numbers and a class of each example.
    """
    draws = np.random.default_rng(0)
    shape, softmax = (4 * batch, *model.input_shape[1:]), model.layers[-1]
    if isinstance(softmax, ks.layers.SampledSoftmax):
        x, y = draws.integers(softmax.num_classes, size=(2, *shape))
        loss = softmax.loss()
    else:
        x = draws.normal(size=shape).astype("float32")
        y = draws.integers(num_classes, size=4 * batch)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    rule = keras.optimizers.SGD(0.001, momentum=0.9)
    return _common.Workload(model, x, y, loss, rule)
