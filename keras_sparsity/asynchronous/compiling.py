"""`compile` of a model whose variables are at servers."""

from keras_sparsity._tf import keras_models, keras_optimizers
from keras_sparsity.asynchronous.delayed import check_scales_no_loss
from keras_sparsity.asynchronous.runs import Runs
from keras_sparsity.conversion import saving
from keras_sparsity.layers import SampledSoftmax, ShardedEmbedding
from keras_sparsity.optimizer import HybridOptimizer
from keras_sparsity.training import jit
from keras_sparsity.training.binding import raise_of_another_strategy

# Set on an adopted model; holds its binding.
_ADOPTION = "_keras_sparsity_asynchronous"


def compile_served(stock, model, args, kwargs, strategy):
    """Compiles a model that workers train by pulls and pushes of their own.

    Raises:
        ValueError: if the model is another strategy's, or has layers or an
            optimizer that servers do not support.
    """
    of_model = getattr(model, "distribute_strategy", None)
    if getattr(model, _ADOPTION, None) is None and (
        hasattr(of_model, "collectives") and of_model is not strategy
    ):
        raise_of_another_strategy(model, of_model)
    _check_layers(model)
    keras_models.set_distribute_strategy(model, strategy)
    stock(model, *args, **kwargs)
    jit.refuse(model, "XLA cannot compile pulls and pushes")
    if getattr(model, "optimizer", None) is not None:
        _check_optimizer(model.optimizer)
        # It may have been made outside of the scope.
        keras_optimizers.set_optimizer_strategy(model.optimizer, strategy)
    if model.steps_per_execution != 1:
        raise ValueError(
            "A worker takes one batch at a time. Received: "
            f"steps_per_execution={model.steps_per_execution} under "
            '`delay="bounded"`. Use 1.'
        )
    if getattr(model, _ADOPTION, None) is None:
        object.__setattr__(model, _ADOPTION, Runs(model))
    getattr(model, _ADOPTION).optimizer = model.optimizer


def _check_layers(model):
    for layer in keras_models.all_layers(model):
        if isinstance(layer, (ShardedEmbedding, SampledSoftmax)):
            raise ValueError(
                f"The layer '{layer.name}' exchanges rows in steps of all "
                'ranks together, and with `delay="bounded"` each rank takes '
                f"its own. Received: a {type(layer).__name__}. Use "
                "`keras.layers.Embedding`, whose rows are at servers then, "
                'or `delay="fixed"`.'
            )
    for table in saving.tables_of(model):
        raise ValueError(
            f"The table of '{table.owner_name}' is spread over ranks that "
            'make their steps together, and with `delay="bounded"` each rank '
            "takes its own. Received: a ShardedTable. Use "
            '`keras.layers.Embedding`, or `delay="fixed"`.'
        )


def _check_optimizer(optimizer):
    if isinstance(optimizer, HybridOptimizer):
        raise ValueError(
            "Servers apply the rule of a Keras optimizer. Received: a "
            "HybridOptimizer. Give `compile` the optimizer that it wraps."
        )
    check_scales_no_loss(optimizer)
