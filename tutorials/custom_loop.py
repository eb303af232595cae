"""A training loop of your own, on several processes.

    python tutorials/custom_loop.py
    keras-sparsity run -n 2 tutorials/custom_loop.py

A `tf.GradientTape`, an optimizer and a loop, as in TensorFlow's guide to custom
training. Both commands print the same losses, to float rounding, though the
last batch of each epoch is short.
"""

import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks

NUM_ITEMS, DIM, NUM_EXAMPLES, BATCH, EPOCHS = 5_000, 16, 10_100, 256, 3

# 1. The strategy comes first.
strategy = ks.HybridStrategy()

# Do people like a set of three items? Seeded, so that all processes have the
# same data.
random = np.random.default_rng(0)
items = random.zipf(1.3, size=(NUM_EXAMPLES, 3)).astype("int32") % NUM_ITEMS
taste = random.normal(size=NUM_ITEMS)
likes = (taste[items].sum(axis=1, keepdims=True) > 0).astype("float32")

# 2. Batches are global; each process receives its part.
dataset = tf.data.Dataset.from_tensor_slices((items, likes)).batch(BATCH)
dataset = strategy.experimental_distribute_dataset(dataset)

keras.utils.set_random_seed(1)
model = keras.Sequential(
    [
        keras.Input((3,), dtype="int32"),
        ks.layers.ShardedEmbedding(NUM_ITEMS, DIM, name="items"),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)

# 3. In the scope: the wrapped optimizer, which sums the processes' gradients,
# and metrics, whose results are those of all processes.
with strategy.scope():
    optimizer = ks.HybridOptimizer(keras.optimizers.Adam(0.01))
    optimizer.build(model.trainable_variables)
    mean_loss = keras.metrics.Mean()
    accuracy = keras.metrics.BinaryAccuracy()

# 4. A loss whose value is that of the global batch, on every process.
loss_of = ks.losses.globalize(keras.losses.BinaryCrossentropy())


def train_step(batch):
    x, y = batch
    with tf.GradientTape() as tape:
        outputs = model(x, training=True)
        loss = loss_of(y, outputs)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    mean_loss.update_state(loss)
    accuracy.update_state(y, outputs)


# 5. `strategy.run` calls the step with the process's part of the batch.
@tf.function
def distributed_train_step(batch):
    strategy.run(train_step, args=(batch,))


losses = []
for epoch in range(EPOCHS):
    for batch in dataset:
        distributed_train_step(batch)
    # Every process asks for the results, one prints them.
    losses.append(float(mean_loss.result()))
    correct = float(accuracy.result())
    if strategy.rank == 0:
        print(f"epoch {epoch + 1}: loss {losses[-1]:.4f}, {correct:.3f} right")
    mean_loss.reset_state()
    accuracy.reset_state()

if strategy.rank == 0:
    listed = ", ".join(f"{loss:.4f}" for loss in losses)
    print(f"losses with {strategy.size} process(es): {listed}")
