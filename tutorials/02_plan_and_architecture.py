"""How does each variable travel, and what does it cost?

    pip install '.[tensorboard]'
    keras-sparsity run -n 2 tutorials/02_plan_and_architecture.py

A step reads all elements of a dense variable and a few rows of a sparse one.
Alpha is the fraction of its elements that one process touches in a step.
AllReduce is best for dense gradients; sending rows to the process that owns
them ("ps", parameter server) is best for sparse ones, unless alpha is large.
This tutorial measures alpha, computes the cost of each architecture and draws
it.
"""

import argparse
import pathlib

import keras
import numpy as np
import tensorflow as tf
from matplotlib import figure as figures

import keras_sparsity as ks

NUM_ITEMS, NUM_DAYS, DIM, BATCH = 50_000, 7, 32, 512

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--folder", default="plan", help="for the pictures")
folder = pathlib.Path(parser.parse_args().folder)

# The default, `architecture="auto"`, starts each table on the parameter server
# and switches to the best architecture, by counted bytes, after the first
# steps. A named architecture, of the strategy or of a layer, stays.
strategy = ks.HybridStrategy()

# Purchases, and their day of the week: a batch touches few rows of the large
# table of items and every row of the small table of days.
random = np.random.default_rng(0)
items = (random.zipf(1.3, size=(20_480, 4)) % NUM_ITEMS).astype("int32")
days = random.integers(NUM_DAYS, size=(20_480, 1), dtype="int32")
labels = ((items.sum(axis=1, keepdims=True) + days) % 2).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices(
    ({"items": items, "days": days}, labels)
).batch(BATCH)

inputs = {
    "items": keras.Input((4,), dtype="int32", name="items"),
    "days": keras.Input((1,), dtype="int32", name="days"),
}
of_items = ks.layers.ShardedEmbedding(NUM_ITEMS, DIM, name="of_items")
of_days = ks.layers.ShardedEmbedding(NUM_DAYS, DIM, name="of_days")
hidden = keras.layers.Concatenate(axis=1)(
    [of_items(inputs["items"]), of_days(inputs["days"])]
)
hidden = keras.layers.Dense(64, activation="relu")(
    keras.layers.Flatten()(hidden)
)
model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(hidden))
with strategy.scope():
    model.compile("adagrad", loss="binary_crossentropy")

# --- Before training ------------------------------------------------------
# The plan takes gradients of some batches and trains nothing. Bytes are those
# that the busiest machine would send and receive in a step, and a variable's
# architecture is that with the fewest. Training moves a table only where that
# saves time, as its line "Architecture: ..." says below. The second table
# predicts a step of each strategy (tutorial 7).
plan = ks.plan(model, dataset)

# --- The same on eight machines -------------------------------------------
# The equations alone, for the large table, as alpha grows. Right of the
# crossing AllReduce of the dense gradient is cheaper.
cluster = ks.planning.Cluster(num_machines=8)
measured = plan.variables[0].sparsity
alphas = np.geomspace(0.001, 1, 40)
costs = {
    architecture: [
        ks.planning.transfer_bytes(
            ks.planning.VariableSpec(measured.name, measured.shape, alpha),
            architecture,
            cluster,
        ).busiest_bytes
        for alpha in alphas
    ]
    for architecture in ("allreduce", "ps", "allgather")
}
if strategy.rank == 0:
    folder.mkdir(parents=True, exist_ok=True)
    figure = figures.Figure(layout="constrained")
    axes = figure.add_subplot()
    for architecture, num_bytes in costs.items():
        axes.loglog(alphas, np.divide(num_bytes, 1e6), label=architecture)
    axes.axvline(measured.alpha, linestyle="--", color="gray")
    axes.set_xlabel(f"alpha (measured for {measured.name}: dashed)")
    axes.set_ylabel("MB per step at each of 8 machines")
    axes.legend()
    figure.savefig(folder / "bytes_by_alpha.png")

# --- While it trains ------------------------------------------------------
# "auto" finds each table's architecture; a line explains the choice.
# TensorBoard shows the plan with the counted bytes, and the times of each path.
logger = ks.callbacks.ArchitectureLogger(folder / "logs", every_steps=20)
model.fit(dataset, epochs=2, callbacks=[logger], verbose=2)

# The measured sparsity. A table under AllReduce has no owner that counts the
# touches of all processes, so its popularity is unknown.
for found in ks.sparsity.measured(model):
    if strategy.rank == 0 and found.alpha is not None:
        print(f"{found.name}: alpha {found.alpha:.4f}")
        if found.busiest_share is not None:
            print(
                f"  the busiest 1 % of its rows have {found.busiest_share:.0%} "
                "of all touches"
            )
if strategy.rank == 0:
    for layer in (of_items, of_days):
        print(f"{layer.name} travels by {layer.table.architecture}")
    print(f"pictures: {folder / 'bytes_by_alpha.png'}")
    print(f"keras-sparsity report {folder / 'logs'}")
