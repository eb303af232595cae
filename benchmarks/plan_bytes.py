"""Do the plan's formulas predict the bytes on the network?

Three models train on an emulated cluster, whose interfaces count the bytes: a
language model with sampled softmax, a recommender with tables of several sizes,
and ResNet-50 at small images. Without headers and idle traffic, the bytes must
be within 5 % of the plan's, which uses the alpha measured in the same run.
Needs root, as `cluster.py` does.
"""

import argparse

import _network
import _program
import cluster
import keras
from _models import MODELS
from workloads import _common

import keras_sparsity as ks
from keras_sparsity.board import model_plan

LIMIT = 0.05
WARM_UP = 20


def main():
    args = parse_arguments()
    if args.inside:
        inside(args)
        return
    figures, misses = {"limit": LIMIT}, []
    for name in args.models:
        found = on_cluster(args, name)
        counted, planned = found["counted_bytes"], found["planned_bytes"]
        error = planned / counted - 1
        figures[name] = {**found, "error": round(error, 4)}
        paths = ", ".join(f"{n} {b:,.0f}" for n, b in found["paths"].items())
        print(
            f"{name}: counted {counted:,.0f} bytes a step, planned "
            f"{planned:,.0f} ({error:+.1%}); alpha of the model "
            f"{found['alpha']:.4f}; {paths}",
            flush=True,
        )
        if abs(error) > LIMIT:
            misses.append(f"{name}: {error:+.1%}, at most {LIMIT:.0%} asked")
    _program.finish(figures, misses)


def on_cluster(args, name):
    """The figures of `inside`, of all machines."""
    arguments = ["--inside", name, "--steps", str(args.steps)]
    (found,) = cluster.measure(
        __file__, arguments, args.engine, machines=args.machines
    )
    counted = sum(
        machine["sent_payload_bytes_per_step"]
        for machine in found["per_machine"]
    )
    return {
        "counted_bytes": counted,
        **{k: found[k] for k in ("planned_bytes", "alpha", "paths")},
    }


def inside(args):
    strategy = ks.HybridStrategy(architecture="hybrid")
    window = _network.Window(is_first=strategy.rank == 0)
    args.warm_up, args.steps = min(WARM_UP, args.steps), [args.steps]
    num_steps = _common.num_steps(args)
    made, batch = MODELS[args.inside](strategy.size, num_steps)
    model = made.model
    with strategy.scope():
        model.compile(keras.optimizers.Adagrad(0.01), made.loss)
    timed = _common.Timed(window, args, strategy.collectives.barrier)
    batches = _common.dataset(made.x, made.y, batch, num_steps)
    model.fit(batches, callbacks=[timed], shuffle=False, verbose=0)
    plan = model_plan.of_running(model)
    chosen = [v.costs[v.architecture] for v in plan.variables]
    paths = {a: plan.bytes_of(a) for a in ("allreduce", "ps", "allgather")}
    window.report(
        batch,
        planned_bytes=sum(sum(cost.sent_bytes) for cost in chosen),
        alpha=plan.alpha_model,
        paths={name: b for name, b in paths.items() if b},
    )


def parse_arguments():
    parser = _program.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--machines", type=int, default=3)
    parser.add_argument("--engine", default="native")
    parser.add_argument("--steps", type=int, default=40, help="counted")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
