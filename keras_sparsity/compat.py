"""The only file that uses private names of TensorFlow and Keras.

Each function names the versions it was checked on; `tests/test_compat.py`
calls each one, so that a new version that breaks one says which.
"""

import contextlib
import functools
import itertools
import typing
import weakref

import keras
import tensorflow as tf

# Methods of a model that `adoption` binds by name. What comes before the first
# step of `fit`: Keras 3.5 to 3.15.
SYMBOLIC_BUILD = "_maybe_symbolic_build"
# What Keras's own steps call for `compute_loss`: Keras 3.6 to 3.15.
STEP_LOSS = "_compute_loss"

# What `tf.train.Checkpoint` and `model.export` call of a variable: Keras 3.5 to
# 3.15.
SAVING_METHODS = (
    "_serialize_to_tensors",
    "_restore_from_tensors",
    "_export_to_saved_model_graph",
)

_graph_numbers = weakref.WeakKeyDictionary()
_next_graph_number = itertools.count(1)


def outermost_graph():
    """The outermost `tf.function` graph being traced; None when eager.

    `FuncGraph.outer_graph`: TensorFlow 2.16 to 2.21.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while isinstance(getattr(graph, "outer_graph", None), tf.Graph):
        if not hasattr(graph.outer_graph, "outer_graph"):
            break
        graph = graph.outer_graph
    return graph


def outermost_function():
    """The number of the outermost function being traced; None when eager."""
    graph = outermost_graph()
    if graph is None:
        return None
    if graph not in _graph_numbers:
        _graph_numbers[graph] = next(_next_graph_number)
    return _graph_numbers[graph]


def captured(tensor):
    """An eager tensor, as the `tf.function` being traced sees it.

    For resources used in a loop: the gradient of a `tf.while_loop` cannot
    capture an eager tensor by itself, only what the function around it has.
    Not the outermost function: one within it may be called by others too.
    `ControlFlowFuncGraph`, `FuncGraph.capture`: TensorFlow 2.16 to 2.21.
    """
    from tensorflow.python.ops import control_flow_v2_func_graphs

    if tf.executing_eagerly():
        return tensor
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, control_flow_v2_func_graphs.ControlFlowFuncGraph):
        graph = graph.outer_graph
    return graph.capture(tensor) if hasattr(graph, "capture") else tensor


def around_control_flow(entered):
    """Where a loop or branch stands in which operations are traced now.

    `ControlFlowFuncGraph`, `FuncGraph.outer_graph`: TensorFlow 2.16 to 2.21.

    Args:
        entered: the graph in which a step began: what it is in itself, a loop
            over steps, does not count.

    Returns:
        The graph of the outermost loop or branch of the step, and the one
        around it; None outside of loops and branches.
    """
    from tensorflow.python.ops import control_flow_v2_func_graphs

    found = None
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None and graph is not entered:
        outer = getattr(graph, "outer_graph", None)
        if isinstance(graph, control_flow_v2_func_graphs.ControlFlowFuncGraph):
            found = graph, outer
        graph = outer
    return found


def timestamp():
    """Seconds, when this operation is reached: a float64 tensor.

    In no order with other operations but by control dependencies: TensorFlow
    would otherwise run all of them, one after the other, with whatever else
    it takes for stateful. `Graph.experimental_acd_manager`,
    `AutomaticControlDependencies.run_independently`: TensorFlow 2.16 to 2.21.
    """
    now = tf.timestamp()
    if not tf.executing_eagerly():
        graph = tf.compat.v1.get_default_graph()
        if graph.experimental_acd_manager is not None:
            graph.experimental_acd_manager.run_independently(now.op)
    return now


def anonymous_name():
    """The `shared_name` of a resource that lives as long as it is used.

    `context.anonymous_name()`: TensorFlow 2.16 to 2.21.
    """
    from tensorflow.python.eager import context

    return context.anonymous_name()


def abort_collectives(message):
    """Makes all running and later native collectives fail with `message`.

    `context().abort_collective_ops`: TensorFlow 2.16 to 2.21.
    """
    from tensorflow.python.eager import context

    context.context().abort_collective_ops(tf.errors.ABORTED, message)


@contextlib.contextmanager
def heartbeats_may_be_missed(seconds):
    """While entered, collectives are configured to wait so long for a process
    that sends no heartbeats, in place of 10 s.

    `context().configure_coordination_service(heartbeat_timeout_in_ms=...)`,
    through which `MultiWorkerMirroredStrategy` goes: TensorFlow 2.16 to 2.21.
    """
    from tensorflow.python.eager import context

    ours = context.context()
    ours.configure_coordination_service = functools.partial(
        ours.configure_coordination_service,
        heartbeat_timeout_in_ms=int(seconds * 1000),
    )
    try:
        yield
    finally:
        del ours.configure_coordination_service


def global_seed():
    """TensorFlow's global random seed; None if it was not set.

    `DEFAULT_GRAPH_SEED`, which stands in its place then: TensorFlow 2.16 to
    2.21.
    """
    from tensorflow.python.framework import random_seed

    seed = tf.compat.v1.get_seed(0)[0]
    return None if seed == random_seed.DEFAULT_GRAPH_SEED else seed


@contextlib.contextmanager
def random_operations_seeded(change):
    """While entered, seeds that random operations find by themselves differ.

    Of `tf.random.normal(shape)` in the graph that is being traced, or eagerly,
    and of `keras.random.normal(shape)`. What is drawn later is not changed.

    `context()._seed`: TensorFlow 2.16 to 2.21; `GLOBAL_SEED_GENERATOR`,
    `global_seed_generator`: Keras 3.5 to 3.15.

    Args:
        change: function of a seed, an integer or an integer tensor.
    """
    from keras.src.backend.common import global_state
    from keras.src.random import seed_generator
    from tensorflow.python.eager import context

    name = seed_generator.GLOBAL_SEED_GENERATOR
    own = global_state.get_global_attribute(name)

    class Changed:
        def next(self, ordered=True):
            nonlocal own
            global_state.set_global_attribute(name, own)
            own = seed_generator.global_seed_generator()
            global_state.set_global_attribute(name, self)
            return change(own.next(ordered))

    owner, attribute = context.context(), "_seed"
    if not tf.executing_eagerly():
        owner, attribute = tf.compat.v1.get_default_graph(), "seed"
    seed = getattr(owner, attribute)
    if seed is not None:  # else it is drawn
        setattr(owner, attribute, change(seed))
    global_state.set_global_attribute(name, Changed())
    try:
        yield
    finally:
        global_state.set_global_attribute(name, own)
        setattr(owner, attribute, seed)


def resolve_loss(identifier, y_true=None, y_pred=None):
    """The `keras.losses.Loss` that `compile(loss=identifier)` would use.

    `keras.src.trainers.compile_utils.get_loss`: Keras 3.5 to 3.15.
    """
    from keras.src.trainers import compile_utils

    return compile_utils.get_loss(identifier, y_true, y_pred)


def match_ranks(values, weights):
    """Both with the same number of dimensions, as Keras's losses do it.

    `squeeze_or_expand_to_same_rank`: Keras 3.5 to 3.15.
    """
    from keras.src.losses import loss

    return loss.squeeze_or_expand_to_same_rank(values, weights)


def keras_mask(tensor):
    """The mask that Keras carries on a tensor; None when it has none.

    `_keras_mask`: Keras 3.5 to 3.15.
    """
    return getattr(tensor, "_keras_mask", None)


def is_variable(value):
    """Whether a value is a Keras variable.

    `keras.src.backend.Variable`: Keras 3.5 to 3.15. The variables that Keras
    3.5 itself makes are not of the class `keras.Variable`.
    """
    from keras.src import backend

    return isinstance(value, backend.Variable)


@contextlib.contextmanager
def assignments_are_told(tell):
    """While entered, `tell(variable)` follows each `variable.assign(...)`.

    `keras.src.backend.Variable`, whose other ways to assign call `assign`:
    Keras 3.5 to 3.15.
    """
    from keras.src import backend

    kind = backend.Variable
    stock, own = kind.assign, vars(kind).get("assign")

    @functools.wraps(stock)
    def assign(variable, value):
        value = stock(variable, value)
        if not is_tracing_shapes():  # where nothing is assigned
            tell(variable)
        return value

    kind.assign = assign
    try:
        yield
    finally:
        if own:
            kind.assign = own
        else:
            del kind.assign


def set_keras_mask(tensor, mask):
    """Lets a tensor carry a mask, as Keras's layers do.

    `_keras_mask`: Keras 3.5 to 3.15.
    """
    tensor._keras_mask = mask


def keras_logits(tensor):
    """What a sigmoid or softmax was taken of, which Keras's losses use.

    `_keras_logits`: Keras 3.5 to 3.15. None where Keras has kept none.
    """
    return getattr(tensor, "_keras_logits", None)


def set_keras_logits(tensor, logits):
    """Lets a tensor carry logits, as Keras's activations do.

    `_keras_logits`: Keras 3.5 to 3.15.
    """
    tensor._keras_logits = logits


def all_layers(model):
    """All layers of a model, those within layers too.

    `_flatten_layers`: Keras 3.5 to 3.15.
    """
    return list(model._flatten_layers(include_self=False))


def weights_that_were_trainable(model):
    """Weights that layers have made to be trained, frozen since or not.

    `_flatten_layers`, `_trainable_variables`: Keras 3.5 to 3.15.
    """
    found = {}
    for layer in model._flatten_layers():
        found.update((id(v), v) for v in layer._trainable_variables)
    return list(found.values())


# What `Model.compile` and the first calls set, and its value before: Keras 3.5
# to 3.15 (`Trainer.__init__`).
COMPILE_STATE = {
    "compiled": False,
    "loss": None,
    "optimizer": None,
    "_compile_config": None,
    "_compile_loss": None,
    "_compile_metrics": None,
    "_distribute_strategy": None,
    "_loss_tracker": None,
    "train_function": None,
    "test_function": None,
    "predict_function": None,
}

# What a layer is to a graph of operations and to the layers that it is part of:
# Keras 3.5 to 3.15.
LAYER_PLACE = (
    "_called",
    "_inbound_nodes",
    "_outbound_nodes",
    "_parent_path",
    "_saved_model_arg_spec",
    "_saved_model_inputs_spec",
)


def compile_arguments(model):
    """The arguments that a model was compiled with, by name; {} if it was not.

    `Model._compile_config`, a `SerializableDict` of the objects themselves:
    Keras 3.5 to 3.15.
    """
    config = getattr(model, "_compile_config", None)
    return dict(config.config) if model.compiled and config else {}


def built_with(layer):
    """The arguments of a layer's `build`, by name.

    `Layer._build_shapes_dict`: Keras 3.5 to 3.15.
    """
    return dict(layer._build_shapes_dict or {})


def sublayers(layer):
    """The layers that a layer holds itself.

    `_flatten_layers(recursive=False)`: Keras 3.5 to 3.15.
    """
    return list(layer._flatten_layers(include_self=False, recursive=False))


def replace_sublayer(layer, old, new):
    """Has a layer hold another sublayer in place of one of its own.

    `Layer._tracker`, `Tracker.config`: Keras 3.5 to 3.15.
    """
    stores = [store for _, store in layer._tracker.config.values()]
    stack = [vars(layer), *stores]
    while stack:
        holder = stack.pop()
        items = holder.items() if isinstance(holder, dict) else None
        for key, value in list(items or enumerate(holder)):
            if value is old:
                kind = dict if isinstance(holder, dict) else list
                kind.__setitem__(holder, key, new)
            elif isinstance(value, (list, dict)):
                stack.append(value)
    renew_ids(layer._tracker, None)


def calls_with_more_arguments(layer, name):
    """Whether a layer is called with a second input, in any graph.

    `Operation._inbound_nodes`, `Node.arguments`: Keras 3.5 to 3.15.

    Args:
        layer: the layer.
        name: that of its second call argument.
    """
    return any(
        len(node.arguments.args) > 1
        or node.arguments.kwargs.get(name) is not None
        for node in layer._inbound_nodes
    )


def is_tracker(value):
    """Whether it is what finds the variables and layers among attributes.

    `keras.src.utils.tracking.Tracker`: Keras 3.5 to 3.15.
    """
    from keras.src.utils import tracking

    return isinstance(value, tracking.Tracker)


def tracked_by_tensorflow(container):
    """The plain container in one that TensorFlow tracks; None of others.

    `tensorflow.python.trackable.data_structures`: TensorFlow 2.16 to 2.21.
    """
    from tensorflow.python.trackable import data_structures

    if isinstance(container, data_structures.ListWrapper):
        return list(container)
    if isinstance(container, data_structures.TrackableDataStructure):
        return getattr(container, "__wrapped__", None)
    return None


def is_dependency_of_tensorflow(name):
    """Whether an attribute of this name lists what TensorFlow's files hold.

    `_self_unconditional_checkpoint_dependencies` and `..._dependency_names` of
    `Trackable`: TensorFlow 2.16 to 2.21.
    """
    return name.startswith("_self_unconditional")


def track_by_tensorflow(container):
    """The inverse: a container as TensorFlow's modules hold it.

    `tf.__internal__.tracking.wrap`: TensorFlow 2.16 to 2.21.
    """
    return tf.__internal__.tracking.wrap(container)


def renew_ids(copied, new_id):
    """Gives the copy of a Keras object the ids of copies.

    `Tracker.stored_ids`, and `Function._nodes`, whose keys
    `keras.src.ops.function.make_node_key` makes: Keras 3.5 to 3.15.

    Args:
        copied: any copy.
        new_id: function from the id of an object to that of its copy.
    """
    if is_tracker(copied):
        copied.stored_ids = {
            kind: {id(value) for value in store}
            for kind, (_, store) in copied.config.items()
        }
    if hasattr(copied, "_nodes_by_depth"):
        parts = [key.partition("_ib-") for key in copied._nodes]
        vars(copied)["_nodes"] = {
            f"{new_id(int(known))}{middle}{index}"
            for known, middle, index in parts
        }


def variable_like(variable):
    """Another `tf.Variable` with the same value and properties."""
    return tf.Variable(
        variable,
        trainable=variable.trainable,
        dtype=variable.dtype,
        name=variable.name.partition(":")[0],
        synchronization=variable.synchronization,
        aggregation=variable.aggregation,
    )


def variable_state(variable):
    """The attributes of a copy of a Keras variable.

    `Variable._value`: Keras 3.5 to 3.15.
    """
    state = dict(vars(variable))
    if state["_value"] is not None:
        state["_value"] = variable_like(state["_value"])
    return state


class Call(typing.NamedTuple):
    """A call that a functional model makes, of symbolic tensors.

    Attributes:
        operation: what is called: a layer or an operation.
        inputs: list of the tensors among its arguments.
        outputs: list of the tensors that it returns.
        arguments: list of its arguments, of any structure, in their order.
    """

    operation: typing.Any
    inputs: list
    outputs: list
    arguments: list


def functional_of(model):
    """What makes the calls of a functional or sequential model.

    None of a subclass, which may do something else, and of a model that is
    not built.

    `Functional` and `Sequential._functional`: Keras 3.5 to 3.15.
    """
    from keras.src.models import functional, sequential

    if type(model) is sequential.Sequential:
        model = model._functional
    return model if type(model) is functional.Functional else None


def functional_calls(functional):
    """The `Call`s of what `functional_of` gives, in their order.

    `_nodes_by_depth`: Keras 3.5 to 3.15.
    """
    nodes = functional._nodes_by_depth
    return [
        Call(
            node.operation,
            list(node.input_tensors),
            list(node.outputs),
            [*node.arguments.args, *node.arguments.kwargs.values()],
        )
        for depth in sorted(nodes, reverse=True)
        for node in nodes[depth]
        if node.operation is not None and not node.is_input
    ]


@contextlib.contextmanager
def next_run_calls(functional, begin):
    """Has what `functional_of` gives make its calls through a function.

    While entered, of its next run alone, whichever functions its layers and
    those who hold them call besides. `_run_through_graph`: Keras 3.5 to 3.15.

    Args:
        functional: what `functional_of` gives.
        begin: function of the run's inputs, in their structure, called when
            it begins. It returns `call(number, operation, *args, **kwargs)`,
            where number is the call's place in `functional_calls`.
    """
    name = "_run_through_graph"

    def run(inputs, operation_fn=lambda operation: operation, **options):
        object.__delattr__(functional, name)
        flat = keras.tree.flatten(inputs)
        call = begin(keras.tree.pack_sequence_as(functional.input, flat))
        numbers = itertools.count()

        def numbered(operation):
            called = operation_fn(operation)
            return functools.partial(call, next(numbers), called)

        return getattr(functional, name)(inputs, numbered, **options)

    # Not through Keras's attribute tracking: this is not state.
    object.__setattr__(functional, name, run)
    try:
        yield
    finally:
        vars(functional).pop(name, None)


def is_stateless(call):
    """Whether a `Call` gives the same for the same tensors, always.

    So do Keras's own operations, but for those that call functions of the
    user's. `keras.src.ops`: Keras 3.5 to 3.15.
    """
    operation = call.operation
    given = keras.tree.flatten([list(vars(operation).values()), call.arguments])
    return type(operation).__module__.startswith("keras.src.ops.") and not any(
        callable(value) for value in given
    )


def losses_are_scaled():
    """Whether this Keras divides a loss by the number of replicas.

    Keras 3.5 does not; 3.6 to 3.15 divide it when it is computed and multiply
    it again before it is shown (`unscale_loss_for_distribution`).
    """
    from keras.src.losses import loss

    return hasattr(loss, "unscale_loss_for_distribution")


@contextlib.contextmanager
def losses_are_not_scaled():
    """While entered, Keras divides no loss by the number of replicas.

    `scale_loss_for_distribution`: Keras 3.6 to 3.15; 3.5 has none.
    """
    from keras.src.losses import loss

    if not losses_are_scaled():
        yield
        return
    stock = loss.scale_loss_for_distribution
    loss.scale_loss_for_distribution = lambda value: value
    try:
        yield
    finally:
        loss.scale_loss_for_distribution = stock


def set_distribute_strategy(model, strategy):
    """Makes a model that was built anywhere train under `strategy`.

    `Model._distribute_strategy`, which Keras sets in the constructor only:
    Keras 3.5 to 3.15.
    """
    model._distribute_strategy = strategy


def dataset_inputs(dataset):
    """The datasets that a `tf.data.Dataset` reads from.

    `Dataset._inputs`: TensorFlow 2.16 to 2.21.
    """
    inputs = getattr(dataset, "_inputs", None)
    return list(inputs()) if inputs else []


def is_tracing_shapes():
    """Whether Keras calls only to learn shapes, with tensors of no origin.

    `in_stateless_scope`, which TensorFlow's `compute_output_spec` enters:
    Keras 3.5 to 3.15.
    """
    from keras.src.backend.common import stateless_scope

    return stateless_scope.in_stateless_scope()


def in_symbolic_scope():
    """Whether Keras is only after shapes: nothing that is traced will run.

    `keras.src.backend.common.symbolic_scope`: Keras 3.5 to 3.15.
    """
    from keras.src.backend.common import symbolic_scope

    return symbolic_scope.in_symbolic_scope()


# What a Keras optimizer keeps to itself: Keras 3.5 to 3.15.


def built_variables(optimizer):
    """The variables an optimizer was built with (`_trainable_variables`)."""
    return optimizer._trainable_variables


def variable_index(optimizer, variable):
    """A variable's place among them (`_get_variable_index`)."""
    return optimizer._get_variable_index(variable)


def exclude_from_weight_decay_too(optimizer, variable, others):
    """Excludes others where a variable is (`_exclude_from_weight_decay`)."""
    excluded = getattr(optimizer, "_exclude_from_weight_decay", None)
    if excluded and optimizer._var_key(variable) in excluded:
        exclude_from_weight_decay(optimizer, others)


def exclude_from_weight_decay(optimizer, variables):
    """Excludes more variables than have been (`_exclude_from_weight_decay`)."""
    if variables:
        optimizer._exclude_from_weight_decay.update(
            optimizer._var_key(variable) for variable in variables
        )


def excluded_from_weight_decay(optimizer):
    """Which of the variables that it was built with: their places."""
    excluded = getattr(optimizer, "_exclude_from_weight_decay", ())
    places = optimizer._trainable_variables_indices
    return [place for key, place in places.items() if key in excluded]


def iterations(optimizer):
    """The variable that counts `apply`'s calls.

    `_iterations`; `iterations` counts updates, if gradients accumulate.
    """
    return optimizer._iterations


def set_optimizer_strategy(optimizer, strategy):
    """The strategy an optimizer updates under (`_distribution_strategy`)."""
    optimizer.__dict__["_distribution_strategy"] = strategy


def own_variables(optimizer):
    """What an optimizer consists of, one inside of it apart (`_variables`)."""
    return optimizer._variables


def rebuild_optimizer(optimizer, variables, own_variables, attributes):
    """Gives a built optimizer other variables to update.

    `_trainable_variables`, `_trainable_variables_indices`, `_var_key`,
    `_variables` and `_tracker`, set as `build` sets them, without tracking.

    Args:
        optimizer: the optimizer.
        variables: those that it is to update.
        own_variables: those that it consists of.
        attributes: dict of its other attributes.
    """
    from keras.src.utils import tracking

    @tracking.no_automatic_dependency_tracking
    def set_all(**values):
        for name, value in values.items():
            setattr(optimizer, name, value)

    set_all(
        _trainable_variables=list(variables),
        _variables=list(own_variables),
        **attributes,
    )
    indices = optimizer._trainable_variables_indices
    indices.clear()
    for index, variable in enumerate(variables):
        indices[optimizer._var_key(variable)] = index
    tracker = optimizer._tracker
    is_variable, _ = tracker.config["variables"]
    tracker.config["variables"] = is_variable, optimizer._variables
    tracker.stored_ids["variables"] = {id(v) for v in own_variables}


@contextlib.contextmanager
def roots_stay_roots():
    """While entered, what Keras's rules trace is not rewritten to `rsqrt`.

    TensorFlow makes `x * rsqrt(y)` of `x / sqrt(y)` in a function. Its `rsqrt`
    rounds the last elements of a tensor, which do not fill a vector register,
    in another way than those before: an update (of Adagrad, RMSprop,
    Adadelta) would depend on where in a partition a row is, and so on the
    number of partitions. `sqrt` and the division do not.

    `keras.src.backend.numpy.sqrt`, which `keras.ops.sqrt` calls: Keras 3.5 to
    3.15. The rewriting stops at `ensure_shape`: TensorFlow 2.16 to 2.21.
    """
    from keras.src.backend import numpy

    stock = numpy.sqrt

    def sqrt(x):
        root = stock(x)
        return tf.ensure_shape(root, root.shape)

    numpy.sqrt = sqrt
    try:
        yield
    finally:
        numpy.sqrt = stock


def take_aggregated_gradients(optimizer, clip):
    """Makes an optimizer apply gradients as they are, but for `clip(grads)`.

    `_all_reduce_sum_gradients` and `_clip_gradients`, on this object alone.
    """
    optimizer.__dict__["_all_reduce_sum_gradients"] = list
    optimizer.__dict__["_clip_gradients"] = clip


def without_missing_gradients(optimizer, grads, variables):
    """Both lists without None, with Keras's warning or error.

    `_filter_empty_gradients`.
    """
    return optimizer._filter_empty_gradients(grads, variables)


@contextlib.contextmanager
def array_orders_change(seed):
    """Keras shuffles arrays anew in each epoch, though the seed is fixed.

    TensorFlow restarts a seeded operation in a dataset's function with every
    iteration, so `fit(x, y)` repeats one order as soon as a seed is set.
    While entered, the datasets that Keras makes of arrays draw from `seed`
    and a count of their iterations instead.

    `ArrayDataAdapter.get_tf_dataset`, which calls `tf.random.shuffle` while
    it traces: Keras 3.5 to 3.15.

    Args:
        seed: an integer, the same on all ranks; None changes nothing.
    """
    from keras.src.trainers.data_adapters import array_data_adapter

    if seed is None:
        yield
        return

    adapter = array_data_adapter.ArrayDataAdapter
    stock_dataset, stock_shuffle = adapter.get_tf_dataset, tf.random.shuffle

    def get_tf_dataset(self):
        with tf.device("CPU:0"):
            count = tf.Variable(0, dtype=tf.int64, trainable=False)

        def shuffle(values):
            return tf.random.experimental.stateless_shuffle(
                values, seed=[tf.constant(seed, tf.int64), count.assign_add(1)]
            )

        tf.random.shuffle = shuffle
        try:
            dataset = stock_dataset(self)
        finally:
            tf.random.shuffle = stock_shuffle
        dataset._keras_sparsity_count = count  # keeps it alive
        return dataset

    adapter.get_tf_dataset = get_tf_dataset
    try:
        yield
    finally:
        adapter.get_tf_dataset = stock_dataset


def compiled_metrics(model):
    """What updates the metrics given to `compile`, or None.

    `Model._compile_metrics`: Keras 3.5 to 3.15.
    """
    return getattr(model, "_compile_metrics", None)


def loss_metrics(model):
    """The metrics of a compiled model that show the losses of its outputs.

    `Model._compile_loss`: Keras 3.5 to 3.15.
    """
    loss = getattr(model, "_compile_loss", None)
    return [] if loss is None else list(loss.metrics)


@contextlib.contextmanager
def epoch_iterators_are_made_in(scope):
    """While entered, `fit` and the like make their input inside of a scope.

    `TFEpochIterator`, which distributes a dataset: Keras 3.5 to 3.15.

    Args:
        scope: function that gives a context manager.
    """
    from keras.src.backend.tensorflow import trainer

    iterator = trainer.TFEpochIterator
    stock = iterator.__init__

    @functools.wraps(stock)
    def initialize(self, *args, **kwargs):
        with scope():
            stock(self, *args, **kwargs)

    iterator.__init__ = initialize
    try:
        yield
    finally:
        iterator.__init__ = stock


# What aggregates what layers add to the loss; None before Keras 3.8.
ADDED_LOSS = (
    "_aggregate_additional_loss"
    if hasattr(keras.Model, "_aggregate_additional_loss")
    else None
)


@contextlib.contextmanager
def losses_replaced(model, losses):
    """While entered, `model.losses` are others.

    `Layer._losses_override`: Keras 3.5 to 3.15.
    """
    object.__setattr__(model, "_losses_override", losses)
    try:
        yield
    finally:
        object.__setattr__(model, "_losses_override", [])


def batch_shapes(iterator):
    """The tensor specs of a batch of Keras's epoch iterator; None for None.

    `TFEpochIterator._distributed_dataset`: Keras 3.5 to 3.15.
    """
    return tf.nest.map_structure(
        lambda spec: None if isinstance(spec, tf.OptionalSpec) else spec,
        iterator._distributed_dataset.element_spec,
    )


def change_input(iterator, change):
    """Has Keras's epoch iterator, before it begins, read another dataset.

    `TFEpochIterator._distributed_dataset`: Keras 3.5 to 3.15.

    Args:
        iterator: what `fit` draws its batches from.
        change: function from its dataset to another one, or None to keep it.
    """
    changed = change(iterator._distributed_dataset)
    if changed is not None:
        iterator._distributed_dataset = changed


def on_next_epoch(epoch_iterator, enumerate_epoch):
    """Has Keras's epoch iterator enumerate its next epoch in another way.

    `EpochIterator._enumerate_iterator`: Keras 3.6 to 3.15; before,
    `enumerate_epoch`.

    Args:
        epoch_iterator: what `fit` draws its batches from.
        enumerate_epoch: generator function of the stock generator function,
            in whose place it stands once.
    """
    name = "_enumerate_iterator"
    if not hasattr(epoch_iterator, name):
        name = "enumerate_epoch"
    stock = getattr(epoch_iterator, name)

    def once():
        delattr(epoch_iterator, name)
        return enumerate_epoch(stock)

    setattr(epoch_iterator, name, once)


def repeats_an_order_at_once(epoch_iterator):
    """Whether an epoch's order is drawn whole with the epoch's first batch.

    `ArrayDataAdapter`, which Keras makes of arrays: Keras 3.5 to 3.15.
    """
    from keras.src.trainers.data_adapters import array_data_adapter

    adapter = epoch_iterator.data_adapter
    return (
        isinstance(adapter, array_data_adapter.ArrayDataAdapter)
        and adapter._shuffle != "batch"
        and not epoch_iterator.steps_per_epoch
    )


def is_read_by_python(epoch_iterator):
    """Whether Python code makes the batches: a generator, a `PyDataset`.

    `GeneratorDataAdapter`, `PyDatasetAdapter`: Keras 3.5 to 3.15.
    """
    from keras.src.trainers.data_adapters import (
        generator_data_adapter,
        py_dataset_adapter,
    )

    return isinstance(
        epoch_iterator.data_adapter,
        generator_data_adapter.GeneratorDataAdapter
        | py_dataset_adapter.PyDatasetAdapter,
    )
