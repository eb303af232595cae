"""Adoption: `compile` in a staged strategy's scope cuts a model."""

import keras

from keras_sparsity._tf import (
    contexts,
    keras_models,
    keras_optimizers,
)
from keras_sparsity.board import measured_plan
from keras_sparsity.conversion.saving import tables_of
from keras_sparsity.global_batch.losses import (
    GlobalMean,
    needing_whole_batch,
)
from keras_sparsity.layers import SampledSoftmax, ShardedEmbedding
from keras_sparsity.optimizer import HybridOptimizer
from keras_sparsity.pipeline import (
    cuts,
    dense_inputs,
    tables,
    whole_batches,
)
from keras_sparsity.pipeline.runs import Runs
from keras_sparsity.pipeline.saved_state import SavedState
from keras_sparsity.pipeline.stage import Stage
from keras_sparsity.pipeline.steps import Steps
from keras_sparsity.pipeline.updates import Updates
from keras_sparsity.pipeline.weights import Weights
from keras_sparsity.stages.cutting import Cutter
from keras_sparsity.training import jit
from keras_sparsity.training.binding import raise_of_another_strategy
from keras_sparsity.update import optimizer_arguments

# Set on an adopted model; holds the objects that its methods belong to.
_ADOPTION = "_keras_sparsity_pipeline"
# Set on a weight: its `id`, as a copy has the attribute, too, the ranks that
# have it, and the name of the model that was cut.
_PLACE = "_keras_sparsity_place"


class Adoption:
    """A compiled model whose stages live on the ranks.

    Attributes:
        parts: the `Part`s of all stages.
    """

    def __init__(self, model, strategy):
        _check(model, strategy)
        cutter = Cutter(model)
        _check_outputs(model, cutter)
        self._profile = strategy.profile(cutter, model.optimizer)
        places = cuts.places(cutter, strategy, self._profile)
        self.parts = cutter.parts(places)
        self._pairs = cutter.pairs
        _hold_unused(self.parts, model)
        tables.check_places(self.parts, strategy)
        tables.check(model.optimizer, self.parts, strategy)
        _check_is_unbuilt(model.optimizer, self.parts)
        strategy.check_columns(self.parts, model.optimizer)
        self._updates = None
        _check_scaling(model.optimizer, self.parts)
        strategy.divide_ranks(places, self._profile)
        of_weights = _places(self.parts, strategy)
        _check_shared(model, of_weights)
        self._bind(model, strategy)
        for variable, ranks in of_weights:
            setattr(variable, _PLACE, (id(variable), ranks, model.name))

    def _bind(self, model, strategy):
        number = strategy.stages_of_ranks[strategy.rank]
        tables.spread(model, self.parts[number].model.weights, strategy)
        optimizer = model.optimizer
        # It may have been made outside of the scope.
        inner = getattr(optimizer, "inner_optimizer", None)
        for each in (optimizer, inner):
            if each is not None:
                keras_optimizers.set_optimizer_strategy(each, strategy)
        self._updates = Updates(
            model, self.parts[number], strategy, self._updates
        )
        stage = Stage(
            number,
            self.parts[number],
            *strategy.links,
            self._updates,
            strategy.options,
            strategy.peers.rank,
        )
        strategy.divide_columns(stage, self.parts, self._profile, optimizer)
        why = whole_batches.why_whole(model, self._divided_pairs(strategy))
        passes = strategy.passes(stage, optimizer, is_whole=why is not None)
        num_parts = strategy.num_parts(*passes)
        asked = strategy.asked_micro_batches
        whole_batches.check(model, why, num_parts, asked)
        limit = strategy.limit(model, self.parts, stage, passes)
        head_sums = strategy.head_sums(self.parts)
        steps = Steps(model, stage, *passes, limit, head_sums)
        if num_parts > 1 and not strategy.computes_whole(len(self.parts) - 1):
            _tell_of_losses(model, steps.mixing)
        plan = strategy.plan_function(model, stage, passes, self._profile)
        object.__setattr__(model, measured_plan.OF_STAGES, plan)
        weights = Weights(model, self.parts, steps, self._updates)
        SavedState(model, self.parts, steps, self._updates)
        self._bindings = [
            weights,
            Runs(model, steps, weights, self._updates),
            steps,
        ]

    def _divided_pairs(self, strategy):
        """Names of calls with pairs of examples, in stages that get parts."""
        return [
            name
            for place, part in enumerate(self.parts)
            if not strategy.computes_whole(place)
            for name in part.names
            if name in self._pairs
        ]

    def settle(self):
        """Ends the backward passes of steps so far; on all ranks."""
        *_, steps = self._bindings
        steps.settle()

    def compiled_again(self, model, strategy):
        """Keeps the stages, as the weights of others are gone."""
        _check(model, strategy)
        _check_scaling(model.optimizer, self.parts)
        strategy.check_columns(self.parts, model.optimizer)
        is_new = not self._updates.is_of(model.optimizer)
        tables.check(model.optimizer, self.parts, strategy, is_new)
        if is_new:
            _check_is_unbuilt(model.optimizer, self.parts)
        else:
            self._updates.check_knows(model.trainable_variables)
        for binding in self._bindings:
            binding.unbind()
        self._bind(model, strategy)


def adopt(stock, model, args, kwargs, strategy):
    """Compiles a model by Keras's `stock`, and cuts it.

    Raises:
        ValueError: if the model, its optimizer or `stages` is not one that
            can be trained in stages.
    """
    if strategy.compiling is model:  # the scope is entered twice
        stock(model, *args, **kwargs)
        return
    adoption = getattr(model, _ADOPTION, None)
    other = getattr(model, "distribute_strategy", None)
    if adoption is None or other is not strategy:
        _check_is_free(model, other)
    else:
        adoption.settle()  # by the optimizer and losses of these steps
    keras_models.set_distribute_strategy(model, strategy)
    with contexts.attribute(strategy, "compiling", model):
        stock(model, *args, **kwargs)
    if adoption is not None:
        adoption.compiled_again(model, strategy)
    else:
        adoption = Adoption(model, strategy)
        object.__setattr__(model, _ADOPTION, adoption)


def _hold_unused(parts, model):
    """Gives the first stage the model's variables that no call uses.

    Such as those of a layer of a model within the model whose outputs are not
    used: they have no gradients, and are saved as all others.
    """
    used = {id(v) for part in parts for v in part.model.variables}
    # Keras finds the variables of an attribute, also in a list.
    parts[0].model.unused = [v for v in model.variables if id(v) not in used]


def _places(parts, strategy):
    """Pairs of each weight of a cut model and the ranks that have it."""
    return [
        (variable, strategy.ranks_of(stage))
        for stage, part in enumerate(parts)
        for variable in part.model.weights
    ]


def _check_shared(model, places):
    """Raises ValueError, on all ranks, if another model has weights elsewhere.

    On the ranks where this one would have them, their values are gone.
    """
    for variable, ranks in places:
        key, known, name = getattr(variable, _PLACE, (None, None, None))
        if key == id(variable) and known != ranks:
            raise ValueError(
                f"The model '{model.name}' shares weights with the model "
                f"'{name}', which has them on other processes, and a weight is "
                f"on those of one stage alone. Received: '{variable.path}' on "
                f"ranks {list(known)}, and by the cuts of '{model.name}' on "
                f"{list(ranks)}. Compile one of the two alone, and make the "
                "other one of the layers of `ks.export(model)`, a whole copy; "
                "or cut both so that the same processes have the shared layers "
                "(`stages`)."
            )


def _check_is_free(model, strategy):
    if getattr(model, _ADOPTION, None) or hasattr(strategy, "placements"):
        raise_of_another_strategy(model, strategy)


def _check(model, strategy):
    size = strategy.collectives.size
    if size > 1:
        why = "XLA cannot compile the messages between stages"
        jit.refuse(model, why, "train in one process, ")
    _check_losses(model, size)
    dense_inputs.check_declared(model)
    if strategy.spreads_tables:
        tables.check_not_tied(model)
    else:
        _check_has_no_tables(model)
    _check_optimizer(model.optimizer, strategy)


def _check_outputs(model, cutter):
    for tensor in cutter.outputs:
        if id(tensor) in cutter.mixed:
            raise ValueError(
                f"The outputs of the model '{model.name}' are put together of "
                "those of a mini-batch's parts, a row for each example. "
                f"Received: an output of '{cutter.mixed[id(tensor)]}', whose "
                "first axis is not that of the examples. Expected: e.g. "
                "(batch, time, classes), not (batch * time, classes)."
            )


def _check_losses(model, size):
    for loss in keras.tree.flatten(model.loss):
        if isinstance(loss, GlobalMean) and size > 1:
            raise ValueError(
                "`ks.losses.GlobalMean` is of all processes' losses, and in a "
                "model in stages the last stage alone computes any. "
                f"Received: the loss '{loss.name}'. Give `compile` the loss "
                "that it wraps."
            )
        is_loss = isinstance(loss, keras.losses.Loss)
        if is_loss and loss.reduction in (None, "none"):
            raise ValueError(
                "The losses of a mini-batch's parts are added up, so each is "
                f"one number. Received: the loss '{loss.name}' with "
                f"reduction={loss.reduction!r}. Keras takes the gradient of "
                'the sum of its values: use `reduction="sum"` for the same '
                "training, or the default for that of their mean."
            )


def _tell_of_losses(model, mixing):
    """Rank 0 warns of Keras's losses that a part of a batch does not have."""
    if model.distribute_strategy.rank != 0:
        return
    for name in needing_whole_batch(model.loss):
        mixing.tell(
            f"loss {name}",
            f"The loss '{name}' of the model '{model.name}' is no mean over "
            "examples, and each pass of the model's stages is of a part of a "
            "batch: training makes the mean of the parts' losses smaller, "
            "another one than in one process. Use "
            "`ks.PipelineStrategy(num_micro_batches=1)` with one process for "
            "each stage.",
        )


def _check_has_no_tables(model):
    for layer in keras_models.all_layers(model):
        if isinstance(layer, (SampledSoftmax, ShardedEmbedding)):
            _refuse_rows(layer.name, type(layer).__name__)
    for table in tables_of(model):
        if not table.is_of_stock_layer:
            _refuse_rows(table.owner_name, "ShardedTable")


def _refuse_rows(name, received):
    raise ValueError(
        f"The layer '{name}' spreads its rows over all processes, but each "
        "weight of a model in stages is on the process of its stage. "
        f"Received: a {received}. Use `keras.layers.Embedding`, or "
        "`keras.layers.Dense` for a softmax (`ks.export(model)` makes a copy "
        "with them), or train under `ks.LayerPlacementStrategy` or "
        "`ks.HybridStrategy`."
    )


def _check_optimizer(optimizer, strategy):
    if isinstance(optimizer, HybridOptimizer):
        raise ValueError(
            f"Under `ks.{type(strategy).__name__}` each process updates its "
            "own stage's weights, so nothing is left to aggregate. Received: a "
            "HybridOptimizer. Give `compile` the optimizer that it wraps."
        )
    rule = optimizer_arguments.rule_of(optimizer)
    # Older versions of Keras have none.
    if isinstance(rule, getattr(keras.optimizers, "MultiOptimizer", ())):
        raise ValueError(
            "Each stage updates its weights by one optimizer, whose slots are "
            "saved in the order of one process. Received: a MultiOptimizer of "
            f"{[type(each).__name__ for each in rule.optimizers]}. Give "
            "`compile` one optimizer; `exclude_from_weight_decay` leaves "
            "weights out of its weight decay, and `layer.trainable = False` "
            "out of training."
        )
    _check_accumulates(rule, strategy)
    needs_all = None
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        needs_all = "Loss scaling", "a LossScaleOptimizer"
    elif getattr(optimizer, "global_clipnorm", None):
        number = optimizer.global_clipnorm
        needs_all = "`global_clipnorm`", f"global_clipnorm={number}"
    if needs_all and not strategy.is_flushed and strategy.size > 1:
        what, received = needs_all
        raise ValueError(
            f"{what} needs the gradients of all stages together, and with "
            f"schedule={strategy.schedule!r} each stage updates its weights "
            f'by itself. Received: {received}. Use `schedule="1f1b"`; or '
            "`clipnorm` or `clipvalue`, which look at one weight at a time, "
            'and for mixed precision "mixed_bfloat16", which needs no loss '
            "scaling."
        )


def _check_accumulates(rule, strategy):
    """Stages agree on the norm of a step's gradients, not of their sums."""
    number = getattr(rule, "gradient_accumulation_steps", None)
    largest = getattr(rule, "global_clipnorm", None)
    if number and largest and strategy.is_flushed:
        raise ValueError(
            "`global_clipnorm` of accumulated gradients looks at the sums of "
            "all stages in the last of their steps, which no stage has. "
            f"Received: global_clipnorm={largest} and "
            f"gradient_accumulation_steps={number}. Leave out "
            "`gradient_accumulation_steps` and make batches as many times as "
            "large (`num_micro_batches` divides them), or use `clipnorm` or "
            "`clipvalue`."
        )


def _check_is_unbuilt(optimizer, parts):
    rule = optimizer_arguments.rule_of(optimizer)
    if rule is not None and rule.built and len(parts) > 1:
        raise ValueError(
            "An optimizer that is built has slots of the whole model, and each "
            "process keeps those of its stage alone. Received: an "
            f"{type(rule).__name__} that is built. Give `compile` a new one; "
            "`keras.models.load_model` in the scope, of a file with the "
            "trained optimizer, gives it its state."
        )


def _check_scaling(optimizer, parts):
    """Ranks agree on the scale by their updates."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return
    for number, part in enumerate(parts):
        # Those that no call uses have no gradients.
        unused = set(map(id, getattr(part.model, "unused", [])))
        if not {id(v) for v in part.model.trainable_variables} - unused:
            raise ValueError(
                "With loss scaling each stage needs weights to train. "
                f"Received: stage {number} of the layers {list(part.names)}. "
                "Cut the model elsewhere (`stages`), or use the policy "
                '"mixed_bfloat16", which needs no loss scaling.'
            )
