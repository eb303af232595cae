"""Does `architecture="measured"` train as fast as the best fixed architecture?

Three models, each trained under "measured" and under each fixed architecture
of the whole model, on several processes of this machine: a language model with
sampled softmax, a recommender with tables of several sizes, and ResNet-50 at
small images. "measured" trains until it has decided. Then all run in turn,
round by round, and the fixed one with the least median is the best. It and
"measured" then run in turn, in rounds of their own, so that the choice of the
best does not count in its favour: the ratio of their steps/s is judged.

Asked of each model: the 95 % interval of the ratio (of the mean of its
logarithm over the rounds) includes 1, or lies above; it is not wider than 6 %.
"""

import math
import statistics

import _program
import keras
import scipy.stats
import tensorflow as tf
from _models import MODELS
from _steps import Steps
from _timing import in_turn

import keras_sparsity as ks
from keras_sparsity.board import model_plan

FIXED = ("hybrid", "allreduce", "allgather", "ps")
# Of a round.
STEPS = 10
# "measured" decides after 16 steps and looks back after 16 more.
SETTLE = 70
FIRST_ROUNDS = 8
LEAST_ROUNDS, MOST_ROUNDS, WIDTH = 20, 80, 0.06


def main():
    args = parse_arguments()
    models, misses = {}, []
    for name in args.models:
        figures = ks.launch.run(
            measure,
            args.processes,
            engine=args.engine,
            args=(name,),
        )[0]
        models[name] = figures
        low, high = figures["interval"]
        milliseconds = ", ".join(
            f"{a} {ms}" for a, ms in figures["milliseconds"].items()
        )
        print(
            f"{name}: {milliseconds} ms a step; steps/s of measured over those "
            f"of {figures['best']} {figures['ratio']:.3f} ({low:.3f} to "
            f"{high:.3f}, {figures['rounds']} rounds)\n  measured: "
            f"{figures['found']}",
            flush=True,
        )
        if high < 1:
            misses.append(f"{name}: {high:.3f} at most, 1 asked")
        if high - low > WIDTH:
            misses.append(f"{name}: the interval is {high - low:.3f} wide")
    _program.finish({"engine": args.engine, "models": models}, misses)


def measure(name):
    """On each rank: the figures of one model."""
    runs = {}
    for architecture in FIXED:
        runs[architecture] = make(name, architecture)[1]
    model, runs["measured"] = make(name, "measured")
    runs["measured"].train(SETTLE)
    first = in_turn(runs, FIRST_ROUNDS)
    medians = {a: statistics.median(rounds) for a, rounds in first.items()}
    best = min(FIXED, key=medians.get)
    logarithms = []
    both = {a: runs[a] for a in ("measured", best)}
    while True:
        rounds = in_turn(both, LEAST_ROUNDS)
        logarithms += [
            math.log(b / a)
            for a, b in zip(rounds["measured"], rounds[best], strict=True)
        ]
        ratio, low, high = interval(logarithms)
        if high - low <= WIDTH or len(logarithms) >= MOST_ROUNDS:
            break
    return {
        "milliseconds": {a: round(ms, 1) for a, ms in medians.items()},
        "best": best,
        "ratio": round(ratio, 4),
        "interval": [round(low, 4), round(high, 4)],
        "rounds": len(logarithms),
        "found": found(model),
    }


def interval(logarithms):
    """exp of the mean, and of its 95 % interval (Student's t)."""
    mean = statistics.mean(logarithms)
    error = statistics.stdev(logarithms) / math.sqrt(len(logarithms))
    half = error * scipy.stats.t.ppf(0.975, len(logarithms) - 1)
    return tuple(math.exp(x) for x in (mean, mean - half, mean + half))


def make(name, architecture):
    """A model under an architecture, and its `Steps`."""
    keras.utils.set_random_seed(1)
    strategy = ks.HybridStrategy(architecture=architecture)
    made, batch = MODELS[name](strategy.size, STEPS)
    model = made.model
    with strategy.scope():
        model.compile(keras.optimizers.Adagrad(0.01), made.loss)
    dataset = tf.data.Dataset.from_tensor_slices((made.x, made.y))
    dataset = dataset.batch(batch).cache().repeat()
    return model, Steps(model, strategy.shard(dataset), STEPS)


def found(model):
    """How each sparse variable travels."""
    return {
        v.sparsity.name: v.architecture
        for v in model_plan.of_running(model).variables
        if v.sparsity.alpha is not None
    }


def parse_arguments():
    parser = _program.parser(__doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    add("--processes", type=int, default=2)
    add("--engine", choices=["native", "horovod"], default="native")
    return parser.parse_args()


if __name__ == "__main__":
    main()
