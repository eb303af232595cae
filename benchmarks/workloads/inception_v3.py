"""Inception v3 at small images, all of it dense; generated.

python benchmarks/cluster.py --machines 4 benchmarks/workloads/inception_v3.py
"""

import _images
import keras

# The least that it takes is 75.
SIZES = {
    "small": {"pixels": 75, "batch": 8},
    "large": {"pixels": 96, "batch": 16},
}

options = _images.options


def make(kit, args, num_examples, generator):
    return _images.make(
        keras.applications.InceptionV3, args, num_examples, generator
    )


if __name__ == "__main__":
    import _training

    _training.run("inception_v3")
