"""What each way to move a variable's gradients costs the network.

Bytes that the machines send and receive in one training step, from the
equations of EuroSys 3.1, with these names:

    N      machines
    L      processes of a machine, each a worker (the paper's equations: 1)
    w      bytes of a variable
    m      number of variables
    alpha  fraction of its elements that one worker touches in a step

Only what crosses a machine's network interface counts, not what the processes
of one machine send each other. Control messages (the number of rows that
follow, TCP's headers) are left out.
"""

from keras_sparsity.planning.architecture import Choice, Plan, plan
from keras_sparsity.planning.partition_search import (
    PartitionChoice,
    PartitionSample,
    PartitionSampler,
)
from keras_sparsity.planning.specs import Cluster, VariableSpec, alpha_model
from keras_sparsity.planning.transfer_cost import (
    TransferBytes,
    engine_bytes,
    sharded_table_bytes,
    transfer_bytes,
)

__all__ = [
    "Choice",
    "Cluster",
    "PartitionChoice",
    "PartitionSample",
    "PartitionSampler",
    "Plan",
    "TransferBytes",
    "VariableSpec",
    "alpha_model",
    "engine_bytes",
    "plan",
    "sharded_table_bytes",
    "transfer_bytes",
]
