"""A recommender of ordinary `Embedding`s beside one of `ShardedEmbedding`s.

The first is a subclassed model of stock Keras's layers, the second a functional
one of this library's: `workloads/subclassed_recommender.py` and
`recommender.py`, in turn, both under the default strategy, once it has chosen
the placement of each table. In the median of the rounds the first must have at
least 0.95 of the samples/s of the second, and at most 1.05 of the bytes of a
step. Needs root, as `cluster.py` does.
"""

import os
import statistics

import _program
import cluster

LEAST_SPEED, MOST_BYTES = 0.95, 1.05
_ORDINARY, _SHARDED = WAYS = "subclassed_recommender", "recommender"
_FOLDER = os.path.join(os.path.dirname(__file__), "workloads")


def main():
    args = parse_arguments()
    found = {way: [] for way in WAYS}
    for number in range(args.rounds):
        for way in WAYS[:: -1 if number % 2 else 1]:
            found[way].append(measured(args, way))
            print(f"round {number + 1}, {way}: {found[way][-1]}", flush=True)
    figures, misses = {"rounds": found}, []
    for rate in found[_SHARDED][0]:
        ratios = {
            figure: statistics.median(
                ordinary[rate][figure] / sharded[rate][figure]
                for ordinary, sharded in zip(*found.values(), strict=True)
            )
            for figure in ("samples_per_second", "bytes_per_step")
        }
        speed, num_bytes = ratios.values()
        figures[rate] = {
            figure: round(ratio, 4) for figure, ratio in ratios.items()
        }
        if speed < LEAST_SPEED:
            misses.append(f"{rate} Mbit/s: {speed:.3f} of the samples/s")
        if num_bytes > MOST_BYTES:
            misses.append(f"{rate} Mbit/s: {num_bytes:.3f} of the bytes")
    limits = {"least_speed": LEAST_SPEED, "most_bytes": MOST_BYTES}
    _program.finish({**limits, **vars(args), **figures}, misses)


def measured(args, way):
    """Samples/s, and bytes of a step that all machines send, by rate."""
    arguments = [f"--size={args.size}", f"--steps={args.steps}"]
    arguments += [f"--warm-up={args.warm_up}", "--architecture=auto"]
    at_rates = cluster.measure(
        os.path.join(_FOLDER, f"{way}.py"),
        arguments,
        args.engine,
        machines=args.machines,
        rate=args.rates,
    )
    return {
        f"{found['rate_mbit']:g}": {
            "samples_per_second": found["words_per_second"],
            "bytes_per_step": sum(
                machine["sent_payload_bytes_per_step"]
                for machine in found["per_machine"]
            ),
        }
        for found in at_rates
    }


def parse_arguments():
    parser = _program.parser(__doc__)
    add = parser.add_argument
    add("--machines", type=int, default=8)
    add("--rates", nargs="+", type=float, default=[50, 1000])
    add("--rounds", type=int, default=3)
    add("--size", default="large", help="of the workload")
    add("--steps", default="6,12", help="that count, at each rate")
    add("--warm-up", type=int, default=20, help="steps, the choice among them")
    add("--engine", default="native")
    return parser.parse_args()


if __name__ == "__main__":
    main()
