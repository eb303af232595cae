"""The training that `synchronous`, `max_staleness` and `delay` name."""

import functools
import math

from keras_sparsity._tf import checks, patches
from keras_sparsity.asynchronous import servers
from keras_sparsity.asynchronous.compiling import compile_served
from keras_sparsity.asynchronous.delayed import compile_delayed
from keras_sparsity.asynchronous.meeting import lasting
from keras_sparsity.collectives import startup
from keras_sparsity.placement import choice
from keras_sparsity.training.compiling import compile_adopted

DELAYS = ("bounded", "fixed")
# Servers keep so many small tokens for each worker, or each process so many
# copies of gradients.
_MOST_STEPS = {"bounded": 100_000, "fixed": 1_000}


def checked(
    synchronous, max_staleness, delay, staleness_aware, delay_compensation
):
    """Checks the arguments of `HybridStrategy` of these names.

    Raises ValueError if one is not valid, or has no effect beside the others.
    """
    checks.boolean("synchronous", synchronous)
    checks.one_of("delay", delay, DELAYS)
    checks.boolean("staleness_aware", staleness_aware)
    most = _MOST_STEPS[delay]
    checks.check(
        max_staleness is None
        or (checks.is_integer(max_staleness) and 0 <= max_staleness <= most),
        "max_staleness",
        max_staleness,
        f"a number of steps from 0 to {most:,} with delay={delay!r}"
        + ", or None for any" * (delay == "bounded"),
    )
    _check_compensation(delay_compensation, synchronous)
    if synchronous and (max_staleness is not None or delay != DELAYS[0]):
        raise ValueError(
            "`max_staleness` and `delay` are of asynchronous training. "
            f"Received: synchronous=True, max_staleness={max_staleness}, "
            f"delay={delay!r}. Add `synchronous=False`, or leave them out."
        )
    if staleness_aware and (synchronous or delay == "fixed"):
        other = "synchronous=False" if synchronous else 'delay="bounded"'
        raise ValueError(
            "`staleness_aware` needs workers that pull and push by themselves. "
            f"Received: staleness_aware=True, synchronous={synchronous}, "
            f"delay={delay!r}. Use `{other}`, or leave `staleness_aware` out."
        )
    if delay == "fixed" and max_staleness is None:
        raise ValueError(
            'With `delay="fixed"` weights are exactly `max_staleness` steps '
            "old. Received: max_staleness=None. Give a number of steps, or "
            'use `delay="bounded"`.'
        )
    _check_of_old_weights(
        max_staleness,
        staleness_aware=staleness_aware or None,
        delay_compensation=delay_compensation,
    )


def _check_of_old_weights(max_staleness, **given):
    for name, value in given.items():
        if max_staleness == 0 and value is not None:
            raise ValueError(
                f"`{name}` is of gradients of old weights, and with "
                "max_staleness=0, which is synchronous training, none are "
                f"old. Received: {name}={value!r}, max_staleness=0. Leave it "
                "out, or let weights be at least 1 step old."
            )


def _check_compensation(delay_compensation, synchronous):
    if delay_compensation is None:
        return
    checks.check(
        checks.is_number(delay_compensation)
        and 0 <= delay_compensation < math.inf,
        "delay_compensation",
        delay_compensation,
        "a finite number from 0, or None for no compensation",
    )
    if synchronous:
        raise ValueError(
            "`delay_compensation` is of gradients of old weights. Received: "
            f"delay_compensation={delay_compensation}, synchronous=True. Add "
            "`synchronous=False`, or leave it out."
        )


def check_supports(architecture, prefetch):
    """Raises ValueError for other arguments that are not supported."""
    if architecture == "measured":
        raise ValueError(
            'With `architecture="measured"` variables move while gradients '
            "of theirs wait to be applied. Received: architecture="
            f"{architecture!r} with synchronous=False. Leave it out, or use "
            '`"hybrid"` or `"ps"`.'
        )
    if prefetch:
        raise ValueError(
            "`prefetch` pulls rows before the updates of this step, and with "
            "synchronous=False other rows are updated than this step has "
            "pulled. Received: prefetch=True with synchronous=False. Leave it "
            "out."
        )


def check_of_servers(strategy):
    """Checks other arguments of a strategy whose workers pull and push."""
    if not is_by_servers(strategy):
        return
    if strategy.wire_dtype == "int8":
        raise ValueError(
            "With a bound, weights and gradients travel between workers and "
            'servers in 16 bits at least. Received: wire_dtype="int8" with '
            'synchronous=False and delay="bounded". Use "bfloat16" or '
            '"float16", or `delay="fixed"`.'
        )
    options = strategy.optimizer_options
    given = {"transform_gradients": options["transform_gradients"]}
    for name in ("dense_aggregation", "sparse_aggregation"):
        # An update is of one worker's batch.
        given[name] = None if options[name] == "mean" else options[name]
    if strategy.architecture not in choice.ALL_AT_SERVERS:
        given["architecture"] = strategy.architecture
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                "Workers that pull and push by themselves have all variables "
                f"at servers, and `{name}` has no effect. Received: "
                f'{name}={value!r} with synchronous=False and delay="bounded". '
                'Leave it out, or use `delay="fixed"`.'
            )


def collectives_of(strategy, collectives):
    """The `Collectives` of a strategy's ranks.

    With dedicated servers, workers that pull and push by themselves may be
    lost.
    """
    if is_by_servers(strategy) and collectives.num_servers:
        return lasting(collectives)
    _check_is_whole(startup.lasting())
    return collectives


def _check_is_whole(collectives):
    """Raises RuntimeError on all ranks if one was lost: the engine needs all.

    Args:
        collectives: those that outlast a loss, None if none can happen.
    """
    if collectives is None:
        return
    has_lost = servers.started(collectives).has_lost
    of_ranks = collectives.gather_objects(has_lost, "servers/lost")
    if any(of_ranks) or len(of_ranks) < collectives.size:
        raise RuntimeError(
            "A process was lost in an asynchronous training, which alone goes "
            "on without it. Received: a `HybridStrategy` whose workers take "
            'their steps together. Use `synchronous=False` with `delay="'
            'bounded"`, or start all processes anew.'
        )


def is_by_servers(strategy):
    """Whether workers pull and push by themselves, and servers update."""
    return (
        not strategy.synchronous
        and strategy.delay == "bounded"
        and strategy.max_staleness != 0
    )


def compile_adopts(strategy):
    """While entered, `Model.compile` adopts the model that it compiles."""
    compile_ = compile_adopted
    if is_by_servers(strategy):
        compile_ = compile_served
    elif strategy.max_staleness:
        compile_ = compile_delayed
    return patches.models_compile_by(
        functools.partial(compile_, strategy=strategy)
    )
