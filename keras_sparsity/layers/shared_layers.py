"""Layers that others hold too, in copies that are made of configurations.

Keras makes a shared layer once where it saves and loads a file. Elsewhere, in
`clone_model` and `Model.from_config`, each holder's configuration has one of
its own, of which Keras makes a layer each. So such a layer's configuration has
a name, and holders that are made one after the other get the same layer, until
one of them asks for it a second time: that begins another copy.
"""

import itertools
import weakref

from keras_sparsity._tf import contexts

# In the configuration of a layer that others hold.
KEY = "shared_as"

_numbers = itertools.count()
# The last layer that was made, and its holders so far, by the layer's name.
_made = {}
# The holder that is being made; none makes the layer itself.
_holders = ["a model"]


def name_for(layer):
    """A name for a layer that is to be shared."""
    return f"{layer.name}/{next(_numbers)}"


def made_for(holder):
    """While entered, layers are made for a holder, given by its name."""
    return contexts.on_top(_holders, holder)


def made(name, make):
    """The layer of a configuration, for the holder that is being made.

    Args:
        name: the name that its configuration has.
        make: function that makes it.
    """
    known, holders = _made.get(name, (lambda: None, ()))
    layer, holder = known(), _holders[-1]
    if layer is None or holder in holders:
        layer, holders = make(), set()
        _made[name] = weakref.ref(layer), holders
    holders.add(holder)
    return layer
