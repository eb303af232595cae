"""The page of results: `results/README.md`, from the files beside it."""

import dataclasses
import functools
import os
import textwrap

import _report
from _results import Results
from sets import report_of

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "results")
PATH = os.path.join(FOLDER, "README.md")

_INTRODUCTION = """\
# Results of scaling.py

`python benchmarks/scaling.py --publish` writes this page and its plots from the
`.jsonl` files beside it: change those, not the page. [README](../README.md)
says what the runs are, [tried.md](../tried.md) what was tried to make them
faster.

Unless a section says otherwise: 8 emulated machines of one process each,
Horovod engine, `--size large`; two cores of an Intel Xeon for all machines,
TensorFlow 2.18.1, Keras 3.15.1, Horovod 0.28.1. MB are megabytes that a machine
sends and receives in a step, on average over the machines.

| way | trained by |
|---|---|
| hybrid | this library's default |
| ps, allreduce | this library, all variables by one architecture |
| naive ps | this library: one message per variable, each id for itself |
| horovod | `peers/horovod_tape.py`: rows by allgather |
| horovod dense | the same, embeddings' gradients dense, by allreduce |
| tensorflow ps | `peers/parameter_server.py`, asynchronous |
| bfloat16, float16, fp16 | 16 bits on the wire |

How far the figures carry:

- Bytes, and a step's time at 50 Mbit/s, are those of a real cluster. The
  machines share two cores: at 1,000 Mbit/s the runs compare computation, and
  normalised scaling is lower than on machines with cores of their own.
- TensorFlow's servers are asynchronous: compare their words/s, not what a
  number of steps learns.
- Each section says how much of the processors other programs used before its
  runs. Above a few percent, only its bytes count.
- The paper (EuroSys 2019) has 8 machines of 6 GPUs and larger models: compare
  ratios, not words/s.
- Runs next to each other differ by up to a tenth.

`scaling.jsonl` has runs of the Xeon, from before `install_horovod.sh` made
Gloo's receiving thread sleep; those of local aggregation, sparsity, `lm` by
AllReduce and TensorFlow's servers ran on two slower cores of an AMD EPYC, with
that patch. The other files have later runs of the EPYC, with it.
"""

_MACHINES_NOTE = """\
A machine's bytes grow with (N-1)/N and with alpha, which is a process's; those
of Horovod's own way, which gathers the rows of all processes, grow with N-1.
Scaling falls where the network comes in and rises again: the examples of a
process stay the same, and a step's network time hardly grows. One machine with
stock Keras (`horovod`, 1) is slow because its optimizer updates every row."""

_ABLATION_NOTE = """\
Architectures of EuroSys Table 4; the cumulative table of the arXiv version, on
4 machines of 2 processes; clipping to a global norm that the owners of rows
compute together, or each worker from all gradients (EuroSys 4.3). The paper's
ratios are those of Table 4. Asked: hybrid at least 0.97 of each other
architecture; each addition at least 0.9 of the row above it at 50 Mbit/s, and
all of them 1.5 of naive servers; owners as fast as workers."""

_BOUND_NOTE = """\
The least time of a synchronous step, with B bytes that the busiest interface
carries in one direction at rate R, C seconds of computation and c bytes that
travel while nothing is left to compute:

    step >= max(B / R, C + c / R)

C ("alone") is measured in the same run: all processes train the same model at
once, none exchanges, until the slowest is through. c ("chain") belongs to the
tables and dense layers that a model begins with: their gradients come last, and
the next step needs their updated rows first. It is alpha w (N-1)/N times the
share of pushed rows that any rank pulls in the next step plus the share of
pulled rows that the last step changed, both counted in the data, and
2 w (S-1)/S of those dense layers. Latency, the rows of an output and other
dense gradients are left out, so the true bound is higher. B is measured at the
fastest rate, where the least idle traffic is subtracted (at 50 Mbit/s up to 7 %
too much). Asked: bound / step at least 0.85."""

_EARLIER_NOTE = """\
Measured before `nmt` was enlarged, with a vocabulary of 1,200, tables of 256
and LSTMs of 192 (`--size earlier`)."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A section of the page.

    Attributes:
        title: of the section.
        sets: names of the sets it shows.
        note: Markdown before the tables.
        arguments: of `scaling.py`, to narrow the sets.
        file: of the results.
        plots: names of the plots it shows.
    """

    title: str
    sets: tuple
    note: str
    arguments: tuple = ()
    file: str = "scaling.jsonl"
    plots: tuple = ()


PARTS = (
    Part(
        "Speed",
        ("speed",),
        "Asked at 50 Mbit/s, ours / Horovod's: `lm` and `recommender` 4 with "
        "float32 and 7 with 16 bits, `nmt` 2.3 and 4, `resnet50` 0.98; `lm` / "
        "naive servers 1.5 with float32 and 2.8 with 16 bits.",
        ("--workloads", "lm", "recommender", "resnet50"),
    ),
    Part(
        "Speed of translation",
        ("speed",),
        "AMD EPYC, both patches of Gloo.",
        ("--workloads", "nmt"),
        "epyc.jsonl",
    ),
    Part(
        "Inception v3, float16, Horovod's dense way",
        ("others",),
        "AMD EPYC, both patches of Gloo. Asked: 0.98 times the images/s "
        "of Inception v3, as many words/s of the others.",
        file="epyc.jsonl",
    ),
    Part(
        "Sparse bytes",
        ("bytes",),
        "Counted by the kernel with all headers, less an idle time's. Asked: "
        "the sparse bytes, without indices and without the dense variables' "
        "4 w (S-1)/S, / the rows' that must travel with float32, "
        "4 alpha w m (N-1)/N. alpha is the library's own count. The native "
        "engine pads the parts of an exchange to the largest; Horovod's cycle "
        "is 20 ms.",
    ),
    Part(
        "Local aggregation",
        ("aggregation",),
        "4 machines of 2 processes; asked: the cut is what the overlap of "
        "rows, counted in the data, predicts, within 5 %. Horovod's cycle is "
        "100 ms: with 20 ms an idle machine carried 350 kB/s, and two of nine "
        "cuts were 5.2 % off.",
    ),
    Part("The bound of a step", ("bound",), _BOUND_NOTE),
    Part(
        "The bound, Gloo's thread asleep",
        ("bound",),
        "Idle AMD EPYC, both patches of Gloo.",
        ("--workloads", "lm", "recommender"),
        "bound.jsonl",
    ),
    Part(
        "The bound of translation",
        ("bound",),
        "AMD EPYC, both patches of Gloo.",
        ("--workloads", "nmt"),
        "epyc.jsonl",
    ),
    Part(
        "The bound, a core for each machine",
        ("bound",),
        "2 machines on the same two cores.",
        ("--machines", "2"),
    ),
    Part(
        "Machines",
        ("machines",),
        f"{_MACHINES_NOTE} Asked: as many words/s as Horovod's way, and on "
        "the most machines as many as on the fewest of several.",
        ("--workloads", "lm"),
        plots=("machines_lm",),
    ),
    Part(
        "Ablation",
        ("ablation",),
        _ABLATION_NOTE,
        ("--workloads", "lm"),
        plots=("architectures_lm", "cumulative_lm"),
    ),
    Part(
        "Ablation, both patches of Gloo",
        ("ablation",),
        "AMD EPYC, all runs of one day. The 8 processes of AllReduce, with "
        "dense gradients of both tables, ran out of 24 GB.",
        ("--workloads", "lm", "--rates", "50", "1000"),
        "ablation.jsonl",
    ),
    Part(
        "Sparsity",
        ("sweep",),
        "`lm` on 1,000 rows of 512, instances of 1 to 120 words, 256 of them "
        "in a process's batch (EuroSys Table 6). Naive servers send each id "
        "of a batch for itself, and Horovod's way gathers all: the longer the "
        "instance, the larger our gain, whereas the paper's falls with its "
        "alpha. Asked: as many words/s as both.",
        plots=("sparsity",),
    ),
    Part(
        "Time to a loss",
        ("target",),
        "Training until a held-out loss over all classes is reached (EuroSys "
        "6.2), evaluated every 25 steps: `lm --size small` to 6 nats a word "
        "(the words' frequencies alone give 7.2, the source has 2.17), a "
        "smaller `nmt` to 4 (5.4; 0). Each run draws other initial values and "
        "samples. Asked: not later than by Horovod's way.",
        plots=("target",),
    ),
    Part(
        "Translation of the earlier size",
        ("speed", "bytes", "aggregation", "bound", "machines", "ablation"),
        _EARLIER_NOTE,
        ("--workloads", "nmt", "--size", "earlier"),
        plots=("machines_nmt", "architectures_nmt", "cumulative_nmt"),
    ),
    Part(
        "Translation of the earlier size, a core for each machine",
        ("bound",),
        "2 machines on the same two cores.",
        ("--workloads", "nmt", "--size", "earlier", "--machines", "2"),
    ),
    Part(
        "Translation of the earlier size, Gloo's thread asleep",
        ("bound",),
        "Idle AMD EPYC. The time alone is uncertain: both ways compute the "
        "same.",
        ("--workloads", "nmt", "--size", "earlier"),
        "bound.jsonl",
    ),
)


def publish(parse):
    """Writes the page and its plots.

    Args:
        parse: function from a list of `scaling.py`'s arguments to options.
    """
    plots = _report.Plots(FOLDER)
    page = text(parse, plots)
    with open(PATH, "w") as file:
        file.write(page)
    plots.save()


def text(parse, plots):
    """The page's Markdown; draws on `plots`."""
    results = functools.cache(
        lambda name: Results(os.path.join(FOLDER, name), for_report=True)
    )
    parts = [_part(part, parse, results(part.file), plots) for part in PARTS]
    return "\n".join([_INTRODUCTION, *parts])


def _part(part, parse, results, plots):
    lines = [f"## {part.title}", "", _wrapped(part.note), ""]
    options = parse(["--set", *part.sets, *part.arguments])
    if not part.plots:  # Plots of one name are drawn into one file.
        plots = _report.Plots(None)
    for name in part.sets:
        found = report_of(name, options, results, plots)
        lines += found.tables
        if found.beyond:
            lines += ["Not reached:", ""]
            lines += [f"- {miss}" for miss in found.beyond] + [""]
    lines += [f"![{name}]({name}.png)" for name in part.plots]
    return "\n".join(lines).rstrip() + "\n"


def _wrapped(note):
    """Paragraphs of at most 80 columns; indented ones are left as they are."""
    return "\n\n".join(
        paragraph if paragraph.startswith(" ") else textwrap.fill(paragraph, 80)
        for paragraph in note.split("\n\n")
    )
