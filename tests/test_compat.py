"""Each private name that is used, so that a new version says which broke."""

import contextlib
import inspect
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from keras_sparsity import compat

pytestmark = pytest.mark.smoke


def test_heartbeats_may_be_missed():
    # Whether they are missed without harm, tests/test_watch.py shows.
    ours = context.context()
    with compat.heartbeats_may_be_missed(7):
        configure = ours.configure_coordination_service
        assert configure.keywords == {"heartbeat_timeout_in_ms": 7000}
        inspect.signature(configure.func).bind(
            "standalone", **configure.keywords
        )
    assert "configure_coordination_service" not in vars(ours)


def test_global_seed():
    before = compat.global_seed()
    try:
        tf.random.set_seed(None)
        assert compat.global_seed() is None
        tf.random.set_seed(7)
        assert compat.global_seed() == 7
    finally:
        tf.random.set_seed(before)


def test_saving_methods():
    for name in compat.SAVING_METHODS:
        assert callable(getattr(keras.Variable, name))


def test_timestamps_are_in_no_order_with_others():
    @tf.function
    def now():
        first, second = compat.timestamp(), compat.timestamp()
        with tf.control_dependencies([first, second]):
            return compat.timestamp() - first

    assert 0 <= float(now()) < 1
    operations = now.get_concrete_function().graph.get_operations()
    stamps = [op for op in operations if op.type == "Timestamp"]
    assert [len(op.control_inputs) for op in stamps] == [0, 0, 2]


def test_resolve_loss():
    assert compat.resolve_loss(None) is None
    assert compat.resolve_loss("mse").name == "mse"
    y_true, y_pred = tf.zeros([2]), tf.zeros([2, 3])
    loss = compat.resolve_loss("crossentropy", y_true, y_pred)
    assert loss.fn is keras.losses.sparse_categorical_crossentropy


def test_match_ranks():
    values, weights = compat.match_ranks(tf.zeros([4]), tf.zeros([4, 1]))
    assert values.shape == weights.shape == (4, 1)


def test_keras_mask():
    embedded = keras.layers.Embedding(3, 2, mask_zero=True)(np.array([[0, 1]]))
    np.testing.assert_array_equal(compat.keras_mask(embedded), [[False, True]])
    assert compat.keras_mask(tf.zeros([1])) is None


def test_set_keras_mask():
    tensor = tf.zeros([2, 1])
    compat.set_keras_mask(tensor, tf.constant([True, False]))
    np.testing.assert_array_equal(compat.keras_mask(tensor), [True, False])


def test_keras_logits():
    logits = tf.constant([[50.0]])
    outputs = keras.activations.sigmoid(logits)
    np.testing.assert_array_equal(compat.keras_logits(outputs), logits)
    assert compat.keras_logits(tf.zeros([1])) is None


def test_set_keras_logits():
    tensor = tf.ones([1, 1])
    compat.set_keras_logits(tensor, tf.constant([[50.0]]))
    loss = keras.losses.binary_crossentropy(tf.zeros([1, 1]), tensor)
    np.testing.assert_allclose(loss, [50.0])  # clipped: 16


def test_is_variable():
    layer = keras.layers.Dense(1)
    layer.build((None, 1))
    assert compat.is_variable(layer.kernel)
    assert compat.is_variable(keras.Variable(1.0))
    assert not compat.is_variable(tf.Variable(1.0))


def test_assignments_are_told():
    variable, told = keras.Variable([1.0]), []
    with compat.assignments_are_told(told.append):
        variable.assign([2.0])
        variable.assign_add([1.0])
        variable.assign_sub([1.0])
        with keras.StatelessScope():
            variable.assign([3.0])  # forgotten
    variable.assign([4.0])
    assert [v is variable for v in told] == [True] * 3


def test_all_layers():
    inner = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    layers = compat.all_layers(keras.Sequential([inner]))
    assert inner in layers
    assert inner.layers[0] in layers


def test_set_distribute_strategy():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    compat.set_distribute_strategy(model, strategy)
    assert model.distribute_strategy is strategy


def test_scopes_of_shapes():
    seen = []

    class Noting(keras.layers.Layer):
        def call(self, inputs):
            seen.append(
                (compat.is_tracing_shapes(), compat.in_symbolic_scope())
            )
            return inputs

    layer = Noting()
    layer(keras.Input((1,)))
    layer(tf.zeros([1, 1]))
    assert seen[0][0]
    assert seen[-1] == (False, False)


def test_optimizers():
    variables = [keras.Variable(tf.ones([n])) for n in (2, 3)]
    optimizer = keras.optimizers.AdamW(gradient_accumulation_steps=2)
    optimizer.exclude_from_weight_decay(var_list=variables[:1])
    compat.exclude_from_weight_decay_too(optimizer, variables[0], variables[1:])
    optimizer.build(variables)
    assert len(compat.built_variables(optimizer)) == 2
    assert compat.variable_index(optimizer, variables[1]) == 1
    assert not optimizer._use_weight_decay(variables[1])
    strategy = tf.distribute.get_strategy()
    compat.set_optimizer_strategy(optimizer, strategy)
    seen = []

    def clip(grads):
        seen.append(grads)
        return grads

    compat.take_aggregated_gradients(optimizer, clip)
    grads = [tf.ones([2]), tf.ones([3])]
    for _ in range(2):
        optimizer.apply(grads, variables)
    assert len(seen) == 1
    assert int(compat.iterations(optimizer)) == 2


def test_rebuild_optimizer():
    variables = [keras.Variable(tf.ones([n])) for n in (2, 3)]
    inner = keras.optimizers.AdamW()
    inner.exclude_from_weight_decay(var_list=variables[:1])
    optimizer = keras.optimizers.LossScaleOptimizer(inner)
    optimizer.build(variables)
    assert compat.excluded_from_weight_decay(inner) == [0]
    own = compat.own_variables(inner)
    others = [keras.Variable(tf.ones([n])) for n in (4, 5, 6)]
    slots = [keras.Variable(tf.zeros([n])) for n in (4, 5, 6)]
    compat.rebuild_optimizer(
        inner, others, own[:2] + slots, {"_momentums": slots}
    )
    compat.exclude_from_weight_decay(inner, others[1:2])
    assert compat.built_variables(inner) == others
    assert [compat.variable_index(inner, v) for v in others] == [0, 1, 2]
    assert inner._momentums == slots
    assert inner.variables == own[:2] + slots
    assert [inner._use_weight_decay(v) for v in others] == [True, False, True]
    added = inner.add_variable_from_reference(others[0], "more")
    assert inner.variables[-1] is added


def test_roots_stay_roots():
    """Each element's result is its own, wherever in a tensor it is."""
    rng = np.random.default_rng(0)
    x, y = rng.random((2, 1000), np.float32) + 1e-3

    def differing(context):
        @tf.function(reduce_retracing=True)
        def divide(x, y):
            with context():
                return x / keras.ops.sqrt(y)

        whole = divide(x, y).numpy()
        parts = [divide(x[i : i + 7], y[i : i + 7]) for i in range(0, 1000, 7)]
        return np.sum(whole != np.concatenate(parts))

    assert differing(compat.roots_stay_roots) == 0
    stock = keras.ops.sqrt(tf.constant(4.0))
    assert float(stock) == 2.0


def test_without_missing_gradients():
    variables = [keras.Variable(1.0), keras.Variable(2.0)]
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        grads, kept = compat.without_missing_gradients(
            keras.optimizers.SGD(), [None, tf.ones([])], variables
        )
    assert len(grads) == len(kept) == 1
    assert kept[0] is variables[1]


def test_losses_are_scaled():
    is_old = tuple(map(int, keras.__version__.split(".")[:2])) < (3, 6)
    assert compat.losses_are_scaled() is not is_old


@pytest.mark.parametrize("name", [compat.SYMBOLIC_BUILD, compat.STEP_LOSS])
def test_keras_calls_what_adoption_binds(name):
    """In `fit`, with the arguments that the bound method takes."""
    if name == compat.STEP_LOSS and not compat.losses_are_scaled():
        return  # not bound there
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    with tf.distribute.get_strategy().scope():
        model.compile("sgd", "mse")
    compat.set_distribute_strategy(model, tf.distribute.get_strategy())
    stock = getattr(model, name)
    calls = []

    def bound(*args, **kwargs):
        calls.append(sorted(kwargs))
        return stock(*args, **kwargs)

    object.__setattr__(model, name, bound)
    model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0)
    assert calls
    if name == compat.SYMBOLIC_BUILD:
        assert calls == [["iterator"]]


def test_dataset_inputs():
    dataset = tf.data.Dataset.range(2)
    assert compat.dataset_inputs(dataset) == []
    assert compat.dataset_inputs(dataset.batch(2)) == [dataset]


def test_array_orders_change():
    from keras.src.trainers.data_adapters import array_data_adapter

    def orders():
        keras.utils.set_random_seed(4)
        stock = tf.random.shuffle
        with compat.array_orders_change(5):
            dataset = array_data_adapter.ArrayDataAdapter(
                np.arange(12), batch_size=5, shuffle=True
            ).get_tf_dataset()
        assert tf.random.shuffle is stock
        return [np.concatenate(list(dataset)).tolist() for _ in range(3)]

    first, second, third = orders()
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second != third
    assert orders() == [first, second, third]


def _epoch_iterator(**arguments):
    from keras.src.backend.tensorflow import trainer

    return trainer.TFEpochIterator(
        distribute_strategy=tf.distribute.get_strategy(), **arguments
    )


def test_on_next_epoch():
    """Once, and as `fit` enumerates an epoch in this version of Keras."""
    iterator = _epoch_iterator(x=np.arange(6), batch_size=2)

    def without_the_first(stock):
        executions = stock()
        next(next(executions)[-1])
        yield from executions

    def batches():
        return [next(item[-1]).numpy().tolist() for item in _epoch(iterator)]

    compat.on_next_epoch(iterator, without_the_first)
    assert batches() == [[2, 3], [4, 5]]
    assert batches() == [[0, 1], [2, 3], [4, 5]]


def test_change_input():
    """Before it begins; None changes nothing."""
    iterator = _epoch_iterator(x=np.arange(6), batch_size=2)
    compat.change_input(iterator, lambda dataset: dataset.map(lambda x: x + 1))
    compat.change_input(iterator, lambda dataset: None)
    batches = [next(item[-1]).numpy().tolist() for item in _epoch(iterator)]
    assert batches == [[1, 2], [3, 4], [5, 6]]


def _epoch(iterator):
    return (
        iterator
        if hasattr(iterator, "__next__")
        else (iterator.enumerate_epoch())
    )


def test_what_makes_the_batches():
    arrays = _epoch_iterator(x=np.arange(6), batch_size=2, shuffle=True)
    assert compat.repeats_an_order_at_once(arrays)
    assert not compat.is_read_by_python(arrays)
    by_batches = _epoch_iterator(x=np.arange(6), batch_size=2, shuffle="batch")
    assert not compat.repeats_an_order_at_once(by_batches)
    generated = _epoch_iterator(x=((np.ones(2),) for _ in range(9)))
    assert compat.is_read_by_python(generated)
    assert not compat.repeats_an_order_at_once(generated)


def test_outermost_graph():
    numbers = []

    @tf.function
    def outer(x):
        numbers.append((compat.outermost_graph(), compat.outermost_function()))

        @tf.function
        def inner(y):
            for _ in tf.range(2):
                numbers.append(
                    (compat.outermost_graph(), compat.outermost_function())
                )
                y += 1.0
            return y

        return inner(x)

    assert compat.outermost_graph() is compat.outermost_function() is None
    graph = outer.get_concrete_function(tf.ones([])).graph
    assert {found for found, _ in numbers} == {graph}
    assert len({number for _, number in numbers}) == 1
    before = numbers[0][1]
    outer.get_concrete_function(tf.ones([2]))
    assert numbers[-1][1] != before


def test_captured():
    handle = tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name="c")
    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(0))
    assert compat.captured(handle) is handle

    @tf.custom_gradient
    def count(x):
        def gradient(upstream):
            tf.raw_ops.AssignAddVariableOp(
                resource=compat.captured(handle), value=tf.constant(1)
            )
            return upstream

        return tf.identity(x), gradient

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in tf.range(3):
                y = count(y) * 2.0
        return tape.gradient(y, x)

    assert step(tf.ones([])) == 8.0
    assert tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int32) == 3


def test_captured_by_a_function_of_several_others():
    handle = tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name="d")
    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(0))

    @tf.function
    def inner():
        tf.raw_ops.AssignAddVariableOp(
            resource=compat.captured(handle), value=tf.constant(1)
        )

    for _ in range(2):
        tf.function(lambda: inner())()
    inner()
    assert tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int32) == 3


def test_anonymous_name():
    handles = [
        tf.raw_ops.VarHandleOp(
            dtype=tf.int32, shape=[], shared_name=compat.anonymous_name()
        )
        for _ in range(2)
    ]
    for value, handle in enumerate(handles):
        tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(value))
    read = tf.function(
        lambda: tf.raw_ops.ReadVariableOp(resource=handles[0], dtype=tf.int32)
    )
    assert read() == 0
    handles.clear()  # the function keeps it alive
    assert read() == 0


def test_abort_collectives():
    # It ends the collectives of this process for good: see test_watch.py.
    from tensorflow.python.eager import context

    assert callable(context.context().abort_collective_ops)


def test_calls_of_a_functional_model_in_their_order():
    first, second = keras.Input((2,)), keras.Input((2,))
    layer = keras.layers.Dense(2)
    hidden = layer(first + second)
    outputs = layer(hidden)
    model = keras.Model([first, second], outputs)
    functional = compat.functional_of(model)
    assert functional is model
    (add, one, two) = compat.functional_calls(functional)
    assert not isinstance(add.operation, keras.Layer)
    assert [id(x) for x in add.inputs] == [id(first), id(second)]
    assert one.operation is two.operation is layer
    assert one.outputs[0] is hidden and two.arguments[0] is hidden
    assert two.outputs[0] is outputs

    class Own(keras.Model):
        pass

    assert compat.functional_of(Own([first, second], hidden)) is None
    sequential = keras.Sequential([layer])
    assert compat.functional_of(sequential) is None
    sequential.build((None, 2))
    functional = compat.functional_of(sequential)
    (call,) = compat.functional_calls(functional)
    assert call.operation is layer
    assert [id(x) for x in call.inputs] == [id(x) for x in sequential.inputs]


def test_weights_that_were_trainable():
    frozen = keras.layers.Dense(1)
    model = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dropout(0.5),
            keras.layers.BatchNormalization(),
            frozen,
        ]
    )
    frozen.trainable = False
    found = compat.weights_that_were_trainable(model)
    normalized = model.layers[1]
    expected = [normalized.gamma, normalized.beta, frozen.kernel, frozen.bias]
    assert {id(v) for v in found} == {id(v) for v in expected}


def test_next_run_calls():
    inputs = keras.Input((2,))
    layer = keras.layers.Identity()
    model = keras.Model(inputs, layer(layer(inputs) + 1.0))
    begun, seen = [], []

    def begin(inputs):
        begun.append(inputs)

        def call(number, operation, *args):
            seen.append(number)
            return operation(*args) * 2.0

        return call

    functional = compat.functional_of(model)
    with compat.next_run_calls(functional, begin):
        np.testing.assert_array_equal(model(np.ones((1, 2))), [[12.0, 12.0]])
        # The next run alone.
        np.testing.assert_array_equal(model(np.ones((1, 2))), [[2.0, 2.0]])
    assert seen == [0, 1, 2] and len(begun) == 1
    with compat.next_run_calls(functional, begin):
        pass
    np.testing.assert_array_equal(model(np.ones((1, 2))), [[2.0, 2.0]])


def test_is_stateless():
    inputs = keras.Input((3,))
    noise = keras.random.SeedGenerator(1)

    def of(outputs):
        (call,) = compat.functional_calls(keras.Model(inputs, outputs))
        return compat.is_stateless(call)

    def add_noise(row):
        return row + keras.random.normal((), seed=noise)

    class Own(keras.Operation):
        def call(self, x):
            return add_noise(x)

        def compute_output_spec(self, x):
            return keras.KerasTensor(x.shape, x.dtype)

    ops = keras.ops
    assert of(inputs * 3) and of(inputs[:, :1]) and of(ops.mod(inputs, 2))
    assert not of(ops.map(add_noise, inputs))
    assert not of(ops.vectorized_map(add_noise, inputs))
    assert not of(Own()(inputs))
    assert not of(keras.layers.Lambda(add_noise)(inputs))


# Copies of models.


def test_compile_state():
    fresh = vars(keras.Sequential())
    for name, value in compat.COMPILE_STATE.items():
        assert fresh.get(name) == value, name
    model = keras.Sequential([keras.layers.Dense(1)])
    assert compat.compile_arguments(model) == {}
    model.compile("sgd", "mse", metrics=["mae"])
    arguments = compat.compile_arguments(model)
    assert arguments["loss"] == "mse" and arguments["metrics"] == ["mae"]
    inspect.signature(keras.Model.compile).bind(
        model, **arguments, auto_scale_loss=False
    )
    model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0)
    changed = {n for n, v in vars(model).items() if fresh.get(n) != v}
    assert {"compiled", "train_function", "_compile_loss"} <= changed


def test_place_of_a_layer():
    inputs = keras.Input((3,))
    layer = keras.layers.Dense(2)
    outputs = layer(inputs)
    assert set(compat.LAYER_PLACE) <= set(vars(layer))
    assert compat.built_with(layer) == {"input_shape": (None, 3)}
    assert compat.built_with(keras.layers.Dense(2)) == {}
    assert not compat.calls_with_more_arguments(layer, "weights")
    attention = keras.layers.Attention()
    attention([outputs, outputs])
    assert not compat.calls_with_more_arguments(attention, "mask")
    attention([outputs, outputs], mask=[outputs, outputs])
    assert compat.calls_with_more_arguments(attention, "mask")


def test_trackers_and_ids():
    layer = keras.Sequential([keras.layers.Dense(1)])
    assert compat.is_tracker(layer._tracker)
    assert not compat.is_tracker(layer)
    old, new = layer.layers[0], keras.layers.Dense(2)
    holder = keras.layers.Layer()
    holder.attribute, holder.several = old, [{"a": old}]
    compat.replace_sublayer(holder, old, new)
    assert holder.attribute is new and holder.several[0]["a"] is new
    assert holder._layers == compat.sublayers(holder) == [new]
    assert holder._tracker.is_in_store("layers", new)
    assert not holder._tracker.is_in_store("layers", old)
    inputs = keras.Input((3,))
    model = keras.Model(inputs, new(inputs))
    compat.renew_ids(model, lambda known: known + 1)
    assert f"{id(new) + 1}_ib-0" in model._nodes


def test_containers_that_tensorflow_tracks():
    layer = keras.layers.Dense(1)
    inputs = keras.Input((3,))
    model = keras.Model(inputs, layer(inputs))
    assert layer in compat.tracked_by_tensorflow(model._operations)
    for plain in ([layer], {"a": layer}, (layer,)):
        tracked = compat.track_by_tensorflow(plain)
        assert type(tracked) is not type(plain)
        assert compat.tracked_by_tensorflow(tracked) == plain
        assert compat.tracked_by_tensorflow(plain) is None
    holder = keras.layers.Layer()
    holder.inner = layer
    names = [n for n in vars(holder) if compat.is_dependency_of_tensorflow(n)]
    assert any(vars(holder)[name] for name in names)


def test_copies_of_variables():
    variable = keras.Variable(np.arange(3.0), trainable=False, name="v")
    state = compat.variable_state(variable)
    assert state.keys() == vars(variable).keys()
    state["_value"].assign(np.zeros(3))
    np.testing.assert_array_equal(variable, np.arange(3.0))
    assert state["_value"].name == variable.value.name
    assert not state["_value"].trainable


def test_around_control_flow():
    found = {}

    def body(i):
        found["loop"] = compat.around_control_flow(found["entered"])
        inside = tf.compat.v1.get_default_graph()
        found["inside"] = compat.around_control_flow(inside)
        return i + 1

    @tf.function
    def function():
        graph = tf.compat.v1.get_default_graph()
        found["entered"] = found["graph"] = graph
        found["outside"] = compat.around_control_flow(graph)
        return tf.while_loop(lambda i: i < 2, body, [0])

    function()
    assert found["outside"] is None and found["inside"] is None
    assert found["loop"] is None or found["loop"][1] is found["graph"]
    assert found["loop"] is not None
    assert compat.around_control_flow(None) is None


def test_random_operations_seeded():
    def draw(change=None):
        keras.utils.set_random_seed(4)
        seeded = (
            compat.random_operations_seeded(change)
            if change
            else contextlib.nullcontext()
        )
        with seeded:
            inside = [keras.random.normal((3,)), tf.random.normal((3,))]
        later = [keras.random.normal((3,)), tf.random.normal((3,))]
        return [np.array(drawn) for drawn in (*inside, *later)]

    stock, other = draw(), draw(lambda seed: seed + 5)
    for one, two in zip(stock[:2], other[:2], strict=True):
        assert np.abs(one - two).min() > 1e-4
    np.testing.assert_array_equal(stock[2:], other[2:])
    np.testing.assert_array_equal(stock, draw(lambda seed: seed))

    @tf.function
    def traced(difference):
        with compat.random_operations_seeded(lambda seed: seed + difference):
            return tf.random.normal((3,)), keras.random.normal((3,))

    tf.random.set_seed(4)
    for one, two in zip(traced(0), traced(5), strict=True):
        assert np.abs(one - two).min() > 1e-4


def test_epoch_iterators_are_made_in():
    entered = []

    @contextlib.contextmanager
    def scope():
        entered.append(True)
        yield

    model = keras.Sequential([keras.layers.Dense(1)])
    x = np.ones((2, 1), "float32")
    with compat.epoch_iterators_are_made_in(scope):
        model.predict(x, verbose=0)
        assert len(entered) == 1
    model.predict(x, verbose=0)
    assert len(entered) == 1


def test_what_is_added_to_the_loss():
    model = keras.Sequential([keras.layers.Dense(1, kernel_regularizer="l2")])
    model.compile("sgd", "mse")
    model.build((None, 1))
    with compat.losses_replaced(model, [tf.constant(3.0)]):
        assert [float(loss) for loss in model.losses] == [3.0]
    assert float(model.losses[0]) < 3.0
    if compat.ADDED_LOSS:
        added = []
        stock = getattr(model, compat.ADDED_LOSS)
        with mock.patch.object(
            model,
            compat.ADDED_LOSS,
            lambda loss: (added.append(loss), stock(loss))[1],
            create=True,
        ):
            y = tf.zeros([1, 1])
            model.compute_loss(y=y, y_pred=y)
        assert len(added) == 1
    else:
        assert int(keras.__version__.split(".")[1]) < 8
