"""What the ranks run in tests of dedicated servers."""

import resource

import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks
from tests import checkpoint_functions
from tests.logged import with_messages_of

ROWS, DIM, LENGTH, BATCH = 30, 3, 4, 8
# The last batch is smaller, and of fewer examples than three workers.
COUNT = 5 * BATCH + 2

# A program that says what its rank is, and how many of nine rows it owns.
SCRIPT = """\
import keras, numpy as np, keras_sparsity as ks

strategy = ks.HybridStrategy()
table = ks.layers.ShardedEmbedding(9, 2)
model = keras.Sequential([table])
with strategy.scope():
    model.compile("adam", "mse")
x = np.arange(8)[:, None] % 9
model.fit(x, np.ones((8, 1, 2)), batch_size=4, epochs=2, verbose=0)
resolver = strategy.cluster_resolver
rows = sum(p.num_rows for p in table.table.partitions)
print("RANK", strategy.rank, strategy.size, resolver.task_type,
      resolver.task_id, rows, flush=True)
"""


def arrays():
    rng = np.random.default_rng(5)
    x = rng.integers(0, ROWS, (COUNT, LENGTH)).astype("int32")
    return x, rng.normal(size=(COUNT, 1)).astype("float32")


def build(embedding, **of_head):
    keras.utils.set_random_seed(5)
    return keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            embedding(ROWS, DIM),
            keras.layers.Flatten(),
            keras.layers.Dense(1, **of_head),
        ]
    )


def inputs(may_read=True, shard=lambda dataset: dataset):
    """Datasets by name: of unknown length, without end, and read by parts."""
    x, y = arrays()

    def check():
        if not may_read:
            raise AssertionError("A server has read its input.")

    def read():
        check()
        for start in range(0, COUNT, BATCH):
            yield x[start : start + BATCH], y[start : start + BATCH]

    def read_on():
        while True:
            yield from read()

    def load(position):
        check()
        return position

    def decode(position):
        position = tf.numpy_function(load, [position], tf.int64)
        position = tf.ensure_shape(position, [])
        return tf.gather(x, position), tf.gather(y, position)

    signature = (
        tf.TensorSpec([None, LENGTH], tf.int32),
        tf.TensorSpec([None, 1], tf.float32),
    )
    of_unknown_length = tf.data.Dataset.from_generator(
        read, output_signature=signature
    )
    # Twelve is a multiple of two and three workers.
    by_elements = tf.data.Dataset.range(36).map(decode).batch(12)
    return {
        "unknown": of_unknown_length,
        "endless": of_unknown_length.repeat(),
        # Not known to be without end: all ranks stop in the middle.
        "stopped": tf.data.Dataset.from_generator(
            read_on, output_signature=signature
        ),
        "sharded": shard(by_elements),
    }


def use(model, data):
    """Trains and evaluates a model in several ways; the logs and outputs."""
    x, y = arrays()
    logs = [
        model.fit(
            data["unknown"],
            epochs=2,
            validation_data=data["unknown"],
            verbose=0,
        ),
        model.fit(data["endless"], epochs=2, steps_per_epoch=4, verbose=0),
        model.fit(data["stopped"], epochs=2, steps_per_epoch=3, verbose=0),
        model.fit(data["sharded"], verbose=0),
        model.fit(
            x,
            y,
            batch_size=BATCH,
            shuffle=False,
            validation_split=0.25,
            verbose=0,
        ),
    ]
    logs = {
        f"{number}/{name}": values
        for number, history in enumerate(logs)
        for name, values in history.history.items()
    }
    return {
        **logs,
        "evaluate": model.evaluate(data["unknown"], verbose=0),
        "predict": model.predict(x, batch_size=BATCH, verbose=0),
        "predict unknown": model.predict(data["unknown"], verbose=0),
        "weights": np.concatenate([w.ravel() for w in model.get_weights()]),
    }


def train():
    """On every rank: what `use` gives, and the number of rows stored here."""
    strategy = ks.HybridStrategy()
    is_server = strategy.collectives.is_server
    assert strategy.num_replicas_in_sync == strategy.size
    assert is_server == (strategy.rank >= strategy.size)
    # Its loss is added by shares of the batch.
    model = build(ks.layers.ShardedEmbedding, activity_regularizer="l2")
    with strategy.scope():
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    found = use(model, inputs(not is_server, strategy.shard))
    (table,) = (v.table for v in model.weights if hasattr(v, "table"))
    num_rows = sum(partition.num_rows for partition in table.partitions)
    slots = model.optimizer.slots_of(table.variable)
    num_slots = {
        name: sum(
            slot.shape[0]
            for slot, partition in zip(of_table, table.partitions, strict=True)
            if partition.num_rows
        )
        for name, of_table in slots.items()
    }
    return found, num_rows, num_slots


def loop():
    """On every rank: a loop of one's own, in words of `tf.distribute`."""
    strategy = ks.HybridStrategy()
    x, y = arrays()
    with strategy.scope():
        model = build(ks.layers.ShardedEmbedding)
        loss_object = keras.losses.MeanSquaredError()
        mean = keras.metrics.MeanAbsoluteError()
    optimizer = ks.HybridOptimizer(keras.optimizers.Adam(0.01))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    dataset = strategy.experimental_distribute_dataset(dataset)

    def train_step(batch):
        inputs, labels = batch
        with tf.GradientTape() as tape:
            outputs = model(inputs, training=True)
            loss = loss_object(labels, outputs)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        mean.update_state(labels, outputs)
        return loss, tf.cast(tf.shape(labels)[:1], tf.float32), outputs

    @tf.function
    def step(batch):
        loss, count, outputs = strategy.run(train_step, args=(batch,))
        return (
            strategy.reduce(tf.distribute.ReduceOp.MEAN, loss, axis=None),
            strategy.reduce(tf.distribute.ReduceOp.SUM, count[0], axis=None),
            strategy.gather(outputs, axis=0),
        )

    found = [[each.numpy() for each in step(batch)] for batch in dataset]
    losses, counts, outputs = zip(*found, strict=True)
    weights = [w.ravel() for w in model.get_weights()]
    return {
        "losses": np.array(losses),
        "counts": np.array(counts),
        "outputs": np.concatenate(outputs),
        "mean": float(mean.result()),
        "weights": np.concatenate(weights),
    }


@with_messages_of("keras_sparsity")
def fit_without_tables(said):
    """On every rank: the warnings of a model without tables, and its loss."""
    model = build(keras.layers.Embedding)
    with ks.HybridStrategy(architecture="hybrid").scope():
        model.compile("sgd", "mse")
    x, y = arrays()
    for _ in range(2):
        history = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return said, history.history["loss"]


def refuse_pipelines():
    """The errors of strategies whose models are cut into stages."""
    told = []
    for kind in (ks.PipelineStrategy, ks.LayerPlacementStrategy):
        try:
            kind()
        except ValueError as error:
            told.append(str(error))
    return told


def train_large(num_rows, dim, spare_bytes):
    """Trains a table for which a worker has no address space.

    Args:
        num_rows, dim: of the table, float32.
        spare_bytes: address space of a worker beyond what it has already.

    Returns:
        The number of rows stored here; the first and the last one after a
        step; and whether a worker can hold the whole table.
    """
    strategy = ks.HybridStrategy()
    is_server = strategy.collectives.is_server
    _step(strategy, 100, dim)  # the memory of a first step
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if not is_server:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + spare_bytes, limits[1]))
    try:
        table = _step(strategy, num_rows, dim)
        stored = sum(partition.num_rows for partition in table.partitions)
        rows = table.gather(np.array([0, num_rows - 1])).numpy()
        try:
            can_hold = np.empty((num_rows, dim), "float32").size > 0
        except MemoryError:
            can_hold = False
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    return stored, rows, can_hold


def _step(strategy, num_rows, dim):
    """Trains one step that touches the first and the last row; the table."""
    layer = ks.layers.ShardedEmbedding(
        num_rows, dim, embeddings_initializer="zeros"
    )
    inputs = keras.Input((2,), dtype="int32")
    model = keras.Model(inputs, layer(inputs))
    with strategy.scope():
        model.compile(keras.optimizers.SGD(1.0), "mse")
    x = np.tile([[0, num_rows - 1]], (8, 1)).astype("int32")
    model.fit(x, np.ones((8, 2, dim)), batch_size=8, verbose=0)
    return layer.table


def train_from(directory, interrupt_after):
    """`checkpoint_functions.train` of a model without random states."""
    return checkpoint_functions.train(
        directory, dropout=0.0, interrupt_after=interrupt_after, every_steps=1
    )
