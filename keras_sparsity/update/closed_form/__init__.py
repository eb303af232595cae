"""Steps without a gradient, any number of them at once."""

from keras_sparsity.update.closed_form.choice import closed_form_of

__all__ = ["closed_form_of"]
