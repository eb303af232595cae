"""Calls that refuse the examples which a measurement draws.

Zeros and empty texts are no values that each layer takes: a `StringLookup`
without out-of-vocabulary indices refuses texts that it does not know.
"""

from keras_sparsity._tf import keras_functional


def replaced(compute, model, zeros, tensors):
    """A computation with zeros in place of the outputs of calls that raise.

    Args:
        compute: function of `tensors` in which the model makes its calls.
        model: functional `keras.Model`.
        zeros: function of a call's number to a list of its outputs.

    Returns:
        Function like `compute`.
    """
    refused = set()

    def tried(number, operation, *args, **kwargs):
        try:
            return operation(*args, **kwargs)
        except Exception:  # whatever a layer raises
            refused.add(number)
            return zeros(number)

    def without(number, operation, *args, **kwargs):
        if number in refused:
            return zeros(number)
        return operation(*args, **kwargs)

    def through(call):
        def computed(tensors):
            with keras_functional.next_run_calls(model, lambda _: call):
                return compute(tensors)

        return computed

    # Outside a graph a call raises where it is made.
    through(tried)(tensors)
    return through(without)
