"""Plans in Markdown, on the terminal and in TensorBoard."""

import abc
import os
import re

import rich.box
import rich.console
import rich.table
import rich.text
import tensorflow as tf
from rich import filesize

# The run's name in TensorBoard, beside Keras's "train" and "validation".
RUN = "architecture"
# The plan's, a text.
PLAN = "plan"


class WrittenPlan(abc.ABC):
    """A plan that is shown as a table."""

    @abc.abstractmethod
    def markdown(self):
        """The plan as a Markdown table, with a line about the whole model."""

    def print(self):
        """Shows the same on the terminal."""
        print_markdown(self.markdown())

    def write(self, log_dir):
        """Writes the same for TensorBoard, as the text `plan`.

        `keras-sparsity plan LOG_DIR` prints it.

        Args:
            log_dir: folder, as for `keras.callbacks.TensorBoard`.
        """
        writer = tf.summary.create_file_writer(os.path.join(log_dir, RUN))
        with writer.as_default(step=0):
            tf.summary.text(PLAN, self.markdown())
        writer.close()


def print_markdown(text):
    """Shows Markdown on the terminal, its one table as wide as need be."""
    lines = [_cells(line) for line in text.splitlines() if line.startswith("|")]
    head, _, *rows = lines
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    for name in head:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(rich.text.Text, row))
    console = rich.console.Console()
    if not console.is_terminal:  # a file, which is as wide as needed
        console = rich.console.Console(width=200)
    before, _, after = text.partition("|")
    after = "\n".join(x for x in after.splitlines()[1:] if x[:1] != "|")
    for part in (before, table, after):
        if not isinstance(part, str) or part.strip():
            is_text = isinstance(part, str)
            console.print(
                part.strip() if is_text else part,
                highlight=False,
                markup=False,
            )


def _cells(line):
    """The cells of a line of `as_table`."""
    cells = re.findall(r"((?:[^\\|]|\\.)*)\|", line.strip()[1:])
    return [re.sub(r"\\([\\|])", r"\1", cell.strip()) for cell in cells]


def as_table(head, rows, about):
    """A Markdown table, and a text behind it."""
    lines = [
        "| " + " | ".join(map(_escaped, row)) + " |"
        for row in [head, ["---"] * len(head), *rows]
    ]
    return "\n".join([*lines, "", about])


def _escaped(cell):
    """A cell's text, as names of layers may have any character."""
    return re.sub(r"([\\|])", r"\\\1", " ".join(cell.splitlines()))


def in_milliseconds(seconds):
    return f"{seconds * 1e3:.3g} ms"


def in_seconds(seconds):
    """Milliseconds below a second."""
    return f"{seconds:.3g} s" if seconds >= 1 else in_milliseconds(seconds)


def in_bytes(number):
    return filesize.decimal(round(number))


def of_unknown(size):
    """A sentence about sizes that the model does not know; empty if None."""
    if size is None:
        return ""
    return (
        " Sizes of tensors that the model does not know, such as lengths of "
        f"sequences, count as {size}: times and bytes are those of this size."
    )
