"""The distribution, the public API, and what may import what."""

import ast
import email
import importlib
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

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
    assert by_extra.pop(None) == {"keras>=3.5", "h5py", "numpy", "scipy"}
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


def test_private_names_stand_in_compat_only():
    private = re.compile(r"(tensorflow\.python|keras\.src|keras\._)\b")
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in MODULES
        for name in imported_names(path)
        if private.match(name) and path != PACKAGE / "compat.py"
    ]
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
