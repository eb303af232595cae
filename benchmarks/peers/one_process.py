"""A workload in one process: stock Keras, `fit`, nothing exchanged.

The model is that of `workloads/`, of stock Keras 3 layers and TensorFlow's
sampled softmax, with the same data and optimizer and one process's batch.

    python benchmarks/peers/one_process.py lm --steps 40
"""

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import _network
import _stock
from workloads import _common


def main():
    module, args = _stock.parse(__doc__)
    workload, held_out = _common.made(module, _stock.KIT, args, 1)
    workload.model.compile(workload.optimizer, workload.loss)
    window = _network.Window()
    figures = _common.fit(
        workload, held_out, args, 1, window, lambda name: None
    )
    window.report(
        workload.words * args.batch,
        engine="stock Keras, one process",
        workload=vars(args),
        num_parameters=workload.num_parameters(),
        **figures,
    )


if __name__ == "__main__":
    main()
