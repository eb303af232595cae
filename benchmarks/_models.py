"""The workloads, small, for benchmarks that train them in other ways.

A dict from a name to a function of the number of processes and of the number
of steps for which there shall be examples. It returns a `Workload` built of
keras_sparsity's layers, and the size of its global batch.
"""

import argparse
import functools

import numpy as np
from workloads import _common

_OPTIONS = {
    "lm": "--vocabulary 30000 --time 16 --sampled 256 --batch 160",
    "recommender": "--tables 5 --smallest 20 --largest 100000 --dim 64 "
    "--hot 1 --batch 2048",
    "resnet50": "--batch 2",
}


def _make(name, num_processes, num_steps):
    module = _common.module(name)
    options = _OPTIONS[name].split()
    args = _common.parse(module, argparse.ArgumentParser(), options)
    batch = args.batch * num_processes
    generator = np.random.default_rng(1)
    kit = _common.module("_training").KIT
    return module.make(kit, args, batch * num_steps, generator), batch


MODELS = {name: functools.partial(_make, name) for name in _OPTIONS}
