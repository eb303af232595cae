"""Layers on one worker and data parallelism on an emulated cluster.

RALP's comparison: networks whose last layers have most of the parameters, each
trained by `ks.LayerPlacementStrategy`, whose activations travel to the last
machine, by `ks.HybridStrategy`, whose gradients go by AllReduce, by Horovod's
own data parallelism, where it is installed, and by naive servers. All have the
same global mini-batch, Horovod as many images for each process as a worker
has. The bytes that the interface of the busiest machine
counts, without headers and idle traffic, must be within 3 % of those that
`ks.plan` counts; images/s of VGG at 50 Mbit/s at least 5 times those of
AllReduce and Horovod and 10 times those of naive servers. Residual and
inception networks, whose convolutions gain little, must have at least 0.98 of
the images/s of data parallelism. Models are divided by the predicted time of a
step at the first rate, or left to data parallelism; "placed, published" divides
them by the paper's rule. "placed, half" has half as many workers and one tail
worker, each worker with as many images. Needs root, as `cluster.py` does.

A cell at a time, in a few minutes:

    cell="python benchmarks/layer_placement.py --steps 2 --models"
    $cell vgg11 --rates 50 --ways placed "placed, half" Horovod
    $cell alexnet --rates 50 --classes 21841 --machines 4 --ways placed
    $cell residual inception --rates 50 --ways placed "data parallel"

`--plots FOLDER` draws the predicted step of each split of the models on such
machines with processors of their own, and trains nothing.
"""

import _network
import _report
import _ways
import keras
import numpy as np
import pipeline

import keras_sparsity as ks
from keras_sparsity.stages import model_facts
from keras_sparsity.stages.cutting import Cutter
from keras_sparsity.stages.split_costs import of_data_parallelism, split_costs

BYTES_LIMIT = 0.03
_PLACED, _HALF, _HOROVOD = "placed", "placed, half", "Horovod"
_PUBLISHED = "placed, published"
_DATA_PARALLEL, _SERVERS = "data parallel", "naive servers"
LIMITS = {_DATA_PARALLEL: 5, _HOROVOD: 5, _SERVERS: 10}
# Of models that gain nothing, to data parallelism.
LEAST = 0.98
WAYS = (_PLACED, _PUBLISHED, _HALF, *LIMITS)
WARM_UP = 2


def vgg11(num_classes):
    """VGG11 at half its width, for images of 96 x 96."""
    x = inputs = keras.Input((96, 96, 3))
    for width, number in ((32, 1), (64, 1), (128, 2), (256, 2), (256, 2)):
        for _ in range(number):
            x = keras.layers.Conv2D(width, 3, padding="same")(x)
            x = keras.layers.ReLU()(x)
        x = keras.layers.MaxPooling2D()(x)
    return _with_wide_layers(inputs, x, num_classes)


def alexnet(num_classes):
    """AlexNet at half its width, for images of 96 x 96."""
    x = inputs = keras.Input((96, 96, 3))
    for width, size, strides, is_pooled in (
        (48, 11, 2, True),
        (128, 5, 1, True),
        (192, 3, 1, False),
        (192, 3, 1, False),
        (128, 3, 1, True),
    ):
        x = keras.layers.Conv2D(width, size, strides, padding="same")(x)
        x = keras.layers.ReLU()(x)
        if is_pooled:
            x = keras.layers.MaxPooling2D()(x)
    return _with_wide_layers(inputs, x, num_classes)


def _with_wide_layers(inputs, x, num_classes):
    x = keras.layers.Flatten()(x)
    for _ in range(2):
        x = keras.layers.Dense(2048, "relu")(x)
    return keras.Model(inputs, keras.layers.Dense(num_classes)(x))


def _application(make, size):
    """A network of `keras.applications` for small images, and no batch size."""
    return lambda: (
        make(
            weights=None,
            input_shape=(size, size, 3),
            classes=pipeline.NUM_CLASSES,
            classifier_activation=None,
        ),
        None,
    )


_UNFRIENDLY = {
    "residual": pipeline.residual,
    "inception": pipeline.inception,
    "resnet50": _application(keras.applications.ResNet50, 32),
    "inception_v3": _application(keras.applications.InceptionV3, 75),
}
MODELS = {"vgg11": vgg11, "alexnet": alexnet, **_UNFRIENDLY}


def _made(args):
    """The model, and the number of its classes."""
    if args.inside in _UNFRIENDLY:
        return _UNFRIENDLY[args.inside]()[0], pipeline.NUM_CLASSES
    return MODELS[args.inside](args.classes), args.classes


def main():
    args = parse_arguments()
    if args.inside:
        inside(args)
        return
    if args.plots:
        draw(args)
        return
    _ways.compare(
        args,
        {"limits": LIMITS, "bytes_limit": BYTES_LIMIT},
        lambda name, way: on_cluster(args, name, way),
        _words,
        missed,
    )


def draw(args):
    """A plot for each model: the predicted steps of its splits."""
    plots = _report.Plots(args.plots)
    num_workers = args.machines - 1
    num_examples = args.part * num_workers
    for name in args.models:
        args.inside = name
        model, _ = _made(args)
        facts = model_facts.measured(
            Cutter(model), num_examples, keras.optimizers.Adam()
        )
        lines = {}
        for rate in args.rates:
            cluster = ks.planning.Cluster(
                args.machines, megabits_per_second=rate
            )
            costs = split_costs(
                facts.profile, num_workers, 1, num_examples, cluster
            )
            whole = of_data_parallelism(facts, cluster, num_examples)
            points = [(cost.place + 1, cost.seconds) for cost in costs]
            # All layers are in the head.
            points.append((len(facts.profile.names), whole.seconds))
            lines[f"{rate:g} Mbit/s"] = points
        axes = "layers in the head", "predicted step (s)"
        plots.lines("splits", name, axes, lines, logarithmic=True)
    plots.save()


def on_cluster(args, name, way):
    """Images/s by rate, and the bytes of a step on the busiest link."""
    options = "--part", str(args.part), "--classes", str(args.classes)
    machines = args.machines
    if way == _HALF:
        machines = machines // 2 + 1
    found = _ways.measured(
        __file__,
        args,
        name,
        way,
        machines,
        *options,
        engine=_ways.engine(way, _HOROVOD, _SERVERS),
    )
    busiest = [
        max(m["sent_payload_bytes_per_step"] for m in each["per_machine"])
        for each in found
    ]
    return {
        "images_per_second": {
            f"{each['rate_mbit']:g}": each["steps"]
            * each["batch"]
            / each["seconds"]
            for each in found
        },
        "busiest_bytes": round(float(np.median(busiest))),
        "planned_bytes": found[0]["planned_bytes"],
        "divided_after": found[0]["divided_after"],
    }


def missed(name, ways):
    """Sentences, one for each figure outside its limit."""
    for way, found in ways.items():
        planned, sent = found["planned_bytes"], found["busiest_bytes"]
        if planned and abs(sent / planned - 1) > BYTES_LIMIT:
            yield f"{way}: {sent / planned - 1:+.1%} of the planned bytes"
    speeds = {way: found["images_per_second"] for way, found in ways.items()}
    placed = speeds.get(_PLACED, {})
    if name in _UNFRIENDLY:
        limits = [(_DATA_PARALLEL, LEAST, rate) for rate in placed]
    else:
        limits = [(way, limit, "50") for way, limit in LIMITS.items()]
    for way, limit, rate in limits:
        if rate in placed and rate in speeds.get(way, {}):
            ratio = placed[rate] / speeds[way][rate]
            if ratio < limit:
                yield f"{ratio:.2f} times {way} at {rate} Mbit/s"


def _words(found):
    speeds = ", ".join(
        f"{speed:,.2f} images/s at {rate} Mbit/s"
        for rate, speed in found["images_per_second"].items()
    )
    words = f"{speeds}; {found['busiest_bytes']:,} bytes on the busiest link"
    if found["planned_bytes"]:
        words += f", planned {found['planned_bytes']:,}"
    return words


def inside(args):
    """Trains on all machines and reports, on rank 0."""
    if args.way == _HOROVOD:
        _ways.trained_by_horovod(
            args,
            lambda size: (_made(args)[0], args.part * size),
            _made(args)[1],
            WARM_UP,
            divided_after=None,
        )
        return
    is_placed = args.way in (_PLACED, _PUBLISHED, _HALF)
    is_published = args.way == _PUBLISHED
    if is_placed:
        strategy = ks.LayerPlacementStrategy(
            rule="published" if is_published else "fastest",
            num_examples=args.part,
        )
    else:
        is_naive = args.way == _SERVERS
        strategy = ks.HybridStrategy(
            architecture="naive_ps" if is_naive else "hybrid"
        )
    window = _network.Window(is_first=strategy.rank == 0)
    # By default a model is divided by the links' rate, which `open` takes off.
    if is_published or not is_placed:
        window.open()
    keras.utils.set_random_seed(1)
    model, num_classes = _made(args)
    # The same for all ways: that of all workers but one.
    batch = args.part * (strategy.size - 1)
    batches = _ways.trained(
        args, window, strategy, model, batch, num_classes, WARM_UP
    )
    plan = ks.plan(model, batches) if is_placed else None
    # One that gains nothing has the plan of data parallelism.
    is_divided = getattr(plan, "chosen", None) is not None
    window.report(
        batch,
        batch=batch,
        planned_bytes=_busiest(plan) if is_divided else 0,
        divided_after=plan.names[plan.chosen] if is_divided else None,
    )


def _busiest(plan):
    """Planned bytes that the busiest machine sends: to a link's direction."""
    chosen = next(cost for cost in plan.costs if cost.place == plan.chosen)
    return round(chosen.busiest_bytes)


def parse_arguments():
    parser = _ways.parser(__doc__, MODELS, WAYS, machines=8, steps=3)
    parser.add_argument(
        "--part", type=int, default=4, help="examples of a worker"
    )
    parser.add_argument(
        "--classes", type=int, default=1000, help="of vgg11 and alexnet"
    )
    parser.add_argument("--plots", help="a folder, for PNG files")
    models = ["vgg11", "alexnet", "residual", "inception"]
    ways = _ways.without_horovod(WAYS, _HOROVOD)
    parser.set_defaults(models=models, ways=ways)
    return parser.parse_args()


if __name__ == "__main__":
    main()
