"""`jit_compile=True` on several processes."""

import logging

# Set on a model that is compiled so.
_IS_COMPILED = "_keras_sparsity_jit_compile"


def settle(model, communicator, is_compiled_anew=False):
    """Has XLA compile a model's steps between messages, where asked for.

    Keras would give XLA the whole step, which cannot compile messages between
    processes: `model.jit_compile` becomes False. Rank 0 logs it.

    Args:
        model: an adopted, compiled model.
        communicator: `Collectives` of all ranks.
        is_compiled_anew: whether earlier requests no longer hold.
    """
    if communicator.size == 1:
        return
    if is_compiled_anew:
        object.__setattr__(model, _IS_COMPILED, False)
    if not model.jit_compile or model.run_eagerly:
        return
    model.jit_compile = False
    object.__setattr__(model, _IS_COMPILED, True)
    if communicator.rank == 0:
        logging.getLogger(__name__).warning(
            "The model '%s' has `jit_compile=True`, on %d processes: XLA "
            "compiles its layers, losses, gradients and the updates of dense "
            "variables; not the messages between processes, which it cannot, "
            "nor the rows of tables, whose number changes from step to step.",
            model.name,
            communicator.size,
        )


def is_asked_for(model):
    """Whether steps of an adopted model are compiled between messages."""
    return getattr(model, _IS_COMPILED, False)


def refuse(model, why, instead=""):
    """Raises where XLA would compile messages of a strategy's own steps.

    Args:
        model: a compiled model.
        why: the part of the message that says why XLA cannot.
        instead: the part that says what else would do, with a comma.
    """
    if model.jit_compile and not model.run_eagerly:
        raise ValueError(
            f"The model '{model.name}' is compiled with `jit_compile=True`, "
            f"but {why}. Received: jit_compile=True. Compile it with "
            f'`jit_compile=False` (or "auto"), {instead}or train under a '
            "synchronous `ks.HybridStrategy`."
        )
