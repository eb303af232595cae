"""Does the plan say what the network carries?

Three models train on some processes in a network namespace of their own, whose
interface counts the bytes: a language model with sampled softmax, a recommender
with tables of several sizes, and ResNet-50 at small images. Less what an idle
run of the same length sends, they must be within 5 % of what the plan's
formulas say with the alpha that was measured meanwhile. ResNet-50 must be
AllReduce alone. Needs root, for the namespace, and the command `ip`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import _timing
import keras
from _models import MODELS

import keras_sparsity as ks
from keras_sparsity import model_plan

LIMIT = 0.05
WARM_UP = 20


def main():
    args = parse_arguments()
    if args.inside:
        inside(args)
        return
    if os.geteuid() != 0 or not shutil.which("ip"):
        sys.exit(
            "plan_bytes.py counts at the interface of a network namespace of "
            "its own: run it as root, where `ip` (iproute2) is installed."
        )
    figures, misses = {"limit": LIMIT}, []
    for name in args.models:
        found = in_namespace(args, name)
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
        if name == "resnet50" and set(found["paths"]) != {"allreduce"}:
            misses.append(f"resnet50 goes by {found['paths']}")
    _timing.finish(figures, misses)


def in_namespace(args, name):
    """What `inside` prints, run in a namespace that is gone afterwards."""
    namespace = f"keras-sparsity-{os.getpid()}"
    run = ["ip", "netns", "exec", namespace, sys.executable]
    run += ["-m", "keras_sparsity.launch", "run", "-n", str(args.processes)]
    run += ["--engine", args.engine, __file__, "--inside", name]
    run += ["--steps", str(args.steps), "--engine", args.engine]
    subprocess.run(["ip", "netns", "add", namespace], check=True)
    try:
        subprocess.run(
            ["ip", "-n", namespace, "link", "set", "lo", "up"], check=True
        )
        result = subprocess.run(run, capture_output=True, text=True)
    finally:
        subprocess.run(["ip", "netns", "del", namespace], check=True)
    if result.returncode:
        sys.exit(result.stdout + result.stderr)
    return json.loads(result.stdout.splitlines()[-1])


def inside(args):
    strategy = ks.HybridStrategy(architecture="hybrid")
    warm_up = min(WARM_UP, args.steps)
    model, x, y, loss = MODELS[args.inside](strategy.size, warm_up + args.steps)
    with strategy.scope():
        model.compile(keras.optimizers.Adagrad(0.01), loss)
    counter = Counter(warm_up, args.steps, strategy.collectives)
    batch = len(x) // (warm_up + args.steps)
    model.fit(x, y, batch, callbacks=[counter], shuffle=False, verbose=0)
    plan = model_plan.of_running(model)
    if strategy.rank == 0:
        chosen = [v.costs[v.architecture] for v in plan.variables]
        paths = {a: plan.bytes_of(a) for a in ("allreduce", "ps", "allgather")}
        found = {
            "counted_bytes": counter.bytes_per_step,
            "planned_bytes": sum(sum(cost.sent_bytes) for cost in chosen),
            "alpha": plan.alpha_model,
            "paths": {name: b for name, b in paths.items() if b},
        }
        print(json.dumps(found))


class Counter(keras.callbacks.Callback):
    """Bytes of the steps after some, less those of an idle time as long."""

    def __init__(self, warm_up, steps, ranks):
        super().__init__()
        self.warm_up, self.steps, self.ranks = warm_up, steps, ranks

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == self.warm_up:
            self.ranks.barrier("begin")
            self.start = sent_bytes(), time.monotonic()
        if batch + 1 == self.warm_up + self.steps:
            self.ranks.barrier("end")
            sent, seconds = (
                now - then
                for now, then in zip(
                    (sent_bytes(), time.monotonic()), self.start, strict=True
                )
            )
            before = sent_bytes()
            time.sleep(seconds)
            idle = sent_bytes() - before
            self.ranks.barrier("idle")
            self.bytes_per_step = (sent - idle) / self.steps


def sent_bytes():
    """Bytes that the interface has sent since it is up."""
    with open("/proc/net/dev") as file:
        (line,) = (x for x in file if x.strip().startswith("lo:"))
    return int(line.split()[9])


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--engine", default="native")
    parser.add_argument("--steps", type=int, default=40, help="counted")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
