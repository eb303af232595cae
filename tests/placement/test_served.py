"""Dense gradients at servers: their planned bytes."""

import pytest

from keras_sparsity.placement.served import NaiveServers, Servers
from keras_sparsity.placement.traffic import Traffic
from keras_sparsity.planning.specs import Cluster, VariableSpec

NUM_BYTES = 4 * 100 * 100


# A plan may count partitions; one server sums all the same.
@pytest.mark.parametrize("num_partitions", [None, 3])
def test_bytes_of_a_gradient(num_partitions):
    spec = VariableSpec("kernel", (100, 100), num_partitions=num_partitions)
    # The one server is on the second machine.
    traffic = Traffic(Cluster(3), "horovod", None, True, None, 1)
    # Of one server, the two others send it a gradient and receive the sum.
    naive = NaiveServers.transfer_bytes(spec, traffic)
    assert naive.sent_bytes == (NUM_BYTES, 2 * NUM_BYTES, NUM_BYTES)
    assert naive.received_bytes == naive.sent_bytes
    # Of three, each process sends two parts, and its sum to two.
    even = Servers.transfer_bytes(spec, traffic)
    assert even.sent_bytes == pytest.approx([4 * NUM_BYTES / 3] * 3)
    assert even.received_bytes == pytest.approx(even.sent_bytes)
