"""Input pipelines as graphs, and where they can be split early.

A `tf.data.Dataset` that someone else has built can be written as a graph,
which is read, changed and made a dataset again here, all by public
operations. What is changed: one step that keeps every n-th element is put
right before the work that only needs to be done for this rank's examples, and
the batches become as many times smaller.
"""

import dataclasses
import hashlib

import tensorflow as tf

_BATCHES = {
    "BatchDataset",
    "BatchDatasetV2",
    "ParallelBatchDataset",
    "PaddedBatchDataset",
    "PaddedBatchDatasetV2",
}
_MAPS = {"MapDataset", "ParallelMapDataset", "ParallelMapDatasetV2"}
_NEUTRAL = {"PrefetchDataset", "OptionsDataset", "ModelDataset"}
_CACHES = {"CacheDataset", "CacheDatasetV2"}
_SHUFFLES = {"ShuffleDataset", "ShuffleDatasetV2", "ShuffleDatasetV3"}
# Among a shuffle's inputs. Both are zero where no seed was set.
_SEEDS = 2, 3
_READING = {
    "FlatMapDataset",
    "InterleaveDataset",
    "ParallelInterleaveDatasetV2",
    "ParallelInterleaveDatasetV3",
    "ParallelInterleaveDatasetV4",
}
_FILTERS = {"FilterDataset", "ParallelFilterDataset"}
_READERS = {
    "FixedLengthRecordDataset",
    "FixedLengthRecordDatasetV2",
    "TFRecordDataset",
    "TFRecordDatasetV2",
    "TextLineDataset",
}

# One element out for each one in, in the same order.
_ONE_TO_ONE = _MAPS | _NEUTRAL | _CACHES
# May see a part of the elements only, and still give each of them once.
_ELEMENTWISE = _ONE_TO_ONE | _SHUFFLES | {"RepeatDataset"}
_LOCAL = _ELEMENTWISE | _READING | _FILTERS

# Ranks with one file more than others train on alone when the others have
# ended: at most one in eight of their batches.
_MIN_FILES_PER_RANK = 8
# Tensors in memory are copied into the graph.
_MAX_GRAPH_BYTES = 512 * 2**20


class CannotSplit(ValueError):
    """Why a pipeline cannot be split early."""


@dataclasses.dataclass(frozen=True)
class Split:
    """A place to split a pipeline.

    Attributes:
        by: "files" or "elements".
        keeps_batches: whether each global batch holds the same examples as
            without splitting.
        after: the node whose elements are dealt out.
        before: the node that reads them.
    """

    by: str
    keeps_batches: bool
    after: object
    before: object


class DatasetGraph:
    """The graph of a dataset: a chain of steps from a source to batches.

    Raises:
        CannotSplit: if the pipeline is no such chain.
    """

    def __init__(self, dataset):
        self._dataset = dataset  # owns the graph's resources
        self._graph = _graph_of(dataset)
        self._nodes = {node.name: node for node in self._graph.node}
        (end,) = (n for n in self._graph.node if n.op == "_Retval")
        self._chain = [self._input(end, 0)]
        while self._feeds(self._chain[-1]):
            self._chain.append(self._input(self._chain[-1], 0))
        self._batch_index = self._find_batch()

    @property
    def steps(self):
        """The names of the steps, from the source on."""
        names = [n.op.partition("Dataset")[0] for n in reversed(self._chain)]
        return " > ".join(names)

    @property
    def batch_size(self):
        return int(self._constant(self._batch, 1))

    @property
    def fingerprint(self):
        """Differs where the ranks' pipelines or their constants do."""
        digest = hashlib.sha256(self.steps.encode())
        for node in self._graph.node:
            value = node.attr["value"].tensor
            if node.op == "Const" and value.dtype not in (
                tf.resource.as_datatype_enum,
                tf.variant.as_datatype_enum,
            ):
                digest.update(value.SerializeToString(deterministic=True))
        return digest.hexdigest()[:16]

    def best_split(self, size, by=None):
        """Where to split among `size` ranks; `by` forces the kind.

        Raises:
            CannotSplit: if there is no such place.
        """
        if self.batch_size % size:
            raise CannotSplit(
                f"the batch size {self.batch_size} is no multiple of the "
                f"{size} ranks"
            )
        reasons = []
        for kind, find in (
            ("files", self._split_files),
            ("elements", self._split_elements),
        ):
            if by in (None, kind):
                try:
                    return find(size)
                except CannotSplit as reason:
                    reasons.append(f"by {kind}, {reason}")
        raise CannotSplit("; ".join(reasons))

    def split(self, place, rank, size):
        """This rank's dataset; its batches have `batch_size // size` rows."""
        graph = tf.compat.v1.GraphDef()
        graph.CopyFrom(self._graph)
        nodes = {node.name: node for node in graph.node}
        shard = graph.node.add(name="keras_sparsity/shard", op="ShardDataset")
        shard.input[:] = [
            place.after.name,
            _add_constant(graph, "keras_sparsity/size", size),
            _add_constant(graph, "keras_sparsity/rank", rank),
        ]
        attributes = place.after.attr
        types = "output_types"
        if types not in attributes:
            types = "Toutput_types"
        shard.attr["output_types"].CopyFrom(attributes[types])
        shard.attr["output_shapes"].CopyFrom(attributes["output_shapes"])
        shard.attr["require_non_empty"].b = False
        nodes[place.before.name].input[0] = shard.name
        nodes[self._batch.name].input[1] = _add_constant(
            graph, "keras_sparsity/batch_size", self.batch_size // size
        )
        variant = tf.raw_ops.DatasetFromGraph(
            graph_def=graph.SerializeToString()
        )
        part = tf.data.experimental.from_variant(
            variant,
            tf.nest.map_structure(_any_rows, self._dataset.element_spec),
        )
        part._keras_sparsity_source = self._dataset
        return part

    # Finding the place.

    @property
    def _batch(self):
        return self._chain[self._batch_index]

    def _find_batch(self):
        index = 0
        while self._chain[index].op in _MAPS | _NEUTRAL:
            index += 1
        batch = self._chain[index]
        if batch.op not in _BATCHES:
            raise CannotSplit(
                "after batching it does more than map and prefetch "
                f"({self.steps})"
            )
        has_maps = any(n.op in _MAPS for n in self._chain[:index])
        if has_maps and self._is_static(batch):
            raise CannotSplit(
                "it drops a remainder, and a map behind it counts on batches "
                "of that many rows"
            )
        if batch.op.startswith("Padded") and self._pads_to_longest(batch):
            raise CannotSplit(
                "its batches are padded to the longest example, which ranks "
                "with parts of a batch cannot know"
            )
        return index

    def _split_files(self, size):
        index = self._batch_index + 1
        while index < len(self._chain) - 1:
            node = self._chain[index]
            if node.op in _READING and self._functions(node) & _READERS:
                break
            if node.op not in _LOCAL or self._is_file_cache(node):
                raise CannotSplit(f"{node.op} counts on all elements")
            index += 1
        else:
            raise CannotSplit("it reads no list of files")
        for node in self._chain[index + 1 : -1]:
            if node.op not in _SHUFFLES | _NEUTRAL:
                raise CannotSplit(f"{node.op} stands before the files")
        source = self._chain[-1]
        if source.op != "TensorSliceDataset":
            raise CannotSplit(f"its files come from {source.op}")
        num_files = self._input(source, 0).attr["value"].tensor.tensor_shape
        num_files = num_files.dim[0].size
        if num_files % size and num_files < _MIN_FILES_PER_RANK * size:
            raise CannotSplit(
                f"{num_files} files cannot be dealt out evenly; a multiple "
                f"of {size}, or {_MIN_FILES_PER_RANK * size} and more, can"
            )
        return Split("files", False, source, self._chain[-2])

    def _split_elements(self, size):
        del size
        for allowed in (_ONE_TO_ONE, _ELEMENTWISE):
            index = self._batch_index + 1
            while (
                index < len(self._chain) - 1
                and self._chain[index].op in allowed
                and not self._is_file_cache(self._chain[index])
            ):
                index += 1
            saved = self._chain[self._batch_index + 1 : index]
            if any(node.op in _MAPS for node in saved):
                self._check_same_on_all_ranks(self._chain[index:])
                return Split(
                    "elements",
                    allowed is _ONE_TO_ONE,
                    self._chain[index],
                    self._chain[index - 1],
                )
        raise CannotSplit("no map stands between its elements and its batches")

    def _check_same_on_all_ranks(self, nodes):
        for node in nodes:
            if node.attr["deterministic"].s == b"false":
                raise CannotSplit(f"the order that {node.op} gives varies")
            if node.op in _SHUFFLES and not self._is_seeded(node):
                raise CannotSplit("it is shuffled without a seed")
            operations = self._functions(node)
            python = {o for o in operations if "PyFunc" in o}
            if python or "PyFunc" in node.op:
                raise CannotSplit("its elements come from Python code")
            if any(o.startswith("Random") for o in operations):
                raise CannotSplit("its elements are drawn at random")

    # Reading nodes.

    def _input(self, node, position):
        name = node.input[position].partition(":")[0]
        return self._nodes[name]

    def _feeds(self, node):
        """Whether the node reads one other dataset; an error if several."""
        inputs = [self._input(node, i) for i in range(len(node.input))]
        datasets = [n for n in inputs if n.op.find("Dataset") > 0]
        if len(datasets) > 1:
            raise CannotSplit(f"{node.op} joins several datasets")
        return bool(datasets)

    def _constant(self, node, position):
        source = self._input(node, position)
        if source.op != "Const":
            raise CannotSplit(f"an argument of {node.op} is computed")
        return tf.make_ndarray(source.attr["value"].tensor)

    def _is_static(self, batch):
        if batch.op in ("BatchDataset", "PaddedBatchDataset"):
            return False
        return bool(self._constant(batch, len(batch.input) - 1))

    def _pads_to_longest(self, batch):
        num_outputs = batch.attr["N"].i
        return any(
            (self._constant(batch, 2 + i) < 0).any() for i in range(num_outputs)
        )

    def _is_seeded(self, shuffle):
        return any(self._constant(shuffle, place) for place in _SEEDS)

    def _is_file_cache(self, node):
        # Ranks on one machine would write the same file.
        return node.op in _CACHES and self._constant(node, 1).item() != b""

    def _functions(self, node):
        """The operations in the functions a node calls."""
        library = {f.signature.name: f for f in self._graph.library.function}
        found, visited = set(), set()
        pending = [a.func.name for a in node.attr.values() if a.func.name]
        while pending:
            name = pending.pop()
            if name in visited or name not in library:
                continue
            visited.add(name)
            for inner in library[name].node_def:
                found.add(inner.op)
                for attribute in inner.attr.values():
                    functions = [attribute.func, *attribute.list.func]
                    pending += [f.name for f in functions if f.name]
        return found


def _graph_of(dataset):
    try:
        serialized = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=1,  # ignore: it stays in this process
        ).numpy()
    except tf.errors.OpError as error:
        raise CannotSplit(f"it cannot be written as a graph: {error}") from None
    if len(serialized) > _MAX_GRAPH_BYTES:
        raise CannotSplit("its data is in memory, and large")
    return tf.compat.v1.GraphDef.FromString(serialized)


def has_unseeded_shuffle(dataset):
    """Whether the order of its elements differs in another process.

    Shuffles of datasets that a function makes are not looked for.
    """
    try:
        graph = _graph_of(dataset)
    except CannotSplit:
        return False
    nodes = {node.name: node for node in graph.node}

    def is_zero(name):
        node = nodes[name.partition(":")[0]]
        return node.op == "Const" and not tf.make_ndarray(
            node.attr["value"].tensor
        )

    return any(
        all(is_zero(shuffle.input[place]) for place in _SEEDS)
        for shuffle in graph.node
        if shuffle.op in _SHUFFLES
    )


def _add_constant(graph, name, value):
    node = graph.node.add(name=name, op="Const")
    node.attr["dtype"].type = tf.int64.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.int64))
    return name


def _any_rows(spec):
    """The spec with None for the number of rows."""
    shape = getattr(spec, "shape", None)
    if shape is None or isinstance(spec, tf.OptionalSpec) or not shape.rank:
        return spec
    shape = [None, *shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(
            shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype
        )
    return type(spec)(shape, spec.dtype)
