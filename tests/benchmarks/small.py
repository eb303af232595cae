"""Small workloads, for tests on several processes.

Ranks find the benchmarks' modules by `import_common` alone.
"""

import argparse
import os
import pathlib
import sys

_BENCHMARKS = os.path.join(str(pathlib.Path(__file__).parents[2]), "benchmarks")
SMALL = {
    "recommender": "--tables 3 --smallest 5 --largest 40 --dim 4 --hot 2",
    "lm": "--vocabulary 30 --dim 4 --units 4 --time 3 --sampled 8",
    "nmt": "--vocabulary 30 --dim 4 --units 4 --time 3 --sampled 8",
}


def import_common():
    """The module `workloads._common`."""
    if _BENCHMARKS not in sys.path:
        sys.path.append(_BENCHMARKS)
    from workloads import _common

    return _common


def make_small(name, kit, size, options=""):
    """A small workload, its held-out examples and its arguments."""
    common = import_common()
    options = f"{SMALL[name]} --batch 4 --warm-up 1 {options}".split()
    options += ["--steps", "1"]
    module = common.module(name)
    args = common.parse(module, argparse.ArgumentParser(), options)
    return *common.made(module, kit, args, size), args
