"""Packaging of keras_sparsity. Tool settings stand in pyproject.toml."""

import pathlib
import runpy

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
VERSION = runpy.run_path(str(ROOT / "keras_sparsity" / "_version.py"))

# Horovod 0.28.1 compiles against TensorFlow 2.16 to 2.18: the wheels of 2.19
# and later lack the XLA headers it includes. It must be compiled with that
# TensorFlow already there and without build isolation, which no extra can
# ask of pip: run scripts/install_horovod.sh first, then these extras find
# everything in place and only hold TensorFlow where Horovod works.
HOROVOD = ["horovod==0.28.1", "cloudpickle", "packaging", "psutil", "pyyaml"]

setup(
    name="keras-sparsity",
    version=VERSION["__version__"],
    description=(
        "Distributed training for Keras 3 on TensorFlow, variable by variable"
    ),
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The keras_sparsity authors",
    license="Apache-2.0",
    packages=find_packages(include=["keras_sparsity", "keras_sparsity.*"]),
    package_data={"keras_sparsity": ["README.md"]},
    python_requires=">=3.10,<3.13",
    # TensorFlow is no hard requirement, as in Keras: `tensorflow-cpu` and
    # `tensorflow` are two names for one module, and a user has chosen one.
    install_requires=["keras>=3.5", "h5py", "numpy", "rich", "scipy"],
    extras_require={
        "cpu": ["tensorflow-cpu>=2.16"],
        "gpu": ["tensorflow[and-cuda]>=2.16"],
        "horovod": ["tensorflow-cpu>=2.16,<2.19", *HOROVOD],
        "horovod-gpu": ["tensorflow[and-cuda]>=2.16,<2.19", *HOROVOD],
        "tensorboard": ["tensorboard", "matplotlib"],
        "dev": [
            "hypothesis",
            "import-linter",  # which folder imports which
            "matplotlib",
            "pre-commit",
            "pytest>=8,<9.2",  # pytest-xdist 3.8's groups: not with 9.2
            "pytest-timeout",
            "pytest-xdist",
            "ruff==0.17.5",
            "selenium",
            "setuptools<81",  # 81 drops what Horovod's build imports
            "tensorboard",
            "wheel",
        ],
    },
    entry_points={
        "console_scripts": ["keras-sparsity = keras_sparsity.launch:main"]
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    keywords="keras tensorflow distributed embedding sparse horovod",
)
