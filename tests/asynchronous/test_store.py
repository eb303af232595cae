"""A model's variables at servers."""

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from keras_sparsity.asynchronous import servers
from keras_sparsity.asynchronous.store import Store
from keras_sparsity.exchange.options import Options
from tests import asynchronous_losses
from tests.conftest import engines


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_large_variables_travel_in_blocks(cluster, engine):
    """A message has at most 2 GiB."""
    ranks = cluster(engine, 2, num_servers=2)
    for updates, *_ in ranks.run(asynchronous_losses.in_blocks):
        np.testing.assert_array_equal(updates, 3)


def test_a_push_is_not_older_than_its_pull():
    """Though a server has lost an update that the pull has seen."""
    strategy = ks.HybridStrategy(synchronous=False, max_staleness=1)
    variables = [keras.Variable(np.zeros(3, "float32"))]
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build(variables)
    found = servers.started(strategy.collectives)
    store = Store(
        *(found.cluster, 0, optimizer, variables, []),
        *(None, True, None, "test_a_push_is_not_older_than_its_pull"),
        Options().wire,
    )
    found.begin(store)
    store.upload()
    push = store.pusher(variables)
    rate, gradient = np.float32(1), np.ones(3, "float32")
    versions = [
        push(np.int64(batch), np.int64(version), rate, gradient)
        for batch, version in enumerate([0, 2, 2])
    ]
    store.download()
    found.end(store)
    store.close()
    assert versions == [0, 2, 2]
    np.testing.assert_array_equal(variables[0].numpy(), -3)
