"""The features of a `ShardedEmbeddingCollection`, and their tables."""

import dataclasses

from keras_sparsity._tf import checks
from keras_sparsity.layers.bags import COMBINERS
from keras_sparsity.layers.sharded_embedding import ShardedEmbedding

_EXPECTED = (
    "a dict or a list of `ks.layers.ShardedEmbedding`s, or of objects with the "
    "attributes of keras-rs's `FeatureConfig`"
)


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature of a collection.

    Attributes:
        key: its key in a dict, or its place in a list.
        layer: the `ShardedEmbedding` of its table.
        combiner: one of `COMBINERS`, or None for a row of each id.
    """

    key: object
    layer: ShardedEmbedding
    combiner: str | None


def features_of(values, combiners):
    """The `Feature`s of the arguments of a collection, a list."""
    is_list = isinstance(values, (list, tuple))
    checks.check(
        (is_list or isinstance(values, dict)) and len(values) > 0,
        "features",
        values,
        _EXPECTED,
    )
    named = items(values)
    given = dict(items({} if combiners is None else combiners, "combiners"))
    unknown = set(given) - set(named)
    checks.check(
        not unknown,
        "combiners",
        combiners,
        f"a dict or a list with some of the features {list(named)}",
    )
    tables, found = {}, []
    for key, value in named.items():
        combiner = given.get(key)
        if not isinstance(value, ShardedEmbedding):
            table = _table(value)
            if id(table) not in tables:
                tables[id(table)] = _layer(table)
            combiner = given.get(key, getattr(table, "combiner", None))
            value = tables[id(table)]
        _check(key, value, combiner)
        found.append(Feature(key, value, combiner))
    return found


def items(values, name="features"):
    """A dict of a dict's items, or of a list's by their places."""
    if isinstance(values, dict):
        return dict(values)
    checks.check(
        isinstance(values, (list, tuple)), name, values, "a dict or a list"
    )
    return dict(enumerate(values))


def _check(key, layer, combiner):
    if type(layer) is not ShardedEmbedding:
        raise ValueError(
            f"`features[{key!r}]` must be a `ks.layers.ShardedEmbedding` "
            "itself, which the collection looks up in place of the layer. "
            f"Received: a {type(layer).__name__}. In place of a "
            "`ShardedEmbeddingBag` give a `ShardedEmbedding`, and the combiner "
            "in `combiners`."
        )
    checks.check(
        combiner is None
        or (isinstance(combiner, str) and combiner in COMBINERS),
        f"combiners[{key!r}]",
        combiner,
        f"None or one of {', '.join(map(repr, COMBINERS))}",
    )


def _table(feature):
    """The table of a feature like keras-rs's `FeatureConfig`."""
    table = getattr(feature, "table", None)
    names = ("vocabulary_size", "embedding_dim")
    if not all(hasattr(table, name) for name in names):
        raise ValueError(
            f"`features` must be {_EXPECTED}: `name` and `table`, a table with "
            "`name`, `vocabulary_size`, `embedding_dim`, `initializer` and "
            f"`combiner`. Received: {checks.spell(feature)} (of type "
            f"{type(feature).__name__})."
        )
    if getattr(table, "optimizer", None) is not None:
        raise ValueError(
            "A table's own optimizer is not supported: the model's optimizer "
            "trains all tables. Received: the table "
            f"{checks.spell(getattr(table, 'name', None))} with the optimizer "
            f"{checks.spell(table.optimizer)}. Leave it None."
        )
    return table


def _layer(table):
    initializer = getattr(table, "initializer", None)
    options = {"embeddings_initializer": initializer or "uniform"}
    if getattr(table, "name", None):
        options["name"] = table.name
    return ShardedEmbedding(
        table.vocabulary_size, table.embedding_dim, **options
    )
