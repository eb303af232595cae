"""A training that goes on from a checkpoint."""

from tests import checkpoint_functions as functions

STEPS = functions.NUM_EXAMPLES // functions.BATCH


def test_says_when_an_order_cannot_be_found_again(tmp_path, caplog):
    functions.train(tmp_path, kind="dataset", interrupt_after=STEPS + 4)
    functions.train(tmp_path, kind="dataset", seed=6)
    (said,) = [r.message for r in caplog.records if "seed" in r.message]
    assert "The random seed is 6, and was 5" in said
    assert "KERAS_SPARSITY_SEED=5" in said
