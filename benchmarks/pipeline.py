"""Models in stages and data parallelism on an emulated cluster.

SpecTrain's figure 9 (samples/s) and figure 3 (bytes of a mini-batch): models of
six shapes, each trained by some schedules of `ks.PipelineStrategy`, by
`ks.HybridStrategy`, whose gradients go by AllReduce, by Horovod's own data
parallelism, where it is installed, and by one process. All have the same global
mini-batch. The bytes that the interfaces count, without
headers and idle traffic, must be within 3 % of those that `ks.plan` counts;
samples/s of "spectrain" at 50 Mbit/s at least 8.91 times those of data
parallelism, for the fully connected and the recurrent model. With two machines,
which have a core each, a step of "spectrain" at 50 and 200 Mbit/s, with
messages ahead if that is among the ways, must take at most 1.18 times the
bound: the slowest stage's computation, as `ks.plan` has it in the same run, or
the bytes that a machine sends over the rate. Each run trains and plans in turn,
five times, and the median ratio counts: the speed of a machine that others use,
too, changes within seconds. Needs root, as `cluster.py` does.
"""

import _network
import _ways
import keras
import numpy as np

import keras_sparsity as ks

# The paper's largest ratio to data parallelism.
LIMIT, BYTES_LIMIT, BOUND_LIMIT = 8.91, 0.03, 1.18
WARM_UP = 6
_NUM_TURNS = 5
NUM_CLASSES = 10
_DATA_PARALLEL, _ALONE, _HOROVOD = "data parallel", "one process", "Horovod"
_AHEAD = ", messages ahead"
_OTHERS = (_DATA_PARALLEL, _HOROVOD, _ALONE)
WAYS = ("spectrain", "stash", "1f1b", *_OTHERS)


def fully_connected():
    """SNN, as in the paper: layers of one width, SELU."""
    layers = [
        keras.layers.Dense(1024, "selu", kernel_initializer="lecun_normal")
        for _ in range(16)
    ]
    inputs = keras.Input((1024,))
    return keras.Sequential([inputs, *layers, keras.layers.Dense(10)]), 64


def recurrent():
    """A residual LSTM of 8 layers."""
    x = inputs = keras.Input((10, 512))
    for _ in range(8):
        x = keras.layers.Add()(
            [x, keras.layers.LSTM(512, return_sequences=True)(x)]
        )
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x)), 32


def convolutional():
    """Blocks of VGG, at 32 x 32: large activations, few weights at first."""
    x = inputs = keras.Input((32, 32, 3))
    for width in (32, 64, 128, 256):
        for _ in range(2):
            x = keras.layers.Conv2D(width, 3, padding="same")(x)
            x = keras.layers.ReLU()(x)
        x = keras.layers.MaxPooling2D()(x)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dense(1024, "relu")(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x)), 32


def attention():
    """Blocks of a transformer."""
    x = inputs = keras.Input((20, 256))
    for _ in range(6):
        y = keras.layers.MultiHeadAttention(4, 64)(x, x)
        x = keras.layers.LayerNormalization()(keras.layers.Add()([x, y]))
        y = keras.layers.Dense(256)(keras.layers.Dense(1024, "relu")(x))
        x = keras.layers.LayerNormalization()(keras.layers.Add()([x, y]))
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x)), 32


def residual():
    """Blocks of ResNet: convolutions, normalization, skip connections."""
    x = inputs = keras.Input((32, 32, 3))
    x = keras.layers.Conv2D(32, 3, padding="same")(x)
    for width, strides in ((32, 1), (64, 2), (128, 2), (256, 2)):
        y = _normalized(x, width, 3, strides)
        y = _normalized(keras.layers.ReLU()(y), width, 3)
        x = keras.layers.Add()([_normalized(x, width, 1, strides), y])
        x = keras.layers.ReLU()(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x)), 32


def inception():
    """Blocks of Inception: convolutions side by side."""
    x = inputs = keras.Input((32, 32, 3))
    x = _normalized(x, 32, 3, 2)
    for width in (32, 64, 96, 128):
        x = keras.layers.Concatenate()(
            [
                keras.layers.ReLU()(_normalized(x, width, size))
                for size in (1, 3, 5)
            ]
        )
        x = keras.layers.MaxPooling2D(padding="same")(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x)), 32


def _normalized(x, width, size, strides=1):
    x = keras.layers.Conv2D(width, size, strides, "same", use_bias=False)(x)
    return keras.layers.BatchNormalization()(x)


MODELS = {
    each.__name__.replace("_", " "): each
    for each in (
        fully_connected,
        recurrent,
        convolutional,
        attention,
        residual,
        inception,
    )
}
# Those for which the paper's largest ratio is asked.
_HEAVY = ("fully connected", "recurrent")


def main():
    args = parse_arguments()
    if args.inside:
        inside(args)
        return
    _ways.compare(
        args,
        {"limit": LIMIT, "bytes_limit": BYTES_LIMIT},
        lambda name, way: on_cluster(args, name, way),
        _words,
        lambda name, ways: missed(name, ways, args.machines),
    )


def on_cluster(args, name, way):
    """Samples/s by rate, and the bytes of a mini-batch."""
    machines = 1 if way == _ALONE else args.machines
    engine = "horovod" if way == _HOROVOD else "native"
    options = []
    if args.micro_batches is not None:
        options = ["--micro-batches", str(args.micro_batches)]
    runs = [args.rates]
    # A pipeline's cuts depend on the links, which compiling measures.
    if way not in _OTHERS:
        runs = [[rate] for rate in args.rates]
    found = [
        each
        for _ in range(args.rounds)
        for rates in runs
        for each in _ways.measured(
            *(__file__, args, name, way, machines, *options),
            engine=engine,
            rates=rates,
        )
    ]
    return _by_rate(found)


def _by_rate(found):
    """Dict from a figure's name to a dict from a rate to the figure.

    Args:
        found: figures of trainings. Of those at a rate the median one counts.
    """
    figures = {}
    for rate in dict.fromkeys(each["rate_mbit"] for each in found):
        rounds = [_figures(each) for each in found if each["rate_mbit"] == rate]
        rounds.sort(
            key=lambda each: (
                each["step_over_bound"],
                each["samples_per_second"],
            )
        )
        for name, value in rounds[len(rounds) // 2].items():
            figures.setdefault(name, {})[f"{rate:g}"] = value
    return figures


def _figures(found):
    speed = found["words_per_second"]
    if found["turns"]:
        steps = [step for step, _ in found["turns"]]
        speed = round(found["batch"] / float(np.median(steps)), 1)
    return {
        "samples_per_second": speed,
        "sent_bytes": sum(
            each["sent_payload_bytes_per_step"] for each in found["per_machine"]
        ),
        "planned_bytes": found["planned_bytes"],
        "step_over_bound": _over_bound(found),
        "stages": found["stages"],
    }


def _over_bound(found):
    """A step's time over the bound; 0 without stages."""
    transfer = found["largest_sent_bytes"] * 8e-6 / found["rate_mbit"]
    ratios = [
        step / max(computation, transfer)
        for step, computation in found["turns"]
    ]
    return round(float(np.median(ratios)), 3) if ratios else 0


def missed(name, ways, num_machines):
    """Sentences, one for each figure outside its limit."""
    bounded = [f"spectrain{_AHEAD}", "spectrain"]
    bounded = [way for way in bounded if way in ways][:1]
    if num_machines == 2 and bounded:
        for rate, over in ways[bounded[0]]["step_over_bound"].items():
            if rate in ("50", "200") and over > BOUND_LIMIT:
                yield f"{over} times the bound at {rate} Mbit/s"
    for way, found in ways.items():
        for rate, planned in found["planned_bytes"].items():
            if not planned:
                continue
            over = found["sent_bytes"][rate] / planned - 1
            if abs(over) > BYTES_LIMIT:
                miss = f"{way}: {over:+.1%} of the planned bytes"
                yield f"{miss} at {rate} Mbit/s"
    if {"spectrain", _DATA_PARALLEL} <= ways.keys():
        speeds = [
            ways[way]["samples_per_second"].get("50")
            for way in ("spectrain", _DATA_PARALLEL)
        ]
        if None not in speeds and name in _HEAVY:
            ratio = speeds[0] / speeds[1]
            if ratio < LIMIT:
                yield f"{ratio:.2f} times data parallelism at 50 Mbit/s"


def _words(found):
    return "; ".join(
        _words_at(rate, {name: values[rate] for name, values in found.items()})
        for rate in found["samples_per_second"]
    )


def _words_at(rate, found):
    words = (
        f"{found['samples_per_second']:,.1f} samples/s at {rate} Mbit/s, "
        f"{found['sent_bytes']:,} bytes"
    )
    if not found["planned_bytes"]:
        return words
    return (
        f"{words} of planned {found['planned_bytes']:,}, "
        f"{found['step_over_bound']} times the bound"
    )


def inside(args):
    """Trains on all machines and reports, on rank 0."""
    if args.way == _HOROVOD:
        _ways.trained_by_horovod(
            args,
            lambda size: MODELS[args.inside](),
            NUM_CLASSES,
            WARM_UP,
            turns=[],
            stages=[],
        )
        return
    is_pipeline = args.way not in _OTHERS
    if is_pipeline:
        schedule = args.way.removesuffix(_AHEAD)
        strategy = ks.PipelineStrategy(
            schedule,
            num_micro_batches=args.micro_batches,
            messages_ahead=schedule != args.way,
        )
    else:
        strategy = ks.HybridStrategy(architecture="hybrid")
    window = _network.Window(is_first=strategy.rank == 0)
    if not is_pipeline:
        window.open()
    model, batch = MODELS[args.inside]()
    batches = _ways.trained(
        args, window, strategy, model, batch, NUM_CLASSES, WARM_UP
    )
    stages, turns = (), []
    if is_pipeline:
        planned, plan = model, ks.plan(model, batches)
        stages = plan.stages
        if not strategy.is_flushed and strategy.num_micro_batches > 1:
            planned = _with_whole_batches(schedule, model, stages)
            plan = ks.plan(planned, batches)
        for turn in range(_NUM_TURNS):
            if turn:
                _ways.train_again(args, window, strategy, model, batches)
                plan = ks.plan(planned, batches)
            step_seconds = window.seconds / args.steps[-1]
            turns.append((step_seconds, plan.step_seconds))
    sent = [stage.sent_bytes + stage.returned_bytes for stage in stages]
    window.report(
        batch,
        batch=batch,
        planned_bytes=sum(sent),
        largest_sent_bytes=max(sent, default=0),
        turns=turns,
        stages=[list(stage.layers) for stage in stages],
    )


def _with_whole_batches(schedule, model, stages):
    """A copy of a model, cut at the same places, of undivided mini-batches.

    Parts cost more than their whole, which is the bound's.
    """
    copy = keras.models.clone_model(model)
    cuts = [stage.layers[-1] for stage in stages[:-1]]
    with ks.PipelineStrategy(schedule, cuts, num_micro_batches=1).scope():
        copy.compile(
            type(model.optimizer).from_config(model.optimizer.get_config()),
            model.loss,
        )
    return copy


def parse_arguments():
    ahead = [schedule + _AHEAD for schedule in ("spectrain", "stash")]
    ways = [*WAYS, *ahead]
    parser = _ways.parser(__doc__, MODELS, ways, machines=4, steps=8)
    parser.add_argument(
        "--micro-batches",
        type=int,
        help="parts of a mini-batch that a pipeline computes in turn; "
        "by default the strategy's",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        choices=range(1, 100, 2),
        metavar="N",
        help="trainings at each rate, an odd number; the median by the bound, "
        "or by samples/s, counts",
    )
    parser.set_defaults(ways=_ways.without_horovod(WAYS, _HOROVOD))
    return parser.parse_args()


if __name__ == "__main__":
    main()
