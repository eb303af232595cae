"""The least bytes and the least time of a step.

Formulas on the figures that a workload reports (`_facts.py`, `_network.py`),
with N machines of L processes, S = N L:

    rows     4 alpha w (N-1)/N, summed over the sparse variables: bytes that a
             machine sends and receives (EuroSys Table 3); with L > 1 and local
             aggregation alpha_machine for alpha, without it L alpha
    indices  2 alpha i rows (N-1)/N: once for each pulled row
    dense    4 w (S-1)/S: AllReduce in a ring

All tables are on servers (`architecture="hybrid"`). This module is independent
of the measured library.
"""

_FLOAT32 = 4
_ALPHAS = ("alpha", "alpha_machine")


def wire_itemsize(figures):
    """Bytes of an element on the network."""
    is_narrow = figures["workload"].get("wire_dtype") not in (None, "float32")
    return 2 if is_narrow else _FLOAT32


def carried_bytes(figures, payload=False):
    """Bytes that a machine sends and receives in a step, on average.

    Args:
        figures: of a run.
        payload: whether without the packets' headers.
    """
    machines = figures["per_machine"]
    unit = "payload_bytes_per_step" if payload else "bytes_per_step"
    ways = ("sent", "received")
    return sum(m[f"{w}_{unit}"] for m in machines for w in ways) / len(machines)


def busiest_bytes(figures):
    """The most bytes of a step, over machines and directions."""
    return max(
        machine[f"{way}_bytes_per_step"]
        for machine in figures["per_machine"]
        for way in ("sent", "received")
    )


def sparse_bytes(figures):
    """As `carried_bytes`, without the dense variables' part and its headers."""
    in_all = carried_bytes(figures)
    headers = in_all / carried_bytes(figures, payload=True)
    return in_all - dense_bytes(figures) * headers


def dense_bytes(figures):
    return _ring_bytes(_dense(figures), figures)


def row_bytes(figures, itemsize=_FLOAT32, together=None):
    """Bytes of rows and of their gradients.

    Args:
        figures: of a run.
        itemsize: bytes of an element.
        together: whether a machine's processes pull and push together; by
            default as in the run.
    """
    share = _share_of_others(figures)
    return (
        sum(
            4
            * _asked(v, figures, together)
            * _product(v["shape"][1:])
            * itemsize
            for v in _sparse(figures)
        )
        * share
    )


def index_bytes(figures, together=None):
    """Bytes of row indices; tables that share messages send them once."""
    total = 0
    exchanges = {}
    for variable in _sparse(figures):
        # Equal counts show tables whose rows are pulled together: a kernel
        # and its bias.
        key = (variable["shape"][0], variable["alpha"])
        exchanges.setdefault(variable["exchange"], {})[key] = variable
    size = figures["machines"] * figures["processes"]
    for variables in exchanges.values():
        owned = sum(-(-rows // size) for rows, _ in variables)
        width = next(n for n in (2, 4, 8) if owned < 2 ** (8 * n - (n > 2)) - 1)
        for variable in variables.values():
            total += 2 * _asked(variable, figures, together) * width
    return total * _share_of_others(figures)


def row_ratio(figures):
    """Sparse bytes without indices / the rows' bytes with float32."""
    return (sparse_bytes(figures) - index_bytes(figures)) / row_bytes(figures)


def as_counted_in_the_data(figures):
    """The figures with alpha as counted in the inputs, where known."""
    return {
        **figures,
        "variables": [
            {**v, **{name: v["rows"][name] for name in _ALPHAS}}
            if "rows" in v
            else v
            for v in figures["variables"]
        ],
    }


def alpha_model(figures):
    """The mean of alpha, dense variables' 1, weighted by size (EuroSys 3.1)."""
    sizes = [_product(v["shape"]) for v in figures["variables"]]
    alphas = [
        1 if v["alpha"] is None else v["alpha"] for v in figures["variables"]
    ]
    return sum(a * n for a, n in zip(alphas, sizes, strict=True)) / sum(sizes)


def step_bound(figures, busiest):
    """The least seconds of a step of synchronous training.

        max(busiest / rate, alone + chain / rate)

    The first term is the transmission time of the bytes. The second: a row that
    a step changes reaches the next step after its update, which follows the
    last gradient. So the gradients and then the rows that both steps need, of
    the tables that a step begins with, travel while nothing is computed. The
    same holds for the dense weights of the layers behind these tables.

        chain = alpha w (N-1)/N (needed_pushes + changed_pulls) + 2 w (S-1)/S

    in one direction, over the tables whose ids are the model's inputs and the
    first dense variables.

    Args:
        figures: of a run with `--alone`.
        busiest: bytes that the busiest interface carries in one direction.

    Returns:
        dict of its parts in seconds: `alone`, `network`, `chain`, and
        `bound`.
    """
    itemsize = wire_itemsize(figures)
    chain = sum(
        _asked(v, figures)
        * _product(v["shape"][1:])
        * itemsize
        * (v["rows"]["needed_pushes"] + v["rows"]["changed_pulls"])
        for v in _sparse(figures)
        if "rows" in v
    ) * _share_of_others(figures)
    first = [v for v in _dense(figures) if v["comes_first"]]
    chain += _ring_bytes(first, figures) / 2
    bytes_per_second = figures["rate_mbit"] * 1e6 / 8
    parts = {
        "alone": figures["seconds_alone"],
        "network": busiest / bytes_per_second,
        "chain": chain / bytes_per_second,
    }
    parts["bound"] = max(parts["network"], parts["alone"] + parts["chain"])
    return parts


def _sparse(figures):
    return [v for v in figures["variables"] if v["alpha"] is not None]


def _dense(figures):
    return [v for v in figures["variables"] if v["alpha"] is None]


def _ring_bytes(variables, figures):
    elements = sum(_product(v["shape"]) for v in variables)
    size = figures["machines"] * figures["processes"]
    return 4 * elements * wire_itemsize(figures) * (size - 1) / size


def _asked(variable, figures, together=None):
    """Rows of a variable that a machine pulls in a step."""
    if together is None:
        together = figures["workload"]["local_aggregation"]
    asked = figures["processes"] * variable["alpha"]
    if together and figures["processes"] > 1:
        asked = variable["alpha_machine"]
    return asked * variable["shape"][0]


def _share_of_others(figures):
    return (figures["machines"] - 1) / figures["machines"]


def _product(shape):
    product = 1
    for size in shape:
        product *= size
    return product
