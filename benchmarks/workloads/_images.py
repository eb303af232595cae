"""The common parts of the image models."""

import _common
import keras


def options(add):
    add("--pixels", type=int, help="of an image's side")
    add("--classes", type=int, default=10)


def make(application, args, num_examples, generator):
    shape = (args.pixels, args.pixels, 3)
    model = application(weights=None, input_shape=shape, classes=args.classes)
    # A few images, repeated, to save memory.
    count = min(num_examples, 256)
    return _common.Workload(
        model,
        generator.random((count, *shape), "float32"),
        generator.integers(args.classes, size=count, dtype="int32"),
        "sparse_categorical_crossentropy",
        keras.optimizers.SGD(0.01, momentum=0.9),
    )
