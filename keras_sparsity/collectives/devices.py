"""The GPU of each process."""

import tensorflow as tf


def pin_gpu(local_rank, local_size):
    """Leaves this process the GPU of its local rank, if there are several."""
    gpus = tf.config.list_physical_devices("GPU")
    if local_size == 1 or len(gpus) < 2:
        return
    try:
        tf.config.set_visible_devices(gpus[local_rank % len(gpus)], "GPU")
    except RuntimeError as error:
        raise RuntimeError(
            "This process must choose its GPU before TensorFlow runs its "
            "first operation. Start the script with `keras-sparsity run`, or "
            "construct the strategy at its top."
        ) from error
