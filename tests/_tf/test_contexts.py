import types

import pytest

from keras_sparsity._tf import contexts


def test_a_value_is_on_top_until_its_context_is_left():
    stack = []
    with contexts.on_top(stack, 1) as first:
        with contexts.on_top(stack, 2):
            assert stack == [1, 2]
        assert (first, stack) == (1, [1])
    assert stack == []


def test_an_attribute_gets_the_value_before_back():
    owner = types.SimpleNamespace(name="before")
    with contexts.attribute(owner, "name", "outer"):
        with contexts.attribute(owner, "name", "inner"):
            assert owner.name == "inner"
        assert owner.name == "outer"
    assert owner.name == "before"


def test_errors_leave_contexts_too():
    stack, owner = [], types.SimpleNamespace(name=1)
    with (
        pytest.raises(KeyError),
        contexts.on_top(stack, 1),
        contexts.attribute(owner, "name", 2),
    ):
        raise KeyError
    assert (stack, owner.name) == ([], 1)
