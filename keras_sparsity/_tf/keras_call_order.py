"""The order of a functional model's calls. Checked on Keras 3.5 to 3.15.

Keras sorts the calls of a new model by their distance from its outputs, and
those of one distance by its search for them from these. A model of some of
another's calls would make them in an order of its own. A layer that is called
twice would then take the batch statistics of its calls, and draw random
numbers for them, in that order.
"""


def nodes(functional):
    """The nodes of a `Functional`'s calls, in order (`_nodes_by_depth`)."""
    by_depth = functional._nodes_by_depth
    return [
        node
        for depth in sorted(by_depth, reverse=True)
        for node in by_depth[depth]
        if node.operation is not None and not node.is_input
    ]


def as_made(calls, made):
    """Calls in an order in which those with one state stand as they were made.

    Others stay where they are as far as that allows: calls of two layers of a
    model that is called twice stand layer by layer, with cuts between them.

    Args:
        calls: list of `keras_functional.Call`s, each behind those whose
            tensors it takes.
        made: list of tensors in the order in which calls made them. Calls
            without tensors in it have no state, as those that make masks.
    """
    places = {id(x): i for i, call in enumerate(calls) for x in call.outputs}
    before = [
        {places[id(x)] for x in call.inputs if id(x) in places}
        for call in calls
    ]
    last = {}
    for place in dict.fromkeys(places[id(x)] for x in made if id(x) in places):
        operation = calls[place].operation
        # Layers may share weights, or the state of random numbers.
        for state in operation, *getattr(operation, "variables", []):
            before[place] |= {last.get(id(state), place)} - {place}
            last[id(state)] = place
    order, waiting = {}, list(range(len(calls)))
    while waiting:
        place = next(i for i in waiting if before[i] <= order.keys())
        order[place] = calls[place]
        waiting.remove(place)
    return list(order.values())


def set_order(model, calls, outputs):
    """Has a functional model make its calls in an order (`_nodes_by_depth`).

    Args:
        model: `keras.Model`. Its nodes may be copies: Keras makes them for a
            model that takes tensors which calls have made.
        calls: its calls in the order, as `keras_functional.Call`s.
        outputs: list of the tensors among theirs that are its outputs.
    """
    of_outputs = {id(x): node for node in nodes(model) for x in node.outputs}
    own = dict(zip(map(id, outputs), model.outputs, strict=True))
    backwards = []
    for call in reversed(calls):
        known = next(own[id(x)] for x in call.outputs if id(x) in own)
        node = of_outputs[id(known)]
        theirs = map(id, [*call.outputs, *call.inputs])
        own.update(
            zip(theirs, [*node.outputs, *node.input_tensors], strict=True)
        )
        backwards.append([node])
    by_depth = model._nodes_by_depth
    inputs = [x for same in by_depth.values() for x in same if x.is_input]
    by_depth.clear()
    by_depth.update({**dict(enumerate(backwards)), len(backwards): inputs})
