"""The plot of a partition search."""

import importlib
import io

import tensorflow as tf

_NEEDED = ("tensorboard", "matplotlib")
# Small in inches, so that letters are large: TensorBoard shows it reduced to
# 330 pixels, or as large as it is.
_INCHES, _DOTS_PER_INCH = (4.5, 3), 150


def check_installed():
    """Raises unless the packages of TensorBoard's figures are installed."""
    for name in _NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ImportError(
                f"ArchitectureLogger needs {' and '.join(_NEEDED)}, and "
                f"{name} is not installed. Fix: pip install "
                f"{' '.join(_NEEDED)}."
            ) from error


def image(name, choice):
    """A `PartitionChoice` with its samples and the fitted curve, as a picture.

    A uint8 tensor `(1, height, width, 4)`.
    """
    # Not pyplot: it would take over the program's own figures.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    sampled = choice.sampled_seconds
    counts = range(min(sampled), max(sampled) + 1)
    axes.plot(
        counts,
        [1e3 * choice.predicted_seconds(count) for count in counts],
        label="fit",
    )
    axes.plot(
        list(sampled), [1e3 * s for s in sampled.values()], "o", label="samples"
    )
    axes.axvline(
        choice.num_partitions,
        linestyle="--",
        color="gray",
        label=f"choice: {choice.num_partitions}",
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("partitions")
    axes.set_ylabel("ms per step")
    axes.set_title(f"Partition search: {name}")
    figure.legend(loc="outside lower center", ncols=3)
    picture = io.BytesIO()
    canvas.print_png(picture)
    return tf.io.decode_png(picture.getvalue(), channels=4)[tf.newaxis]
