#!/usr/bin/env python
"""Counts that say how readable the package is, beside those of a commit.

    scripts/counts.py                 # all counts, a table
    scripts/counts.py --list KIND     # the places behind one of them
    scripts/counts.py --ways          # the traced calls, one by one
    scripts/counts.py --check         # public docstrings, for `make lint`

Static counts read the source and need no TensorFlow. The calls on a row's and
on a dense gradient's way are traced while two processes trace one training
step of a small model (`--no-trace` leaves them out).
"""

import argparse
import ast
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Commit c431dcb, by `scripts/counts.py --root <its checkout>`.
BEFORE = {
    "lines": 25684,
    "code_lines": 16614,
    "long_files": 14,
    "long_functions": 23,
    "ambient": 71,
    "kinds": 34,
    "row_files": 30,
    "row_functions": 166,
    "row_all": 222,
    "dense_files": 18,
    "dense_functions": 49,
    "dense_all": 94,
}
TITLES = {
    "lines": "lines of the package",
    "code_lines": "of which code: no blank lines, comments, docstrings",
    "long_files": "files over 400 lines",
    "long_functions": "functions over 40 lines, docstrings apart",
    "ambient": "ambient look-ups",
    "kinds": "tests of an architecture outside of placement/choice.py",
    "row_files": "a row's way, down to messages: files",
    "row_functions": "a row's way, down to messages: functions",
    "row_all": "a row's way, messages included: functions",
    "dense_files": "a dense gradient's way, down to messages: files",
    "dense_functions": "a dense gradient's way, down to messages: functions",
    "dense_all": "a dense gradient's way, messages included: functions",
}
BEFORE_DOCS = {
    "names": 46,
    "Raises": 36,
    "Example": 18,
    "References": 28,
    "Args": 3,
}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 40

# Calls that find an object in the surroundings instead of being given it.
AMBIENT = {
    "current",
    "get_strategy",
    "has_strategy",
    "get_replica_context",
    "in_cross_replica_context",
    "entered",
}
AMBIENT_OF = re.compile(r"\barchitectures\.(?!check$)\w+$")
KINDS = {"ps", "naive_ps", "allgather", "allreduce", "hybrid", "auto"}
KIND_FLAGS = {"merges", "shares_messages"}
CHOICE = "placement/choice.py"

# Rooms below the ways of rows and gradients: a call into them is one call.
BELOW = ("collectives/", "health/", "machines/", "_tf/")

# Sections that the docstring of a public name must have.
SECTIONS = {
    "Raises": re.compile(r"^\s*Raises:", re.M),
    "Example": re.compile(r"^\s*Examples?:\s*$(?=(?:.|\n)*>>> )", re.M),
    "References": re.compile(r"^\s*References?:", re.M),
    "Args": None,  # every parameter is described
}
# At most so many may lack each: never raise these numbers.
ALLOWED = dict.fromkeys(SECTIONS, 0)


def main():
    options = parse_options()
    package = Package(options.root)
    if options.trace:
        return trace(options.trace)
    if options.check:
        return check(package)
    counts = static_counts(package)
    if options.list:
        print(*counts[options.list], sep="\n")
        return 0
    ways = {} if options.no_trace else traced_ways(options.root)
    if options.ways:
        print_ways(ways)
    print_table(numbers(package, counts, ways), missing(package))
    return 0


def parse_options():
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
    )
    parser.add_argument("--root", type=pathlib.Path, default=ROOT)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--no-trace", action="store_true")
    parser.add_argument("--ways", action="store_true")
    parser.add_argument(
        "--list", choices=["long_files", "long_functions", "ambient", "kinds"]
    )
    parser.add_argument("--trace", type=pathlib.Path, help=argparse.SUPPRESS)
    return parser.parse_args()


@dataclasses.dataclass(frozen=True)
class Module:
    """A source file, parsed once."""

    path: str  # below the package
    text: str
    tree: ast.Module

    def at(self, node, words=""):
        return f"{self.path}:{node.lineno}: {words}".rstrip(": ")


class Package:
    """The modules of `<root>/keras_sparsity`, by path."""

    def __init__(self, root):
        self.folder = pathlib.Path(root).resolve() / "keras_sparsity"
        self.modules = {}
        for path in sorted(self.folder.rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            name = path.relative_to(self.folder).as_posix()
            self.modules[name] = Module(name, text, ast.parse(text))

    def __iter__(self):
        return iter(self.modules.values())

    def find(self, dotted):
        """The `Module` of a dotted name; None where it is no module."""
        path = "/".join(dotted.split(".")[1:])
        for name in (f"{path}.py", f"{path}/__init__.py".lstrip("/")):
            if name in self.modules:
                return self.modules[name]
        return None


# Static counts.


def static_counts(package):
    """The places behind each count, as lists of lines to print."""
    return {
        "long_files": [
            f"{module.path}: {num_lines(module)}"
            for module in package
            if num_lines(module) > MAX_FILE_LINES
        ],
        "long_functions": [
            module.at(node, f"{node.name}: {length(node)}")
            for module, node in nodes(package, FUNCTIONS)
            if length(node) > MAX_FUNCTION_LINES
        ],
        "ambient": [
            module.at(node, ast.unparse(node))
            for module, node in nodes(package, ast.Call)
            if is_ambient(node)
        ],
        "kinds": [
            module.at(node, ast.unparse(getattr(node, "test", node)))
            for module, node in nodes(package, (ast.Compare, *TESTS))
            if module.path != CHOICE and is_kind_test(node, package)
        ],
    }


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
TESTS = (ast.Call, ast.If, ast.IfExp, ast.BoolOp, ast.MatchValue)


def nodes(package, kind):
    for module in package:
        for node in ast.walk(module.tree):
            if isinstance(node, kind):
                yield module, node


def num_lines(module):
    return module.text.count("\n")


def length(function):
    """Lines of a function without its docstring and decorators."""
    return function.end_lineno - function.lineno + 1 - doc_lines(function)


def doc_lines(node):
    if ast.get_docstring(node) is None:
        return 0
    return node.body[0].end_lineno - node.body[0].lineno + 1


def code_lines(module):
    documented = (ast.Module, ast.ClassDef, *FUNCTIONS)
    docs = sum(
        doc_lines(node)
        for node in ast.walk(module.tree)
        if isinstance(node, documented)
    )
    blank_in_docs = sum(
        not line.strip()
        for node in ast.walk(module.tree)
        if isinstance(node, documented) and doc_lines(node)
        for line in module.text.split("\n")[
            node.body[0].lineno - 1 : node.body[0].end_lineno
        ]
    )
    lines = [line.strip() for line in module.text.split("\n")]
    full = sum(bool(line) and not line.startswith("#") for line in lines)
    return full - docs + blank_in_docs


def is_ambient(call):
    name = ast.unparse(call.func)
    return name.split(".")[-1] in AMBIENT or bool(AMBIENT_OF.search(name))


def is_kind_test(node, package):
    """Whether an expression asks which architecture something has."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        found = KINDS & {text for side in sides for text in strings_of(side)}
        # `verbose="auto"` is Keras's.
        return bool(found) and "verbose" not in ast.unparse(node)
    if isinstance(node, ast.MatchValue):
        return bool(KINDS & set(strings_of(node.value)))
    if isinstance(node, ast.Call):
        return is_placement_check(node, package)
    tests = node.values if isinstance(node, ast.BoolOp) else [node.test]
    return any(is_flag(test) for test in tests)


def strings_of(node):
    """Strings that an operand of a comparison is, or lists."""
    items = getattr(node, "elts", [node])
    return [item.value for item in items if is_string(item)]


def is_string(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def is_flag(node):
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    return isinstance(node, ast.Attribute) and node.attr in KIND_FLAGS


def is_placement_check(call, package):
    """`isinstance` with a class of the room of placements."""
    if ast.unparse(call.func) not in ("isinstance", "issubclass"):
        return False
    names = {
        name.split(".")[-1]
        for name in re.findall(r"[\w.]+", ast.unparse(call.args[1]))
    }
    return bool(names & placement_classes(package))


def placement_classes(package):
    return {
        node.name
        for module in package
        if module.path.startswith("placement/")
        for node in module.tree.body
        if isinstance(node, ast.ClassDef) and is_placement(node)
    }


def is_placement(node):
    bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
    return node.name == "Placement" or "Placement" in bases


# Public names and their docstrings.


@dataclasses.dataclass(frozen=True)
class Public:
    """A public class or function: its name under `ks` and its definition."""

    name: str
    module: Module
    node: ast.AST

    @property
    def is_error(self):
        return isinstance(self.node, ast.ClassDef) and any(
            ast.unparse(base).endswith(("Error", "Exception"))
            for base in self.node.bases
        )

    def lacks(self):
        """Names of the sections that the docstring does not have."""
        doc = ast.get_docstring(self.node) or ""
        found = [
            section
            for section, pattern in SECTIONS.items()
            if pattern is not None and not pattern.search(doc)
        ]
        if self.is_error:  # it is itself what is raised
            found = [section for section in found if section != "Raises"]
        unsaid = [
            name
            for name in parameters(self.node)
            # "a, b: both", and `*args`.
            if not re.search(rf"^\s+\**(\w+, )*\**{name}\b[^\n]*", doc, re.M)
        ]
        return found + ["Args"] * bool(unsaid)


def public_names(package, dotted="keras_sparsity", prefix="ks"):
    """`Public` of each class and function that `__all__` lists, in depth."""
    module = package.find(dotted)
    found = []
    for name in exported(module):
        source = resolve(package, dotted, name)
        if isinstance(source, str):
            inner = package.find(source)
            if exported(inner):
                found += public_names(package, source, f"{prefix}.{name}")
        else:
            found.append(Public(f"{prefix}.{name}", *source))
    return found


def exported(module):
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and (
            ast.unparse(node.targets[0]) == "__all__"
        ):
            return ast.literal_eval(node.value)
    return []


def resolve(package, dotted, name):
    """`(module, node)` that defines a name, or the dotted name of a module."""
    module = package.find(dotted)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    inner = f"{node.module}.{alias.name}"
                    if package.find(inner):
                        return inner
                    return resolve(package, node.module, alias.name)
    for node in module.tree.body:
        if getattr(node, "name", None) == name:
            return module, node
    raise LookupError(f"{dotted} exports {name}, which is not found")


def parameters(node):
    """Names of the parameters that a caller may give."""
    if isinstance(node, ast.ClassDef):
        decorators = [ast.unparse(each) for each in node.decorator_list]
        inits = [each for each in node.body if is_init(each)]
        if inits:
            node = inits[0]
        elif any("dataclass" in each for each in decorators):
            return [
                each.target.id
                for each in node.body
                if isinstance(each, ast.AnnAssign)
            ]
        else:
            return []
    arguments = node.args
    found = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    names = [each.arg for each in found]
    return [name for name in names if name not in ("self", "cls")]


def is_init(node):
    return isinstance(node, ast.FunctionDef) and node.name == "__init__"


def missing(package):
    """Public names by what their docstrings lack."""
    publics = public_names(package)
    return {"names": [public.name for public in publics]} | {
        section: [each.name for each in publics if section in each.lacks()]
        for section in SECTIONS
    }


def check(package):
    """Fails if more public docstrings lack a section than before."""
    found = missing(package)
    code = 0
    for section, allowed in ALLOWED.items():
        names = found[section]
        if len(names) > allowed:
            code = 1
            print(
                f"{len(names)} public docstrings lack {section!r}, at most "
                f"{allowed} may: {', '.join(names)}.\nFix: complete them as "
                "CONTRIBUTING.md says.",
                file=sys.stderr,
            )
    if not code:
        lacks = ", ".join(f"{len(found[name])} {name}" for name in SECTIONS)
        print(f"{len(found['names'])} public names; of these lack: {lacks}")
    return code


# Calls of a training step, as they are traced.


def traced_ways(root):
    """Calls of the package on both ways, of rank 0 of two processes."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "calls.json")
        subprocess.run(
            [sys.executable, "-m", "keras_sparsity.launch", "run", "-n", "2"]
            + ["--engine", "native", str(pathlib.Path(__file__).resolve())]
            + ["--root", str(root), "--trace", str(path)],
            check=True,
            timeout=300,
            stdout=subprocess.DEVNULL,
            cwd=root,  # which comes first in the path of modules
            env={**os.environ, "PYTHONPATH": str(pathlib.Path(root).resolve())},
        )
        return json.loads(path.read_text())


def trace(path):
    """In each of the processes: writes the calls of two small steps."""
    import keras
    import tensorflow as tf

    import keras_sparsity as ks

    strategy = ks.HybridStrategy(architecture="hybrid")
    ids = tf.constant([[3, 1, 3], [2, 7, 1]])

    def calls_of(layer, inputs):
        optimizer = ks.HybridOptimizer(keras.optimizers.SGD(0.1))
        with strategy.scope():
            layer(inputs)
            optimizer.build(layer.trainable_variables)
        recorder = Recorder(pathlib.Path(ks.__file__).parent)

        def step(inputs):
            with tf.GradientTape() as tape:
                with recorder:
                    outputs = layer(inputs)
                loss = tf.reduce_sum(outputs**2)
            with recorder:
                gradients = tape.gradient(loss, layer.trainable_variables)
                optimizer.apply(gradients, layer.trainable_variables)

        # Twice: counters and the like are made in the first one. AutoGraph
        # would call copies of the functions.
        for _ in range(2):
            recorder.calls.clear()
            tf.function(
                lambda: strategy.run(
                    tf.autograph.experimental.do_not_convert(step), (inputs,)
                ),
                autograph=False,
            )()
        return recorder.calls

    ways = {
        "row": calls_of(ks.layers.ShardedEmbedding(10, 4), ids),
        "dense": calls_of(keras.layers.Dense(4), tf.ones([2, 3])),
    }
    if strategy.rank == 0:
        path.write_text(json.dumps(ways))
    return 0


class Recorder:
    """Records calls of a package's functions: depth, file, function.

    Comprehensions and lambdas belong to the function that holds them.
    """

    def __init__(self, folder):
        self.calls = []
        self._prefix = f"{folder}{os.sep}"
        self._depth = 0

    def __enter__(self):
        self._depth = 0
        sys.setprofile(self._note)

    def __exit__(self, *error):
        sys.setprofile(None)

    def _note(self, frame, event, _):
        code = frame.f_code
        is_inside = code.co_filename.startswith(self._prefix)
        if not is_inside or code.co_name.startswith("<"):
            return
        if event == "call":
            path = code.co_filename[len(self._prefix) :]
            name = getattr(code, "co_qualname", code.co_name)
            self.calls.append([self._depth, path, name])
            self._depth += 1
        elif event == "return":
            self._depth -= 1


def print_ways(ways):
    for way, calls in ways.items():
        print(f"\n{way}:")
        for depth, path, name in down_to_messages(calls):
            print(f"{'  ' * depth}{name}  [{path}]")
    print()


# The table.


def numbers(package, counts, ways):
    found = {
        "lines": sum(map(num_lines, package)),
        "code_lines": sum(map(code_lines, package)),
        **{name: len(places) for name, places in counts.items()},
    }
    for way, calls in ways.items():
        found[f"{way}_all"] = len({tuple(call[1:]) for call in calls})
        calls = down_to_messages(calls)
        found[f"{way}_files"] = len({path for _, path, _ in calls})
        found[f"{way}_functions"] = len({tuple(call[1:]) for call in calls})
    return found


def down_to_messages(calls):
    """The calls without those inside of a message or a helper of `_tf`."""
    found, inside = [], None
    for depth, path, name in calls:
        if inside is not None and depth > inside:
            continue
        inside = depth if path.startswith(BELOW) else None
        found.append((depth, path, name))
    return found


def print_table(found, lacking):
    rows = [
        (title, BEFORE[name], found.get(name)) for name, title in TITLES.items()
    ]
    rows.append(("public names", BEFORE_DOCS["names"], len(lacking["names"])))
    rows += [
        (
            f"  whose docstring lacks {section}",
            BEFORE_DOCS[section],
            len(lacking[section]),
        )
        for section in SECTIONS
    ]
    print(f"{'':56}{'c431dcb':>9}{'now':>9}")
    for title, before, now in rows:
        print(f"{title:56}{text_of(before):>9}{text_of(now):>9}")


def text_of(number):
    return "-" if number is None else f"{number:,}"


if __name__ == "__main__":
    sys.exit(main())
