"""Updates of a stage's weights: of a table, of the touched rows."""

from keras_sparsity._tf import keras_models, keras_optimizers
from keras_sparsity.layers import ordinary
from keras_sparsity.optimizer import HybridOptimizer
from keras_sparsity.pipeline.tables import Placements, is_spread
from keras_sparsity.placement import choice
from keras_sparsity.sparsity import touches
from keras_sparsity.training.binding import raise_of_compiled_outside
from keras_sparsity.update import lookups, optimizer_arguments, rules


class Updates:
    """Applies a rank's optimizer to the weights of its stage.

    The rows of an `Embedding` that was made inside of `strategy.scope()` are
    updated as those of a table in one process: its gradients are those of all
    of the stage's ranks already. Of a spread table a rank updates its own.

    Args:
        before: the `Updates` of an earlier `compile`, or None.

    Attributes:
        trained: list of the stage's variables that are trained, from `compile`
            on: gradients, slots and copies stand in their order.
        all_built, own_built: lists of the trained variables of the model and
            of the stage when the optimizer was built; fewer may be trained
            since.
        predictor: `Predictor` of the optimizer, once a schedule has made it;
            averages of weights' changes outlive a `compile` as slots do.
        by_rows: list of the variables, on this rank alone, of which a step
            reads and updates the rows that it looks up.
    """

    def __init__(self, model, part, strategy, before=None):
        self._optimizer = model.optimizer
        self._all_trained = list(model.trainable_variables)
        of_model = {id(variable) for variable in self._all_trained}
        # The model's own `trainable` counts, too, which its parts do not know.
        self.trained = [v for v in part.model.variables if id(v) in of_model]
        self.all_built = list(self._all_trained)
        self.own_built = list(self.trained)
        self._of_rows = self.predictor = None
        own = {id(variable) for variable in self.trained}
        embeddings = [
            layer
            for layer in keras_models.all_layers(model)
            if id(ordinary.weight_of(layer)) in own
        ]
        lookups.mark(embeddings, strategy.peers.size)
        self._placements = Placements(strategy)
        if before is not None and before.is_of(self._optimizer):
            self.all_built = before.all_built
            self.own_built = before.own_built
            self.predictor = before.predictor
        if before is not None and before._optimizer is self._optimizer:
            self._of_rows = before._of_rows
        elif before is not None:
            before._release()
        if self._optimizer is not None and self._of_rows is None:
            self._build()
        self.by_rows = list(filter(self._reads_rows_of, self.trained))
        for variable in self.by_rows:
            variable.value.is_looked_up = True

    def _build(self):
        optimizer, variables = self._optimizer, self.own_built
        rule = optimizer_arguments.rule_of(optimizer)
        # A new loss scaling may be around a rule that has trained.
        is_new = not rule.built
        if not optimizer.built and not any(map(is_spread, variables)):
            optimizer.build(variables)
        if any(
            map(lookups.owner_of, variables)
        ) and optimizer_arguments.is_rule(optimizer):
            self._of_rows = HybridOptimizer(optimizer)
            with choice.entering(self._placements):
                self._of_rows.build(variables, is_new)
        # Keras builds that of a loaded model again; a LossScaleOptimizer would
        # make more variables.
        object.__setattr__(optimizer, "build", lambda variables: None)

        def finalize(variables):
            del variables  # Keras gives it those of all stages.
            type(rule).finalize_variable_values(
                rule, keras_optimizers.built_variables(rule)
            )

        object.__setattr__(optimizer, "finalize_variable_values", finalize)

    def is_of(self, optimizer):
        """Whether they are applied by this optimizer, but for loss scaling."""
        rule_of = optimizer_arguments.rule_of
        return rule_of(optimizer) is rule_of(self._optimizer)

    def check_is_of(self, model):
        """Raises ValueError if a model was compiled outside of the scope."""
        if model.optimizer is not self._optimizer:
            raise_of_compiled_outside(model)

    def check_trains(self, model):
        """Raises ValueError if `trainable` has changed since `compile`."""
        before, now = (
            {id(v): v.path for v in variables}
            for variables in (self._all_trained, model.trainable_variables)
        )
        if before.keys() == now.keys():
            return
        frozen, added = (
            [path for key, path in some.items() if key not in others]
            for some, others in ((before, now), (now, before))
        )
        raise ValueError(
            "`compile` decides which weights each stage trains, and layers' "
            "`trainable` has changed since. Received: newly frozen weights "
            f"{frozen}, newly trained weights {added}; expected: `trainable` "
            "as in `compile`. Compile again: `with strategy.scope(): "
            "model.compile(...)`."
        )

    def check_knows(self, variables):
        """Raises ValueError for variables that the optimizer has no slots of.

        Args:
            variables: the model's trained variables, of all stages.
        """
        known = set(map(id, self.all_built))
        unknown = [v.path for v in variables if id(v) not in known]
        if self._optimizer is not None and unknown:
            raise ValueError(
                "An optimizer updates the weights that it was built with, and "
                "some that are trained now were frozen then. Received: the "
                f"optimizer of the earlier `compile`, and {unknown}. Give "
                "`compile` a new one."
            )

    def _reads_rows_of(self, variable):
        return (
            self._of_rows is not None
            and lookups.owner_of(variable) is not None
            and not is_spread(variable)
            and self._of_rows.updates_rows_of(variable)
            and rules.may_keep_rows(variable)
            # It would read all of them.
            and variable.regularizer is None
        )

    @property
    def places(self):
        """How the optimizer's variables are stored, see `update.state`."""
        if self._of_rows is not None:
            return self._of_rows.places()
        return [(None, [variable]) for variable in self._optimizer.variables]

    def apply(self, gradients):
        """Updates the variables with gradients in their order.

        Args:
            gradients: list, as `Together.summed` returns it.
        """
        if self._optimizer is not None:
            # It is built by `compile`, and weights may be set since.
            keras_optimizers.start_from_weights(
                optimizer_arguments.rule_of(self._optimizer)
            )
        is_whole = len(self.trained) == len(self._all_trained)
        has_none = all(gradient is None for gradient in gradients)
        if not self.trained or (has_none and not is_whole):
            if self._optimizer is not None:
                self._count_step()
            return
        if self._of_rows is None:
            self._optimizer.apply(gradients, self.trained)
            return
        with choice.entering(self._placements), touches.left_out():
            self._of_rows.apply(gradients, self.trained)

    def _count_step(self):
        """As one optimizer of all stages does in a step.

        Keras's does nothing without any gradient.

        Raises:
            ValueError: if this stage could not agree with others on a scale.
        """
        rule = optimizer_arguments.rule_of(self._optimizer)
        if self.trained and rule is not self._optimizer:
            raise ValueError(
                "With loss scaling each stage needs gradients, by which all "
                "agree on the scale. Received: a stage whose weights have "
                f"none, as no loss depends on {[v.path for v in self.trained]}"
                ". Cut the model elsewhere (`stages`), freeze these weights, "
                'or use the policy "mixed_bfloat16", which needs no loss '
                "scaling."
            )
        keras_optimizers.update_averages(rule)
        keras_optimizers.advance_without_variables(rule)

    def _release(self):
        """Leaves the rows, up to date, to another optimizer."""
        if self._of_rows is not None:
            self._of_rows.release_rows()
