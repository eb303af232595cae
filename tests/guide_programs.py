"""Programs of Keras's and TensorFlow's distributed-training guides.

Each trains a tiny problem under any `tf.distribute` strategy and returns the
numbers that it has come to. A program gets the strategy, a function that wraps
the optimizer of a custom loop, and a folder.
"""

import os
import pathlib

import keras
import numpy as np
import tensorflow as tf

IMAGES, SIDE, CLASSES = 20, 4, 3
BATCH, EPOCHS = 8, 2  # the last batch of an epoch is a short one
SUM = tf.distribute.ReduceOp.SUM


def images(count=IMAGES, seed=3):
    rng = np.random.default_rng(seed)
    shape = (count, SIDE, SIDE, 1)
    return (
        rng.normal(size=shape).astype("float32"),
        rng.integers(0, CLASSES, count),
    )


def batches(count=IMAGES, seed=3, batch=BATCH):
    return tf.data.Dataset.from_tensor_slices(images(count, seed)).batch(batch)


def network(**options):
    keras.utils.set_random_seed(4)
    return keras.Sequential(
        [
            keras.Input((SIDE, SIDE, 1)),
            keras.layers.Conv2D(2, 3, activation="relu", **options),
            keras.layers.Flatten(),
            keras.layers.Dense(CLASSES),
        ]
    )


def cross_entropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, **options
    )


def compiled(learning_rate=0.01):
    model = network()
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate),
        loss=cross_entropy(),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )
    return model


def read(weights):
    return [np.array(w) for w in weights]


# Keras: multi-GPU distributed training with TensorFlow.


def fit_and_restore(strategy, wrap, folder):
    """Fit, validate, checkpoint after each epoch; then start from the last."""
    folder = pathlib.Path(folder)

    def make_or_restore():
        saved = sorted(folder.glob("*.keras"))
        if saved:
            return keras.models.load_model(saved[-1])
        return compiled()

    def run(epochs):
        with strategy.scope():
            model = make_or_restore()
        callbacks = [
            keras.callbacks.ModelCheckpoint(
                filepath=str(folder / "at-{epoch}.keras"), save_freq="epoch"
            )
        ]
        history = model.fit(
            batches(),
            epochs=epochs,
            callbacks=callbacks,
            validation_data=batches(12, seed=5),
            verbose=2,
        )
        return history.history, model

    first, _ = run(EPOCHS)
    second, model = run(1)  # with the optimizer's state
    evaluated = model.evaluate(batches(9, seed=6), return_dict=True)
    return {
        "first": first,
        "second": second,
        "evaluated": evaluated,
        "weights": model.get_weights(),
        "files": sorted(path.name for path in folder.iterdir()),
    }


# TensorFlow: distributed training with Keras; saving and loading.


def fit_with_callbacks(strategy, wrap, folder):
    """Weights saved in each epoch, a schedule, a callback of one's own."""
    folder = pathlib.Path(folder)
    rates = []

    class Rates(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))

    with strategy.scope():
        model = compiled()
    callbacks = [
        keras.callbacks.TensorBoard(log_dir=str(folder / "logs")),
        keras.callbacks.ModelCheckpoint(
            filepath=str(folder / "at-{epoch}.weights.h5"),
            save_weights_only=True,
        ),
        keras.callbacks.LearningRateScheduler(
            lambda epoch: 0.02 if epoch < 1 else 0.005
        ),
        Rates(),
    ]
    history = model.fit(
        batches(),
        epochs=EPOCHS,
        callbacks=callbacks,
        verbose=0,
    ).history
    trained = model.get_weights()
    model.load_weights(folder / "at-1.weights.h5")
    after_one = model.evaluate(batches(), verbose=0)
    model.load_weights(folder / f"at-{EPOCHS}.weights.h5")
    for ours, theirs in zip(trained, model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    model.save(folder / "model.keras")
    inside = []
    with strategy.scope():
        again = keras.models.load_model(folder / "model.keras")
        again.compile("sgd", cross_entropy(), metrics=["accuracy"])
    inside.append(again.evaluate(batches(), verbose=0))
    again.fit(batches(), verbose=0)
    inside.append(again.evaluate(batches(), verbose=0))
    return {
        "history": history,
        "rates": rates,
        "after one": after_one,
        "loaded": inside,
        "weights": trained,
    }


def load_without_strategy(strategy, wrap, folder):
    """Whole files in every process, also those for serving."""
    folder = pathlib.Path(folder)
    with strategy.scope():
        model = compiled()
    model.fit(batches(), verbose=0)
    model.save(folder / "model.keras")
    outputs = model.predict(batches(), verbose=0)
    plain = keras.models.load_model(folder / "model.keras")
    alone = plain.predict_on_batch(images()[0])
    # Each process writes a copy of its own, as the guide has workers do.
    replica = getattr(strategy, "rank", 0)
    served = str(folder / f"served-{replica}")
    tf.saved_model.save(model, served)
    serving = tf.saved_model.load(served).signatures["serving_default"]
    (logits,) = serving(tf.constant(images()[0])).values()
    return {"outputs": outputs, "alone": alone, "served": logits.numpy()}


# TensorFlow: custom training.


def loop_with_metrics(strategy, wrap, folder):
    """A loop with a regularizer, metrics in both steps and checkpoints."""
    train = strategy.experimental_distribute_dataset(batches())
    test = strategy.experimental_distribute_dataset(batches(12, seed=5))
    with strategy.scope():
        loss_object = cross_entropy(reduction="none")
        test_loss = keras.metrics.Mean(name="test_loss")
        train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train")
        test_accuracy = keras.metrics.SparseCategoricalAccuracy(name="test")
        model = network(kernel_regularizer="l2")
        optimizer = wrap(keras.optimizers.Adam(0.01))
        checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)

    def compute_loss(labels, predictions):
        per_example = loss_object(labels, predictions)
        loss = tf.nn.compute_average_loss(per_example, global_batch_size=BATCH)
        return loss + tf.nn.scale_regularization_loss(tf.add_n(model.losses))

    def train_step(inputs):
        pictures, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(pictures, training=True)
            loss = compute_loss(labels, predictions)
        gradients = tape.gradient(loss, model.trainable_variables)
        pairs = zip(gradients, model.trainable_variables, strict=True)
        optimizer.apply_gradients(pairs)
        train_accuracy.update_state(labels, predictions)
        return loss

    def test_step(inputs):
        pictures, labels = inputs
        predictions = model(pictures, training=False)
        test_loss.update_state(loss_object(labels, predictions))
        test_accuracy.update_state(labels, predictions)

    @tf.function
    def distributed_train_step(inputs):
        losses = strategy.run(train_step, args=(inputs,))
        return strategy.reduce(SUM, losses, axis=None)

    @tf.function
    def distributed_test_step(inputs):
        return strategy.run(test_step, args=(inputs,))

    seen = []
    prefix = os.path.join(folder, "ckpt")
    for _ in range(EPOCHS):
        total = 0.0
        for inputs in train:
            total += distributed_train_step(inputs)
        for inputs in test:
            distributed_test_step(inputs)
        metrics = (test_loss, train_accuracy, test_accuracy)
        seen.append([float(total)] + [float(m.result()) for m in metrics])
        path = checkpoint.save(prefix + str(getattr(strategy, "rank", 0)))
        for metric in metrics:
            metric.reset_state()
    trained = read(model.get_weights())
    # Restored, the optimizer's state too: the next step is the same.
    for inputs in train:
        distributed_train_step(inputs)
    once = read(model.get_weights())
    checkpoint.restore(path).assert_existing_objects_matched()
    for ours, theirs in zip(trained, model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for inputs in train:
        distributed_train_step(inputs)
    return {
        "seen": seen,
        "weights": trained,
        "once": once,
        "twice": read(model.get_weights()),
    }


# TensorFlow: multi-worker training, with Keras and with one's own loop.


def is_chief(strategy):
    resolver = strategy.cluster_resolver
    return resolver is None or resolver.task_id == 0


def fit_workers(strategy, wrap, folder):
    """A dataset without an end; the chief's file counts."""
    dataset = batches().repeat()
    with strategy.scope():
        model = compiled()
    history = model.fit(
        dataset, epochs=EPOCHS, steps_per_epoch=3, verbose=0
    ).history
    # Every worker saves, the others where nobody looks.
    place = "chief" if is_chief(strategy) else "others"
    os.makedirs(os.path.join(folder, place), exist_ok=True)
    model.save(os.path.join(folder, place, "model.keras"))
    path = os.path.join(folder, "chief", "model.keras")
    loaded = keras.models.load_model(path)
    return {
        "history": history,
        "weights": model.get_weights(),
        "loaded": loaded.get_weights(),
    }


def loop_of_workers(strategy, wrap, folder):
    """Input by context, an iterator in a loop inside of the function."""
    num_steps = 3

    def own_part(context):
        own_batch = context.get_per_replica_batch_size(BATCH)
        dataset = tf.data.Dataset.from_tensor_slices(images(24))
        dataset = dataset.shard(
            context.num_input_pipelines, context.input_pipeline_id
        )
        return dataset.repeat().batch(own_batch).prefetch(2)

    with strategy.scope():
        model = network()
        dataset = strategy.distribute_datasets_from_function(own_part)
        optimizer = wrap(keras.optimizers.RMSprop(0.01))
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        loss_object = cross_entropy(reduction="none")
    epoch = tf.Variable(0, dtype=tf.int64)

    @tf.function
    def train_epoch(iterator):
        def step(inputs):
            pictures, labels = inputs
            with tf.GradientTape() as tape:
                predictions = model(pictures, training=True)
                per_example = loss_object(labels, predictions)
                loss = tf.nn.compute_average_loss(
                    per_example, global_batch_size=BATCH
                )
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            accuracy.update_state(labels, predictions)
            return loss

        total = 0.0
        for _ in tf.range(num_steps):
            losses = strategy.run(step, args=(next(iterator),))
            total += strategy.reduce(SUM, losses, axis=None)
        return total / num_steps

    optimizer.build(model.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=model, epoch=epoch)
    place = "chief" if is_chief(strategy) else "others"
    manager = tf.train.CheckpointManager(
        checkpoint, os.path.join(folder, place), max_to_keep=1
    )
    iterator = iter(dataset)
    seen = []
    while epoch.numpy() < EPOCHS:
        seen.append([float(train_epoch(iterator)), float(accuracy.result())])
        manager.save()
        accuracy.reset_state()
        epoch.assign_add(1)
    trained = read(model.get_weights())
    # A sum that all wait for: the chief has saved, too.
    float(strategy.reduce(SUM, strategy.run(lambda: tf.ones([])), axis=None))
    with strategy.scope():
        again = network()
    path = tf.train.latest_checkpoint(os.path.join(folder, "chief"))
    tf.train.Checkpoint(model=again).restore(path).expect_partial()
    for ours, theirs in zip(trained, again.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    return {"seen": seen, "weights": trained}


# TensorFlow: distributed input.


def read_input(strategy, wrap, folder):
    """Signatures from specs, optional elements, values by context."""
    dataset = strategy.experimental_distribute_dataset(
        tf.data.Dataset.range(10).map(lambda x: tf.cast(x, tf.float32)).batch(4)
    )

    @tf.function(input_signature=[dataset.element_spec])
    def total_of(values):
        total = strategy.run(tf.reduce_sum, args=(values,))
        return strategy.reduce(SUM, total, axis=None)

    totals = [float(total_of(values)) for values in dataset]
    iterator = iter(dataset)
    optional = []
    while True:
        element = iterator.get_next_as_optional()
        if not element.has_value():
            break
        optional.append(float(total_of(element.get_value())))

    def value_of(context):
        return tf.constant(1.0) / context.num_replicas_in_sync

    values = strategy.experimental_distribute_values_from_function(value_of)
    summed = strategy.run(lambda x: x * 2, args=(values,))
    return {
        "totals": totals,
        "optional": optional,
        "values": float(strategy.reduce(SUM, summed, axis=None)),
        "first": [float(total_of(next(iter(dataset))))],
    }
