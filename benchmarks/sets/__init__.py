"""What is asked of trainings on an emulated cluster: runs, tables, limits.

A set is a function of the options that names its runs, and one that makes a
`Report` of their figures. Machines, rates and workloads are those of the
command line, or else the set's own.
"""

from sets import paper, speed, target, wire

SETS = {
    "quick": speed.QUICK,
    "speed": speed.SPEED,
    "others": speed.OTHERS,
    "bytes": wire.BYTES,
    "aggregation": wire.AGGREGATION,
    "bound": wire.BOUND,
    "machines": paper.MACHINES,
    "ablation": paper.ABLATION,
    "sweep": paper.SWEEP,
    "target": target.TARGET,
}
