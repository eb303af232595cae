"""The cost of measuring a model's sparsity while it trains.

Seconds of a step of `fit` with the counting of touched rows, which is always
on, / without: at most 1.03, in one process and in several. The models are
small, so that overheads show; each has a `ShardedEmbedding` and an ordinary
`Embedding`. A third model without counting shows the noise. Then the counting
alone, in microseconds per variable: in a sampled step and in another.
"""

import contextlib
import functools
import statistics
import time

import _program
import _timing
import keras
import numpy as np
import tensorflow as tf
from single_process import StepSeconds, make_dataset

import keras_sparsity as ks
from keras_sparsity.sparsity import touches

LIMIT = 1.03


def main():
    args = parse_arguments()
    figures, misses = {"limit": LIMIT}, []
    for num_processes in args.num_processes:
        # Of rank 0: a step takes all ranks the same time.
        seconds = ks.launch.run(
            measure,
            num_processes,
            engine=args.engine if num_processes > 1 else "local",
            args=(args,),
        )[0]
        step = statistics.median(seconds["without"])
        print(f"{num_processes} process(es), {1000 * step:.2f} ms a step")
        figures[f"milliseconds_{num_processes}"] = round(1000 * step, 3)
        ratios = {
            name: _timing.median_ratio(seconds[name], seconds["without"])
            for name in ("with", "control")
        }
        for name, ratio in ratios.items():
            print(f"  {name:8} {ratio:6.3f}")
            figures[f"{name}_{num_processes}"] = round(ratio, 4)
        if ratios["with"] > LIMIT:
            misses.append(
                f"{ratios['with']:.3f} times the step in {num_processes} "
                f"process(es), at most {LIMIT} asked"
            )
    figures.update(of_one_variable(args))
    _program.finish(figures, misses)


def measure(args):
    """dict from the name of a model to the seconds of a step, by round."""
    dataset = make_dataset(args)
    fits, clocks = {}, {}
    for name in ("with", "without", "control"):
        fit = functools.partial(
            make_model(args).fit,
            dataset,
            steps_per_epoch=args.steps,
            verbose=0,
        )
        is_counted = name == "with"
        with contextlib.nullcontext() if is_counted else touches.left_out():
            fit()  # traced, and past the first samples
        clocks[name] = StepSeconds()
        fits[name] = functools.partial(fit, callbacks=[clocks[name]])
    _timing.interleaved(fits, num_rounds=args.rounds, num_warm_up=0)
    return {name: clock.seconds for name, clock in clocks.items()}


def of_one_variable(args, num_variables=10):
    """Microseconds that counting takes in a sampled step, and in another."""
    words = next(iter(make_dataset(args)))[0]
    ids = tf.reshape(words, [-1])
    variables = [
        keras.Variable(np.zeros((args.num_rows, 1)))
        for _ in range(num_variables)
    ]

    @tf.function
    def count(ids):
        touches.end_step([(variable, ids, None) for variable in variables])

    @tf.function
    def nothing(ids):
        del ids

    count(ids)
    nothing(ids)
    found = {"sampled": [], "other": []}
    for _ in range(args.rounds):
        ks.sparsity.reset(variables)
        # The first 16 steps are sampled, the next 15 are not.
        for kind, num_steps in (("sampled", 16), ("other", 15)):
            seconds = {
                step: timed(step, ids, num_steps) for step in (count, nothing)
            }
            seconds = (seconds[count] - seconds[nothing]) / num_variables
            found[kind].append(seconds)
    found = {k: 1e6 * statistics.median(s) for k, s in found.items()}
    print("microseconds of one variable in a step:")
    for kind, microseconds in found.items():
        print(f"  {kind:8} {microseconds:6.1f}")
    return {f"microseconds_{k}": round(s, 1) for k, s in found.items()}


def timed(step, ids, num_steps):
    start = time.perf_counter()
    for _ in range(num_steps):
        step(ids)
    return (time.perf_counter() - start) / num_steps


def make_model(args):
    keras.utils.set_random_seed(0)
    words = keras.Input((args.time,), dtype="int32")
    embeddings = ks.layers.ShardedEmbedding, keras.layers.Embedding
    rows = [layer(args.num_rows, args.dim)(words) for layer in embeddings]
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.Add()(rows))
    x = keras.layers.Dense(256, activation="relu")(x)
    x = keras.layers.Dense(10, activation="softmax")(x)
    model = keras.Model(words, x)
    with ks.HybridStrategy(architecture="hybrid").scope():
        model.compile("sgd", loss="sparse_categorical_crossentropy")
    return model


def parse_arguments():
    parser = _program.parser(__doc__)
    add = parser.add_argument
    add("--num-processes", type=int, nargs="+", default=[1, 2])
    add("--engine", default="native", help="of several processes")
    add("--num-rows", type=int, default=20_000)
    add("--dim", type=int, default=64)
    add("--batch-size", type=int, default=128)
    add("--time", type=int, default=20, help="words of an example")
    add("--rounds", type=int, default=20)
    add(
        "--steps",
        type=int,
        default=97,
        help="steps of a round, the first not timed",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
