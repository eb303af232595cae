"""Bytes of each architecture on the network, and the choice among them.

Machines send and receive them in one training step, by the equations of
EuroSys 3.1, with these names:

    N      machines
    L      processes of a machine, each a worker (the paper's equations: 1)
    w      bytes of a variable
    m      number of variables
    alpha  fraction of its elements that one worker touches in a step

Only bytes that cross a machine's network interface count, not messages between
processes of one machine, nor control messages (numbers of rows, TCP headers).
"""

from keras_sparsity.planning.architecture import Choice, Plan, plan
from keras_sparsity.planning.engine_cost import (
    engine_bytes,
    sharded_table_bytes,
)
from keras_sparsity.planning.partition_search import (
    PartitionChoice,
    PartitionSample,
    PartitionSampler,
)
from keras_sparsity.planning.specs import Cluster, VariableSpec, alpha_model
from keras_sparsity.planning.transfer_cost import (
    TransferBytes,
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
