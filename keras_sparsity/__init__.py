"""Sparsity-aware data-parallel training for Keras 3 on TensorFlow."""

from keras_sparsity._requirements import check_requirements

check_requirements()

from keras_sparsity._version import __version__ as __version__  # noqa: E402
