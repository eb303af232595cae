"""How far updates of touched rows are off stock Keras's dense ones.

Trains a table in one process with gradients of rows drawn by Zipf, and a
learning rate that follows a cosine: by stock Keras in float64 on the dense
gradient, and in float32 by stock Keras, by exact rules and by lazy ones. The
error is the distance of the weights from float64's, relative to the distance
that those have moved. Asked of exact rules: at most 1e-5, and at most 1.1 times
stock Keras's own error in float32 or a millionth, whichever is larger. Lazy
rules are asked to be off by more than 0.1 %, as a control.

Beside Adam stand two published rules that catch rows up when they are touched
next, in NumPy and float64: Caffe2's `SmartDecaySparseAdam` (all steps with the
learning rate and the second moment of the last one, without bias correction)
and HugeCTR's `Update_t.LazyGlobal` (all steps with the second moment of the
first one, its bias correction and the learning rate of the last one).
"""

import _program
import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks

LIMIT = 1e-5
FLOOR = 1e-6
TIMES_STOCK = 1.1
LEAST_OF_LAZY = 1e-3
RULES = {
    "Adam": ("Adam", {}),
    "AdamW": ("AdamW", {"weight_decay": 0.01}),
    "AMSGrad": ("Adam", {"amsgrad": True}),
    "Adamax": ("Adamax", {}),
    "Nadam": ("Nadam", {}),
    "Lion": ("Lion", {}),
    "Ftrl": ("Ftrl", {"l1_regularization_strength": 0.01}),
    "SGD, momentum": ("SGD", {"momentum": 0.9}),
    "RMSprop, momentum": ("RMSprop", {"momentum": 0.9}),
    "Adadelta": ("Adadelta", {}),
}
RATES = {"Adadelta": 1.0, "Lion": 1e-3, "Ftrl": 0.1}  # others: 0.01
BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-7  # Keras's
WAYS = ("stock", "exact", "lazy")


def main():
    args = parse_arguments()
    ids, upstream = batches(args)
    figures, misses = {}, []
    print(f"{'':18}" + "".join(f"{way:>12}" for way in WAYS), flush=True)
    for name in RULES:
        start, reference = trained(name, "float64", args, ids, upstream)
        moved = np.linalg.norm(reference - start)
        errors = {
            way: np.linalg.norm(
                trained(name, way, args, ids, upstream)[1] - reference
            )
            / moved
            for way in WAYS
        }
        figures[name] = {way: float(f"{e:.2g}") for way, e in errors.items()}
        line = "".join(f"{errors[way]:12.1e}" for way in WAYS)
        print(f"{name:18}{line}", flush=True)
        misses += missed(name, errors)
        if name == "Adam":
            for other in PUBLISHED:
                found = caught_up(other, start, args, ids, upstream)
                found = [np.linalg.norm(w - reference) / moved for w in found]
                figures[name][other] = [float(f"{e:.2g}") for e in found]
                print(
                    f"  {other:16}{found[0]:12.1e}, {found[1]:.1e} after a "
                    "touch of all rows",
                    flush=True,
                )
    _program.finish({"num_steps": args.num_steps, "errors": figures}, misses)


def missed(name, errors):
    """Sentences about errors of one rule that are outside of their limits."""
    misses = []
    limit = min(LIMIT, max(TIMES_STOCK * errors["stock"], FLOOR))
    if not errors["exact"] <= limit:
        misses.append(
            f"{name}: exact is off by {errors['exact']:.1e}, at most "
            f"{limit:.1e} asked"
        )
    if not errors["lazy"] > LEAST_OF_LAZY:
        misses.append(
            f"{name}: lazy is off by {errors['lazy']:.1e} only: the control "
            "fails"
        )
    return misses


def batches(args):
    """Ids `(steps, ids)` and gradients `(steps, ids, dim)`."""
    random = np.random.default_rng(0)
    shape = args.num_steps, args.num_ids
    by_zipf = 1 / np.arange(1, args.num_rows + 1)
    ids = random.choice(args.num_rows, shape, p=by_zipf / by_zipf.sum())
    return ids, random.normal(size=(*shape, args.dim))


def trained(name, way, args, ids, upstream):
    """Weights before and after a training: float64 arrays."""
    dtype = "float64" if way == "float64" else "float32"
    kind, options = RULES[name]
    rate = schedule(RATES.get(name, 0.01), args)
    optimizer = getattr(keras.optimizers, kind)(rate, **options)
    shape = args.num_rows, args.dim
    start = np.random.default_rng(1).normal(size=shape) * 0.05
    if way in ("exact", "lazy"):
        optimizer = ks.HybridOptimizer(optimizer, sparse_updates=way)
        table = ks.ShardedTable(*shape, dtype=dtype)
        table.assign(start.astype(dtype))
        variable = table.variable
    else:
        variable = keras.Variable(start.astype(dtype), dtype=dtype)
    optimizer.build([variable])

    @tf.function
    def step(ids, values):
        gradient = tf.IndexedSlices(values, ids, tf.constant(shape, tf.int64))
        if way not in ("exact", "lazy"):
            gradient = tf.math.unsorted_segment_sum(values, ids, shape[0])
        optimizer.apply([gradient], [variable])

    for of_step, values in zip(ids, upstream, strict=True):
        step(tf.constant(of_step), tf.constant(values, dtype))
    return start, np.array(variable.numpy(), "float64")


def schedule(rate, args):
    # Not down to zero, which would leave no weights of Ftrl.
    return keras.optimizers.schedules.CosineDecay(
        rate, args.num_steps, alpha=0.1
    )


def caught_up(name, start, args, ids, upstream):
    """Weights after a training by Adam with one of `PUBLISHED`.

    Returns:
        Those that it has stored, and those after a touch of all rows.
    """
    update, is_one_behind = PUBLISHED[name]
    rate = schedule(0.01, args)
    weights, m, v = start.copy(), np.zeros_like(start), np.zeros_like(start)
    last = np.zeros((args.num_rows, 1))

    def touch(rows, gradient, step, now):
        steps = now - last[rows]
        new_m = m[rows] * BETA_1**steps + (1 - BETA_1) * gradient
        new_v = v[rows] * BETA_2**steps + (1 - BETA_2) * gradient**2
        weights[rows] -= float(rate(step)) * update(
            steps, last[rows], (m[rows], v[rows]), (new_m, new_v)
        )
        m[rows], v[rows], last[rows] = new_m, new_v, now

    for step, (of_step, values) in enumerate(zip(ids, upstream, strict=True)):
        rows, index = np.unique(of_step, return_inverse=True)
        gradient = np.zeros((len(rows), args.dim))
        np.add.at(gradient, index.reshape(-1), values)
        touch(rows, gradient, step, step + 1)
    stored = weights.copy()
    now = args.num_steps + is_one_behind
    touch(np.arange(args.num_rows), 0.0, args.num_steps - 1, now)
    return stored, weights


def smart_decay(steps, last, old, new):
    """Caffe2's movement of rows: the missed steps, and this one."""
    missed = old[0] * BETA_1 * (1 - BETA_1 ** (steps - 1)) / (1 - BETA_1)
    return (new[0] + missed) / (np.sqrt(new[1]) + EPSILON)


def lazy_global(steps, last, old, new):
    """HugeCTR's movement of rows: all steps before this one."""
    last = np.maximum(last, 1)  # nothing moves before the first gradient
    correction = np.sqrt(1 - BETA_2**last) / (1 - BETA_1**last)
    size = correction * (1 - BETA_1**steps) / (1 - BETA_1)
    return size * old[0] / (np.sqrt(old[1]) + EPSILON)


# Functions of the number of steps since rows were touched, the step of that
# touch, and the moments before and after: the movement / the learning rate. And
# whether the step itself is left to the next touch.
PUBLISHED = {"Caffe2": (smart_decay, False), "HugeCTR": (lazy_global, True)}


def parse_arguments():
    parser = _program.parser(__doc__)
    add = parser.add_argument
    # More elements than tables that are updated whole have.
    add("--num-rows", type=int, default=4096)
    add("--dim", type=int, default=16)
    add("--num-ids", type=int, default=16, help="of a step")
    add("--num-steps", type=int, default=2000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
