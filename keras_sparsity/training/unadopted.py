"""Keras's runs of models that no strategy has adopted.

Keras gives each model that is made in a strategy's scope to that strategy. One
that is not compiled there, such as an encoder cut from a trained model, has
none of the methods that bring the ranks' parts together.
"""

import functools

from keras_sparsity._tf import patches
from keras_sparsity.conversion.copying import is_of_this_package
from keras_sparsity.data import distribution
from keras_sparsity.training.binding import raise_of_compiled_outside


def have_whole_input(kind):
    """Has each rank predict all of its input by models that are not adopted.

    As outside of a scope. Training and evaluation of such a model raise: its
    optimizer and metrics are not the strategy's.

    Args:
        kind: class of the strategies that this is about.
    """

    def make(name, stock):
        def run(model, *args, **kwargs):
            # Strategies in stages bind fewer of the others.
            is_adopted = is_of_this_package(vars(model).get("fit"))
            if is_adopted or not isinstance(model.distribute_strategy, kind):
                return stock(model, *args, **kwargs)
            if model.compiled and not name.startswith("predict"):
                raise_of_compiled_outside(model)
            with patches.epoch_iterators_are_made_in(
                lambda epoch_input: distribution.undivided()
            ):
                return stock(model, *args, **kwargs)

        return run

    for name, patch in patches.UNADOPTED_RUNS.items():
        patch.stay(functools.partial(make, name))
