"""Several jobs at once on the machines of an emulated cluster.

RALP's tables 3 and 4: two and four trainings, each of its own model on all
machines, share the processors and links. Friendly models have most of their
parameters in their last layers; the others, convolutions with normalization,
layer placement divides only where it predicts a gain. All jobs of a run are
trained the same way. Their first machines differ, so that the last layers of
different jobs are on different ones. Images/s of each job are those of the time
in which all jobs train. Needs root, as `cluster.py` does.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time

import _network
import _program
import _ways
import keras
import pipeline
from cluster import Cluster, ClusterError
from workloads import _common

import keras_sparsity as ks

_PLACED, _DATA_PARALLEL = "placed", "data parallel"
_HOROVOD, _SERVERS = "Horovod", "naive servers"
WAYS = (_PLACED, _DATA_PARALLEL, _HOROVOD, _SERVERS)
MIXES = {
    "friendly": ("vgg", "alexnet"),
    "mixed": ("vgg", "inception"),
    "unfriendly": ("residual", "inception"),
    "four friendly": ("vgg", "alexnet") * 2,
    "four mixed": ("vgg", "residual", "alexnet", "inception"),
}
_CLASSES, _BATCH = 10, 32
WARM_UP = 2
_MANY = 1_000_000  # mini-batches
# Steps from an agreed end until it: no rank is further than one ahead.
_UNTIL_END = 3


def vgg():
    """VGG's shape, for images of 32 x 32."""
    return _with_wide_layers((16, 32, 64), 3, 1024)


def alexnet():
    """AlexNet's shape: fewer and larger filters."""
    return _with_wide_layers((24, 48), 5, 1024)


def _with_wide_layers(widths, size, width):
    x = inputs = keras.Input((32, 32, 3))
    for filters in widths:
        x = keras.layers.Conv2D(filters, size, padding="same")(x)
        x = keras.layers.ReLU()(x)
        x = keras.layers.MaxPooling2D()(x)
    x = keras.layers.Flatten()(x)
    for _ in range(2):
        x = keras.layers.Dense(width, "relu")(x)
    return keras.Model(inputs, keras.layers.Dense(_CLASSES)(x))


MODELS = {
    "vgg": vgg,
    "alexnet": alexnet,
    "residual": lambda: pipeline.residual()[0],
    "inception": lambda: pipeline.inception()[0],
}


class Steps:
    """The steps of a job, which goes on until each job has made enough.

    Jobs tell each other by files, so that the network carries nothing of it.

    Args:
        args: the command line.
        is_first: whether this rank counts for its job.
    """

    def __init__(self, args, is_first):
        self._args, self._is_first = args, is_first
        self._times, self._begin = [], None

    def done(self):
        """Counts a step; says whether it is the job's last one."""
        self._times.append(time.monotonic())
        number = len(self._times)
        if self._is_first:
            self._agree(number)
        path = self._path("end", self._args.job)
        if not os.path.exists(path):
            return False
        with open(path) as file:
            return number >= int(file.read())

    def _agree(self, number):
        if number == WARM_UP:
            self._tell("warm")
        if self._begin is None:
            if self._all("warm"):
                self._begin = number + _network.SETTLE
        elif number == self._begin + self._args.steps:
            self._tell("enough")
        if self._all("enough"):
            self._tell("end", number + _UNTIL_END)

    def report(self):
        """Writes when the steps that count ended."""
        if self._is_first:
            self._tell("times", self._times[self._begin :])

    def _tell(self, what, value=None):
        path = self._path(what, self._args.job)
        if os.path.exists(path):
            return
        with open(f"{path}.new", "w") as file:
            json.dump(value, file)
        os.replace(file.name, path)

    def _all(self, what):
        jobs = range(self._args.num_jobs)
        return all(os.path.exists(self._path(what, job)) for job in jobs)

    def _path(self, what, job):
        return os.path.join(self._args.folder, f"{what}-{job}")


class UntilEnd(keras.callbacks.Callback):
    """Ends `fit` with the last of some `Steps`."""

    def __init__(self, steps):
        super().__init__()
        self._steps = steps

    def on_train_batch_end(self, batch, logs=None):
        if self._steps.done():
            self.model.stop_training = True


def main():
    args = parse_arguments()
    if args.inside:
        inside(args)
        return
    figures = {}
    for mix in args.mixes:
        for rate in args.rates:
            for way in args.ways:
                begin = time.monotonic()
                found = on_cluster(args, MIXES[mix], way, rate)
                figures.setdefault(mix, {}).setdefault(f"{rate:g}", {})[way] = (
                    found
                )
                speeds = ", ".join(
                    f"{name} {speed:,.1f}"
                    for name, speed in zip(MIXES[mix], found, strict=True)
                )
                print(
                    f"{mix}, {rate:g} Mbit/s, {way}: {speeds} images/s "
                    f"({time.monotonic() - begin:.0f} s)",
                    flush=True,
                )
    _program.finish(figures, [])


def on_cluster(args, models, way, rate):
    """Images/s of each job.

    Args:
        args: the command line.
        models: tuple of the names of the jobs' models.
        way: the way of all of them.
        rate: Mbit/s of each machine's link.
    """
    shown = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        try:
            with (
                contextlib.redirect_stdout(shown),
                Cluster(args.machines, rate=rate) as cluster,
            ):
                commands = [
                    _command(args, cluster, folder, models, job, way)
                    for job in range(len(models))
                ]
                found = cluster.run_commands(commands, until_all_end=True)
        except ClusterError as error:
            sys.exit(f"jobs.py: {error}")
        if found["exit_code"]:
            sys.exit(f"{shown.getvalue()}\n{models}, {way}: {found}")
        jobs = []
        for job in range(len(models)):
            with open(os.path.join(folder, f"times-{job}")) as file:
                jobs.append(json.load(file))
    batch = _BATCH
    if way == _HOROVOD:  # Its processes have equal parts.
        batch = _BATCH // args.machines * args.machines
    return [batch * speed for speed in together(jobs)]


def _command(args, cluster, folder, models, job, way):
    arguments = ["--inside", models[job], "--way", way, "--folder", folder]
    arguments += ["--job", str(job), "--num-jobs", str(len(models))]
    return cluster.command(
        __file__,
        [
            *arguments,
            *("--steps", str(args.steps), "--machines", str(args.machines)),
        ],
        _ways.engine(way, _HOROVOD, _SERVERS),
        first_machine=job * args.machines // len(models),
    )


def together(jobs):
    """Steps/s of jobs, in the time in which all of them count.

    Args:
        jobs: list of the moments at which each job's steps ended.
    """
    begin = max(moments[0] for moments in jobs)
    end = min(moments[-1] for moments in jobs)
    found = []
    for moments in jobs:
        inside = [each for each in moments if begin <= each <= end]
        found.append((len(inside) - 1) / (inside[-1] - inside[0]))
    return found


def inside(args):
    """Trains a job on all machines, until each job has made enough steps."""
    if args.way == _HOROVOD:
        by_horovod(args)
        return
    if args.way == _PLACED:
        strategy = ks.LayerPlacementStrategy(
            num_examples=_BATCH // args.machines
        )
    else:
        is_naive = args.way == _SERVERS
        strategy = ks.HybridStrategy(
            architecture="naive_ps" if is_naive else "hybrid"
        )
    model = MODELS[args.inside]()
    workload = _ways.made(model, _BATCH, _CLASSES)
    with strategy.scope():
        model.compile(workload.optimizer, workload.loss)
    batches = _common.dataset(workload.x, workload.y, _BATCH, _MANY)
    steps = Steps(args, strategy.rank == 0)
    model.fit(batches, callbacks=[UntilEnd(steps)], shuffle=False, verbose=0)
    steps.report()


def by_horovod(args):
    """The same by a tape of Horovod, without this library."""
    import horovod.tensorflow as hvd
    from peers import horovod_tape

    hvd.init()
    workload = _ways.made(MODELS[args.inside](), _BATCH, _CLASSES)
    trainer = horovod_tape.Trainer(workload, _BATCH // hvd.size())
    steps = Steps(args, hvd.rank() == 0)
    trainer.train(1)
    while not steps.done():
        trainer.train(1)
    steps.report()


def parse_arguments():
    parser = _program.parser(__doc__)
    add = parser.add_argument
    ways = _ways.without_horovod(WAYS, _HOROVOD)
    add("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    add("--ways", nargs="+", choices=WAYS, default=ways)
    add("--machines", type=int, default=4)
    add("--rates", nargs="+", type=float, default=[50])
    add("--steps", type=int, default=6, help="of the slowest job, at least")
    for name, kind in (
        *(("--inside", str), ("--way", str), ("--folder", str)),
        *(("--job", int), ("--num-jobs", int)),
    ):
        add(name, type=kind, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
