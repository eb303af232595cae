"""Operations among the processes of one training run.

`current()` returns the `Collectives` of this process: those of the engine that
`start()` has started, or those of a single process.
"""

from keras_sparsity.collectives.base import Collectives
from keras_sparsity.collectives.engine import Route
from keras_sparsity.collectives.startup import agreed_seed, current, start
from keras_sparsity.health.errors import CollectiveError, explained, failure
from keras_sparsity.machines.topology import Topology

__all__ = [
    "CollectiveError",
    "Collectives",
    "Route",
    "Topology",
    "agreed_seed",
    "current",
    "explained",
    "failure",
    "start",
]
