"""Strategies that `ks.plan` predicts, and what they measure on a cluster.

For each model, and each rate of the links of an emulated cluster, `ks.plan`
predicts the step of every way to train the model. Of these the fastest ones
with the result of one process are trained: data parallelism, layer placement,
and a pipeline of each number of stages. In 11 of 12 cells the way that the plan
has first must have at least 0.95 of the steps/s of the fastest measured one,
and its predicted time must be within 20 % of the measured one. All machines
share this machine's processors, which the plan is told. Needs root, as
`cluster.py` does.
"""

import json
import os

import _network
import _program
import _ways
import layer_placement
import pipeline
from workloads import _common

import keras_sparsity as ks
from keras_sparsity import planner
from keras_sparsity.stages.costs import DATA_PARALLELISM, StrategyCost

LEAST_SPEED, MOST_ERROR, SHARE_OF_CELLS = 0.95, 0.20, 11 / 12
WARM_UP = 4
_PLAN = "plan"
_CLASSES = 10


def _alexnet():
    return layer_placement.alexnet(), 28


# None of them has a part in how the plan was made.
MODELS = {
    "attention": pipeline.attention,
    "residual": pipeline.residual,
    "fully connected": pipeline.fully_connected,
    "alexnet": _alexnet,
}


def main():
    args = parse_arguments()
    if args.inside:
        inside(args)
        return
    figures, cells = {}, []
    for name in args.models:
        found = of_model(args, name)
        figures[name] = found
        cells += [(name, rate, cell) for rate, cell in found.items()]
    _program.finish(
        {"least_speed": LEAST_SPEED, "most_error": MOST_ERROR, **figures},
        list(missed(cells)),
    )


def of_model(args, name):
    """Dict from a rate to predicted and measured times of a step, by way."""
    plans = measured(args, name, _PLAN)[0]["plans"]
    print(plans, flush=True)
    ways = {way for predicted in plans.values() for way in predicted}
    seconds = {}
    for way in sorted(ways):
        for each in measured(args, name, way):
            rate = f"{each['rate_mbit']:g}"
            seconds.setdefault(rate, {})[way] = 1 / each["steps_per_second"]
            print(name, rate, way, seconds[rate][way], flush=True)
    cells = {}
    for rate, predicted in plans.items():
        cells[rate] = cell(predicted, seconds[rate])
        print(f"{name}, {rate} Mbit/s: {cells[rate]}", flush=True)
    return cells


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
        ]
    )


def _as_cost(way):
    way, *others = json.loads(way)
    names = "schedule", "stages", "num_replicas", "num_tails"
    names = *names, "num_micro_batches", "tail_split"
    facts = dict(zip(names, others, strict=False))
    return StrategyCost(way, 0, 0, 0, 0, (), **facts)


def parse_arguments():
    parser = _ways.parser(__doc__, MODELS, None, machines=4, steps=6)
    return parser.parse_args()


if __name__ == "__main__":
    main()
