"""The recommender as a subclassed model of ordinary `Embedding`s.

python benchmarks/cluster.py --machines 4 \\
    benchmarks/workloads/subclassed_recommender.py
"""

import recommender
from peers import _stock

SIZES, options = recommender.SIZES, recommender.options


def make(kit, args, num_examples, generator):
    del kit  # whose tables are this library's
    return recommender.make(
        _stock.KIT, args, num_examples, generator, is_functional=False
    )


if __name__ == "__main__":
    import _training

    _training.run("subclassed_recommender")
