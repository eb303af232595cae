"""Docstrings in this library's manner, as Griffe's Google style reads them.

Doctests stand at the margin below `Example:`, and several arguments may share
one description.
"""

import re

import griffe

_HEADING = re.compile(
    r"^(Args|Attributes|Returns|Yields|Raises|Examples?|References?|Shapes?):$"
)


class Docstrings(griffe.Extension):
    def on_instance(self, *, obj, **kwargs):
        if obj.docstring is not None:
            obj.docstring.value = normalized(obj.docstring.value)


def normalized(text):
    """A docstring of which Griffe finds all sections."""
    found = [(None, [])]
    for line in text.split("\n"):
        heading = _HEADING.match(line)
        if heading:
            found.append((heading.group(1), []))
        else:
            found[-1][1].append(line)
    parts = []
    for heading, lines in found:
        if heading in ("Example", "Examples"):
            heading = "Examples"
            lines = [f"    {line}" if line else "" for line in lines]
            while lines and not lines[0]:
                del lines[0]
        elif heading in ("Args", "Attributes"):
            lines = one_name_each(lines)
        parts += [f"{heading}:"] * bool(heading) + lines
    return "\n".join(parts)


def one_name_each(lines):
    """Items `a, b: text` as `a: text` and `b: see a`."""
    items = []
    for line in lines:
        is_new = re.match(r" {4}\S", line) and (
            not items or ":" in " ".join(items[-1])
        )
        if is_new or not items:
            items.append([])
        items[-1].append(line)
    found = []
    for item in items:
        names, colon, description = "\n".join(item).partition(":")
        first, *others = (name.strip() for name in names.split(","))
        found.append(f"    {first}{colon}{description}" if colon else names)
        found += [f"    {other}: see `{first}`." for other in others]
    return "\n".join(found).split("\n") + [""]
