"""An adopted model's files, written once."""

from keras_sparsity._tf.current_variable import read_as_stored
from keras_sparsity.conversion import saving
from keras_sparsity.training.binding import Binding
from keras_sparsity.update import lookups


class Saves(Binding):
    """What saves a model does so on rank 0; and the saved compile arguments.

    `export` by functions that read rows as they are saved.
    """

    def __init__(self, model, replicas):
        self._replicas = replicas
        names = ["save", "save_weights", "export", "get_compile_config"]
        super().__init__(model, names)

    def export(self, *args, **kwargs):
        with read_as_stored(lookups.keepers_of(self._model.variables)):
            self._save("export", args, kwargs)

    def get_compile_config(self):
        """As stock, but with loss scaling outermost, where Keras looks for it.

        Otherwise a model that is loaded outside of a scope gets a second one.
        """
        config = self._stock["get_compile_config"]()
        hybrid = (config or {}).get("optimizer") or {}
        inner = hybrid.get("config", {}).get("inner_optimizer")
        if inner and inner["class_name"] == "LossScaleOptimizer":
            rule = inner["config"]["inner_optimizer"]
            hybrid = {
                **hybrid,
                "config": {**hybrid["config"], "inner_optimizer": rule},
            }
            config["optimizer"] = {
                **inner,
                "config": {**inner["config"], "inner_optimizer": hybrid},
            }
        return config

    def _save(self, name, args, kwargs):
        self._check_same_call(name, {})
        self._replicas.check()
        with saving.on_rank_zero(self._model) as is_writer:
            if is_writer:
                saving.write(self._stock[name], args, kwargs)
