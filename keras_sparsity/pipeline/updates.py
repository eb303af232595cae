"""Updates of a stage's weights: of an `Embedding`, of the touched rows."""

from keras_sparsity._tf import keras_models
from keras_sparsity.collectives import startup
from keras_sparsity.exchange.options import Options
from keras_sparsity.layers import ordinary
from keras_sparsity.optimizer import HybridOptimizer
from keras_sparsity.placement import choice
from keras_sparsity.sparsity import touches
from keras_sparsity.update import lookups, rules


class Updates:
    """Applies a rank's optimizer to the weights of its stage.

    The rows of an `Embedding` that was made inside of `strategy.scope()` are
    updated as those of a table in one process: its gradients are those of all
    of the stage's ranks already.

    Args:
        model: a compiled model.
        part: the rank's `Part`.
        strategy: the `StagedStrategy`.

    Attributes:
        by_rows: list of the variables of which a step reads and updates the
            rows that it looks up.
    """

    def __init__(self, model, part, strategy):
        self._optimizer = model.optimizer
        self._variables = part.model.trainable_variables
        self._of_rows, self.by_rows = None, []
        own = {id(variable) for variable in self._variables}
        embeddings = [
            layer
            for layer in keras_models.all_layers(model)
            if id(ordinary.weight_of(layer)) in own
        ]
        lookups.mark(embeddings, strategy.peers.size)
        if self._optimizer is None:
            return
        is_new = not self._optimizer.built
        self._optimizer.build(self._variables)
        looked_up = [v for v in self._variables if lookups.owner_of(v)]
        if looked_up:
            self._of_rows = HybridOptimizer(self._optimizer)
            # On this process alone, and updated under the strategy.
            self._alone = choice.Placements(
                "hybrid", startup.single_process(), Options(), strategy
            )
            with choice.entering(self._alone):
                self._of_rows.build(self._variables, is_new)
            self.by_rows = [v for v in looked_up if self._reads_rows_of(v)]
            for variable in self.by_rows:
                variable.value.is_looked_up = True

    def _reads_rows_of(self, variable):
        return (
            self._of_rows.updates_rows_of(variable)
            and rules.may_keep_rows(variable)
            # It would read all of them.
            and variable.regularizer is None
        )

    def apply(self, gradients):
        """Updates the variables with gradients in their order.

        Args:
            gradients: list, as `merged` returns it.
        """
        if not self._variables:
            return
        if self._of_rows is None:
            self._optimizer.apply(gradients, self._variables)
            return
        with choice.entering(self._alone), touches.left_out():
            self._of_rows.apply(gradients, self._variables)

    def release(self):
        """Leaves the rows, up to date, to another optimizer."""
        if self._of_rows is not None:
            self._of_rows.release_rows()
