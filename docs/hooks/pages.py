"""Pages that are made of this repository's other files.

Each tutorial becomes a page: its comments are the text, its code the code, and
the output that `docs/tutorials/<name>.txt` keeps stands below it, after the
command that printed it (`tests/test_tutorials.py` compares commands and losses
with the tutorials). The benchmarks' documents, the map
of the source, CONTRIBUTING and CHANGELOG are pages as they are. Links to files
that are no pages become the files' names.
"""

import ast
import pathlib
import posixpath
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[2]
TUTORIALS = ROOT / "tutorials"
OUTPUTS = ROOT / "docs" / "tutorials"

# Path in the repository: path on the site.
DOCUMENTS = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "keras_sparsity/README.md": "source_map.md",
    **{
        path.relative_to(ROOT).as_posix(): path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "benchmarks").rglob("*.md"))
    },
}
ON_SITE = {
    **DOCUMENTS,
    "README.md": "index.md",
    **{
        f"tutorials/{path.name}": f"tutorials/{path.stem}.md"
        for path in TUTORIALS.glob("*.py")
        if (OUTPUTS / f"{path.stem}.txt").exists()
    },
}


def on_files(files, config):
    """Adds the pages, and pictures that the benchmarks' documents show."""

    def add(uri, **source):
        files.append(File.generated(config, uri, **source))

    for path, uri in DOCUMENTS.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        add(uri, content=with_site_links(text, path, uri))
    for path, uri in ON_SITE.items():
        if path.endswith(".py"):
            add(uri, content=tutorial_page(ROOT / path))
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.png")):
        uri = path.relative_to(ROOT).as_posix()
        add(uri, abs_src_path=str(path))
    return files


def with_site_links(text, path, uri):
    """Links relative to a file of the repository, as ones of the site."""

    def replaced(match):
        shown, target = match.groups()
        if re.match(r"\w+:|#", target):
            return match.group()
        target, _, anchor = target.partition("#")
        folder = posixpath.dirname(path)
        found = posixpath.normpath(posixpath.join(folder, target))
        is_other = found == "README.md" and anchor  # the first page is another
        if not is_other and (found in ON_SITE or found.endswith(".png")):
            page = ON_SITE.get(found, found)
            link = posixpath.relpath(page, posixpath.dirname(uri) or ".")
            return f"[{shown}]({link}{'#' * bool(anchor)}{anchor})"
        return shown

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", replaced, text)


def tutorial_page(path):
    """A script as a page: text, code, and what it prints."""
    source = path.read_text(encoding="utf-8")
    module = ast.parse(source)
    title, _, text = ast.get_docstring(module).partition("\n")
    body = "\n".join(source.split("\n")[module.body[0].end_lineno :])
    parts = [f"# {title.rstrip('.')}", fenced_commands(text.strip("\n"))]
    for comment, code in sections(body):
        heading = re.match(r"--- (.*?) -+\n", comment)
        if heading:
            parts.append(f"## {heading.group(1)}")
            comment = comment[heading.end() :]
        parts += [comment, f"```python\n{code}\n```" * bool(code)]
    output = (OUTPUTS / f"{path.stem}.txt").read_text(encoding="utf-8")
    parts += ["## Output", f"```text\n{output.rstrip()}\n```"]
    picture = OUTPUTS / f"{path.stem}.png"
    if picture.exists():
        parts.append(f"![What it draws]({picture.name})")
    parts.append(f"The whole script: `tutorials/{path.name}`.")
    return "\n\n".join(part for part in parts if part)


def fenced_commands(text):
    """Indented lines are commands."""

    def fenced(match):
        # A continued line of the docstring has its margin within.
        lines = [
            re.sub(r" {4,}", " ", line[4:])
            for line in match.group().splitlines()
        ]
        return "\n".join(["```sh", *lines, "```\n"])

    return re.sub(r"(?:^    .*\n?)+", fenced, text, flags=re.M)


def sections(body):
    """Pairs of a comment at the margin and the code below it."""
    blocks = re.split(r"(?:^|\n\n)((?:#.*\n)+)", f"\n\n{body.strip()}\n")
    yield "", blocks[0].strip("\n")
    for comment, code in zip(blocks[1::2], blocks[2::2], strict=True):
        yield paragraph(comment.splitlines()), code.strip("\n")


def paragraph(comment):
    """Text of a comment; `1.` begins no list, as the code stands between."""
    text = "\n".join(line[1:].strip() for line in comment)
    return re.sub(r"^(\d+\.) ", r"**\1** ", text)
