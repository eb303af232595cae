"""How the workloads are trained with keras_sparsity."""

import argparse
import functools

import _asynchronous
import _common
import _facts
import _network
import tensorflow as tf

import keras_sparsity as ks

# Small enough that gradients are clipped.
NORM = 0.01
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
    _options(parser.add_argument)
    args = _common.parse(module, parser)
    strategy = _strategy(args)
    window = _network.Window(is_first=strategy.rank == 0)
    if args.architecture != "measured":  # which measures the links
        window.open()
    is_ordinary = args.ordinary or not strategy.synchronous
    kit = _asynchronous.KIT if is_ordinary else KIT
    workload, held_out = _common.made(module, kit, args, strategy.size)
    if args.clip == "owners":
        workload.optimizer.global_clipnorm = NORM
    with strategy.scope():
        workload.model.compile(workload.optimizer, workload.loss)
    figures = _fit(workload, held_out, args, strategy, window)
    if not is_ordinary:
        figures["variables"] = _facts.of_variables(
            workload.model, workload.x, args.batch * strategy.size, strategy
        )
    if args.alone and held_out is None:
        figures["seconds_alone"] = _facts.seconds_alone(
            lambda: _alone(module, args),
            args.warm_up,
            max(args.steps),
            strategy.collectives,
        )
    window.report(
        workload.words * args.batch * strategy.size,
        engine=strategy.collectives.engine,
        workload=vars(args),
        num_parameters=workload.num_parameters(),
        **figures,
    )


def _fit(workload, held_out, args, strategy, window):
    ranks = strategy.collectives
    if not strategy.synchronous:
        return _asynchronous.fit(workload, held_out, args, window, ranks)
    return _common.fit(
        workload, held_out, args, strategy.size, window, ranks.barrier
    )


def _options(add):
    add("--architecture", default="hybrid", help="of the strategy")
    add("--wire-dtype", help="of the strategy")
    add(
        "--no-local-aggregation",
        dest="local_aggregation",
        action="store_false",
        help="of the strategy",
    )
    add("--prefetch", action="store_true", help="of the strategy")
    add("--alone", action="store_true", help="also time it without exchange")
    add("--ordinary", action="store_true", help="`Embedding`s, no tables")
    add(
        "--asynchronous",
        metavar="BOUND",
        help="of ordinary `Embedding`s, with this `max_staleness`, or none",
    )
    add(
        "--clip",
        choices=["owners", "workers"],
        help=f"to a global norm of {NORM}, computed by the owners of rows from "
        "one number of each, or by every worker from all gradients",
    )


def _strategy(args):
    if args.asynchronous is not None:
        is_bounded = args.asynchronous != "none"
        return ks.HybridStrategy(
            synchronous=False,
            max_staleness=int(args.asynchronous) if is_bounded else None,
            wire_dtype=args.wire_dtype,
        )
    return ks.HybridStrategy(
        architecture=args.architecture,
        wire_dtype=args.wire_dtype,
        local_aggregation=args.local_aggregation,
        prefetch=args.prefetch,
        transform_gradients=clip_by_workers if args.clip == "workers" else None,
    )


def clip_by_workers(gradients, variables):
    """Clips by the norm of gradients gathered from their owners."""
    ranks = ks.collectives.current()
    squares = []
    for index, gradient in enumerate(gradients):
        if isinstance(gradient, tf.IndexedSlices):
            gradient = ranks.all_gather(gradient.values, f"clip/{index}")
        squares.append(tf.reduce_sum(tf.square(gradient)))
    norm = tf.sqrt(tf.add_n(squares))
    scale = NORM / tf.maximum(norm, NORM)
    return [
        tf.IndexedSlices(g.values * scale, g.indices, g.dense_shape)
        if isinstance(g, tf.IndexedSlices)
        else g * scale
        for g in gradients
    ]


def _alone(module, args):
    """Prepares the training without exchange: see `_facts.seconds_alone`."""
    workload, _ = _common.made(module, KIT, args, 1)
    with ks.HybridStrategy(architecture="hybrid").scope():
        workload.model.compile(workload.optimizer, workload.loss)
    batches = _common.dataset(
        workload.x, workload.y, args.batch, args.warm_up + max(args.steps)
    )
    return lambda callbacks: workload.model.fit(
        batches, callbacks=callbacks, shuffle=False, verbose=0
    )
