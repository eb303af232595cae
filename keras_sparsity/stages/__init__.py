"""Models in stages: where to cut, the schedule, weights some steps ahead."""
