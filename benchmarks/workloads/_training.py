"""How the workloads are trained with keras_sparsity."""

import argparse
import functools

import _common

import keras_sparsity as ks

KIT = _common.Kit(
    embedding=ks.layers.ShardedEmbedding,
    bag=functools.partial(ks.layers.ShardedEmbeddingBag, combiner="sum"),
    softmax=ks.layers.SampledSoftmax,
)


def run(name):
    """Trains a workload, and reports it on rank 0.

    Args:
        name: The workload's.
    """
    module = _common.module(name)
    parser = argparse.ArgumentParser(
        description=module.__doc__.partition("\n")[0]
    )
    add = parser.add_argument
    add("--architecture", default="hybrid", help="of the strategy")
    add("--wire-dtype", help="of the strategy")
    args = _common.parse(module, parser)
    strategy = ks.HybridStrategy(
        architecture=args.architecture, wire_dtype=args.wire_dtype
    )
    workload, held_out = _common.made(module, KIT, args, strategy.size)
    with strategy.scope():
        workload.model.compile(workload.optimizer, workload.loss)
    window, num_steps, figures = _common.fit(
        workload, held_out, args, strategy.size, strategy.collectives.barrier
    )
    if strategy.rank == 0:
        window.report(
            num_steps,
            workload.words * args.batch * strategy.size,
            engine=strategy.collectives.engine,
            workload=vars(args),
            num_parameters=workload.num_parameters(),
            **figures,
        )
