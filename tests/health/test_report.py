"""Reports of ranks, as they travel and as they are shown."""

import json

from keras_sparsity.health.report import Call, Report

A = Call("all_reduce sum", "a", "float32", (3,))
FIRST_TWO = Call("all_reduce sum", "machine/a", "float32", (3,), (0, 1))


def test_reports_travel_as_json():
    several = Call("broadcast", "weights", "float32", ((3,), (None, 2)))
    report = Report(
        *("blocked", (several, FIRST_TWO), (A,), 5.0),
        begun=(1, 4),
        left=((A, 3),),
    )
    sent = json.loads(json.dumps(report.to_json()))
    assert Report.from_json(sent) == report
