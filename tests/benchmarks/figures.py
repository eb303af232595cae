"""Runs and their figures, as the benchmarks report them."""

import argparse

from _runs import Run

RUN = Run("lm", "hybrid", machines=4, rate=50)


# Two tables of 1,000 rows, one of them an output's kernel with its bias, and
# 500 dense elements.
def make_figures(
    run, sparse_factor=1.0, words=1000.0, step=1.0, headers=1.0, to_target=50.0
):
    """Figures of a run; `sparse_factor`: its sparse bytes / the least."""
    together = "no local" not in run.way
    itemsize = 2 if "16" in run.way else 4
    asked = run.processes * 0.02
    if together and run.processes == 2:
        asked = 0.03
    share = (run.machines - 1) / run.machines
    rows = 4 * asked * 1000 * (64 + 64 + 1) * itemsize * share
    ids = 2 * 2 * asked * 1000 * 2 * share
    size = run.machines * run.processes
    dense = 4 * 500 * itemsize * (size - 1) / size
    payload = (sparse_factor * rows + ids + dense) / 2
    each_way = {"": payload * headers, "payload_": payload}
    table = {
        "architecture": "ps",
        "alpha": 0.02,
        "alpha_machine": 0.03 if run.processes == 2 else 0.02,
    }
    counted = {
        "alpha": 0.02,
        "alpha_machine": table["alpha_machine"],
        "changed_pulls": 0.5,
        "needed_pushes": 0.25,
    }
    return {
        "machines": run.machines,
        "processes": run.processes,
        "rate_mbit": run.rate,
        "steps": 10,
        "seconds": 10 * step,
        "words_per_second": words,
        "busy_before": 0.1,
        "seconds_alone": 0.9,
        "workload": {
            "wire_dtype": "bfloat16" if "16" in run.way else None,
            "local_aggregation": together,
        },
        "per_machine": [
            {
                f"{way}_{kind}bytes_per_step": number
                for way in ("sent", "received")
                for kind, number in each_way.items()
            }
        ]
        * run.machines,
        "variables": [
            {"shape": [1000, 64], "exchange": "a", "rows": counted, **table},
            {"shape": [1000, 64], "exchange": "b", **table},
            {"shape": [1000, 1], "exchange": "b", **table},
            {"shape": [15, 20], "comes_first": True, **_DENSE},
            {"shape": [10, 20], "comes_first": False, **_DENSE},
        ],
        "to_target": {
            "is_reached": True,
            "target": 1.5,
            "least_loss": 0.5,
            "steps": 100,
            "seconds": to_target,
            "curve": [{"steps": 100, "seconds": to_target, "loss": 1.0}],
        },
    }


_DENSE = {
    "architecture": "allreduce",
    "alpha": None,
    "alpha_machine": None,
    "exchange": None,
}


def make_options(**others):
    return argparse.Namespace(
        **{
            "machines": [1, 8],
            "rates": None,
            "workloads": None,
            "engine": "horovod",
            "size": "large",
            "steps": None,
            "warm_up": None,
            "arguments": [],
            **others,
        }
    )
