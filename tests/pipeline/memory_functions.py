"""Functions that the processes of `memory_bytes`'s tests run."""

import numpy as np
import tensorflow as tf

import keras_sparsity as ks
from tests import pipeline_functions

_CUTS = {"masks": "rows", "nested": "middle/inner/dense"}


def limited(schedule, name):
    """The plan's bytes, and training with limits around the largest.

    Returns:
        `(bytes of the stages, whether training with exactly the largest is
        finite, messages of one byte less and of 100 bytes)`.
    """
    size = pipeline_functions.BATCH_SIZE
    x, y = pipeline_functions.data(name, size)
    data = tf.data.Dataset.from_tensors((_tuple(x), _tuple(y)))
    model = _compiled(schedule, name, None)
    stages = ks.plan(model, data).stages
    of_stages = [stage.memory_bytes for stage in stages]
    most = max(of_stages)
    model = _compiled(schedule, name, most)
    (loss,) = model.fit(data, verbose=0).history["loss"]
    messages = []
    for limit in (most - 1, 100):
        try:
            _compiled(schedule, name, limit).fit(data, verbose=0)
        except (ValueError, tf.errors.InvalidArgumentError) as error:
            messages.append(str(error))
    return of_stages, bool(np.isfinite(loss)), messages


def _tuple(values):
    return tuple(values) if isinstance(values, list) else values


def _compiled(schedule, name, limit):
    strategy = ks.PipelineStrategy(
        schedule,
        [_CUTS[name]],
        num_micro_batches=2,
        memory_bytes=limit,
    )
    model = pipeline_functions.made(name)
    with strategy.scope():
        model.compile(**pipeline_functions.compile_options(name, "adam"))
    return model
