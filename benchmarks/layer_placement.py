"""Layers on one worker and data parallelism on an emulated cluster.

RALP's comparison: networks whose last layers have most of the parameters, each
trained by `ks.LayerPlacementStrategy`, whose activations travel to the last
machine, by `ks.HybridStrategy`, whose gradients go by AllReduce, and by naive
servers. All have the same global mini-batch. The bytes that the interface of
the busiest machine counts, without headers and idle traffic, must be within 3 %
of those that `ks.plan` counts; images/s at 50 Mbit/s at least 5 times those of
AllReduce and 10 times those of naive servers. Needs root, as `cluster.py` does.
"""

import _network
import _ways
import keras
import numpy as np

import keras_sparsity as ks

BYTES_LIMIT = 0.03
_PLACED, _DATA_PARALLEL, _SERVERS = "placed", "data parallel", "naive servers"
LIMITS = {_DATA_PARALLEL: 5, _SERVERS: 10}
WAYS = (_PLACED, *LIMITS)
_CLASSES = 1000
WARM_UP = 2


def vgg11():
    """VGG11 at half its width, for images of 96 x 96."""
    x = inputs = keras.Input((96, 96, 3))
    for width, number in ((32, 1), (64, 1), (128, 2), (256, 2), (256, 2)):
        for _ in range(number):
            x = keras.layers.Conv2D(width, 3, padding="same")(x)
            x = keras.layers.ReLU()(x)
        x = keras.layers.MaxPooling2D()(x)
    return _with_wide_layers(inputs, x, 2048)


def alexnet():
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
    return _with_wide_layers(inputs, x, 2048)


def _with_wide_layers(inputs, x, width):
    x = keras.layers.Flatten()(x)
    for _ in range(2):
        x = keras.layers.Dense(width, "relu")(x)
    return keras.Model(inputs, keras.layers.Dense(_CLASSES)(x))


MODELS = {each.__name__: each for each in (vgg11, alexnet)}


def main():
    args = parse_arguments()
    if args.inside:
        inside(args)
        return
    _ways.compare(
        args,
        {"limits": LIMITS, "bytes_limit": BYTES_LIMIT},
        lambda name, way: on_cluster(args, name, way),
        _words,
        missed,
    )


def on_cluster(args, name, way):
    """Images/s by rate, and the bytes of a step on the busiest link."""
    options = "--part", str(args.part)
    machines = args.machines
    found = _ways.measured(__file__, args, name, way, machines, *options)
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
    del name
    for way, found in ways.items():
        planned, sent = found["planned_bytes"], found["busiest_bytes"]
        if planned and abs(sent / planned - 1) > BYTES_LIMIT:
            yield f"{way}: {sent / planned - 1:+.1%} of the planned bytes"
    placed = ways.get(_PLACED, {"images_per_second": {}})
    speed = placed["images_per_second"].get("50")
    for way, limit in LIMITS.items():
        if speed and way in ways and "50" in ways[way]["images_per_second"]:
            ratio = speed / ways[way]["images_per_second"]["50"]
            if ratio < limit:
                yield f"{ratio:.2f} times {way} at 50 Mbit/s"


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
    is_placed = args.way == _PLACED
    if is_placed:
        strategy = ks.LayerPlacementStrategy()
    else:
        is_naive = args.way == _SERVERS
        strategy = ks.HybridStrategy(
            architecture="naive_ps" if is_naive else "hybrid"
        )
    window = _network.Window(is_first=strategy.rank == 0)
    window.open()
    keras.utils.set_random_seed(1)
    model = MODELS[args.inside]()
    # The same for all ways: that of all workers but one.
    batch = args.part * (strategy.size - 1)
    batches = _ways.trained(
        args, window, strategy, model, batch, _CLASSES, WARM_UP
    )
    plan = ks.plan(model, batches) if is_placed else None
    window.report(
        batch,
        batch=batch,
        planned_bytes=_busiest(plan) if plan else 0,
        divided_after=plan.names[plan.chosen] if plan else None,
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
    return parser.parse_args()


if __name__ == "__main__":
    main()
