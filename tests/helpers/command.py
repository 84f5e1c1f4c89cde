"""The environment of the command line in a process of its own."""

import os
import sys

ENV = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(sys.path),
    "COLUMNS": "80",
    "OMP_NUM_THREADS": "1",
    "RANKUP_DATA": "",
}
