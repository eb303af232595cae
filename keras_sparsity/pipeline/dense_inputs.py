"""Sparse and ragged inputs that stages cannot take."""

import keras
import tensorflow as tf

from keras_sparsity._tf import keras_functional

# Options of `keras.Input`, and the functions that make such tensors dense.
_TO_DENSE = {"sparse": "tf.sparse.to_dense", "ragged": "rows.to_tensor()"}


def check_declared(model):
    """Raises ValueError of a model whose `keras.Input` says that it is one."""
    functional = keras_functional.functional_of(model)
    for tensor in functional.inputs if functional else []:
        for kind, to_dense in _TO_DENSE.items():
            if getattr(tensor, kind, False):
                raise ValueError(
                    "Models in stages divide mini-batches into parts, which a "
                    f"{kind} tensor cannot be. Received: the input "
                    f"'{tensor.name}', with {kind}=True. Expected: dense "
                    f"inputs. Leave out `{kind}`, and make the batches dense "
                    f"(`{to_dense}` in `dataset.map`)."
                )


def refuse_ragged(functional, data):
    """Raises ValueError, on all ranks, of a ragged mini-batch.

    Passes take ragged rows where layers make them dense in the same stage, but
    they cannot wait in variables, nor be counted by a shape.

    Args:
        functional: the model's `Functional`.
        data: a batch, as `train_step` gets it.
    """
    x, *_ = keras.utils.unpack_x_y_sample_weight(data)
    inputs = keras_functional.flat_inputs(functional, x)
    for symbolic, value in zip(functional.inputs, inputs, strict=True):
        if isinstance(value, tf.RaggedTensor):
            raise ValueError(
                "Without a flush, or with `memory_bytes`, models in stages "
                "train on dense mini-batches alone. Received: a ragged tensor "
                f"for the input '{symbolic.name}'. Make the batches dense "
                f"(`{_TO_DENSE['ragged']}` in `dataset.map`)."
            )


def check_sent(tensors, name):
    """Raises ValueError if a stage would send ragged tensors.

    Args:
        name: that of the stage's last call.
    """
    if any(isinstance(each, tf.RaggedTensor) for each in tensors):
        raise ValueError(
            "Dense tensors travel between stages. Received: a ragged tensor "
            f"of the stage that ends with '{name}'. Cut the model behind the "
            "layer that makes rows of one length of it (`stages`), or make "
            f"the batches dense (`{_TO_DENSE['ragged']}` in `dataset.map`)."
        )
