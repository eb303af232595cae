"""Options of the entered strategy, until `exchange` is handed them."""

from keras_sparsity.exchange import options


def of(strategy=None):
    return getattr(strategy, "options", None) or options.entered()


def wire(dtype, cast_to=None):
    return of().wire(dtype, cast_to)


def aggregates_locally(strategy=None):
    return of(strategy).aggregates_locally
