"""How many partitions should a table have?

    pip install '.[tensorboard]'
    keras-sparsity run -n 2 tutorials/03_partition_search.py
    keras-sparsity report logs

A sharded table is stored, read and updated partition by partition. Few
partitions leave owners without work; many cost time to split ids and to join
rows. The best number depends on the table, the optimizer and the machines, so
the search measures it while the model trains.
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
# "hybrid" keeps tables on their owners; others have no partitions.
strategy = ks.HybridStrategy(architecture="hybrid")

# As in a text, few words occur often. A step pulls, updates and pushes the rows
# of its words, in as many pieces as there are partitions.
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

# The search starts with one partition per machine, doubles the number as long
# as steps get faster, then halves it, fits a curve to the samples and takes the
# best number. All of these steps train, and the result of training depends on
# the search by rounding only. A file keeps the choice for the next run.
search = ks.callbacks.PartitionSearch(
    num_steps=12,
    num_warm_up_steps=2,
    max_seconds=60,  # then the best so far is kept
    path=log_dir / "partitions.json",
)
# TensorBoard shows samples, curve and choice.
logger = ks.callbacks.ArchitectureLogger(log_dir, every_steps=50)
# Few steps per sample, to be quick here.
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
    print(f"\ntensorboard --logdir {log_dir}")
    print(f"keras-sparsity report {log_dir}  # the same on a terminal")
