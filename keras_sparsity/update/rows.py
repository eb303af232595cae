"""Any Keras optimizer, applied to the touched rows of a variable."""

import contextlib
import functools

import tensorflow as tf

from keras_sparsity._tf import keras_optimizers, keras_variables, patches
from keras_sparsity.health import journal
from keras_sparsity.health.journal import UPDATE

# Stand-ins take part in an optimizer's arithmetic through these.
_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv "
    "pow rpow neg abs matmul lt le gt ge getitem"
).split()
# Set on a copy of an optimizer.
_STAND_INS = "_keras_sparsity_stand_ins"


class RowStandIn:
    """Some rows that an optimizer updates in place of their variable.

    The optimizer reads and assigns it like the variable. Only the tensor held
    here changes; `write_back` scatters it into the variable. Rows are read
    when first needed: a rule that only subtracts (SGD, Adagrad) reads none.
    """

    def __init__(self, variable, rows, read=None, constraint=None):
        self._variable = variable
        self._rows = rows
        self._tensor = None
        self._is_changed = False
        self._subtracted = None  # while the rows are not read
        # Stored rows may be behind; rows that are read are not.
        self._read = read
        self.constraint = constraint
        self.name = keras_optimizers.tensorflow_name(variable)
        self.path = variable.path
        self.dtype = tf.as_dtype(variable.dtype)
        # By which Keras's TensorFlow optimizers find it.
        self._unique_id = variable.value._unique_id
        self.overwrite_with_gradient = False

    @property
    def tensor(self):
        if self._tensor is None and self._read is not None:
            self._tensor = self._read(self._variable)
        elif self._tensor is None:
            # On the variable itself: reading its value would copy it whole.
            self._tensor = tf.gather(self._variable.value, self._rows)
            if self._subtracted is not None:
                self.assign(self._tensor - self._subtracted)
        return self._tensor

    @property
    def variable(self):
        return self._variable

    @property
    def is_changed(self):
        return self._is_changed or self._subtracted is not None

    @property
    def value(self):
        return self

    @property
    def shape(self):
        return self.tensor.shape

    def assign(self, value):
        self._tensor = tf.cast(value, self.dtype)
        self._is_changed = True
        self._subtracted = None
        return self

    def assign_add(self, value):
        return self.assign(self.tensor + tf.cast(value, self.dtype))

    def assign_sub(self, value):
        value = tf.cast(value, self.dtype)
        is_unread = self._tensor is None and self._subtracted is None
        if is_unread and self._read is None:
            self._subtracted = value
            return self
        return self.assign(self.tensor - value)

    def write_back(self):
        if self._subtracted is not None:
            self._variable.value.scatter_sub(
                tf.IndexedSlices(self._subtracted, self._rows)
            )
        elif self._is_changed:
            self._variable.value.scatter_update(
                tf.IndexedSlices(self._tensor, self._rows)
            )

    def __tf_tensor__(self, dtype=None, name=None):
        return tf.convert_to_tensor(self.tensor, dtype=dtype, name=name)


def _forward(name):
    def operator(self, *args):
        args = [a.tensor if isinstance(a, RowStandIn) else a for a in args]
        args = [
            tf.convert_to_tensor(a) if keras_variables.is_variable(a) else a
            for a in args
        ]
        return getattr(self.tensor, name)(*args)

    return operator


for _name in _OPERATORS:
    setattr(RowStandIn, f"__{_name}__", _forward(f"__{_name}__"))


def apply(step, rule, updates):
    """Applies a rule to variables, or to rows that stand in for them.

    Args:
        step: the `Step`.
        rule: its rule, or a copy that accumulates no gradients.
        updates: list of `Update`.
    """
    kept = KeptUpdates(updates, step.kept)
    copy, stand_ins = stand_in_for(rule, kept.row_updates)
    keras_optimizers.take_aggregated_gradients(
        copy,
        lambda grads: step.clipping.clip(rule, grads, updates),
        step.strategy,
    )
    values = [u.values for u in updates]
    variables = [stand_ins.get(id(u.variable), u.variable) for u in updates]
    notes = journal.current()
    with tf.name_scope("update"), notes.measured(UPDATE, values):
        with patches.roots_stay_roots():
            copy.apply(values, variables)
        with kept.storing():
            for stand_in in copy.__dict__[_STAND_INS]:
                stand_in.write_back()


class KeptUpdates:
    """The updates of rows in one step, of which some are kept.

    Args:
        updates: list of `Update`. Those with `tf.IndexedSlices`, which have
            no row twice, update these rows of their variable.
        kept_of: function of such a variable: its `KeptRows`, or None.

    Attributes:
        row_updates: the same as `stand_in_for` takes them.
    """

    def __init__(self, updates, kept_of):
        self._rows = {}
        self.row_updates = []
        for update in updates:
            if not isinstance(update.gradient, tf.IndexedSlices):
                continue
            variable, of_variable = update.variable, update.gradient.indices
            kept, read = kept_of(variable), None
            if kept is not None:
                self._rows.setdefault(kept, []).append((variable, of_variable))
                read = functools.partial(
                    _row_of, kept.read(variable, of_variable)
                )
            self.row_updates.append((variable, of_variable, read))
        self._numbers = {kept: kept.next_step() for kept in self._rows}

    @contextlib.contextmanager
    def storing(self):
        """While entered, the updated rows are stored."""
        try:
            for kept in self._rows:
                kept.is_writing = True
            yield
            for kept, rows in self._rows.items():
                kept.advance(self._numbers[kept], rows)
        finally:
            for kept in self._rows:
                kept.is_writing = False


def _row_of(tensors, variable):
    return tensors[id(variable.value)]


def stand_in_for(optimizer, row_updates):
    """A copy of an optimizer in which rows stand in for variables.

    Hyperparameters, iterations and the learning rate are shared with the
    optimizer; so are the slots of all other variables.

    Args:
        optimizer: a built Keras optimizer.
        row_updates: list of `(variable, rows, read)`, the variables of the
            optimizer of which only `rows` (int tensor, no row twice) take
            part. `read` is a function that gives these rows of the variable,
            or of one of its slots; None: they are gathered.

    Returns:
        `(copy, stand_ins)`: the optimizer to apply, and a dict from the `id`
        of each variable to its `RowStandIn`, for `apply`. None of them has
        written its rows yet.
    """
    copy = object.__new__(type(optimizer))
    # Not `copy.copy`: Keras's own reduce would go through serialization.
    copy.__dict__.update(optimizer.__dict__)
    made = []
    in_place_of = {}
    indices = {}
    variables = list(keras_optimizers.built_variables(optimizer))
    for variable, rows, read in row_updates:
        stand_in = RowStandIn(variable, rows, read, variable.constraint)
        in_place_of[id(variable)] = stand_in
        index = keras_optimizers.variable_index(optimizer, variable)
        indices[index] = rows, read
        variables[index] = stand_in
        made.append(stand_in)
    keras_optimizers.set_built_variables(copy, variables)
    for name, slots in _slot_containers(optimizer) if indices else ():
        replaced = _plain(slots)
        for index, (rows, read) in indices.items():
            slot = _slot(slots, index)
            if slot is not None:
                replaced[index] = RowStandIn(slot, rows, read)
                made.append(replaced[index])
        copy.__dict__[name] = replaced
    copy.__dict__[_STAND_INS] = made
    return copy, in_place_of


def slots_of(optimizer, variables):
    """The slots of some variables: one list for each kind of slot.

    Args:
        optimizer: a built Keras optimizer.
        variables: variables that it was built with.

    Returns:
        Dictionary from the kind (the name of the optimizer's attribute) to a
        list as long as `variables`.
    """
    indices = [keras_optimizers.variable_index(optimizer, v) for v in variables]
    found = {}
    for kind, slots in _slot_containers(optimizer):
        of_variables = [_slot(slots, index) for index in indices]
        if all(slot is not None for slot in of_variables):
            found[kind] = of_variables
    return found


def replace_variables(optimizer, replaced):
    """Replaces some variables of a built optimizer.

    All else stays: attributes that a user has set, the learning rate, the
    number of steps, and the order of the slots.

    Args:
        optimizer: a built Keras optimizer.
        replaced: list of `(old, new, slots)`: lists of variables that it was
            built with and of new ones, and the slots of the latter, as
            `slots_of` returns them.
    """
    old_variables = list(keras_optimizers.built_variables(optimizer))
    in_place_of = {}
    not_decayed = []
    # By index: optimizers find a variable by its value, which may be new.
    slot_of = {
        kind: {id(v): _slot(slots, i) for i, v in enumerate(old_variables)}
        for kind, slots in _slot_containers(optimizer)
    }
    excluded = keras_optimizers.excluded_from_weight_decay(optimizer)
    excluded = {id(old_variables[index]) for index in excluded}
    for old, new, slots in replaced:
        if id(old[0]) in excluded:
            not_decayed += new
        in_place_of.update(_in_place_of(old, new))
        for kind, of_kind in slots.items():
            old_slots = [slot_of[kind].pop(id(v)) for v in old]
            in_place_of.update(_in_place_of(old_slots, of_kind))
            slot_of[kind].update(zip(map(id, new), of_kind, strict=True))
    variables = _replaced(old_variables, in_place_of)
    attributes = {}
    for kind, slots in _slot_containers(optimizer):
        in_order = [slot_of[kind].get(id(v)) for v in variables]
        if not isinstance(slots, list):
            in_order = {
                index: slot
                for index, slot in enumerate(in_order)
                if slot is not None
            }
        attributes[kind] = in_order
    keras_optimizers.rebuild_optimizer(
        optimizer,
        variables,
        _replaced(keras_optimizers.own_variables(optimizer), in_place_of),
        attributes,
    )
    keras_optimizers.exclude_from_weight_decay(optimizer, not_decayed)


def _in_place_of(old, new):
    """Puts all new variables in the place of the first old one."""
    return {id(o): list(new) if o is old[0] else [] for o in old}


def _replaced(variables, in_place_of):
    return [v for old in variables for v in in_place_of.get(id(old), [old])]


def _slot_containers(optimizer):
    """Attributes that hold one slot for each variable: `(name, slots)`.

    Keras's optimizers keep a list, or a dictionary by index, for each kind of
    slot, in the order of the variables that they were built with.
    """
    count = len(keras_optimizers.built_variables(optimizer))
    for name, value in optimizer.__dict__.items():
        if name in ("_trainable_variables", "_variables"):
            continue
        if isinstance(value, list) and len(value) == count:
            elements = list(value)
        elif isinstance(value, dict) and value:
            elements = list(value.values())
        else:
            continue
        if any(keras_variables.is_variable(e) for e in elements) and all(
            e is None or keras_variables.is_variable(e) for e in elements
        ):
            yield name, value


def _slot(slots, index):
    return slots[index] if isinstance(slots, list) else slots.get(index)


def _plain(slots):
    """A plain list or dict: Keras's tracked ones refuse foreign objects."""
    return list(slots) if isinstance(slots, list) else dict(slots.items())


def changed(copy):
    """List of `(variable, rows)` of all changed rows, which are not written."""
    return [
        (stand_in.variable, stand_in.tensor)
        for stand_in in copy.__dict__[_STAND_INS]
        if stand_in.is_changed
    ]
