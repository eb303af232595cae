"""Each rank owns some rows of a table: the parameter server."""

from keras_sparsity.placement.base import Placement, Reducer


class Owners(Reducer):
    """Takes the gradients of the rows that this rank owns.

    The gradient of a pull has pushed them here: they are those of all ranks.
    """

    path = "ps"

    @classmethod
    def reduce(cls, updates, communicator, options):
        for update in updates:
            if not update.is_of_rows:
                raise ValueError(
                    f"The gradient of the sharded table {update.variable} must "
                    "be the tf.IndexedSlices that the gradient tape gives. "
                    f"Received: {update.gradient}."
                )

    @classmethod
    def updated_bytes(cls, own, whole, size, num_slots):
        return own * (1 + num_slots)

    @classmethod
    def role_of(cls, variable):
        return f"{variable.table.messages}/"

    @classmethod
    def shares_message(cls, variable):
        table = getattr(variable, "table", None)
        return table is not None and table.shares_messages


class Owned(Placement):
    """Owners send rows to those who need them, and receive their gradients.

    Args:
        layout: `Layout` of the rows.

    References:
        EuroSys 3.1 (parameter server), 4.3.
    """

    name = "ps"
    reducers = Owners, Owners

    def __init__(self, layout):
        self.layout = layout
