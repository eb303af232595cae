"""`TensorBoard(histogram_freq=...)` of tables that are spread over ranks."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.callbacks import histograms
from tests.conftest import engines

EPOCHS = 3


class Predicting(keras.callbacks.TensorBoard):
    """A user's own, which calls the model: every rank must."""

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        found = self.model.predict(np.zeros((2, 4), "int32"), verbose=0)
        tf.summary.scalar("predicted", found[0, 0], step=epoch)


KINDS = [Predicting, keras.callbacks.TensorBoard]


def train(log_dir, strategy=None):
    """The weights after each epoch, as layers have them."""
    keras.utils.set_random_seed(1)
    kind = keras.layers.Embedding
    if strategy is not None:
        kind = ks.layers.ShardedEmbedding
    layers = [
        keras.Input((4,), dtype="int32"),
        kind(10, 3, name="table"),
        keras.layers.Flatten(),
        keras.layers.Dense(1, name="dense"),
    ]
    model = keras.Sequential(layers, name="model")
    boards = [
        kind(f"{log_dir}/{kind.__name__}", histogram_freq=2) for kind in KINDS
    ]
    x = np.random.default_rng(0).integers(0, 10, (16, 4))
    y = np.linspace(-1, 1, 16, dtype="float32")[:, None]
    if strategy is None:
        model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse")
    else:
        with strategy.scope():
            model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse")
    for first in (0, EPOCHS):  # the same callback twice
        model.fit(
            x,
            y,
            batch_size=8,
            initial_epoch=first,
            epochs=first + EPOCHS,
            shuffle=False,
            callbacks=boards,
            verbose=0,
        )
    return model.get_weights()


def train_spread(log_dir):
    strategy = ks.HybridStrategy()
    return strategy.rank, train(log_dir, strategy)


def written(log_dir):
    """Histograms `(buckets, 3)` by tag and step."""
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    events = accumulators.EventAccumulator(str(log_dir / "train"))
    events.Reload()
    return {
        (tag, event.step): tf.make_ndarray(event.tensor_proto)
        for tag in events.Tags()["tensors"]
        if "histogram" in tag
        for event in events.Tensors(tag)
    }


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_histograms_are_of_whole_weights(cluster, engine, tmp_path):
    own, stock = tmp_path / "own", tmp_path / "stock"
    train(stock)
    ranks = cluster(engine, 2).run(train_spread, str(own))
    assert [rank for rank, _ in ranks] == [0, 1]
    for kind in KINDS:
        expected, found = (written(x / kind.__name__) for x in (stock, own))
        assert found.keys() == expected.keys()
        tables = [key for key in found if "table" in key[0]]
        assert [step for _, step in tables] == [0, 2, 4]
        for key, histogram in found.items():
            # Limits of buckets round apart, and so may a value near one.
            np.testing.assert_allclose(
                histogram[:, :2], expected[key][:, :2], atol=1e-5
            )
            assert np.abs(histogram[:, 2] - expected[key][:, 2]).sum() <= 2
        assert all(found[key][:, 2].sum() == 10 * 3 for key in tables)
        of_fits = 2  # not of ranks
        assert len(list((own / kind.__name__ / "train").iterdir())) == of_fits


def test_embeddings_for_the_projector_are_refused(tmp_path):
    board = keras.callbacks.TensorBoard(tmp_path, embeddings_freq=1)
    with pytest.raises(ValueError, match="embeddings_freq=1.*ModelCheckpoint"):
        histograms.of_whole_weights([board], 0)
