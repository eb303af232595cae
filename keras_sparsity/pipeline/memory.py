"""The bytes that a stage holds, and their limit."""

import keras
import tensorflow as tf

from keras_sparsity._tf import keras_functional, keras_losses
from keras_sparsity._tf.numpy_functions import NumpyFunctions
from keras_sparsity.stages.profile import num_bytes


def lasting_bytes(stage, optimizer, versions):
    """Bytes of a stage's weights, gradients, slots and copies of weights.

    Gradients and copies of rows that a batch looks up do not count: they are
    no more than the `Embedding`'s outputs. With a flush `versions` are None.
    """
    tables = num_bytes(stage.updates.by_rows)
    found = num_bytes(stage.part.model.weights)
    found += num_bytes(stage.variables) - tables
    # A rank without weights has no slots.
    if optimizer is not None and stage.variables:
        found += num_bytes(optimizer.variables)
    if versions is not None:
        found += num_bytes(versions.copied)
    return found


def num_passes(strategy, schedule, versions):
    """The number of a mini-batch's micro-batches that a rank computes."""
    if versions is None:
        return schedule.num_batches // strategy.replicas
    return strategy.num_micro_batches


def passing_bytes(schedule, number, turns, num_in_turn, read, received, made):
    """Bytes of the passes that a stage holds at once.

    Args:
        number: the stage's number.
        turns: `Turns`, without a flush; else None.
        num_in_turn: the number of a mini-batch's micro-batches, then.
        read, received: bytes of the inputs that a pass takes, and of the
            tensors from the stage before.
        made: bytes of its layers' outputs.
    """
    if turns is None:
        return schedule.in_flight(number) * (read + received + made)
    # Of mini-batches in flight, the inputs alone are kept. The last stage ends
    # both passes of a micro-batch before the next one.
    num_ahead = turns.num_ahead(number)
    num_made = num_in_turn if num_ahead else 1
    # Inputs are read so many turns before their pass; messages come in the one
    # before it.
    waiting = turns.forward(number)
    taken = waiting * read + min(1, waiting) * received
    taken += (num_ahead + 1) * (read + received)
    return num_in_turn * taken + num_made * made


def with_all_outputs(part):
    """A `keras.Model` of a `Part`: the outputs of all of its calls."""
    calls = keras_functional.functional_calls(part.model)
    # Those of models within the model may have one name.
    names = {call.operation: f"call_{i}" for i, call in enumerate(calls)}
    with keras_functional.named(names):
        return keras.Model(
            part.model.inputs, [x for call in calls for x in call.outputs]
        )


class Limit:
    """Refuses a step in which a stage would hold more bytes than it may.

    Every rank works out the bytes of all stages, from the shapes of a batch
    alone: all raise the same error, before anything is sent. With a flush
    `versions` are None.

    Raises:
        ValueError: if a stage holds more without any pass.
    """

    def __init__(self, model, parts, stage, schedule, versions):
        strategy = model.distribute_strategy
        self._functional = keras_functional.functional_of(model)
        self._parts, self._schedule = parts, schedule
        passes = num_passes(strategy, schedule, versions)
        self._turns = versions and versions.turns
        self._num_in_turn = passes
        stages = strategy.stages_of_ranks
        # Of a mini-batch, at each stage.
        self._num_parts = [
            passes * stages.count(number) for number in range(len(parts))
        ]
        self._most, self._known = strategy.memory_bytes, set()
        self._numpy_function = NumpyFunctions()
        own = lasting_bytes(stage, model.optimizer, versions)
        of_ranks = strategy.collectives.gather_objects(
            own, name="pipeline/memory"
        )
        self._lasting = [
            of_ranks[stages.index(number)] for number in range(len(parts))
        ]
        self._check(self._lasting, "without the activations of a step")

    def checked(self, data):
        """A tensor that a step waits for; its computation checks the batch."""
        x, *_ = keras.utils.unpack_x_y_sample_weight(data)
        inputs = keras_functional.flat_inputs(self._functional, x)
        return self._numpy_function(
            self._check_shapes, [tf.shape(each) for each in inputs], tf.bool
        )

    def _check_shapes(self, *shapes):
        shapes = tuple(tuple(map(int, shape)) for shape in shapes)
        if shapes not in self._known:
            num_examples = shapes[0][0]
            self._check(
                self.bytes_of(shapes), f"in a step of {num_examples} examples"
            )
            self._known.add(shapes)
        return True

    def bytes_of(self, shapes):
        """List of the bytes of the stages in a step.

        Args:
            shapes: the shapes of the model's inputs, of a whole batch.
        """
        values = {
            id(symbolic): keras.KerasTensor(shape, symbolic.dtype)
            for symbolic, shape in zip(
                self._functional.inputs, shapes, strict=True
            )
        }
        return [
            lasting
            + passing_bytes(
                self._schedule,
                number,
                self._turns,
                self._num_in_turn,
                *self._of_pass(part, values, -(-shapes[0][0] // num_parts)),
            )
            for number, (part, lasting, num_parts) in enumerate(
                zip(self._parts, self._lasting, self._num_parts, strict=True)
            )
        ]

    def _of_pass(self, part, values, num_examples):
        """Bytes of the inputs of a pass, of what it receives, and makes.

        Args:
            values: dict from the ids of symbolic tensors to their shapes, as
                `keras.KerasTensor`; those that the stage makes are added.
        """

        def arriving(symbolic):
            value = values[id(symbolic)]
            shape = num_examples, *value.shape[1:]
            return keras.KerasTensor(shape, value.dtype)

        inputs = [arriving(self._functional.inputs[i]) for i in part.inputs]
        received = [arriving(symbolic) for symbolic in part.received]
        whole = with_all_outputs(part)
        made = keras.tree.flatten(
            whole.compute_output_spec(
                [*inputs, *(received[place] for place in part.taken)]
            )
        )
        by_output = dict(zip(map(id, whole.outputs), made, strict=True))
        for symbolic, output in zip(part.made, part.model.outputs, strict=True):
            values[id(symbolic)] = by_output[id(output)]
        masks = [
            keras.KerasTensor(value.shape[: len(mask.shape)], mask.dtype)
            for symbolic, value in zip(part.received, received, strict=True)
            if (mask := keras_losses.keras_mask(symbolic)) is not None
        ]
        return (
            num_bytes(inputs),
            num_bytes([*received, *masks]),
            num_bytes(made),
        )

    def _check(self, of_stages, when):
        number = max(range(len(of_stages)), key=of_stages.__getitem__)
        if of_stages[number] <= self._most:
            return
        names = self._parts[number].names
        raise ValueError(
            f"Stage {number}, of the layers '{names[0]}' to '{names[-1]}', "
            f"holds {of_stages[number]:,} bytes {when}, more than "
            f"`memory_bytes`. Received: memory_bytes={self._most:,}. Use more "
            "processes and stages, other cuts (`stages`), smaller "
            'mini-batches, or `schedule="1f1b"` with more micro-batches; '
            "`ks.plan` shows the memory of each stage."
        )
