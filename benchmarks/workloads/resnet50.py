"""ResNet-50 at small images, all of it dense; generated.

python benchmarks/cluster.py --machines 4 benchmarks/workloads/resnet50.py
"""

import _images
import keras

SIZES = {
    "small": {"pixels": 32, "batch": 8},
    "large": {"pixels": 64, "batch": 16},
}

options = _images.options


def make(kit, args, num_examples, generator):
    return _images.make(
        keras.applications.ResNet50, args, num_examples, generator
    )


if __name__ == "__main__":
    import _training

    _training.run("resnet50")
