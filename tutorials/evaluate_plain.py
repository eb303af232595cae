"""Evaluates the exported language model with Keras alone.

    python evaluate_plain.py DIRECTORY

`language_model.py` starts it, to show that its export needs no keras_sparsity.
"""

import json
import math
import pathlib
import sys

import keras
import numpy as np

directory = pathlib.Path(sys.argv[1])
model = keras.models.load_model(directory / "language_model.keras")
words, targets = np.load(directory / "held_out.npy").swapaxes(0, 1)

model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
loss = model.evaluate(words, targets, batch_size=64, verbose=0)
if "keras_sparsity" in sys.modules:
    sys.exit("keras_sparsity was imported, and should not have been needed")
print(json.dumps({"perplexity": math.exp(loss)}))
