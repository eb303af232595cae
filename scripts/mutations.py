"""Counts how many small faults of the library its tests find.

A mutation changes one expression or drops one statement in a copy of the
tree; the tests of the same folder run on it, then wider ones, until one fails.
A mutation that none finds is a survivor: write the missing test, or see that
the mutant computes the same.

    .venv-horovod/bin/python scripts/mutations.py --count 30 --seed 1
    .venv-horovod/bin/python scripts/mutations.py --folders pipeline stages
    .venv-horovod/bin/python scripts/mutations.py --only exchange/pull.py:57

Before a mutation counts as found, the failing test must pass without it. Tests
on Horovod run after the others of their folder, then those that `make test`
leaves to CI. Takes some seconds to two minutes per mutation, many for a
survivor.
"""

import argparse
import ast
import dataclasses
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = "keras_sparsity"
# Tests of a folder's users, after its own.
WIDER = {
    "placement": [
        "tests/test_optimizer.py",
        "tests/update",
        "tests/moves",
        "tests/planning",
        "tests/test_equality.py",
        "tests/callbacks/test_sharded_checkpoint.py",
        "tests/callbacks/test_auto_architecture.py",
        "tests/training",
    ],
    "exchange": [
        "tests/layers/test_sharded_embedding.py",
        "tests/test_equality.py",
        "tests/layers",
        "tests/health",
        "tests/training",
        "tests/moves",
        "tests/tables",
        "tests/data",
        "tests/sparsity",
    ],
    "update": [
        "tests/test_optimizer.py",
        "tests/test_equality.py",
        "tests/training",
        "tests/tables",
        "tests/callbacks/test_sharded_checkpoint.py",
        "tests/conversion",
        "tests/asynchronous",
    ],
    "checkpoint": [
        "tests/callbacks/test_sharded_checkpoint.py",
        "tests/callbacks/test_saved_partitions.py",
        "tests/callbacks/test_rank_zero.py",
        "tests/test_strategy.py",
    ],
    # These by `--folders` alone.
    "pipeline": ["tests/test_planner.py", "tests/test_strategy.py"],
    "stages": ["tests/test_planner.py", "tests/pipeline", "tests/board"],
    "asynchronous": ["tests/test_servers.py", "tests/test_strategy.py"],
    "planning": [
        "tests/test_planner.py",
        "tests/placement",
        "tests/callbacks/test_partition_search.py",
        "tests/stages",
        "tests/board",
    ],
    "planner.py": ["tests/stages", "tests/planning", "tests/pipeline"],
    "moves": [
        "tests/placement",
        "tests/callbacks",
        "tests/update/test_kept_rows.py",
    ],
    "launch": [
        "tests/machines",
        "tests/collectives/test_startup.py",
        "tests/test_cluster.py",
        "tests/test_servers.py",
    ],
}
USUALLY = ["placement", "exchange", "update", "checkpoint"]
# Options of pytest.
_OF_NATIVE = ["-k", "not horovod and not drawn"]
_OF_HOROVOD = ["-k", "horovod and not drawn"]
_LONG = ["-k", "not drawn", "-m", "long and not all_cells"]
# Constants that no mutation changes: other numbers give the same results.
LEFT_OUT = {
    "_BLOCK_BYTES": "memory that is taken at a time",
    "_CHUNK_BYTES": "memory that is taken at a time",
    "_FEWEST_STEPS": "when kept rows are stored, as any read would give them",
    "_MOST_BYTES": "far above all files that there are",
    "_MOST_STEPS": "when kept rows are stored, or whether rows are kept",
    "_MOST_TERMS": "whether rows are kept: an update of all is as exact",
    "_NUM_NODES": "more than the series needs",
    "_SMALL_ELEMENTS": "the faster of two exact updates",
}
TIMEOUT_SECONDS = 2400

_COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
}


@dataclasses.dataclass(frozen=True)
class Mutation:
    """Source text from `start` to `end`, in bytes, that becomes `new`."""

    path: str  # below the package
    line: int
    start: int
    end: int
    old: str
    new: str

    def __str__(self):
        old, new = (" ".join(t.split())[:60] for t in (self.old, self.new))
        return f"{self.path}:{self.line}  {old}  ->  {new}"

    def apply(self, folder):
        path = folder / PACKAGE / self.path
        text = path.read_bytes()
        new = text[: self.start] + self.new.encode() + text[self.end :]
        path.write_bytes(new)


def mutations(path):
    """All mutations of a file of the package."""
    text = (ROOT / PACKAGE / path).read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in _mutable(ast.parse(text)):
        for new in _replacements(node):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            old = text[start:end].decode()
            found.append(Mutation(path, node.lineno, start, end, old, new))
    return found


def _mutable(node):
    """Nodes below a node, without errors' texts, types and docstrings.

    Nor `strict=True` of `zip`: no input of a right program reaches its check.
    """
    for child in ast.iter_child_nodes(node):
        is_text = isinstance(child, ast.Raise | ast.JoinedStr)
        match child:
            case ast.keyword("strict", ast.Constant(True)):
                continue
            case ast.Assign([ast.Name(name)]) if name in LEFT_OUT:
                continue
        is_type = child in (
            getattr(node, "annotation", None),
            getattr(node, "returns", None),
        ) or child in getattr(node, "decorator_list", ())
        if not is_text and not is_type:
            yield child
            yield from _mutable(child)


def _replacements(node):
    """Source texts that may stand for a node's."""
    match node:
        # A clock does not show a deadline to the bit.
        case ast.Compare() if "time.monotonic()" in ast.unparse(node):
            yield f"(not {ast.unparse(node)})"
        case ast.Compare(left, [op], [right]):
            new = ast.Compare(left, [_COMPARISONS[type(op)]()], [right])
            yield f"({ast.unparse(new)})"
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            new = ast.BinOp(left, _OPERATORS[type(op)](), right)
            yield f"({ast.unparse(new)})"
        case ast.BoolOp(op, values):
            other = ast.And() if isinstance(op, ast.Or) else ast.Or()
            yield f"({ast.unparse(ast.BoolOp(other, values))})"
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield f"({ast.unparse(operand)})"
        case ast.IfExp(test, body, orelse):
            yield f"({ast.unparse(ast.IfExp(test, orelse, body))})"
        case ast.Constant(bool() as value):
            yield str(not value)
        case ast.Constant(int() as value):
            yield str(value + 1)
        case ast.Expr(ast.Call()):
            yield "pass"


def draw(folders, count, seed):
    """Mutations, as many of each folder."""
    rng = random.Random(seed)
    drawn = []
    for index, folder in enumerate(folders):
        root = ROOT / PACKAGE / folder
        files = [root] if root.is_file() else sorted(root.rglob("*.py"))
        paths = [str(f.relative_to(ROOT / PACKAGE)) for f in files]
        every = [mutation for path in paths for mutation in mutations(path)]
        share = count // len(folders) + (index < count % len(folders))
        drawn += rng.sample(every, min(share, len(every)))
    return drawn


def selections(path):
    """pytest's options and tests to run in turn: mirror, folder, users."""
    path = pathlib.Path(path)
    folder = path.parts[0]
    mirror = f"tests/{path.parent}/test_{path.name}"
    near = [t for t in (mirror, f"tests/{folder}") if (ROOT / t).exists()]
    wider = ["tests/test_bad_input.py", *WIDER[folder]]
    return [
        *((_OF_NATIVE, [tests]) for tests in near),
        (_OF_HOROVOD, near[-1:]),
        (_LONG, near[-1:]),
        *((_OF_NATIVE, [tests]) for tests in wider),
        (_OF_HOROVOD, wider),
        (_LONG, wider),
    ]


def copy(folder):
    """The files of the tree that git knows, as they are now."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(listed, cwd=ROOT, text=True)
    for name in names.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def failure(folder, options, tests):
    """The first test that fails in a copy of the tree, or None."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "--tb=no"]
    command += ["-p", "no:cacheprovider", "-o", "timeout=180"]
    process = subprocess.Popen(
        [*command, *options, *tests],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return "does not end"
    if process.returncode in (0, 5):  # 5: no test selected
        return None
    named = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.M)
    return named[1] if named else output.strip().splitlines()[-1]


def judge(mutation):
    """The test that finds a mutation, or None."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        folder = pathlib.Path(name)
        copy(folder)
        mutation.apply(folder)
        for options, tests in selections(mutation.path):
            found = failure(folder, options, tests)
            if found is None:
                continue
            original = ROOT / PACKAGE / mutation.path
            shutil.copy2(original, folder / PACKAGE / mutation.path)
            again = [found] if "::" in found else tests
            if failure(folder, options, again):
                sys.exit(f"Fails without a mutation, too: {found}")
            return found
    return None


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=32, help="of mutations")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folders", nargs="+", choices=WIDER, default=USUALLY)
    parser.add_argument(
        "--only", metavar="FILE:LINE", help="all mutations of one line"
    )
    parser.add_argument("--list", action="store_true", help="run none")
    options = parser.parse_args()
    if options.only:
        path, _, line = options.only.rpartition(":")
        chosen = [m for m in mutations(path) if m.line == int(line)]
    else:
        chosen = draw(options.folders, options.count, options.seed)
    survivors = 0
    for mutation in chosen:
        if options.list:
            print(mutation)
            continue
        begin = time.monotonic()
        found = judge(mutation)
        survivors += found is None
        print(
            f"{'found   ' if found else 'SURVIVES'} {mutation}\n"
            f"         {time.monotonic() - begin:.0f} s  {found or ''}",
            flush=True,
        )
    if not options.list:
        print(f"{len(chosen) - survivors} of {len(chosen)} mutations found")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
