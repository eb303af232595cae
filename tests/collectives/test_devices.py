"""Each process of a machine uses another GPU."""

import pytest
import tensorflow as tf

from keras_sparsity.collectives import devices


@pytest.mark.parametrize(
    ("num_gpus", "local_rank", "local_size", "expected"),
    [
        (0, 1, 2, []),
        (1, 1, 2, []),
        (2, 0, 1, []),
        (2, 1, 2, ["GPU1"]),
        (2, 2, 4, ["GPU0"]),
    ],
)
def test_which_gpu(num_gpus, local_rank, local_size, expected, monkeypatch):
    gpus = [f"GPU{index}" for index in range(num_gpus)]
    chosen = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(
        tf.config,
        "set_visible_devices",
        lambda device, kind: chosen.append(device),
    )
    devices.pin_gpu(local_rank, local_size)
    assert chosen == expected


def test_a_late_choice_says_what_to_move(monkeypatch):
    def refuse(device, kind):
        raise RuntimeError("Visible devices cannot be modified")

    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind: ["a", "b"]
    )
    monkeypatch.setattr(tf.config, "set_visible_devices", refuse)
    with pytest.raises(RuntimeError, match="keras-sparsity run"):
        devices.pin_gpu(1, 2)
