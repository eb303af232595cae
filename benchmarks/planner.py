"""Strategies that `ks.plan` predicts, and what they measure on a cluster.

For each model, and each rate of the links of an emulated cluster, `ks.plan`
predicts the step of every way to train the model. Of these the fastest ones
with the result of one process are trained: data parallelism, layer placement,
and a pipeline of each number of stages; those that are predicted to take three
times as long as the fastest one are not. In 11 of 12 cells the way that the
plan has first must have at least 0.95 of the steps/s of the fastest measured
one, and its predicted time must be within 20 % of the measured one. All
machines share this machine's processors, which the plan is told. Needs root, as
`cluster.py` does.

One model at a time, which takes about five minutes:

    python benchmarks/planner.py --models attention

`--plots FOLDER` draws the measured steps over the predicted ones.
"""

import argparse
import json
import os
import time

import _network
import _program
import _report
import _ways
import keras
import layer_placement
import pipeline
from workloads import _common

import keras_sparsity as ks
from keras_sparsity import planner
from keras_sparsity.stages.costs import (
    DATA_PARALLELISM,
    LAYER_PLACEMENT,
    StrategyCost,
)

LEAST_SPEED, MOST_ERROR, SHARE_OF_CELLS = 0.95, 0.20, 11 / 12
WARM_UP = 2
_PLAN = "plan"
# Slower ways are not trained, by prediction.
_MOST_TIMES = 3
# A slow way makes fewer steps, but two.
_WINDOW_SECONDS = 10
_CLASSES, _WORDS = 10, 20_000


def _alexnet():
    return layer_placement.alexnet(num_classes=1000), 28


def _vgg11():
    return layer_placement.vgg11(num_classes=1000), 28


def gated():
    """GRUs, one on the other."""
    x = inputs = keras.Input((12, 256))
    for _ in range(4):
        x = keras.layers.GRU(384, return_sequences=True)(x)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dense(512, "relu")(x)
    return keras.Model(inputs, keras.layers.Dense(_CLASSES)(x)), 32


def separable():
    """Blocks of MobileNet: a convolution of each channel, then of 1 x 1."""
    x = inputs = keras.Input((64, 64, 3))
    x = keras.layers.Conv2D(32, 3, 2, padding="same")(x)
    for width, strides in ((64, 1), (128, 2), (128, 1), (256, 2), (512, 2)):
        x = keras.layers.DepthwiseConv2D(3, strides, padding="same")(x)
        x = keras.layers.BatchNormalization()(x)
        x = keras.layers.Conv2D(width, 1, activation="relu")(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    x = keras.layers.Dense(1024, "relu")(x)
    return keras.Model(inputs, keras.layers.Dense(_CLASSES)(x)), 32


def mixer():
    """Blocks of MLP-Mixer: layers over places, then over channels."""
    x = inputs = keras.Input((32, 256))
    for _ in range(4):
        y = keras.layers.Permute((2, 1))(keras.layers.LayerNormalization()(x))
        y = keras.layers.Dense(32)(keras.layers.Dense(64, "gelu")(y))
        x = keras.layers.Add()([x, keras.layers.Permute((2, 1))(y)])
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.Dense(256)(keras.layers.Dense(768, "gelu")(y))
        x = keras.layers.Add()([x, y])
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(_CLASSES)(x)), 32


def dense_blocks():
    """Blocks of DenseNet: each convolution reads all before it."""
    x = inputs = keras.Input((32, 32, 3))
    x = keras.layers.Conv2D(32, 3, 2, padding="same")(x)
    for _ in range(3):
        for _ in range(3):
            y = keras.layers.BatchNormalization()(x)
            y = keras.layers.ReLU()(y)
            y = keras.layers.Conv2D(32, 3, padding="same")(y)
            x = keras.layers.Concatenate()([x, y])
        x = keras.layers.AveragePooling2D(2)(x)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dense(2048, "relu")(x)
    return keras.Model(inputs, keras.layers.Dense(_CLASSES)(x)), 32


def language():
    """An LSTM over words, and a sampled softmax over as many."""
    words = keras.Input((16,), dtype="int32")
    x = ks.layers.ShardedEmbedding(_WORDS, 64, name="words")(words)
    x = keras.layers.LSTM(256, return_sequences=True, name="states")(x)
    x = keras.layers.Dense(128, name="projected")(x)
    x = ks.layers.SampledSoftmax(_WORDS, num_sampled=500, name="softmax")(x)
    return keras.Model(words, x), 32


# The plan measures each model, and has no figure of these. But its rules were
# improved with the first eight in sight, see `tried.md`; not with the others.
MODELS = {
    **pipeline.MODELS,
    "alexnet": _alexnet,
    "vgg11": _vgg11,
    "gated": gated,
    "separable": separable,
    "mixer": mixer,
    "dense blocks": dense_blocks,
    "language": language,
}


def main():
    args = parse_arguments()
    if args.inside:
        inside(args)
        return
    figures, cells, points = {}, [], {}
    for name in args.models:
        found = of_model(args, name)
        figures[name] = found
        cells += [(name, rate, cell) for rate, cell in found.items()]
        steps = [s for cell in found.values() for s in cell["seconds"].values()]
        points[name] = [each for each in steps if all(each)]
    plots = _report.Plots(args.plots)
    axes = "predicted step (s)", "measured step (s)"
    plots.points("planner", "Predicted steps", axes, points, MOST_ERROR)
    plots.save()
    _program.finish(
        {"least_speed": LEAST_SPEED, "most_error": MOST_ERROR, **figures},
        list(missed(cells)),
    )


def of_model(args, name):
    """Dict from a rate to predicted and measured times of a step, by way."""
    begin = time.monotonic()

    def say(line):
        print(f"{line} (after {time.monotonic() - begin:.0f} s)", flush=True)

    plans = measured(args, name, _PLAN)[0]["plans"]
    say(f"{name}: planned")
    ways = sorted({way for predicted in plans.values() for way in predicted})
    seconds = {rate: {} for rate in plans}
    for way in ways:
        of_way = args_of(args, plans, way)
        for each in measured(of_way, name, way) if of_way.rates else ():
            took = each["seconds"] / each["steps"]
            rate = f"{each['rate_mbit']:g}"
            seconds[rate][way] = took
            planned = 1e3 * plans[rate][way]
            say(
                f"{rate} Mbit/s, {spelled(way)}: {planned:,.0f} ms predicted, "
                f"{1e3 * took:,.0f} ms measured"
            )
    print("\n".join(table(name, plans, seconds)), flush=True)
    return {rate: cell(plans[rate], seconds[rate]) for rate in plans}


def args_of(args, plans, way):
    """The command line with the rates and steps at which a way is trained."""
    steps = {}
    for rate, predicted in plans.items():
        most = _MOST_TIMES * min(predicted.values())
        if predicted.get(way, most) < most:
            number = round(_WINDOW_SECONDS / predicted[way])
            steps[float(rate)] = min(args.steps[0], max(2, number))
    return argparse.Namespace(
        **{**vars(args), "rates": [*steps], "steps": [*steps.values()]}
    )


def table(name, plans, seconds):
    """Lines: milliseconds, predicted and measured, of each way at each rate.

    Args:
        name: the model's.
        plans: dict from a rate to a dict from a way to predicted seconds.
        seconds: the same of measured ones.
    """
    rates = [f"{rate} Mbit/s" for rate in plans]
    yield f"| {name} | {' | '.join(rates)} |"
    yield "|---" * (1 + len(rates)) + "|"
    for way in sorted({way for found in plans.values() for way in found}):
        cells = [
            "; ".join(
                f"{1e3 * found[rate][way]:,.0f}"
                for found in (plans, seconds)
                if way in found[rate]
            )
            for rate in plans
        ]
        yield f"| {spelled(way)} | {' | '.join(cells)} |"


def spelled(way):
    """A way in words."""
    cost = _as_cost(way)
    if cost.way == DATA_PARALLELISM:
        return cost.way
    if cost.way == LAYER_PLACEMENT:
        tails = f"{cost.num_replicas} workers, {cost.num_tails} tails"
        return f"{cost.way} after {cost.stages[0]}, {tails}"
    ranks = " + ".join(map(str, cost.ranks_of_stages or [cost.num_replicas]))
    return (
        f"{cost.schedule}, {len(cost.stages) + 1} stages of {ranks}, "
        f"{cost.num_micro_batches} micro-batches"
    )


def cell(predicted, seconds):
    """What the plan chose, beside what was the fastest.

    Args:
        predicted: dict from a way to the predicted seconds of a step.
        seconds: dict from a way to the measured ones.
    """
    chosen = min(predicted, key=predicted.get)
    best = min(seconds, key=seconds.get)
    return {
        "chosen": chosen,
        "best": best,
        "speed": round(seconds[best] / seconds[chosen], 3),
        "error": round(predicted[chosen] / seconds[chosen] - 1, 3),
        "seconds": {
            way: [round(predicted.get(way, 0), 4), round(measured_seconds, 4)]
            for way, measured_seconds in seconds.items()
        },
    }


def missed(cells):
    """Sentences, one for each limit that too many cells are outside of."""
    slow = [c for c in cells if c[2]["speed"] < LEAST_SPEED]
    wrong = [c for c in cells if abs(c[2]["error"]) > MOST_ERROR]
    most = len(cells) * (1 - SHARE_OF_CELLS) + 1e-9
    for found, figure in (slow, "speed"), (wrong, "error"):
        if len(found) > most:
            where = ", ".join(
                f"{name} at {rate} Mbit/s {at[figure]}"
                for name, rate, at in found
            )
            yield f"{figure} of {len(found)} of {len(cells)} cells: {where}"


def measured(args, name, way):
    return _ways.measured(__file__, args, name, way, args.machines)


def inside(args):
    """Plans or trains on all machines, and reports on rank 0."""
    if args.way == _PLAN:
        strategy = ks.HybridStrategy()
    else:
        strategy = planner.strategy_of(_as_cost(args.way))
    _share_processors(strategy.rank, args.machines)
    window = _network.Window(is_first=strategy.rank == 0)
    window.open()
    with strategy.scope():
        model, batch = MODELS[args.inside]()
    if args.way == _PLAN:
        plans = of_rates(args, window, strategy, model, batch)
        window.report(batch, plans=plans)
        return
    _ways.trained(args, window, strategy, model, batch, _CLASSES, WARM_UP)
    window.report(batch)


def _share_processors(rank, num_machines):
    """Gives each machine a part of one processor, as the plan has it.

    Else one that waits leaves its part to others.
    """
    cores = sorted(os.sched_getaffinity(0))
    core = cores[rank * len(cores) // num_machines]
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})


def of_rates(args, window, strategy, model, batch):
    """Dict from a rate to the predicted steps of the fastest ways."""
    workload = _ways.made(model, batch, _CLASSES)
    with strategy.scope():
        model.compile(workload.optimizer, workload.loss)
    batches = _common.dataset(workload.x, workload.y, batch, 1)
    cluster = ks.planning.Cluster(
        num_machines=args.machines,
        processes_per_processor=max(1, args.machines // os.cpu_count()),
    )
    plans = {}
    for rate in window.rates:
        strategy.collectives.barrier("planner/limit")
        window.limit(rate)
        strategy.collectives.barrier("planner/begin")
        window.begin()
        costs = ks.plan(model, batches, cluster).comparison.costs
        window.end(1)
        plans[f"{rate:g}"] = _fastest(costs)
    window.idle()
    return plans


def _fastest(costs):
    """The fastest way of each kind, and its predicted seconds."""
    found = {}
    for cost in costs:
        kind = cost.way, len(cost.stages)
        if cost.is_exact and kind not in found:
            found[kind] = _as_way(cost), cost.step_seconds
    return dict(found.values())


def _as_way(cost):
    if cost.way == DATA_PARALLELISM:
        return json.dumps([cost.way])
    return json.dumps(
        [
            cost.way,
            cost.schedule,
            cost.stages,
            cost.num_replicas,
            cost.num_tails,
            cost.num_micro_batches,
            cost.tail_split,
            cost.ranks_of_stages,
        ]
    )


def _as_cost(way):
    way, *others = json.loads(way)
    names = "schedule", "stages", "num_replicas", "num_tails"
    names = *names, "num_micro_batches", "tail_split", "ranks_of_stages"
    facts = dict(zip(names, others, strict=False))
    return StrategyCost(way, 0, 0, 0, 0, (), **facts)


def parse_arguments():
    parser = _ways.parser(__doc__, MODELS, None, machines=4, steps=12)
    parser.add_argument("--plots", help="a folder, for a PNG file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
