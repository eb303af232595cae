"""The `tf.distribute.Strategy`: one replica in each process."""

import contextlib

import tensorflow as tf

from keras_sparsity import collectives
from keras_sparsity._tf import checks
from keras_sparsity.asynchronous import modes
from keras_sparsity.board.epoch_figures import EpochFigures
from keras_sparsity.collectives.startup import single_process
from keras_sparsity.data import sharding
from keras_sparsity.exchange.options import Options, check_wire_dtype
from keras_sparsity.global_batch import losses, metrics
from keras_sparsity.layers import ordinary
from keras_sparsity.placement import choice
from keras_sparsity.training.extended import HybridExtended, ProcessStrategy
from keras_sparsity.update.optimizer_arguments import checked_options


class HybridStrategy(ProcessStrategy):
    """Data-parallel training that treats dense and sparse variables apart.

    Every process runs the same script and trains on its part of each global
    batch. Gradients of dense variables are all-reduced; rows of sharded
    tables are pulled from, pushed to and updated at the process that owns
    them.

    `keras-sparsity run`, `horovodrun`, Slurm's `srun` or `TF_CONFIG` start the
    processes; without any of them there is one, and the same script trains on
    it. Make the strategy first of all in the script, before TensorFlow runs its
    first operation. `keras-sparsity run` starts the engine before the script's
    first line, so that the strategy may be made anywhere in the script.

    Args:
        engine: `"native"` (TensorFlow's own collectives), `"horovod"`,
            `"local"` (one process), or None to choose by how the process was
            started.
        sparse_updates, dense_aggregation, sparse_aggregation,
            transform_gradients: options with which `compile` wraps the
            optimizer, see `ks.HybridOptimizer`. A wrapped optimizer keeps its
            own, and takes `transform_gradients` if it has none. A custom loop
            gives them to `ks.HybridOptimizer` itself.
        architecture: how variables of models compiled inside of the scope
            travel. A table's own `architecture` goes first, see
            `ks.ShardedTable`.
            `"auto"`: dense gradients are all-reduced; each sharded table and
            each ordinary `Embedding` gets the architecture with the lowest
            time on a network of 1,000 Mbit/s, by its size and by alpha, which
            the first steps of `fit` count; again when alpha drifts. Until
            then, and in a custom loop, as `"hybrid"`, but the rows of an
            `Embedding` of more than 16 MiB are on parameter servers. Nothing
            is timed, so that runs repeat each other to the bit.
            `"measured"`: as `"auto"`, by the measured speeds of this cluster;
            a move that makes steps slower is taken back. Runs may differ by
            rounding.
            `"hybrid"`: dense gradients are all-reduced, sharded tables are on
            parameter servers, the rows of an ordinary `Embedding` are
            gathered from all ranks.
            For comparison: `"allreduce"`, all gradients made dense and
            all-reduced; `"allgather"`, whole tables on each rank, which
            gathers the rows of all ranks; `"ps"`, dense gradients too go
            through servers, in one message, and ordinary `Embedding`s are on
            them; `"naive_ps"`, servers without merging: a message for each
            variable, all of it on one server, duplicate rows sent one by one,
            and the rows of an ordinary `Embedding` gathered.
        wire_dtype: `"bfloat16"` or `"float16"`: rows, their gradients and dense
            gradients travel in 16 bits; owners sum them in float32. None: in
            their own dtype, and rows in the compute dtype of a layer, where it
            is narrower. `"float16"` rounds less, but values above 65,504
            become infinite. `"int8"`: rows and their gradients travel in 8
            bits, with a float32 scale for each row, and dense gradients in
            bfloat16. Rows are rounded to the nearest of 255 levels of the
            row's largest number; gradients to one of the two beside them, at
            random, so that their mean is exact. Runs repeat each other to the
            bit. With `delay="bounded"` workers pull all weights so, too;
            servers hold them in their own dtype; `"int8"` is not supported.
        local_aggregation: whether the processes of a machine pull rows of
            sharded tables together, each row once, and add up its gradients
            before they push. It needs several machines with equally many
            processes; where they have unequally many, rank 0 logs it once.
            Dense gradients do the same where they travel in 16 bits or through
            servers. False for comparison.
        bucket_bytes: size of one all-reduce of dense gradients, in bytes. The
            last layers' gradients go first and travel while the backward pass
            computes the others. None: one message for all.
        prefetch: whether `fit` pulls the next batch's rows while it computes
            this one. Rows that this step may change are pulled when the next
            step begins; the result is the same to the bit. It pays where the
            network idles during computation, and costs time where steps wait
            for processors or links. It needs tables whose ids are inputs of a
            functional or sequential model, or made of them by operations, and
            an optimizer that updates touched rows only (see
            `sparse_updates`). Rows are pulled when needed in custom loops, on
            single batches, with input that Python makes (generators), with
            `"naive_ps"`, and where machines pull together (see
            `local_aggregation`); rank 0 then logs the reason once.
        timeout: seconds for which a rank may keep the others waiting (stopped,
            hanging, or computing alone) before all ranks are ended with a
            message on the call each was in; at least 5, and the same on all
            ranks. By default the environment's `KERAS_SPARSITY_TIMEOUT`, which
            `keras-sparsity run --rank-timeout` sets, else 600. A rank that
            dies, raises or makes another call than the others ends them within
            seconds.
        synchronous: False: gradients are of weights to which some updates are
            still missing, see `max_staleness` and `delay`.
        max_staleness: the number s of steps by which weights may be old, at
            most 100,000, or 1,000 with `delay="fixed"`; None for any number. 0
            is synchronous training: a rank that dies ends all.
        delay: how old weights are.
            `"bounded"`: each worker takes the batches that no other has taken,
            pulls the weights that are there, and pushes its gradient, which
            servers apply at once: one update for each batch. No worker is
            more than s steps ahead of the slowest. The servers are
            TensorFlow's own: the dedicated ones, or else one in each process;
            each holds some variables, or pieces of large ones, with their
            slots. With dedicated servers training goes on without a worker
            that dies or leaves.
            `sparse_updates="exact"` takes rules that leave untouched rows of an
            `Embedding` alone.
            `"fixed"`: exactly s steps old. All ranks train on their parts of
            each batch, as in synchronous training, and the mean gradient of
            step t, of the weights after the update of step t - s - 1, is
            applied s steps later, the last ones at the end of each epoch.
            Runs repeat each other to the bit.
        staleness_aware: True, with `delay="bounded"`: the learning rate of an
            update is divided by the number of updates since its worker's pull,
            if that is more than 1.
        delay_compensation: a number c from 0: in place of a gradient g of old
            weights w', g + c g g (w - w') is applied to the present weights w,
            element by element. None: g itself. With `delay="bounded"` each
            push carries w', too.

    Attributes:
        collectives: `ks.collectives.Collectives` of all processes.
        rank: this process's number.
        size: the number of processes that compute. Dedicated servers do not
            (see `keras-sparsity run --servers`): their ranks begin at `size`.
        staleness: of the last epoch of `delay="bounded"`: dict from the number
            of updates between a pull and its push to the number of all
            workers' pushes.
        epoch_figures: of the last epoch of `delay="bounded"`, else None: the
            `version` of the weights, `waiting_seconds` and `num_steps` of each
            worker, updates and bytes of each of `servers`; `print()` shows
            them.

    Raises:
        ValueError: if an argument is not valid, if another engine runs
            already, or if ranks have different timeouts or versions.

    Example:

    >>> import keras, keras_sparsity as ks
    >>> strategy = ks.HybridStrategy()
    >>> model = keras.Sequential([ks.layers.ShardedEmbedding(100, 8)])
    >>> with strategy.scope():
    ...     model.compile(optimizer="adagrad", loss="mse")
    >>> strategy.num_replicas_in_sync
    1

    References:
        EuroSys 3.1 (hybrid architecture), 4.3 (placement), Table 4 (the
        architectures for comparison), 2.1 (asynchronous training); Ho et al.,
        NIPS 2013 (the bound); Zhang et al., IJCAI 2016 (`staleness_aware`);
        Zheng et al., ICML 2017 (`delay_compensation`).
    """

    def __init__(
        self,
        engine=None,
        sparse_updates="exact",
        dense_aggregation="mean",
        sparse_aggregation="mean",
        transform_gradients=None,
        architecture="auto",
        wire_dtype=None,
        local_aggregation=True,
        bucket_bytes=8 * 2**20,
        prefetch=False,
        timeout=None,
        synchronous=True,
        max_staleness=None,
        delay="bounded",
        staleness_aware=False,
        delay_compensation=None,
    ):
        choice.check("architecture", architecture)
        _check_options(wire_dtype, local_aggregation, bucket_bytes, prefetch)
        modes.checked(
            *(synchronous, max_staleness, delay),
            *(staleness_aware, delay_compensation),
        )
        if not synchronous:
            modes.check_supports(architecture, prefetch)
            # Variables stay where they are while gradients wait.
            architecture = choice.without_moves(architecture)
        self.synchronous = synchronous
        self.max_staleness = (
            None if max_staleness is None else int(max_staleness)
        )
        self.delay, self.staleness = delay, {}
        self.staleness_aware = bool(staleness_aware)
        self.delay_compensation = (
            None if delay_compensation is None else float(delay_compensation)
        )
        self.epoch_figures = (
            EpochFigures() if modes.is_by_servers(self) else None
        )
        self.architecture, self.wire_dtype = architecture, wire_dtype
        self.local_aggregation = bool(local_aggregation)
        self.bucket_bytes = bucket_bytes
        self.prefetch = bool(prefetch)
        self.optimizer_options = checked_options(
            sparse_updates=sparse_updates,
            dense_aggregation=dense_aggregation,
            sparse_aggregation=sparse_aggregation,
            transform_gradients=transform_gradients,
        )
        self.options = Options(
            merges=choice.ARCHITECTURES[architecture].merges,
            wire_dtype=wire_dtype,
            local_aggregation=self.local_aggregation,
            bucket_bytes=bucket_bytes,
        )
        modes.check_of_servers(self)
        self.collectives = modes.collectives_of(
            self, collectives.start(engine, timeout)
        )
        self.options.tell_of_uneven_machines(self.collectives)
        # In its steps, a worker of servers is alone.
        self._of_steps = self.collectives
        if modes.is_by_servers(self):
            self._of_steps = single_process()
        self.placements = choice.Placements(
            architecture, self._of_steps, self.options, self
        )
        is_here = not modes.is_by_servers(self)
        super().__init__(HybridExtended(self, self._of_steps, is_here))

    @property
    def cluster_resolver(self):
        """This process as a worker, whose `task_id` is its rank, or a server.

        For scripts that find the chief by it. The addresses are names only.
        """
        communicator = self.collectives
        names = [f"rank-{rank}" for rank in range(communicator.size)]
        jobs = {"worker": names[: self.size]}
        if communicator.num_servers:
            jobs["ps"] = names[self.size :]
        is_server = communicator.is_server
        return tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(jobs),
            task_type="ps" if is_server else "worker",
            task_id=self.rank - self.size if is_server else self.rank,
        )

    @contextlib.contextmanager
    def scope(self):
        """Context in which `model.compile` makes a model distributed.

        Models compiled inside it (also by `keras.models.load_model`) train on
        all processes, wherever they were built. Metrics made inside it give
        results over all processes, wherever a custom loop reads them outside
        of `run`; every process must read them. Here and in `run`, the value of
        a Keras loss object that reduces is that of the global batch.
        """
        with (
            super().scope(),
            modes.compile_adopts(self),
            ordinary.made_as_tables(self.placements),
            metrics.new_ones_are_global(self._of_steps),
            losses.of_global_batch(self._of_steps),
        ):
            yield self

    def shard(self, dataset):
        """This rank's part of a dataset of global batches, efficiently.

        Give it to `fit` as it is, see `ks.data.shard`.

        Args:
            dataset: `tf.data.Dataset` of global batches, the same on all
                ranks.

        Returns:
            `tf.data.Dataset` of this rank's parts.

        Raises:
            ValueError: if the ranks' datasets differ.
        """
        return sharding.shard(dataset, self.collectives)


def _check_options(wire_dtype, local_aggregation, bucket_bytes, prefetch):
    check_wire_dtype(wire_dtype, has_rows=True)
    checks.boolean("local_aggregation", local_aggregation)
    if bucket_bytes is not None:
        checks.positive_integer(
            "bucket_bytes", bucket_bytes, ", or None for one message"
        )
    checks.boolean("prefetch", prefetch)
