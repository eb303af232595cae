"""Requirements that are checked before the package's other imports."""

import os
import re

MIN_KERAS = (3, 5)
MIN_TENSORFLOW = (2, 16)

INSTALL = (
    "pip install 'tensorflow-cpu>=2.16' (for GPUs 'tensorflow[and-cuda]>=2.16')"
)
SWITCH = (
    "set KERAS_BACKEND=tensorflow in the environment, before Keras is first "
    'imported (or "backend": "tensorflow" in ~/.keras/keras.json)'
)


def check_requirements():
    """Check that Keras 3 runs on TensorFlow, or say how to get there.

    Keras fails with a `ModuleNotFoundError` of a configured backend that is
    not installed, and this package would fail in the middle of its imports.
    One error here is easier to act on.

    Raises:
        ImportError: if TensorFlow or Keras is missing or too old, or if Keras
            runs on another backend. The message names the fix.
    """
    try:
        # First: Keras would name the backend that it is configured for.
        import tensorflow  # isort: skip
        import keras
    except ModuleNotFoundError as error:
        explanation = _explain_missing(error.name)
        if explanation is None:
            raise  # Installed, and broken: the error itself says how.
        raise ImportError(explanation) from None
    _check_version(
        "TensorFlow",
        tensorflow.__version__,
        MIN_TENSORFLOW,
        "tensorflow (or tensorflow-cpu, if that is installed)",
    )
    _check_version("Keras", keras.__version__, MIN_KERAS, "keras")
    backend = keras.config.backend()
    if backend != "tensorflow":
        raise ImportError(_wrong_backend(backend))


def _explain_missing(module):
    if module == "tensorflow":
        return (
            "keras_sparsity needs Keras's TensorFlow backend, and TensorFlow "
            f"is not installed. Fix: {INSTALL}, and {SWITCH}."
        )
    if module == "keras":
        return "keras_sparsity needs Keras 3. Fix: pip install 'keras>=3.5'."
    # Keras imports its configured backend's packages, installed or not.
    configured = os.environ.get("KERAS_BACKEND") or "tensorflow"
    if configured != "tensorflow":
        return _wrong_backend(configured)
    if module in ("jax", "torch", "openvino"):  # From ~/.keras/keras.json.
        return _wrong_backend(module)
    return None


def _wrong_backend(backend):
    return (
        "keras_sparsity runs on Keras's TensorFlow backend only; received "
        f"the backend {backend!r}. Fix: {SWITCH}."
    )


def numbers_of(version):
    """The first two numbers of a version.

    Example:

    >>> numbers_of("3.15.1")
    (3, 15)
    """
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _check_version(name, version, minimum, package):
    if numbers_of(version) < minimum:
        wanted = ".".join(map(str, minimum))
        raise ImportError(
            f"keras_sparsity needs {name} {wanted} or later; received "
            f"{version}. Fix: pip install --upgrade {package}."
        )
