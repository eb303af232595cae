"""Asynchronous training beside synchronous, on four emulated machines.

    speed      One machine computes at a fifth of the others' speed, which is
               emulated by pauses (`workloads/_pause.py`). Samples/s with a
               bound of 4 steps, of 16 and without one / those of synchronous
               training: at least 3 without a bound.
    target     The same until a held-out loss, of the language model and the
               recommender, also by TensorFlow's `ParameterServerStrategy`.
               Time of training steps alone.
    network    Words/s of the language model without a bound / those of
               `ParameterServerStrategy`, in turn: at least 1.5 at each rate.
               And with 16 bits on the wire.

The models have ordinary `Embedding`s, the same in all ways. Needs root, as
`cluster.py` does.
"""

import statistics

import _program
import _runs
import _timing

LEAST_SPEED, LEAST_WORDS = 3.0, 1.5
# Without a bound last.
_OURS = ("asynchronous, 4", "asynchronous, 16", "asynchronous")
_NARROW = "asynchronous, bfloat16"
_SYNCHRONOUS, _PEER = "ordinary", "tensorflow ps"
_TIMEOUT_SECONDS = 3600
# Held-out losses, and what reaches them within minutes.
_TARGETS = {
    "lm": (
        *("--target", "6", "--learning-rate", "0.5"),
        *("--vocabulary", "5000", "--held-out", "128"),
    ),
    "recommender": ("--target", "0.6", "--learning-rate", "0.1"),
}


def main():
    args = parse_arguments()
    figures, misses = {**vars(args)}, []
    for part in args.parts:
        figures[part], missed = _PARTS[part](args)
        misses += [f"{part}: {miss}" for miss in missed]
    _program.finish(figures, misses)


def speed(args):
    found = {}
    for way in (_SYNCHRONOUS, *_OURS):
        steps = args.steps if way in _OURS else max(2, args.steps // 4)
        run = _run(args, "lm", way, args.pause_option, steps=steps)
        found[way] = measured([run])[0]["words_per_second"]
        print(f"speed, {way}: {found[way]:,.0f} words/s", flush=True)
    ratios = {way: found[way] / found[_SYNCHRONOUS] for way in _OURS}
    missed = []
    if ratios[_OURS[-1]] < LEAST_SPEED:
        missed = [f"{ratios[_OURS[-1]]:.2f} times synchronous"]
    return {"words_per_second": found, "ratios": ratios}, missed


def target(args):
    figures, missed = {}, []
    for name in args.models:
        figures[name] = {}
        for way in (_SYNCHRONOUS, *_OURS, _PEER):
            options = [*args.pause_option, *_TARGETS[name]]
            # As many examples between two looks at the loss.
            options += ["--every", str(args.every)]
            options += ["--most-steps", str(args.most_steps)]
            (found,) = measured([_run(args, name, way, options)])
            found = figures[name][way] = found["to_target"]
            print(
                f"target, {name}, {way}: {found['seconds']:.0f} s, "
                f"{found['steps']} steps, loss {found['curve'][-1]['loss']:.3f}"
                f" of {found['target']}, least {found['least_loss']}",
                flush=True,
            )
            if not found["is_reached"]:
                missed.append(f"{name}, {way}: not reached")
    return figures, missed


def network(args):
    runs = {
        way: [_run(args, "lm", way, rate=rate) for rate in args.rates]
        for way in (_OURS[-1], _NARROW, _PEER)
    }
    found = _timing.in_turn(
        {way: lambda of=of: measured(of) for way, of in runs.items()},
        args.rounds,
    )
    figures, missed = {}, []
    for index, rate in enumerate(args.rates):
        words = {
            way: [rates[index]["words_per_second"] for rates in of_way]
            for way, of_way in found.items()
        }
        *ours, theirs = words.values()
        ratio, narrow = (
            statistics.median(a / b for a, b in zip(of, theirs, strict=True))
            for of in ours
        )
        print(
            f"network, {rate:g} Mbit/s: {ratio:.2f}, in 16 bits {narrow:.2f}, "
            f"{words}",
            flush=True,
        )
        figures[f"{rate:g}"] = {
            "words_per_second": words,
            "ratio": ratio,
            "ratio_of_16_bits": narrow,
        }
        if ratio < LEAST_WORDS:
            missed.append(f"{rate:g} Mbit/s: {ratio:.2f} times TensorFlow's")
    return figures, missed


def _run(args, workload, way, arguments=(), rate=0, steps=None):
    return _runs.Run(
        workload,
        way,
        machines=4,
        rate=rate,
        engine=args.engine,
        steps=steps or args.steps,
        warm_up=3,
        size=args.size,
        arguments=(*args.arguments, *arguments),
    )


def measured(runs):
    """Figures of runs that share processes."""
    return _runs.execute(runs, _TIMEOUT_SECONDS)


_PARTS = {"speed": speed, "target": target, "network": network}


def parse_arguments():
    parser = _program.parser(__doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=list(_PARTS), default=list(_PARTS))
    add("--models", nargs="+", choices=list(_TARGETS), default=list(_TARGETS))
    add("--rates", nargs="+", type=float, default=[50, 200, 1000])
    add("--rounds", type=int, default=3, help="of the network")
    add("--steps", type=int, default=40, help="of each machine")
    add("--every", type=int, default=20, help="steps between two losses")
    add("--most-steps", type=int, default=600, help="to give up after")
    add("--pause", default="0.3", help="seconds of a step; see _pause.py")
    add("--engine", default="native")
    add("--size", default="small")
    add("arguments", nargs="*", help="more of the workloads, behind --")
    args = parser.parse_args()
    args.pause_option = ("--pause", args.pause)
    return args


if __name__ == "__main__":
    main()
