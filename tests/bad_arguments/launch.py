"""Wrong arguments of `ks.launch.run`."""

import numpy as np

from tests.bad_arguments.patterns import INTEGER
from tests.public_calls import Unpicklable

BAD = [
    *(
        ("launch.run", arguments, message)
        for arguments, message in [
            ({"function": 3}, "top level of a module.*Received: 3"),
            ({"function": lambda: 1}, "top level.*to a file of its own"),
            ({"function": None}, "top level of a module.*Received: None"),
            ({"function": np.zeros(2)}, "top level of a module.*Received: ar"),
            ({"num_processes": 20_000}, "At most 10000 pro.*Received: 20000"),
            ({"num_processes": 10_000}, "of memory, and this machine has"),
            ({"num_processes": 0}, f"{INTEGER}num_processes=0"),
            ({"num_processes": "a"}, f"{INTEGER}num_processes='a'"),
            ({"num_processes": 1.5}, f"{INTEGER}num_processes=1.5"),
            (
                {"engine": "mpi"},
                "must be one of 'local'.*: engine='mpi'",
            ),
            ({"engine": np.zeros(2)}, "must be one of 'local'.*: engine=array"),
            (
                {"engine": "local", "num_processes": 2},
                "for one process.*2 processes. Use engine='native'",
            ),
            ({"num_servers": -1}, "processes, or 0.*num_servers=-1"),
            ({"num_servers": True}, "processes, or 0.*num_servers=True"),
            ({"machines": 0}, f"{INTEGER}machines=0"),
            ({"machines": "a"}, f"{INTEGER}machines='a'"),
            (
                {"num_processes": 2, "machines": 3},
                "must divide.*2 processes and machines=3",
            ),
            ({"args": 3}, "a tuple of arguments.*Received: args=3"),
            ({"args": (Unpicklable(),)}, "must pickle. Received.*a lock"),
            ({"kwargs": 3}, "a dictionary.*Received: kwargs=3"),
            ({"kwargs": {1: 2}}, "a dictionary.*Received: kwargs={1: 2}"),
            ({"timeout": 0}, "positive number of seconds.*timeout=0"),
            (
                {"timeout": float("inf")},
                "positive number of seconds, or None for no limit.*timeout=inf",
            ),
            ({"timeout": "9"}, "positive number of seconds.*timeout='9'"),
            ({"env": 3}, "a dictionary of strings.*Received: env=3"),
            ({"env": {"": "a"}}, "a dictionary of strings.*as an environment"),
            ({"env": {"A=B": "a"}}, "a dictionary of strings.*env={'A=B': "),
            ({"env": {"A": "\0"}}, "a dictionary of strings.*as an environm"),
            ({"env": {"A": 1}}, "a dictionary of strings.*env={'A': 1}"),
        ]
    ),
]
