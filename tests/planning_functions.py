"""What `test_planning.py` runs in a network namespace: counted bytes.

As a program with an engine's name it prints, as JSON, the bytes that all
processes together send in one step of each kind.
"""

import json
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.exchange.options import Options
from keras_sparsity.placement.base import Update
from keras_sparsity.placement.gathered import AllGather

NUM_PROCESSES = 3
STEPS = 8
NUM_VALUES = 300_000
NUM_ROWS, DIM = 20_000, 64
# The native engine pads them: 9.7 % more. Each rank asks for this many of
# each owner, and for every third row twice.
ROWS_OF_EACH_OWNER = 1_050
# These, with their indices, it hardly pads: by 8 words.
GATHERED_ROWS = 1_016


def sent_bytes():
    """Bytes that the interface has sent since it is up."""
    with open("/proc/net/dev") as file:
        (line,) = (x for x in file if x.strip().startswith("lo:"))
    return int(line.split()[9])


def count_bytes():
    """Bytes of one step, without those of as much time without a step."""
    strategy = ks.HybridStrategy()
    ranks = strategy.collectives
    layer = ks.layers.ShardedEmbedding(NUM_ROWS, DIM)
    model = keras.Sequential([keras.Input((3,), dtype="int32"), layer])
    with strategy.scope():
        model.compile(optimizer="sgd", loss="mse")
    # As many of each owner, for rows go round the owners.
    ids = 5_000 * ranks.rank + np.arange(NUM_PROCESSES * ROWS_OF_EACH_OWNER)
    ids = tf.constant(np.concatenate([ids, ids[::3]]))

    variable = keras.Variable(tf.zeros([NUM_ROWS, DIM]), name="gathered")

    def all_reduce():
        values = tf.random.normal([NUM_VALUES])
        return ranks.all_reduce([values], name="test/values")

    def all_gather():
        values = tf.random.normal([GATHERED_ROWS, DIM])
        rows = tf.IndexedSlices(values, tf.range(GATHERED_ROWS))
        update = Update(variable, rows, variable, is_of_rows=True)
        AllGather.reduce([update], ranks, Options())
        return update.gradient.values

    def pull_and_push():
        table = layer.table
        with tf.GradientTape() as tape:
            rows = table.gather(ids)
        return tape.gradient(rows, table.variable).values

    return {
        "allreduce": measured(ranks, tf.function(all_reduce)),
        "allgather": measured(ranks, tf.function(all_gather)),
        "sharded": measured(
            ranks, tf.function(lambda: strategy.run(pull_and_push))
        ),
    }


def measured(ranks, step):
    for _ in range(2):  # the first ones set up connections and keys
        step()
    ranks.barrier("test/start")
    before, start = sent_bytes(), time.monotonic()
    for _ in range(STEPS):
        step()
    ranks.barrier("test/end")
    seconds = time.monotonic() - start
    counted = sent_bytes() - before
    before = sent_bytes()
    time.sleep(1)
    idle = seconds * (sent_bytes() - before)
    ranks.barrier("test/idle")
    return (counted - idle) / STEPS


if __name__ == "__main__":
    results = ks.launch.run(
        count_bytes, NUM_PROCESSES, engine=sys.argv[1], timeout=120
    )
    print(json.dumps(results[0]))
