"""scripts/install_horovod.sh builds the released archive and no other."""

import hashlib
import io
import os
import pathlib
import subprocess
import sys
import tarfile

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts/install_horovod.sh"

# Code of the archive, as pip runs it to learn about the package.
BACKEND = """
import os, pathlib
pathlib.Path(os.environ["MARKER"]).write_text("ran")
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = pathlib.Path(folder, "horovod-0.28.1.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\\nName: horovod\\nVersion: 0.28.1\\n"
    )
    return info.name
def build_wheel(folder, config_settings=None, metadata_directory=None):
    raise NotImplementedError
"""
FILES = {
    "PKG-INFO": "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n",
    "backend.py": BACKEND,
    "pyproject.toml": (
        "[build-system]\nrequires = []\nbuild-backend = 'backend'\n"
        "backend-path = ['.']\n"
    ),
}
# This Python, but for the tools of the build, which it does not install.
PYTHON = """\
#!/bin/sh
case "$*" in "-m pip install"*) exit 0 ;; esac
exec {python} "$@"
"""


@pytest.fixture
def archive(tmp_path):
    """An archive of Horovod's name, in a folder of its own."""
    path = tmp_path / "index" / "horovod-0.28.1.tar.gz"
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as tar:
        for name, text in FILES.items():
            entry = tarfile.TarInfo(f"horovod-0.28.1/{name}")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    return path


def install(script, archive, folder):
    """Runs the script where pip finds `archive`; whether its code has run."""
    packages = folder / "packages"
    metadata = packages / "tensorflow-2.18.1.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Name: tensorflow\nVersion: 2.18.1\n")
    (packages / "horovod.py").write_text("raise ImportError")
    python = folder / "python"
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    marker = folder / "marker"
    ended = subprocess.run(
        ["bash", script, python],
        env={
            **os.environ,
            "PYTHONPATH": str(packages),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(archive.parent),
            "MARKER": str(marker),
            "CXX": "true",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    return ended, marker.exists()


def test_another_archive_is_refused_before_its_code_runs(archive, tmp_path):
    ended, has_run = install(SCRIPT, archive, tmp_path)
    assert ended.returncode == 1
    assert not has_run
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert f"Got        {digest}" in ended.stderr
    assert "is not the one that was" in ended.stderr
    assert "PyPI" in ended.stderr.splitlines()[-1]


def test_the_expected_archive_is_built(archive, tmp_path):
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    lines = SCRIPT.read_text().splitlines()
    (number,) = (n for n, x in enumerate(lines) if x.startswith("SHA256="))
    lines[number] = f"SHA256={digest}"
    script = tmp_path / "install_horovod.sh"
    script.write_text("\n".join(lines))
    ended, has_run = install(script, archive, tmp_path)
    assert has_run
    # It holds no Gloo to change.
    assert "did not compile" in ended.stderr


def test_an_archive_that_is_not_found(archive, tmp_path):
    archive.unlink()
    ended, _ = install(SCRIPT, archive, tmp_path)
    assert ended.returncode == 1
    assert "could not be downloaded" in ended.stderr
    assert "No matching distribution" in ended.stderr
