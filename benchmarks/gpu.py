"""Training on a GPU: the time of a step beside the paper notebook's, the time of whole runs from
the command line beside their bars, and how far steps are from what the machine allows.

    python benchmarks/gpu.py                            # tables, and a dated JSON in results
    python benchmarks/gpu.py --only steps               # or some of it: steps, p-mnist, seeded,
    python benchmarks/gpu.py --only resnet1,resnet5     # resnet1, resnet5; a day's are merged

Steps: medians over epochs, the candidates taking turns; an epoch is as in `fit`, including its
random draws and reading its losses. The notebook's MLP has as many factors per layer as ours.

Runs: `rankup run` in a process of its own, from start-up to report page. A first tiny, untimed run
decodes the data into the cache and compiles Python's modules to bytecode, as an installation does;
what a run itself captures or compiles is timed. MNIST and CIFAR-100 must be there already:
RANKUP_DATA or --data names the folder that holds them.

Floors: copies and multiplications of large matrices are timed in the same process; a step's floor
is what it needs by formula at those rates. Kernels are counted in replays of the step's graph, and
compared with as many that do nothing.

`--device cpu --small` goes through all of it with tiny sizes, to see that it works.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, write_result
from gpu_floors import ceilings, empty_kernel, floors, show_floors
from gpu_runs import RUNS, Write, whole_runs
from gpu_steps import CASES, show_steps, started, step_times


def all_steps(options: argparse.Namespace, write: Write) -> None:
    rates, empty = ceilings(options), empty_kernel(options)
    write({"ceilings": rates | {"empty_kernel_microseconds": 1e6 * empty}})
    learning = {}
    for name, case in CASES.items():
        try:
            learning[name] = started(case, options)
        except Exception as error:  # one that cannot begin must not stop the others
            print(f"{name} could not be started: {error}", flush=True)
    steps = step_times(learning, options)
    show_steps(steps, options.device)
    write({"steps": steps})
    # Last, because a profiler may slow down whatever runs after it.
    found = floors(learning, rates, empty)
    show_floors(found, steps, rates, empty)
    write({"floors": found})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [*RUNS, "steps"]
    parser.add_argument("--only", default=",".join(known), help=f"some of {','.join(known)}")
    parser.add_argument("--repeats", type=int, default=9, help="epochs of steps")
    parser.add_argument("--runs", type=int, default=1, help="times that a whole run is repeated")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny numbers, to see that it works")
    parser.add_argument("--data", type=Path, help="where data sets are, else $RANKUP_DATA")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := set(names) - set(known):
        parser.error(f"there is no {', '.join(sorted(unknown))}, only {', '.join(known)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --device cpu --small only tries the script")
    torch.set_num_threads(options.threads)

    def write(measured: dict[str, Any]) -> Path:
        name = "gpu-small" if options.small else "gpu"
        return write_result(
            name, measured, threads=f"{options.threads}", folder=options.out, merge=True
        )

    # Runs come first, while this process holds no GPU memory.
    runs = [name for name in RUNS if name in names]
    whole = whole_runs(runs, options, write) if runs else True
    if "steps" in names:
        all_steps(options, write)
    print(f"written to {write({})}")
    sys.exit(0 if whole else 1)


if __name__ == "__main__":
    main()
