"""Images: ResNet-50 or Inception v3, all of it dense; generated.

python benchmarks/cluster.py --machines 4 benchmarks/workloads/images.py
"""

import _training
import keras
import numpy as np

MODELS = {
    "resnet50": keras.applications.ResNet50,
    "inception_v3": keras.applications.InceptionV3,
}


def make(args, num_examples, generator):
    shape = (args.pixels, args.pixels, 3)
    model = MODELS[args.model](
        weights=None, input_shape=shape, classes=args.classes
    )
    # A few, again and again: they take the memory.
    few = generator.random((min(num_examples, 256), *shape), "float32")
    which = np.arange(num_examples) % len(few)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    loss = "sparse_categorical_crossentropy"
    return model, few[which], which % args.classes, loss, optimizer, 1


def options():
    parser = _training.options(__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model", choices=list(MODELS), default="resnet50")
    add("--pixels", type=int, default=32, help="75 or more for inception_v3")
    add("--classes", type=int, default=10)
    return parser


if __name__ == "__main__":
    _training.run(make, options())
