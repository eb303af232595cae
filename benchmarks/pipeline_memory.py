"""Peak memory of the processes of a model in stages, and of one process.

A model of equal `Dense` layers, trained with Adam by stock Keras in one
process, then in stages by some schedules of `ks.PipelineStrategy`, in whose
scope it is made. Each process holds the weights, slots and gradients of its
stage alone. Two peaks of resident memory, above that of a process without a
model: until the end of `compile`, at most `LIMIT` times the N-th part of the
bytes of weights and slots; and in `fit`, at most `FIT_LIMIT` times the N-th
part of the peak of one process. With a flush a stage holds two sums of
gradients, of the micro-batches so far and with the last one, where one process
has none.
"""

import contextlib
import re

import _program
import keras
import numpy as np

import keras_sparsity as ks

LIMIT, FIT_LIMIT, TAIL_LIMIT = 1.2, 2.0, 0.7
_SLOTS = 2  # of Adam
_ALONE = "one process"
_MEGABYTE = 2**20
_TAIL_WIDTH, _TAIL_BATCH = 1024, 12_288


def main():
    args = parse_arguments()
    model_bytes = 4 * args.layers * args.width**2
    figures = {"model_megabytes": model_bytes // _MEGABYTE}
    figures |= {"limit": LIMIT, "fit_limit": FIT_LIMIT}
    misses = []
    for way in (_ALONE, *args.schedules):
        is_alone = way == _ALONE
        found = ks.launch.run(
            measure,
            1 if is_alone else args.processes,
            engine="local" if is_alone else args.engine,
            args=(args, way),
        )
        figures[way] = {
            name: [rank[name] // _MEGABYTE for rank in found]
            for name in found[0]
        }
        print(f"{way}: {figures[way]} MiB", flush=True)
        if is_alone:
            of_fit = found[0]["training"]
            continue
        of_stage = (1 + _SLOTS) * model_bytes / len(found)
        for name, whole, limit in (
            ("building", of_stage, LIMIT),
            ("training", of_fit / len(found), FIT_LIMIT),
        ):
            ratio = max(rank[name] for rank in found) / whole
            figures[way][f"{name}_ratio"] = round(ratio, 3)
            if ratio > limit:
                misses.append(f"{way}, {name}: {ratio:.2f} times its part")
    figures["tail_batches"], missed = of_tails(args)
    misses += missed
    _program.finish(figures, misses)


def of_tails(args):
    """Megabytes of the tail worker by `tail_batches`, and what is missed."""
    figures = {}
    for way in ("whole", "by_worker"):
        *_, tail = ks.launch.run(
            measure_tail, args.processes, engine=args.engine, args=(way,)
        )
        figures[way] = tail // _MEGABYTE
        print(f"tail_batches={way!r}: {figures[way]} MiB", flush=True)
    ratio = figures["by_worker"] / figures["whole"]
    missed = [f"tail_batches: {ratio:.2f}"] if ratio > TAIL_LIMIT else []
    return {**figures, "ratio": round(ratio, 3)}, missed


def measure_tail(tail_batches):
    """On each rank: bytes of memory in `fit`, above those after `compile`."""
    strategy = ks.LayerPlacementStrategy(["head"], tail_batches=tail_batches)
    layers = [keras.layers.Dense(_TAIL_WIDTH, "tanh") for _ in range(8)]
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((16,)),
                keras.layers.Dense(16, name="head"),
                *layers,
                keras.layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
    before = _resident("VmRSS")
    _forget_peak()
    x = np.ones((_TAIL_BATCH, 16), "float32")
    model.fit(x, x[:, :1], _TAIL_BATCH, epochs=2, verbose=0)
    return _resident("VmHWM") - before


def measure(args, way):
    """On each rank: bytes of memory above those without a model."""
    strategy = None if way == _ALONE else ks.PipelineStrategy(way)
    keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]).predict(
        np.ones((1, 4)), verbose=0
    )
    before = _resident("VmRSS")
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((args.width,))])
        for _ in range(args.layers):
            model.add(keras.layers.Dense(args.width, use_bias=False))
        model.compile("adam", "mse")
    building = _resident("VmHWM") - before
    _forget_peak()
    x = np.ones((args.batch, args.width), "float32")
    model.fit(x, x, args.batch, epochs=args.steps, verbose=0)
    return {
        "building": building,
        "training": _resident("VmHWM") - before,
    }


def _resident(name):
    """Bytes: the resident memory, "VmRSS", or its peak, "VmHWM"."""
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(rf"{name}:\s*(\d+)", file.read())[1])


def _forget_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def parse_arguments():
    parser = _program.parser(__doc__)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--engine", default="native")
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "spectrain"])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=3072)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    main()
