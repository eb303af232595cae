"""The stages of a cut model compute, one after the other, what it computes."""

import functools
import itertools
import random

import keras
import numpy as np
import pytest

from keras_sparsity.stages.cutting import Cutter, shared

# Keras's own, of nested models.
pytestmark = pytest.mark.filterwarnings("ignore:.*does not support masking")


def _branches():
    """Two inputs and outputs, masks, recurrent layers, skip connections."""
    ids = keras.Input((None,), dtype="int32", name="ids")
    numbers = keras.Input((4,), name="numbers")
    rows = keras.layers.Embedding(20, 8, mask_zero=True, name="rows")(ids)
    states = keras.layers.LSTM(8, return_sequences=True, name="first")(rows)
    state = keras.layers.LSTM(8, name="second")(states)
    dense = keras.layers.Dense(8, activation="relu", name="dense")(numbers)
    dense = keras.layers.BatchNormalization(name="norm")(dense)
    both = keras.layers.Add(name="both")([state, dense])
    first = keras.layers.Dense(3, name="one")(both)
    wide = keras.layers.Concatenate(name="wide")([both, dense])
    wide = keras.layers.Dense(8, name="narrow")(wide)
    skip = keras.layers.Add(name="skip")([wide, dense])
    second = keras.layers.Dense(1, name="two")(skip)
    return keras.Model([ids, numbers], [first, second])


def _nested():
    """A model in a model in a model; each has a layer called `dense`."""
    inner = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, name="dense"),
            keras.layers.Dropout(0.5, name="drop"),
            keras.layers.Dense(6, name="wide"),
        ],
        name="inner",
    )
    x = keras.Input((6,))
    middle = keras.Model(
        x,
        keras.layers.Add(name="add")(
            [x, keras.layers.Dense(6, name="dense")(inner(x))]
        ),
        name="middle",
    )
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(6, name="dense"),
            middle,
            keras.layers.Dense(2, name="behind"),
        ]
    )


def _nested_masks():
    """Nested models of several inputs and outputs, with masks across them."""
    ids = keras.Input((None,), dtype="int32", name="ids")
    rows = keras.layers.Embedding(20, 8, mask_zero=True, name="rows")(ids)
    embedder = keras.Model(
        ids, [rows, keras.layers.Dense(8, name="dense")(rows)], name="embedder"
    )
    sequence = keras.Input((None, 8), name="s")
    state = keras.Input((8,), name="t")
    states = keras.layers.LSTM(8, name="states")(sequence)
    both = keras.layers.Add(name="both")([states, state])
    reader = keras.Model({"s": sequence, "t": state}, both, name="reader")
    ids = keras.Input((None,), dtype="int32", name="ids")
    numbers = keras.Input((4,), name="numbers")
    first, second = embedder(ids)
    x = keras.layers.Dense(8, name="first")(numbers)
    x = reader({"s": second, "t": x})
    y = keras.layers.LSTM(8, name="last")(first)
    return keras.Model([ids, numbers], [x, y])


def _inputs_as_outputs():
    """Of two inputs, which are outputs: one that the last stage takes."""
    x, y = keras.Input((6,), name="x"), keras.Input((6,), name="y")
    first = keras.layers.Dense(6, name="first")(x)
    middle = keras.layers.Add(name="middle")([first, y])
    last = keras.layers.Dense(2, name="last")(middle)
    last = keras.layers.Concatenate(name="both")([last, y])
    return keras.Model([x, y], [x, last, {"y": y}])


def _batch(model):
    return [keras.ops.convert_to_tensor(array) for array in _arrays(model)]


def _arrays(model):
    draws = np.random.default_rng(0)
    if all(x.shape == (None, 6) for x in model.inputs):
        shape = 3, 6
        return [
            draws.normal(size=shape).astype("float32") for _ in model.inputs
        ]
    ids = np.array([[1, 2, 0, 0], [3, 4, 5, 0], [1, 0, 0, 0]])
    return [ids, draws.normal(size=(3, 4)).astype("float32")]


def _run(cutter, places, batch, training=None):
    """The model's outputs, stage by stage; only `sent` reaches the next."""
    arrived = []
    for part in cutter.parts(places):
        taken = [batch[place] for place in part.inputs]
        taken += [arrived[place] for place in part.taken]
        made = part.compute(taken, training)
        values = {
            id(tensor): value
            for tensors, found in [(part.made, made), (part.arriving, taken)]
            for tensor, value in zip(tensors, found, strict=True)
        }
        for tensor, value in zip(part.received, arrived, strict=True):
            values[id(tensor)] = value
        arrived = [values[id(tensor)] for tensor in part.sent]
    return arrived


@pytest.mark.parametrize(
    "make", [_branches, _nested, _nested_masks, _inputs_as_outputs]
)
def test_any_cut_gives_the_model(make):
    model = make()
    batch = _batch(model)
    expected = keras.tree.flatten(model(batch if len(batch) > 1 else batch[0]))
    cutter = Cutter(model)
    every = [[place] for place in cutter.places]
    for places in [[], *every, cutter.places]:
        outputs = _run(cutter, places, batch)
        for output, value in zip(outputs, expected, strict=True):
            np.testing.assert_array_equal(output, value)


@pytest.mark.parametrize("make", [_branches, _nested, _nested_masks])
def test_a_model_that_is_cut_can_be_saved(make):
    model = make()
    config = model.get_config()
    cutter = Cutter(model)
    for place in cutter.places:
        cutter.parts([place])
    assert model.get_config() == config


def test_stages_share_the_models_weights_and_none_with_each_other():
    model = _branches()
    cutter = Cutter(model)
    parts = cutter.parts(cutter.places)
    weights = [id(v) for part in parts for v in part.model.variables]
    assert sorted(weights) == sorted(id(v) for v in model.variables)


def test_inputs_do_not_travel_and_skip_connections_do():
    cutter = Cutter(_branches())
    first, second, third = cutter.parts(cutter.after(["norm", "wide"]))
    assert first.inputs == (0, 1)
    assert second.inputs == third.inputs == ()
    # `norm` skips the second stage, which both takes it and hands it on.
    assert third.taken == tuple(range(len(third.received)))
    shapes = sorted(tuple(tensor.shape) for tensor in third.received)
    assert shapes == [(None, 8), (None, 8), (None, 16)]
    assert len(second.made) == 2


def test_nested_models_are_cut_by_the_names_of_their_layers():
    cutter = Cutter(_nested())
    first, second = cutter.parts(cutter.after(["middle/inner/dense"]))
    assert first.names == ("dense", "middle/inner/dense")
    assert second.names == (
        "middle/inner/drop",
        "middle/inner/wide",
        "middle/dense",
        "middle/add",
        "behind",
    )
    # The skip connection around `inner` crosses, too.
    shapes = [tuple(tensor.shape) for tensor in second.received]
    assert shapes == [(None, 6), (None, 5)]


def _called_twice():
    inner = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(4, name="dense")], name="inner"
    )
    x = keras.Input((4,))
    y = keras.layers.Dense(4, name="between")(inner(x))
    return keras.Model(x, keras.layers.Dense(2, name="behind")(inner(y)))


def _towers(is_nested):
    """Layers with batch statistics and random numbers, each called twice."""
    layers = [
        keras.layers.BatchNormalization(momentum=0.5, name="first"),
        keras.layers.Dense(6, activation="tanh", name="dense"),
        keras.layers.Dropout(0.5, seed=1, name="drop"),
        keras.layers.BatchNormalization(momentum=0.5, name="second"),
    ]
    inputs = keras.Input((6,), name="x"), keras.Input((6,), name="y")
    if is_nested:
        tower = keras.Sequential([keras.Input((6,)), *layers], name="tower")
    else:

        def tower(x):
            for layer in layers:
                x = layer(x)
            return x

    x = keras.layers.Subtract(name="both")([tower(each) for each in inputs])
    x = keras.layers.Dense(6, name="behind")(x)
    return keras.Model(inputs, keras.layers.Dense(2, name="last")(x))


@pytest.mark.parametrize("is_nested", [False, True])
def test_layers_that_are_called_twice_are_called_in_the_models_order(is_nested):
    keras.utils.set_random_seed(1)
    model = _towers(is_nested)
    states = model.non_trainable_variables
    x, y = _batch(model)
    batch, before = [x, y**2], [v.numpy() for v in states]

    def trained(run):
        for state, value in zip(states, before, strict=True):
            state.assign(value)
        (made,) = run()
        return [made, *(v.numpy() for v in states)]

    expected = trained(lambda: [model(batch, training=True)])
    cutter = Cutter(model)
    # Also between the layers of the towers.
    names = [call.name.split("/")[-1] for call in cutter.calls]
    ends = "first", "dense", "drop", "second", "both", "behind"
    last = {name: place for place, name in enumerate(names)}
    assert cutter.places == [last[name] for name in ends]
    for places in [[], *([place] for place in cutter.places), cutter.places]:
        found = trained(functools.partial(_run, cutter, places, batch, True))
        for value, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(value, other)


class _Own(keras.Model):
    """A model that Keras cannot see into."""

    def __init__(self):
        super().__init__(name="own")
        self.dense = keras.layers.Dense(4)

    def call(self, inputs):
        return self.dense(inputs)


def _with_own_mask():
    """A nested model that is given a mask which its input does not have."""
    x = keras.Input((3, 4))
    inner = keras.Sequential([keras.layers.LSTM(4, name="lstm")], name="inner")
    mask = keras.ops.greater(x[:, :, 0], 0)
    return keras.Model(x, keras.layers.Dense(2)(inner(x, mask=mask)))


@pytest.mark.parametrize(
    ("make", "whole"),
    [
        (_called_twice, "inner/dense"),
        (
            lambda: keras.Sequential(
                [keras.Input((4,)), _Own(), keras.layers.Dense(2)]
            ),
            "own",
        ),
        (_with_own_mask, "inner"),
    ],
    ids=["called twice", "subclass", "own mask"],
)
def test_what_of_nested_models_is_not_cut(make, whole):
    cutter = Cutter(make())
    assert whole in [call.name for call in cutter.calls]
    if whole == "inner/dense":
        assert cutter.places == [2]


def test_a_layer_that_is_called_twice_is_not_cut_through():
    inputs = keras.Input((4,))
    twice = keras.layers.Dense(4, name="twice")
    x = keras.layers.Dense(4, name="between")(twice(inputs))
    x = keras.layers.Dense(2, name="behind")(twice(x))
    cutter = Cutter(keras.Model(inputs, x))
    assert cutter.places == [2]
    with pytest.raises(ValueError, match="'twice' or its weights"):
        cutter.after(["between"])


def test_names_of_a_model_with_more_calls_than_layers():
    inputs = keras.Input((4,), name="first"), keras.Input((4,), name="second")
    twice = keras.layers.Dense(4, name="twice")
    x = keras.layers.Add(name="add")([twice(each) for each in inputs])
    x = keras.layers.Dense(2, name="behind")(x)
    cutter = Cutter(keras.Model(inputs, x))
    assert cutter.after(["twice", "add"]) == [1, 2]
    order = r"order: \['twice', 'add', 'behind'\]"
    for names in ["behind"], ["add", "twice"]:
        with pytest.raises(ValueError, match=order):
            cutter.after(names)


def _folded(x):
    x = keras.ops.reshape(x, (-1, 4))
    x = keras.layers.Dense(5, name="of_rows")(x)
    return keras.ops.reshape(x, (-1, 3, 5))


def _with_mean(x):
    mean = keras.ops.mean(x, axis=0, keepdims=True)
    x = keras.layers.Dense(4, name="of_rows")(mean) + x
    return keras.layers.Dense(4, name="behind")(x)


@pytest.mark.parametrize(
    ("mix", "length"), [(_folded, 3), (_with_mean, 3), (_with_mean, None)]
)
def test_tensors_without_a_row_for_each_example_do_not_cross(mix, length):
    inputs = keras.Input((length, 4))
    x = mix(keras.layers.Dense(4, name="first")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(2, name="last")(x))
    cutter = Cutter(model)
    places = {call.name: place for place, call in enumerate(cutter.calls)}
    assert places["of_rows"] == 2
    assert set(range(places["last"])) - set(cutter.places) == {1, 2}
    with pytest.raises(ValueError, match="'of_rows' would travel.*Cut before"):
        cutter.after(["of_rows"])
    assert cutter.after(["first"]) == [0]
    assert not model.losses


def _time_first(x):
    """The examples are on another axis in between."""
    x = keras.ops.transpose(x, (1, 0, 2))
    return keras.ops.transpose(keras.ops.tanh(x), (1, 0, 2))


def _products(x):
    first, second = (keras.ops.expand_dims(x, axis) for axis in (0, 1))
    return keras.ops.reshape(first * second, (-1, 4))


@pytest.mark.parametrize(
    ("mix", "is_of_pairs"),
    [
        (lambda x: keras.ops.matmul(x, keras.ops.transpose(x)), True),
        (lambda x: keras.ops.einsum("ai,bi->abi", x, x), True),
        (_products, True),
        # A trace has 97 examples.
        (keras.layers.Dense(97 * 97), False),
        (lambda x: _time_first(keras.ops.expand_dims(x, 1)), False),
        (lambda x: _folded(keras.layers.RepeatVector(3)(x)), False),
        (lambda x: x - keras.ops.mean(x, axis=0, keepdims=True), False),
    ],
)
def test_numbers_of_pairs_of_examples(mix, is_of_pairs):
    inputs = keras.Input((4,))
    model = keras.Model(inputs, mix(inputs))
    calls = {call.name for call in Cutter(model).calls}
    pairs = Cutter(model).pairs
    assert bool(pairs) == is_of_pairs and calls.issuperset(pairs)


class _Subclass(keras.Model):
    def call(self, inputs):
        return inputs


@pytest.mark.parametrize(
    "make",
    [_Subclass, lambda: keras.Sequential([keras.layers.Dense(2)])],
    ids=["subclass", "not built"],
)
def test_a_model_without_a_graph_is_refused(make):
    with pytest.raises(ValueError, match="cannot be cut into stages"):
        Cutter(make())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["absent"], "'absent'"),
        (["both", "dense"], "in the model's order"),
        (["both", "both"], "in the model's order"),
        (["one"], "before the last layer"),
    ],
)
def test_names_that_are_no_cuts(names, message):
    cutter = Cutter(_branches())
    assert cutter.calls[-1].operation.name == "one"
    with pytest.raises(ValueError, match=message):
        cutter.after(names)


def test_balanced_cuts_are_the_best_of_all():
    draws = random.Random(1)
    for _ in range(300):
        num_calls = draws.randint(1, 9)
        seconds = [float(draws.randint(0, 9)) for _ in range(num_calls)]
        count = draws.randint(0, num_calls - 1)
        places = sorted(draws.sample(range(num_calls - 1), count))
        num_stages = draws.randint(1, len(places) + 1)
        crossing = {place: draws.randint(0, 9) for place in places}
        again = [float(draws.randint(0, 5)) for _ in range(num_calls)]

        handling = {place: draws.randint(0, 5) for place in places}
        given = seconds, crossing, again, handling

        def bottleneck(cuts, given=given):
            seconds, crossing, again, handling = given
            bounds = [-1, *cuts, len(seconds) - 1]
            stages = [
                sum(seconds[before + 1 : last + 1])
                for before, last in itertools.pairwise(bounds)
            ]
            for place, (before, last) in enumerate(itertools.pairwise(bounds)):
                stages[place] += handling.get(before, 0)
                stages[place] += handling.get(last, 0)
                if last < len(seconds) - 1:
                    stages[place] += sum(again[before + 1 : last + 1])
            return max([*stages, *(crossing[cut] for cut in cuts)])

        one_each = [[1]] * num_stages
        found, _ = shared(
            *(seconds, places, one_each, num_stages, crossing),
            again_seconds=again,
            handling_seconds=handling,
        )
        assert len(found) == num_stages - 1
        assert bottleneck(found) == min(
            map(bottleneck, itertools.combinations(places, num_stages - 1))
        )


def test_more_stages_than_cuts_allow():
    with pytest.raises(ValueError, match="Use at most 2"):
        shared([1.0, 1.0, 1.0], [1], [[1]] * 3, 3)
