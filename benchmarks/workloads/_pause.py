"""Computation that needs no processor, and of which one machine does more.

Emulated machines share a few cores, so that work of their own would slow all.
"""

import keras
import tensorflow as tf

# The name of the last of four machines of `cluster.py`.
_SLOW = "machine-3"
# Its seconds / those of another.
TIMES_SLOWER = 5


def paused(workload, seconds):
    """The workload with a pause between each forward and backward pass.

    Args:
        workload: `_common.Workload` of a functional or sequential model.
        seconds: of all machines but the slow one.
    """
    (output,) = workload.model.outputs
    model = keras.Model(workload.model.inputs, Pause(seconds)(output))
    return workload._replace(model=model)


class Pause(keras.layers.Layer):
    """Returns its input, in training after some time.

    The operations are TensorFlow's: they find the machine on which they run,
    which under `ParameterServerStrategy` is not that of this program.

    Args:
        seconds: see `paused`.
    """

    def __init__(self, seconds):
        super().__init__()
        self._seconds = seconds

    def call(self, inputs, training=None):
        if not training:
            return inputs
        with tf.control_dependencies([inputs]):
            machine = tf.data.TextLineDataset("/proc/sys/kernel/hostname")
            is_slow = tf.equal(machine.get_single_element(), _SLOW)
            rested = self._rested(tf.where(is_slow, TIMES_SLOWER, 1))
        with tf.control_dependencies(rested):
            return tf.identity(inputs)

    def _rested(self, times):
        # Once before the element, and once before the end of the data.
        microseconds = tf.cast(times, tf.int64) * int(self._seconds * 5e5)
        types = {"output_types": [tf.int64], "output_shapes": [[]]}
        return tf.raw_ops.DatasetToSingleElement(
            dataset=tf.raw_ops.SleepDataset(
                input_dataset=tf.raw_ops.TensorDataset(
                    components=[microseconds], output_shapes=[[]]
                ),
                sleep_microseconds=microseconds,
                **types,
            ),
            **types,
        )
