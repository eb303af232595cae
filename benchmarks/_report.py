"""Tables in Markdown, and plots."""

import os


def table(title, head, rows):
    """A title and a table of Markdown, with columns as wide as they need.

    Args:
        title: of the table.
        head: list of the columns' names.
        rows: list of lists of cells: strings, numbers, or None for an empty
            cell.
    """
    cells = [head, *([_spell(cell) for cell in row] for row in rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    head, *rows = (
        [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        for row in cells
    )
    rule = ["-" * width for width in widths]
    lines = [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]
    return "\n".join([f"**{title}**", "", *lines, ""])


def _spell(cell):
    """A string, or a number to three digits."""
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell
    if cell == 0 or abs(cell) >= 100:
        return f"{cell:,.0f}"
    digits = 2 if abs(cell) >= 1 else 3
    return f"{cell:.{digits}f}"


class Plots:
    """PNG files, three plots of one name side by side.

    Args:
        folder: made if there is none; None to draw nothing.
    """

    _PER_ROW = 3

    def __init__(self, folder):
        self._folder = folder
        self._files = {}
        if folder:
            # Needed for drawing alone.
            import matplotlib

            matplotlib.use("Agg")
            os.makedirs(folder, exist_ok=True)

    def lines(self, name, title, axes, lines, logarithmic=False):
        """Lines over numbers.

        Args:
            name: of the file, without `.png`.
            title: of the plot.
            axes: the names of x and y.
            lines: dict from a line's name to its list of `(x, y)`.
            logarithmic: whether the axis of y is.
        """

        def draw(axis):
            for label, points in lines.items():
                if points:
                    points = zip(*sorted(points), strict=True)
                    axis.plot(*points, "o-", label=label)
            if logarithmic:
                axis.set_yscale("log")
            axis.set_ylim(bottom=None if logarithmic else 0)
            axis.set(title=title, xlabel=axes[0], ylabel=axes[1])
            axis.legend()

        if any(lines.values()):
            self._files.setdefault(name, []).append(draw)

    def points(self, name, title, axes, points, error):
        """Points of two figures that should be equal, on logarithmic axes.

        Args:
            name, title, axes: as for `lines`.
            points: dict from a label to a list of `(x, y)`.
            error: the part by which x may be off, shown as a band.
        """

        def draw(axis):
            for label, each in points.items():
                axis.plot(*zip(*each, strict=True), "o", label=label)
            every = [x for each in points.values() for x, _ in each]
            ends = [min(every), max(every)]
            low, high = (
                [x / (1 + off) for x in ends] for off in (error, -error)
            )
            axis.fill_between(ends, low, high, alpha=0.2)
            axis.set(title=title, xlabel=axes[0], ylabel=axes[1])
            axis.set(xscale="log", yscale="log")
            axis.legend()

        self._files.setdefault(name, []).append(draw)

    def bars(self, name, title, axis_name, bars):
        """A bar for each entry of a dict."""

        def draw(axis):
            axis.barh(list(bars)[::-1], list(bars.values())[::-1])
            axis.set(title=title, xlabel=axis_name)

        if bars:
            self._files.setdefault(name, []).append(draw)

    def save(self):
        """Writes the files."""
        if not self._folder:
            return
        from matplotlib import pyplot

        for name, drawn in self._files.items():
            columns = min(self._PER_ROW, len(drawn))
            rows = -(-len(drawn) // columns)
            figure, axes = pyplot.subplots(
                rows,
                columns,
                figsize=(5 * columns, 3.5 * rows),
                layout="constrained",
                squeeze=False,
            )
            for axis in axes.flat[len(drawn) :]:
                axis.axis("off")
            for axis, draw in zip(axes.flat, drawn, strict=False):
                draw(axis)
            path = os.path.join(self._folder, f"{name.replace(' ', '_')}.png")
            figure.savefig(path, dpi=80)
            pyplot.close(figure)
