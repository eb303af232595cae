"""How many partitions should a table have?

    keras-sparsity run -n 2 tutorials/03_partition_search.py
    keras-sparsity report logs

A sharded table is stored, looked up and updated partition by partition. Few
partitions leave owners without work; many cost time to split ids and to put
rows together. Which number is best depends on the table, the optimizer and
the machines: so it is tried out, while the model trains.
"""

import argparse
import pathlib

import keras
import numpy as np

import keras_sparsity as ks

NUM_WORDS, DIM, LENGTH, BATCH = 60_000, 64, 16, 256

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--log-dir", default="logs", help="for TensorBoard")
parser.add_argument("--steps", type=int, default=300, help="of training")
args = parser.parse_args()
log_dir = pathlib.Path(args.log_dir)
# Tables stay on their owners: what is not spread has no partitions.
strategy = ks.HybridStrategy(architecture="hybrid")

# Words as in a text: few of them occur often. With Adam, as Keras defines it,
# each step updates all rows of the table (their moments decay), so that it
# matters how many processes and cores share them.
random = np.random.default_rng(0)
texts = (random.zipf(1.2, size=(4_096, LENGTH)) % NUM_WORDS).astype("int32")
labels = (texts.min(axis=1, keepdims=True) < 3).astype("float32")

model = keras.Sequential(
    [
        keras.Input((LENGTH,), dtype="int32"),
        ks.layers.ShardedEmbedding(NUM_WORDS, DIM, name="words"),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
with strategy.scope():
    model.compile("adam", loss="binary_crossentropy")

# The search: it begins with as many partitions as there are machines, doubles
# them as long as a step gets faster, then halves them, fits a curve to what it
# has seen, and takes the best. All of these steps train as any others do; the
# result of training does not depend on it, to the bit. The choice is kept in a
# file, from which the next run takes it without a search.
search = ks.callbacks.PartitionSearch(
    num_steps=12, num_warm_up_steps=2, path=log_dir / "partitions.json"
)
# And what TensorBoard shows: samples, curve and choice, and much more.
logger = ks.callbacks.ArchitectureLogger(log_dir, every_steps=50)
# Its steps are few here, to be quick: a real training has enough of them.
model.fit(
    texts,
    labels,
    batch_size=BATCH,
    epochs=max(1, args.steps * BATCH // len(texts)),
    callbacks=[search, logger],
    verbose=0,
)

if strategy.rank == 0:
    for group, choice in search.result.items():
        print(f"\n{group}: {choice.num_partitions} partitions")
        for count, seconds in sorted(choice.sampled_seconds.items()):
            fitted = 1e3 * choice.predicted_seconds(count)
            print(
                f"  {count:3d} partitions: {1e3 * seconds:7.2f} ms a step, "
                f"{fitted:7.2f} ms by the fit"
            )
    print(f"\ntensorboard --logdir {log_dir}     # or: keras-sparsity report")
