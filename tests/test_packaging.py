"""The distribution, the public API, and what may import what."""

import ast
import email
import importlib
import inspect
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
import tensorflow as tf

import keras_sparsity

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "keras_sparsity"
MODULES = sorted(PACKAGE.rglob("*.py"))

EXTRAS = {
    "cpu": {"tensorflow-cpu>=2.16"},
    "gpu": {"tensorflow[and-cuda]>=2.16"},
    "horovod": {"tensorflow-cpu<2.19,>=2.16", "horovod==0.28.1"},
    "horovod-gpu": {"tensorflow[and-cuda]<2.19,>=2.16", "horovod==0.28.1"},
    "tensorboard": {"tensorboard"},
    "dev": {"pytest<9.2,>=8", "pytest-timeout", "ruff==0.17.5", "pre-commit"},
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy: building leaves files in the source tree."""
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    shutil.copytree(
        PACKAGE,
        source / "keras_sparsity",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md"):
        shutil.copy(ROOT / name, source)
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel"]
        + ["--quiet", "--no-deps", "--no-build-isolation"]
        + ["--wheel-dir", str(directory), str(source)],
        check=True,
        timeout=120,
    )
    (path,) = directory.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def read_metadata(wheel, name):
    (path,) = (n for n in wheel.namelist() if n.endswith(f"dist-info/{name}"))
    return wheel.read(path).decode()


def requirements(metadata):
    """The requirements by extra; those of every installation under None."""
    by_extra = {}
    for line in metadata.get_all("Requires-Dist"):
        requirement, _, marker = line.partition(";")
        extra = re.search(r"""extra == ['"](.+)['"]""", marker)
        extra = extra.group(1) if extra else None
        # "horovod (==0.28.1)" in older versions of setuptools and wheel.
        requirement = re.sub(r"[\s()]", "", requirement)
        by_extra.setdefault(extra, set()).add(requirement)
    return by_extra


def test_metadata(wheel):
    metadata = email.message_from_string(read_metadata(wheel, "METADATA"))
    assert metadata["Name"] == "keras-sparsity"
    assert metadata["Version"] == keras_sparsity.__version__
    assert metadata["License"] == "Apache-2.0"
    assert set(metadata["Requires-Python"].split(",")) == {">=3.10", "<3.13"}
    by_extra = requirements(metadata)
    needed = {"keras>=3.5", "h5py", "numpy", "rich", "scipy"}
    assert by_extra.pop(None) == needed
    assert by_extra.keys() == EXTRAS.keys()
    for extra, expected in EXTRAS.items():
        assert expected <= by_extra[extra]


def test_wheel_contains_every_module_and_no_test(wheel):
    packed = {n for n in wheel.namelist() if n.endswith(".py")}
    assert packed == {str(path.relative_to(ROOT)) for path in MODULES}


def test_console_script_is_there(wheel):
    entry_points = read_metadata(wheel, "entry_points.txt")
    assert "keras-sparsity = keras_sparsity.launch:main" in entry_points
    launch = importlib.import_module("keras_sparsity.launch")
    assert callable(launch.main)


def public_names():
    names = set()
    for name in keras_sparsity.__all__:
        value = getattr(keras_sparsity, name)
        if name in ("layers", "callbacks"):
            inner_names = getattr(value, "__all__", [])
            names |= {f"ks.{name}.{inner}" for inner in inner_names}
        else:
            names.add(f"ks.{name}")
    return names - {"ks.__version__"}


def test_readme_lists_the_public_api():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## API\n(.*?)^## ", readme, re.M | re.S)
    listed = set(re.findall(r"^\| `(ks\.[\w.]+)", section, re.M))
    assert listed == public_names()


@pytest.mark.parametrize(
    "path",
    [ROOT / "README.md", *sorted((ROOT / "tutorials").glob("*.py"))],
    ids=lambda path: path.name,
)
def test_documented_names_exist(path):
    text = path.read_text(encoding="utf-8")
    for name in sorted(set(re.findall(r"\bks((?:\.[A-Za-z_]\w*)+)", text))):
        value = keras_sparsity
        for part in name[1:].split("."):
            value = getattr(value, part)


def test_readme_commands_exist():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.M))
    assert set(re.findall(r"^make (\w+)", readme, re.M)) <= targets
    for path in re.findall(r"\]\(([\w./]+)\)", readme):
        assert (ROOT / path).exists(), path
    for code in re.findall(r"```python\n(.*?)```", readme, re.S):
        ast.parse(code)


def imported_names(path):
    """Every module name that a file imports, or names in a string."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"[\w.]+", node.value):
                yield node.value


# Keras and TensorFlow call or read these of their subclasses.
OVERRIDDEN = {
    "CurrentVariable": {
        *("_handle", "_read_variable_op", "_export_to_saved_model_graph"),
    },
    "HybridOptimizer": {"_trainable_variables"},
    "Partition": {"_path", "_initialize", "_value"},
    "ShardedEmbedding": {"_embeddings"},
    "TableVariable": {"_initialize_with_initializer", "_value"},
}
PRIVATE = re.compile(r"_[a-z]\w*")


def defined_names(tree):
    """Names that a file defines, and attributes that its objects set."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(
            node.ctx, ast.Store
        ):
            yield node.attr if ast.unparse(node.value) == "self" else ""
        elif isinstance(node, ast.Subscript) and isinstance(
            node.ctx, ast.Store
        ):
            yield getattr(node.slice, "value", "")  # of a `__dict__`


def used_private_names(tree):
    """Private attributes that a file reads, and private names in strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_of_python = ast.unparse(node.value) in ("os", "sys")
            name = "" if is_of_python else node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
        else:
            continue
        is_marker = name.startswith("_keras_sparsity") or name.endswith("_")
        if PRIVATE.fullmatch(name) and not is_marker:
            yield node.lineno, name


def test_private_names_stand_in_tf_only():
    """Modules, and attributes that no file of this package defines."""
    outside = [path for path in MODULES if path.parent != PACKAGE / "_tf"]
    trees = {p: ast.parse(p.read_text(encoding="utf-8")) for p in MODULES}
    own = {name for tree in trees.values() for name in defined_names(tree)}
    own |= set(dir(tuple)) | {"_replace", "_fields"}  # of a NamedTuple
    private = re.compile(r"(tensorflow\.python|keras\.src|keras\._)\b")
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in outside
        for name in imported_names(path)
        if private.match(name)
    ]
    found += [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in outside
        for line, name in used_private_names(trees[path])
        if name not in own
    ]
    assert not found


def classes_of_keras():
    """Classes of the package that derive from one of Keras or TensorFlow."""
    for path in MODULES:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if module.endswith("__main__") or path.parent == PACKAGE / "launch":
            continue
        try:
            members = vars(importlib.import_module(module))
        except ImportError:  # the engine that is not installed
            continue
        for kind in members.values():
            if inspect.isclass(kind) and kind.__module__ == module:
                bases = [b for b in kind.__mro__ if is_foreign(b)]
                if bases:
                    yield kind, bases


def is_foreign(kind):
    return kind.__module__.partition(".")[0] in ("keras", "tensorflow")


def own_attributes(kind):
    """Private methods and attributes in the source of a class."""
    found = re.findall(r"(?:self\.|def )(\w+)", inspect.getsource(kind))
    return {name for name in found if PRIVATE.fullmatch(name)}


def test_no_class_uses_a_private_name_of_its_base():
    found = {}
    for kind, bases in classes_of_keras():
        if issubclass(kind, tf.distribute.StrategyExtended):
            continue  # whose interface consists of such names
        of_bases = set().union(*map(own_attributes, bases))
        names = own_attributes(kind) & of_bases
        found[kind.__name__] = names - OVERRIDDEN.get(kind.__name__, set())
    assert not any(found.values()), found


def test_global_names_are_replaced_in_patches_only():
    roots = re.compile(r"(keras|tf|tensorflow)\.")
    found = []
    for path in MODULES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            target = ""
            if isinstance(node, ast.Attribute) and not isinstance(
                node.ctx, ast.Load
            ):
                target = ast.unparse(node)
            elif isinstance(node, ast.Call) and node.args:
                if ast.unparse(node.func) in ("setattr", "delattr"):
                    target = ast.unparse(node.args[0]) + "."
            if roots.match(target):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found


@pytest.mark.parametrize(
    "importers,banned",
    [
        (["collectives"], "layers optimizer planning strategy tables"),
        (["planning"], "collectives layers optimizer strategy tables"),
        (["tables"], "aggregation layers optimizer strategy"),
        (
            ["collectives", "planning", "tables", "layers", "launch"],
            "callbacks",
        ),
    ],
)
def test_imports_point_one_way(importers, banned):
    banned = re.compile(rf"keras_sparsity\.({banned.replace(' ', '|')})\b")
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for importer in importers
        for path in sorted((PACKAGE / importer).rglob("*.py"))
        for name in imported_names(path)
        if banned.match(name)
    ]
    assert not found


def test_no_relative_imports():
    """So that the checks above see every import by its full name."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: line {node.lineno}"
