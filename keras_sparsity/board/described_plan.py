"""The ways to train a saved model on a described cluster, in one process."""

import warnings

import keras

# Register what a saved model may have: the command imports nothing else.
from keras_sparsity import layers as layers
from keras_sparsity import optimizer as optimizer
from keras_sparsity._tf import checks
from keras_sparsity.board.comparison import can_be_cut, plan_of
from keras_sparsity.global_batch import losses as losses
from keras_sparsity.stages import model_facts
from keras_sparsity.stages.cutting import Cutter


def described(path, cluster, num_examples=None, alpha=None):
    """The `StrategyPlan` of a saved model; no dataset is needed.

    Passes are measured here, of examples that are drawn by the model's inputs.
    Sizes of the inputs that the model does not know count as 16.

    Args:
        path: a file that `model.save` has written.
        cluster: `planning.Cluster` whose rate is known.
        num_examples: the number of a mini-batch's examples; by default 32 for
            each process.
        alpha: of each `Embedding` the fraction of the rows that a process
            touches in a step; by default that without duplicate rows.

    Raises:
        ValueError: if there is no such model, or it cannot be cut.
    """
    if num_examples is None:
        num_examples = 32 * cluster.size
    checks.positive_integer("num_examples", num_examples)
    model = _loaded(path)
    if not can_be_cut(model):
        raise ValueError(
            f"The model in {path!r} cannot be cut into stages. Received: a "
            f"{type(model).__name__}; expected: a functional or sequential "
            "model of any batch size, whose `SampledSoftmax` has no `table`. "
            "Save `ks.export(model)`, or call `ks.plan(model, dataset, "
            "cluster)` for the bytes of its tables."
        )
    cutter = Cutter(model)
    of_process = max(1, num_examples // cluster.size)
    specs = model_facts.variable_specs(cutter, alpha, of_process)
    optimizer = getattr(model, "optimizer", None) or keras.optimizers.Adam()
    facts = model_facts.measured(cutter, num_examples, optimizer, specs)
    return plan_of(facts, cutter, cluster, num_examples)


def _loaded(path):
    try:
        with warnings.catch_warnings():
            # The optimizer's slots, which a plan does not need.
            warnings.filterwarnings("ignore", "Skipping variable loading")
            return keras.models.load_model(path)
    except Exception as error:  # whatever a file of another kind leads to
        raise ValueError(
            f"{path!r} is no model that can be loaded. Expected: a file that "
            "`model.save` has written, of Keras's own layers and this "
            f"library's. Keras says: {checks.shortened(error)}"
        ) from error
