"""A Keras optimizer around another: aggregates, then updates by its rule."""

import math

import keras
import tensorflow as tf

from keras_sparsity import (
    agreement,
    checks,
    collectives,
    compat,
    row_update,
)
from keras_sparsity import optimizer_arguments as arguments
from keras_sparsity.aggregation import Aggregation, Update, each_row_once
from keras_sparsity.collectives import journal
from keras_sparsity.tables import control_flow
from keras_sparsity.tables.row_wise import acts_on_rows
from keras_sparsity.tables.sharded_table import under_strategy
from keras_sparsity.tables.table_variable import TableVariable, pieces_of

# In one process, finding the rows that occur twice costs more than updating all
# of a table of so many elements: a step of a small model on 1,000 x 16 takes
# 0.68 ms in place of 0.98, on 1,000 x 64 the same (the model and batch of
# benchmarks/single_process.py; stock Keras 0.67 and 1.33).
_SMALL_ELEMENTS = 1 << 15
# Set on the wrapper itself after construction; all else is the inner's.
_OWN = ("built", "name", "_trainable_variables", "_aggregation")
# Not to be found by Keras's saving, which walks `dir()`.
_HIDDEN = ("inner_optimizer", "_rule")
# Of the base class's attributes, those that the wrapper needs for itself.
_KEPT = (
    "name",
    "built",
    "_lock",
    "_tracker",
    "_variables",
    "_trainable_variables",
    "_trainable_variables_indices",
)


@keras.saving.register_keras_serializable(package="keras_sparsity")
class HybridOptimizer(keras.optimizers.Optimizer):
    """Wraps a Keras optimizer for training over several processes.

    Dense gradients are all-reduced, the rows of an ordinary `Embedding` are
    gathered from all ranks, and the rows of a sharded table stay with their
    owner, where they arrived already. Clipping comes after that, as on one
    process, and then the inner optimizer's own rule: on every replica for
    dense variables, at the owner for rows.

    `strategy.scope()` wraps the optimizer given to `model.compile` by itself;
    a custom training loop writes `ks.HybridOptimizer(optimizer)`. Attributes
    of the inner optimizer (`learning_rate`, `beta_1`, ...) are read and set
    through the wrapper.

    Args:
        inner_optimizer: any Keras optimizer. With sharded tables, one whose
            rule treats each row by itself.
        sparse_updates: `"exact"`, what the stock optimizer computes on the
            dense gradient. Where rows that were not touched change too
            (momentum, decay of slots or weights), the owner updates its whole
            part. `"lazy"`: only touched rows, at a cost in proportion to
            them. For rules that leave untouched rows alone (SGD, Adagrad) the
            two are the same, and always cheap. Moving averages (`use_ema`)
            and `gradient_accumulation_steps` update the whole part.
        dense_aggregation: `"mean"`: the inner optimizer gets the gradient of
            the mean loss over the global batch. Each rank's loss is weighted
            by its share of that batch, so the ranks' gradients are added.
            `"sum"`: `size` times that gradient. Where the ranks' parts of the
            batch count the same, it is the sum over ranks of the gradient of
            each rank's own mean loss.
        sparse_aggregation: the same for sharded tables and for variables
            whose gradient is `tf.IndexedSlices` (an ordinary `Embedding`).
        transform_gradients: `function(gradients, variables) -> gradients`, to
            read or to change the gradients of all ranks. It is called once in
            each step, after aggregation (and after loss scaling has divided,
            if the step is not skipped), before clipping and accumulation. Its
            lists have one entry for each of the model's variables that has a
            gradient: a tensor, or for rows a `tf.IndexedSlices` in which each
            row occurs once, by its index in the whole variable. Of a sharded
            table these are the touched rows that this rank owns, of an
            ordinary `Embedding` all touched rows; under the architecture
            "allreduce" they are dense. It returns gradients of the same
            kinds, shapes, dtypes and rows. Every rank must make the same
            change to what all of them have. Not part of the configuration:
            give it anew to a model that is loaded.

    Example:

    >>> import keras
    >>> optimizer = HybridOptimizer(keras.optimizers.Adagrad(0.1))
    >>> round(float(optimizer.learning_rate), 3)
    0.1

    References:
        EuroSys 4.3 (post-aggregation operations); arXiv 3.1 (correctness;
        reading aggregated gradients).
    """

    def __init__(
        self,
        inner_optimizer,
        sparse_updates="exact",
        dense_aggregation="mean",
        sparse_aggregation="mean",
        transform_gradients=None,
        name=None,
        **kwargs,
    ):
        if name is not None:
            checks.string("name", name)
        inner_optimizer = arguments.get(inner_optimizer, "inner_optimizer")
        if isinstance(inner_optimizer, HybridOptimizer):
            raise ValueError(
                "`inner_optimizer` is a HybridOptimizer already. Pass the "
                f"optimizer inside it. Received: {inner_optimizer}."
            )
        options = arguments.checked_options(
            sparse_updates=sparse_updates,
            dense_aggregation=dense_aggregation,
            sparse_aggregation=sparse_aggregation,
            transform_gradients=transform_gradients,
        )
        if kwargs:
            raise ValueError(
                f"HybridOptimizer takes no arguments {sorted(kwargs)}; set "
                "them on the inner optimizer."
            )
        arguments.check_is_rule(inner_optimizer)
        self.__dict__["_inner"] = _Holder(inner_optimizer)
        super().__init__(learning_rate=0.0, name=name)
        for option, value in options.items():
            setattr(self, option, value)
        self._aggregation = Aggregation([], [])
        # What the base class made for itself is the inner optimizer's.
        for attribute in set(self.__dict__) & set(self._rule.__dict__):
            if attribute not in _KEPT:
                del self.__dict__[attribute]
        self.__dict__["_is_wrapping"] = True

    @property
    def inner_optimizer(self):
        return self.__dict__["_inner"].optimizer

    @property
    def _rule(self):
        """The optimizer whose rule updates variables."""
        inner = self.inner_optimizer
        if isinstance(inner, keras.optimizers.LossScaleOptimizer):
            return inner.inner_optimizer
        return inner

    def options(self):
        """The arguments with which to wrap another optimizer like this."""
        names = (*arguments.CHOICES, "transform_gradients")
        return {name: getattr(self, name) for name in names}

    def __dir__(self):
        return [name for name in super().__dir__() if name not in _HIDDEN]

    def __getattr__(self, name):
        # Only called for what the wrapper does not have.
        if name.startswith("__") or "_is_wrapping" not in self.__dict__:
            raise AttributeError(
                f"'{type(self).__name__}' object has no attribute '{name}'"
            )
        return getattr(self._rule, name)

    def __setattr__(self, name, value):
        forwards = (
            "_is_wrapping" in self.__dict__
            and name not in self.__dict__
            and name not in _OWN
            and not hasattr(type(self), name)
        )
        if forwards and hasattr(self._rule, name):
            setattr(self._rule, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def learning_rate(self):
        return self._rule.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate):
        self._rule.learning_rate = learning_rate

    @property
    def iterations(self):
        return self._rule.iterations

    @property
    def variables(self):
        return self.inner_optimizer.variables

    def scale_loss(self, loss):
        return self.inner_optimizer.scale_loss(loss)

    # Building.

    def build(self, var_list):
        if self.built:
            return
        var_list = arguments.checked_variables(var_list, "var_list")
        pieces = []
        for variable in var_list:
            if isinstance(variable, TableVariable):
                row_update.check_applies_by_rows(self._rule)
            pieces.append(pieces_of(variable))
        self._aggregate(var_list, pieces)
        # First of all: some rules start their slots from the variables.
        whole = [v for v in var_list if not self._aggregation.is_spread(v)]
        _same_on_all_ranks(var_list, whole)
        inner = self.inner_optimizer
        state = None
        if inner.built and len(whole) < len(var_list):
            # Built for whole tables, for example by `load_model`: start anew
            # on the partitions and hand the state over.
            state = [keras.ops.convert_to_numpy(v) for v in inner.variables]
            inner = type(inner).from_config(inner.get_config())
            self.__dict__["_inner"] = _Holder(inner)
        for optimizer in (inner, self._rule):
            compat.set_optimizer_strategy(
                optimizer, tf.distribute.get_strategy()
            )
        if not inner.built:
            for variable, of_variable in zip(var_list, pieces, strict=True):
                compat.exclude_from_weight_decay_too(
                    self._rule, variable, of_variable
                )
            with keras.name_scope(inner.name):
                inner.build([v for several in pieces for v in several])
        self._trainable_variables = var_list
        self.built = True
        if state is not None:
            self._assign_state(state)

    # Tables that are moved.

    def slots_of(self, variable):
        """The slots of one of the model's variables, by their kind.

        Returns:
            Dictionary of lists of variables, one for each of its pieces;
            empty if the variable is not trained.
        """
        pieces = self._aggregation.pieces_of(variable)
        return row_update.slots_of(self._rule, pieces) if pieces else {}

    def follow(self, moved):
        """Goes on with tables that were moved, and with their slots.

        Args:
            moved: list of `(variable, pieces, slots)`: the model's variable,
                what is to be updated in its place now, and the slots of that,
                as `slots_of` gives them.
        """
        pieces_of = {id(v): pieces for v, pieces in self._aggregation.places}
        moved = [move for move in moved if id(move[0]) in pieces_of]
        replaced = [(pieces_of[id(v)], new, slots) for v, new, slots in moved]
        row_update.replace_variables(self._rule, replaced)
        inner = self.inner_optimizer
        if inner is not self._rule and compat.built_variables(inner):
            row_update.replace_variables(
                inner, [(old, new, {}) for old, new, _ in replaced]
            )
        pieces_of.update((id(v), list(new)) for v, new, _ in moved)
        variables = [v for v, _ in self._aggregation.places]
        self._aggregate(variables, [pieces_of[id(v)] for v in variables])

    def _aggregate(self, variables, pieces):
        self._aggregation = Aggregation(
            variables, pieces, self.dense_aggregation, self.sparse_aggregation
        )

    # One step.

    def apply(self, grads, trainable_variables=None):
        """Aggregates the gradients of all ranks and updates each variable.

        Args:
            grads: list of this rank's gradients: tensors, `tf.IndexedSlices`
                or None. Their sum over ranks is applied, see
                `dense_aggregation`.
            trainable_variables: list of variables, as in Keras.
        """
        grads = arguments.checked_list(grads)
        if not grads:
            return
        _check_under_strategy()
        if trainable_variables is None:
            trainable_variables = self._trainable_variables
        trainable_variables = arguments.checked_variables(
            trainable_variables, "trainable_variables"
        )
        arguments.check_gradients(grads, trainable_variables)
        if not self.built:
            self.build(trainable_variables)
        for variable in trainable_variables:
            self._check_known(variable)
        control_flow.check_no_update(trainable_variables)
        grads, variables = compat.without_missing_gradients(
            self, grads, trainable_variables
        )
        updates = self._aggregation.aggregate(
            grads, variables, self._updates_touched_rows_of
        )
        if self.transform_gradients is None:
            updates = self._by_piece(updates)
        else:  # which is to see each variable as one
            updates = each_row_once(updates)
        inner = self.inner_optimizer
        if inner is self._rule:
            self._update(updates)
        else:
            self._update_if_finite(inner, updates)

    def _check_known(self, variable):
        pieces = self._aggregation.pieces_of(variable)
        if pieces is None:
            raise ValueError(
                f"Unknown variable: {variable}. This optimizer was built with "
                "other variables; make a new one for this model."
            )
        is_table = isinstance(variable, TableVariable)
        if is_table and pieces[0] is not variable.table.pieces[0]:
            raise ValueError(
                f"The table of {variable} was spread or moved after the "
                "optimizer was built. Compile the model again, with a new "
                "optimizer, or assign it to `model.optimizer` before "
                "`ks.moves` moves the model's tables, so that it follows them."
            )

    def _by_piece(self, updates):
        return self._aggregation.by_piece(updates, self.updates_rows_of)

    def _updates_touched_rows_of(self, variable):
        """Whether of a variable no other rows may change."""
        return self.sparse_updates == "lazy" and self.updates_rows_of(variable)

    def updates_rows_of(self, variable):
        """Whether only the touched rows of a variable are updated."""
        rule = self._rule
        if self.sparse_updates == "exact":
            # A constraint may change rows that were not touched.
            return (
                variable.constraint is None
                and row_update.leaves_untouched_rows(rule)
                and not _is_small_table(variable)
            )
        return (
            acts_on_rows(variable.constraint)
            and row_update.is_by_rows(rule)
            and not row_update.needs_whole_part(rule)
        )

    def _update_if_finite(self, loss_scale_optimizer, updates):
        """Loss scaling: all ranks update, or all skip."""
        finite = self._aggregation.is_finite(updates)
        step = object.__new__(type(loss_scale_optimizer))
        step.__dict__.update(loss_scale_optimizer.__dict__)
        step.__dict__["check_finite"] = lambda grads: finite
        step.__dict__["inner_optimizer"] = _Unscaled(self, updates)
        step.apply([u.gradient for u in updates], [u.variable for u in updates])

    def _update(self, updates):
        """The inner optimizer's step, rows standing in for variables."""
        if self.transform_gradients is not None:
            updates = self._by_piece(
                self._aggregation.transform(self.transform_gradients, updates)
            )
        if not updates:  # a rank that owns no row, of a model of tables only
            self._go_along()
            return
        rows = [
            (u.variable, u.gradient.indices)
            for u in updates
            if isinstance(u.gradient, tf.IndexedSlices)
        ]
        step, stand_ins = row_update.stand_in_for(self._rule, rows)
        compat.set_optimizer_strategy(step, tf.distribute.get_strategy())
        # Aggregated already; clipped over all owners.
        compat.take_aggregated_gradients(
            step,
            lambda grads: self._aggregation.clip(self._rule, grads, updates),
        )
        values = [u.values for u in updates]
        notes = journal.current()
        with (
            tf.name_scope("update"),
            notes.measured("optimizer/update", values),
        ):
            with compat.roots_stay_roots():
                step.apply(
                    values,
                    [
                        stand_ins.get(id(u.variable), u.variable)
                        for u in updates
                    ],
                )
            row_update.write_back(step)

    def _go_along(self):
        """Takes part in the other ranks' step, without a row to update."""
        rule = self._rule
        iterations = compat.iterations(rule)
        if rule.clipnorm or rule.global_clipnorm:
            steps = rule.gradient_accumulation_steps or 1
            tf.cond(
                (iterations.value + 1) % steps == 0,
                lambda: tf.add_n(
                    list(self._aggregation.squared_norms([], []).values())
                ),
                lambda: tf.zeros([]),
            )
        iterations.assign_add(1)

    # As an optimizer among Keras's own.

    def finalize_variable_values(self, var_list):
        del var_list  # the inner optimizer has partitions in its place
        if self.built:
            self._rule.finalize_variable_values(
                compat.built_variables(self._rule)
            )

    def exclude_from_weight_decay(self, var_list=None, var_names=None):
        self._rule.exclude_from_weight_decay(var_list, var_names)

    def save_own_variables(self, store):
        for i, value in enumerate(self.state()):
            store[str(i)] = value

    def load_own_variables(self, store):
        if not self.built:  # Keras's own warning, of another number
            super().load_own_variables(store)
            return
        values = [store[str(i)] for i in range(len(store.keys()))]
        # None: a loss scaling that Keras put around has loaded all of them.
        if values:
            self._assign_state(values)

    def set_weights(self, weights):
        if not self.built:
            super().set_weights(weights)  # raises
        self._assign_state(weights)

    def places(self):
        """Each variable of a stock optimizer's state: how it is stored here.

        List of `(table, pieces)`, in the order in which the stock optimizer
        has them; `table` is None for what is not spread.
        """
        whole_of = {}
        for variable, pieces in self._aggregation.places:
            if pieces[0] is variable:
                continue
            for slots in row_update.slots_of(self._rule, pieces).values():
                whole_of[id(slots[0])] = (variable.table, slots)
                for slot in slots[1:]:
                    whole_of[id(slot)] = None
        places = [
            whole_of.get(id(v), (None, [v]))
            for v in self.inner_optimizer.variables
        ]
        return [place for place in places if place is not None]

    def state(self):
        """Arrays as a stock optimizer of whole tables has them."""
        return [
            keras.ops.convert_to_numpy(pieces[0])
            if table is None
            else table.read_like(pieces)
            for table, pieces in self.places()
        ]

    def _assign_state(self, values):
        places = self.places()
        if len(values) != len(places):
            raise ValueError(
                "The saved optimizer has another number of variables. "
                f"Received: {len(values)}. Expected: {len(places)}."
            )
        for (table, pieces), value in zip(places, values, strict=True):
            if table is None:
                pieces[0].assign(value[...])
            else:
                table.assign_like(pieces, value[...])

    def get_config(self):
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(
                self.inner_optimizer
            ),
            **{option: getattr(self, option) for option in arguments.CHOICES},
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        config["inner_optimizer"] = keras.saving.deserialize_keras_object(
            config["inner_optimizer"], custom_objects=custom_objects
        )
        return cls(**config)


class _Holder:
    """Keeps the inner optimizer out of Keras's tracking."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


class _Unscaled:
    """What a LossScaleOptimizer applies once it has unscaled gradients."""

    def __init__(self, optimizer, updates):
        self._optimizer = optimizer
        self._updates = updates

    def apply(self, grads, trainable_variables=None):
        del trainable_variables
        updates = [
            Update(u.variable, gradient, u.whole)
            for gradient, u in zip(grads, self._updates, strict=True)
        ]
        self._optimizer._update(updates)


def _check_under_strategy():
    """Raises where each rank would be taken to hold a part, but has all."""
    size = collectives.current().size
    if size > 1 and not under_strategy():
        raise ValueError(
            f"A HybridOptimizer was applied on one of {size} processes outside "
            "of a strategy. Write `with strategy.scope(): model.compile(...)`, "
            "or, in a custom training loop, "
            "`strategy.run(train_step, args=(batch,))`, with a "
            "`ks.HybridStrategy()`."
        )


def _same_on_all_ranks(all_variables, variables):
    """Gives every rank rank 0's values, whatever its own seed was.

    Not those of spread tables, of which no rank has all.
    """
    communicator = collectives.current()
    if communicator.size == 1:
        return
    facts = agreement.of_variables(variables)
    for variable in all_variables:
        if isinstance(variable, TableVariable) and variable.table.given:
            facts[f"values given to {variable.path}"] = variable.table.given
    with tf.init_scope():  # now, not in the step that may be traced
        communicator.check_equal(
            facts,
            "The variables that an optimizer updates",
            "Build the same model on every rank, and set its weights there.",
        )
        if not variables:
            return
        values = communicator.broadcast(
            [tf.convert_to_tensor(v.value) for v in variables],
            name="optimizer/variables",
        )
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def _is_small_table(variable):
    """Whether a variable is a table in one piece that is quickly updated."""
    return (
        isinstance(variable, TableVariable)
        and math.prod(variable.shape) <= _SMALL_ELEMENTS
    )
