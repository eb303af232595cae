"""The lookups of a function, from a trace of it that is thrown away."""

import contextlib
import copy
import logging

import tensorflow as tf

from keras_sparsity._tf import (
    checks,
    current_variable,
    custom_gradients,
    keras_scopes,
    patches,
    tf_graphs,
    tf_subgraphs,
)
from keras_sparsity.data import empty_parts
from keras_sparsity.exchange.pull import shaped
from keras_sparsity.exchange.together import gather_together
from keras_sparsity.layers.candidate_sampler import class_ids
from keras_sparsity.layers.sampled_softmax_loss import ORIGIN
from keras_sparsity.tables import foreseen

# Set on a model of which has been told that tables pull by themselves.
_TOLD = "_keras_sparsity_told"
_logger = logging.getLogger(__name__)


def scouted_step(model, step, batch, tells):
    """What a step asks for while its first tape records; None if unknown.

    Args:
        model, step, batch, tells: as for `own_step`.
    """
    scouted = Scouted(None)

    def forward(batch):
        scouted.is_asked = False
        with patches.first_tape_is_told(scouted.begin, scouted.end):
            step(batch)

    is_traced = scouted.traces(forward, (batch,), {}, "step", model, tells)
    return scouted if is_traced else None


class _Enough(BaseException):
    """Ends a trace that is thrown away, through any code of the user's."""


class Scouted:
    """What a function asks for, from a trace that is thrown away.

    Args:
        labels: those that tell the rows of the model's loss, or None.

    Attributes:
        is_asked: whether lookups are noted now.
    """

    def __init__(self, labels):
        self._asked, self._computations = [], tf_subgraphs.Computations()
        self._softmax, self._labels = None, labels
        self._graph = None  # of the trace
        self.is_asked = True

    def traces(self, run, args, kwargs, kind, model, tells):
        """Traces a function; whether that was possible.

        Args:
            run, args, kwargs: the function, which may raise `_Enough`, and its
                arguments.
            kind: what it is, for a message.
            model, tells: as for `tell`.
        """
        try:
            self._trace(run, args, kwargs)
        except Exception as error:  # of the user's code, or a graph unknown
            # The function itself raises it again, if it is the user's.
            why = f"{type(error).__name__}: {checks.shortened(error)}"
            what = "The tables" if kind == "call" else "The calls in a step"
            why = f"its {kind} cannot be traced twice, {why}"
            tell(tells, model, why, what)
            return False
        return True

    def begin(self):
        """Notes the lookups from now on, if they are of the trace itself."""
        self.is_asked = tf.compat.v1.get_default_graph() is self._graph

    def end(self):
        raise _Enough

    def _trace(self, run, args, kwargs):
        flat = tf.nest.flatten((args, kwargs), expand_composites=True)
        places = [i for i, x in enumerate(flat) if tf.is_symbolic_tensor(x)]

        def forward(*tensors):
            self._graph = tf.compat.v1.get_default_graph()
            given = list(flat)
            for place, tensor in zip(places, tensors, strict=True):
                given[place] = tensor
            args_, kwargs_ = tf.nest.pack_sequence_as(
                (args, kwargs), given, expand_composites=True
            )
            with (
                keras_scopes.tracing_shapes(
                    lambda: self._check_is_not_kept("changes its state")
                ),
                current_variable.read_as_stored([]),
                self._on_part(),
                foreseen.by(self),
                contextlib.suppress(_Enough),
            ):
                outputs = run(*args_, **kwargs_)
                layer, is_training, _ = getattr(outputs, ORIGIN, [None] * 3)
                if is_training and layer.may_come_with_others():
                    self._softmax = layer
            custom_gradients.forget_with(self)

        self._tensors = [flat[place] for place in places]
        specs = [tf.TensorSpec(x.shape, x.dtype) for x in self._tensors]
        traced = tf.function(forward, autograph=False)
        self._traced = traced.get_concrete_function(*specs)
        self._placeholders = self._traced.inputs[: len(specs)]
        for number, pair in enumerate(
            zip(self._placeholders, self._tensors, strict=True)
        ):
            for tensor in pair:
                self._computations.stands_for(tensor, number)

    @staticmethod
    def _on_part():
        """Context of the step's part, which keeps no tensor of the trace."""
        part = empty_parts.current()
        if part is None:
            return contextlib.nullcontext()
        return empty_parts.computing_on(copy.copy(part))

    def _check_is_not_kept(self, does):
        """Raises ValueError in a `tf.function` of the user's.

        TensorFlow would keep it as it is traced here.
        """
        if tf_graphs.innermost_function() not in (None, self._graph):
            raise ValueError(f"it calls a tf.function that {does}")

    def rows(self, table, ids, columns, dtype):
        """Notes a lookup; zeros in place of its rows, which it must not use."""
        self._check_is_not_kept("looks up rows")
        shape = tf.concat([tf.shape(ids), [table.dim]], axis=0)
        rows = tf.identity(shaped(tf.zeros(shape, dtype), ids))
        self._computations.stands_for(rows, None)
        # Those of a loop's body are others in each of its runs.
        is_of_call = tf.is_symbolic_tensor(ids) and ids.graph is self._graph
        is_of_call = is_of_call and self.is_asked
        if columns is None and table.is_sharded and is_of_call:
            self._asked.append((table, ids, dtype))
        return rows if columns is None else rows[..., slice(*columns)]

    def known(self, least=1):
        """The lookups whose ids are known, computed in the current graph.

        Args:
            least: the number of them below which none counts.

        Returns:
            dict from a key to `(table, ids, dtype)`.
        """
        known = {}
        for table, ids, dtype in self._asked:
            number = self._computations.number_of(ids)
            if number is not None:
                known[id(table), number, dtype] = table, ids, dtype
        if len(known) < max(least, 1):
            return {}
        again = tf_subgraphs.made_again(
            [ids for _, ids, _ in known.values()],
            list(zip(self._placeholders, self._tensors, strict=True)),
        )
        return {
            key: (table, ids, dtype)
            for (key, (table, _, dtype)), ids in zip(
                known.items(), again, strict=True
            )
        }

    def knows_all(self):
        """Whether the ids of all lookups that were noted are known."""
        number_of = self._computations.number_of
        return all(number_of(ids) is not None for _, ids, _ in self._asked)

    def given(self, rows):
        """Source for `foreseen.by` of rows by the keys of `known`."""
        return Pulled(self._computations, rows, None)

    def pulled(self, options):
        """Pulls the rows of the lookups whose ids are known; None if of one.

        Args:
            options: `Options` of the strategy.
        """
        softmax = self._softmax if self._labels is not None else None
        known = self.known(least=2 - (softmax is not None))
        if not known:
            return None
        of_loss, then = [], None
        if softmax is not None:
            sample = softmax.sample(class_ids(self._labels))
            of_loss, then = softmax.asked(sample.ids)
        rows, last = gather_together(
            [*known.values(), *of_loss], options, then=then
        )
        of_sample = None
        if softmax is not None:
            last = rows[len(known) :] if then is None else last
            of_sample = softmax, (sample, last)
        by_key = dict(zip(known, rows, strict=False))
        return Pulled(self._computations, by_key, of_sample)


class Pulled:
    """The rows of a call, which were pulled when it began.

    Attributes:
        unused: keys of the rows that no lookup has asked for.
    """

    def __init__(self, computations, rows, of_sample):
        self._computations, self._rows = computations, rows
        self._of_sample = of_sample
        self.unused = set(rows)

    def rows(self, table, ids, columns, dtype):
        if columns is not None or not table.sends_messages:
            return None
        number = self._computations.number_of(ids)
        key = id(table), number, dtype
        if number is None or key not in self._rows:
            return None
        self.unused.discard(key)
        return shaped(self._rows[key], ids)

    def tell_of_unused(self, model, tells):
        if self.unused:
            tell(
                tells,
                model,
                f"{len(self.unused)} of its lookups are others each time that "
                "it is traced",
            )

    def hand_over(self, outputs):
        """Gives the rows of the loss to the outputs that it is called on."""
        if self._of_sample is None:
            return
        layer, rows = self._of_sample
        of_layer, is_training, _ = getattr(outputs, ORIGIN, [None] * 3)
        if of_layer is layer and is_training:
            setattr(outputs, ORIGIN, (layer, True, [rows]))


def tell(tells, model, why, what="The tables"):
    """Says once that a model makes more messages than it could."""
    told = getattr(model, _TOLD, ())
    if what in told or not tells:
        return
    object.__setattr__(model, _TOLD, (*told, what))
    _logger.warning(
        "%s of '%s' pull their rows one after the other: %s.",
        what,
        model.name,
        why,
    )
