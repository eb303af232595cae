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


def test_own_attributes_give_methods_and_attributes_back():
    class Owner:
        def method(self):
            return "of the class"

    owner = Owner()
    owner.value = 1
    with contexts.own_attributes(owner, method=lambda: "own", value=2):
        with contexts.own_attributes(owner, method=lambda: "inner"):
            assert owner.method() == "inner"
        assert (owner.method(), owner.value) == ("own", 2)
    assert (owner.method(), vars(owner)) == ("of the class", {"value": 1})


def test_errors_leave_contexts_too():
    stack, owner = [], types.SimpleNamespace(name=1)
    with (
        pytest.raises(KeyError),
        contexts.on_top(stack, 1),
        contexts.attribute(owner, "name", 2),
        contexts.own_attributes(owner, other=3),
    ):
        raise KeyError
    assert (stack, vars(owner)) == ([], {"name": 1})
