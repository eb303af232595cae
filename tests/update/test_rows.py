"""Rows and pieces in the place of an optimizer's variables."""

import keras
import numpy as np

from keras_sparsity._tf import keras_optimizers
from keras_sparsity.update import rows


def variables(*shapes):
    return [keras.Variable(np.ones(shape, "float32")) for shape in shapes]


def test_pieces_are_decayed_as_what_they_replace():
    old = variables((4, 2), (3, 2), (5,))
    rule = keras.optimizers.AdamW(0.1)
    rule.exclude_from_weight_decay(var_list=old[:1])
    rule.build(old)
    replaced, made = [], []
    for variable, shapes in zip(
        old, (((2, 2), (2, 2)), ((3, 2),)), strict=False
    ):
        pieces = variables(*shapes)
        kinds = rows.slots_of(rule, [variable])
        slots = {kind: variables(*shapes) for kind in kinds}
        replaced.append(([variable], pieces, slots))
        made.append(pieces)
    rows.replace_variables(rule, replaced)
    not_decayed, decayed = made
    found = keras_optimizers.built_variables(rule)
    for one, other in zip(found, [*not_decayed, *decayed, old[2]], strict=True):
        assert one is other
    for variable in found:
        is_decayed = keras_optimizers.uses_weight_decay(rule, variable)
        assert is_decayed == all(variable is not v for v in not_decayed)
