"""The optimizer: aggregates gradients, then applies a Keras rule."""

import keras
import tensorflow as tf

from keras_sparsity._tf import checks, keras_optimizers, xla
from keras_sparsity._tf.current_variable import keeper_of
from keras_sparsity.placement import choice
from keras_sparsity.tables import control_flow
from keras_sparsity.tables.table_variable import TableVariable, pieces_of
from keras_sparsity.update import keeping, lookups, rules, start, state
from keras_sparsity.update import optimizer_arguments as arguments
from keras_sparsity.update import rows as row_update
from keras_sparsity.update.closed_form import closed_form_of
from keras_sparsity.update.loss_scale import unscaled
from keras_sparsity.update.step import Aggregation, Clipping, Step, merged
from keras_sparsity.update.wrapper import OptimizerWrapper


@keras.saving.register_keras_serializable(package="keras_sparsity")
class HybridOptimizer(OptimizerWrapper):
    """Wraps a Keras optimizer for training over several processes.

    Each variable's placement makes the gradients of all ranks one: dense
    gradients are all-reduced, rows of an ordinary `Embedding` gathered, and
    rows of a sharded table pushed to their owner. The aggregated gradients
    are clipped, as on one process, and the inner optimizer's rule applies
    them: on every rank for dense variables, at the owner for rows.

    `model.compile` wraps its optimizer inside of `strategy.scope()`; a custom
    training loop writes `ks.HybridOptimizer(optimizer)`. The wrapper forwards
    the attributes of the inner optimizer (`learning_rate`, `beta_1`, ...).

    Args:
        inner_optimizer: any Keras optimizer. With sharded tables, one whose
            rule treats each row by itself.
        sparse_updates: `"exact"`: as the stock optimizer on the dense
            gradient, but for rounding. `"lazy"`: touched rows only. Both
            are the same for rules that leave untouched rows alone (SGD,
            Adagrad); with other rules lazy updates train another model:
            untouched rows keep a momentum that stock Keras spends. Both
            update touched rows only. For SGD with momentum, RMSprop,
            Adadelta, Adam, AdamW, Adamax, Nadam, Lion and Ftrl, also with
            `weight_decay` and `use_ema`, owners compute the movement of an
            untouched row and its average when these are read; that takes 4
            bytes a row. An ordinary `Embedding` takes part if it is made,
            and its model compiled, inside of `strategy.scope()`. The guide
            "Exact and lazy updates" lists the cases in which each step
            updates all rows.
        dense_aggregation: `"mean"`: the gradient of the mean loss over the
            global batch. Each rank's loss is weighted by its share of that
            batch, so the ranks' gradients are added. `"sum"`: `size` times
            that gradient: the sum of the gradients of the ranks' own mean
            losses, if all ranks have as many examples.
        sparse_aggregation: the same for sharded tables and for variables
            whose gradient is `tf.IndexedSlices` (an ordinary `Embedding`).
        transform_gradients: `function(gradients, variables) -> gradients`
            that reads or changes the gradients of all ranks. Called once in
            each step: after aggregation and unscaling, before clipping and
            accumulation; not in steps that loss scaling skips. Both lists
            have one entry for each of the model's variables with a gradient:
            a tensor of the variable's shape, or `tf.IndexedSlices` in which
            each row occurs once, by its index in the whole variable. Those of
            a sharded table hold the touched rows that this rank owns, those
            of an ordinary `Embedding` all touched rows; the placement
            `"allreduce"` makes them dense. The function returns gradients of
            the same kinds, shapes, dtypes and rows, and every rank makes the
            same change. AutoGraph does not convert it: write `tf.cond` for a
            condition of a tensor. Not part of the configuration: pass it again
            to a loaded model.
        name: name of the optimizer; by default the class's.
        **kwargs: none; set other options on the inner optimizer.

    Raises:
        ValueError: if an option is unknown, the inner optimizer is wrapped
            already, or it updates variables by an `apply` of its own.

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
        super().__init__(inner_optimizer, name)
        for option, value in options.items():
            setattr(self, option, value)
        self._aggregation = Aggregation([], [])
        # Variables of which `_keep_rows` has told, by `id`.
        self._told = set()
        # Set where a model is compiled.
        self.is_compiled_by_xla = False
        self.delay = None  # a `Delay`
        self._forward_attributes()

    def options(self):
        """The arguments with which to wrap another optimizer like this."""
        names = (*arguments.CHOICES, "transform_gradients")
        return {name: getattr(self, name) for name in names}

    # Building.

    def build(self, var_list, are_zero=False):
        """Builds the inner optimizer, if it is not built, on all pieces.

        Args:
            var_list: list of variables, as in Keras.
            are_zero: whether the slots of a built one are zero.
        """
        checks.boolean("are_zero", are_zero)
        if self.built:
            return
        var_list = arguments.checked_variables(var_list, "var_list")
        is_synchronised = start.synchronise_model(self)
        pieces = []
        for variable in var_list:
            if isinstance(variable, TableVariable) and not (
                variable.table.is_of_stock_layer and variable.table.has_replicas
            ):
                rules.check_applies_by_rows(self._rule)
            pieces.append(pieces_of(variable))
        self._aggregate(var_list, pieces)
        placements = choice.entered()
        # First of all: some rules start their slots from the variables.
        whole = [
            variable
            for variable, of_variable in zip(var_list, pieces, strict=True)
            if of_variable[0] is variable
        ]
        if not is_synchronised:
            start.same_on_all_ranks(placements.communicator, var_list, whole)
        values = self._anew_for(whole, var_list)
        inner = self.inner_optimizer
        strategy = placements.strategy
        for optimizer in (inner, self._rule):
            keras_optimizers.set_optimizer_strategy(optimizer, strategy)
        are_zero |= not inner.built and values is None
        if not inner.built:
            start.build(inner, self._rule, var_list, pieces)
        self._trainable_variables = var_list
        self.built = True
        if values is not None:
            state.assign(self.places(), values)
        self._keep_rows(var_list, are_zero)

    def _anew_for(self, whole, variables):
        """Replaces an inner optimizer that was built for whole tables.

        Returns:
            Its state, to be handed over; None if it stays.
        """
        inner = self.inner_optimizer
        if self._rule.built and not inner.built:
            # A new loss scaling, around a rule that may have trained.
            inner.build(keras_optimizers.built_variables(self._rule))
        if not inner.built or len(whole) == len(variables):
            return None
        # For example by `load_model`.
        values = [keras.ops.convert_to_numpy(v) for v in inner.variables]
        self._wrap(keras_optimizers.unbuilt(inner))
        return values

    def _keep_rows(self, variables, are_zero=False):
        """Has rows of tables kept, where all would be updated else."""
        if self.is_compiled_by_xla:
            return
        for variable in filter(rules.may_keep_rows, variables):
            if self.updates_rows_of(variable):
                continue
            slots = self.slots_of(variable)
            if self.sparse_updates == "exact":
                pieces = self._aggregation.pieces_of(variable)
                owner = lookups.owner_of(variable)
                why_not = keeping.keep(
                    self._rule, pieces, slots, owner, are_zero
                )
            else:
                why_not = rules.why_not_lazy(variable, self._rule)
            if why_not and id(variable) not in self._told:
                self._told.add(id(variable))
                keeping.tell_of_whole_updates(variable, len(slots), why_not)

    def release_rows(self):
        """Leaves the rows of tables, up to date, to another optimizer."""
        variables = [variable for variable, _ in self._aggregation.places]
        for keeper in set(lookups.keepers_of(variables)):
            if keeper.rule is self._rule:
                keeper.release()

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
                the pieces to be updated in its place now, and their slots,
                as `slots_of` gives them.
        """
        pieces_of = {id(v): pieces for v, pieces in self._aggregation.places}
        moved = [move for move in moved if id(move[0]) in pieces_of]
        if self.delay is not None:
            self.delay = self.delay.emptied()
        replaced = [(pieces_of[id(v)], new, slots) for v, new, slots in moved]
        row_update.replace_variables(self._rule, replaced)
        inner = self.inner_optimizer
        if inner is not self._rule and keras_optimizers.built_variables(inner):
            row_update.replace_variables(
                inner, [(old, new, {}) for old, new, _ in replaced]
            )
        pieces_of.update((id(v), list(new)) for v, new, _ in moved)
        variables = [v for v, _ in self._aggregation.places]
        self._aggregate(variables, [pieces_of[id(v)] for v in variables])
        self._keep_rows([v for v, _, _ in moved])

    def _aggregate(self, variables, pieces):
        self._aggregation = Aggregation(
            variables, pieces, self.dense_aggregation, self.sparse_aggregation
        )

    # One step.

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads, trainable_variables=None):
        """Aggregates the gradients of all ranks and updates each variable.

        Args:
            grads: list of this rank's gradients: tensors, `tf.IndexedSlices`
                or None. Their sum over ranks is applied, see
                `dense_aggregation`.
            trainable_variables: list of variables, as in Keras.
        """
        if trainable_variables is None:
            trainable_variables = self._trainable_variables
        variables = arguments.checked_variables(
            trainable_variables, "trainable_variables"
        )
        grads = arguments.checked_gradients(grads, variables)
        if not grads:
            return
        placements = choice.entered()
        arguments.check_strategy(placements, self.delay is not None)
        if not self.built:
            self.build(variables)
        for variable in variables:
            arguments.check_known(
                variable, self._aggregation.pieces_of(variable)
            )
        control_flow.check_no_update(variables)
        grads, variables = keras_optimizers.without_missing_gradients(
            self, grads, variables
        )
        with xla.not_compiled():  # each dense variable's update is again
            self._apply(grads, variables, placements)

    def _apply(self, grads, variables, placements):
        updates = self._aggregation.aggregate(
            grads, variables, placements, self._keeps_rows
        )
        if self._inner is self._rule:
            updates = unscaled(self._rule, updates)
        if self.transform_gradients is None:
            updates = self._aggregation.by_piece(updates, self.updates_rows_of)
        else:  # which is to see each variable as one
            updates = merged(updates)
        if self.delay is None:
            self._apply_aggregated(updates, placements)
        else:
            self.delay.step(
                updates, lambda due: self._apply_aggregated(due, placements)
            )

    def apply_next(self):
        """Applies the oldest gradients that a `Delay` has kept."""
        placements = choice.entered()
        self.delay.apply_next(
            lambda due: self._apply_aggregated(due, placements)
        )

    def _apply_aggregated(self, updates, placements):
        communicator = placements.communicator
        Step(
            self._inner,
            self._rule,
            self._aggregation,
            Clipping(communicator, self._aggregation.spread),
            placements.strategy,
            self.transform_gradients,
            self.updates_rows_of,
            self._kept,
        ).apply(updates)

    def _keeps_rows(self, variable):
        """Whether only the touched rows of a variable may change."""
        if self.sparse_updates == "lazy":
            return self.updates_rows_of(variable)
        return self._kept(variable) is not None

    def updates_rows_of(self, variable):
        """Whether only the touched rows of a variable are updated."""
        return self._kept(variable) is not None or rules.updates_rows_of(
            variable, self._rule, self.sparse_updates
        )

    def may_keep_rows_of(self, variable):
        """Whether a table's rows need not all be updated in each step."""
        return (
            self.sparse_updates == "exact"
            and rules.may_keep_rows(variable)
            and closed_form_of(self._rule, variable) is not None
        )

    def _kept(self, variable):
        """The `KeptRows` of a variable by the rule as it is now, or None."""
        if self.sparse_updates != "exact":
            return None
        keeper = keeper_of(variable.value)
        if keeper is None or keeper.rule is not self._rule:
            return None
        form = closed_form_of(self._rule, variable)
        return keeper if keeper.form == form else None

    # As an optimizer among Keras's own.

    def places(self):
        """How each variable of a stock optimizer's state is stored here.

        Returns:
            List of `(table, pieces)`, in the order in which the stock
            optimizer has them; `table` is None for the others.
        """
        return state.places(
            self._rule, self.inner_optimizer, self._aggregation.places
        )

    def state(self):
        """The arrays of a stock optimizer's state, of whole tables."""
        return state.read(self.places())

    def get_config(self):
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(
                self.inner_optimizer
            ),
            **{option: getattr(self, option) for option in arguments.CHOICES},
        }
