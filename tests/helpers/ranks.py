"""Two processes that learn one network, by gloo on this machine."""

import gc
import importlib
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

import rankup

SIZE = 2


def run_ranks(folder: Path, module: str, jobs: list[str]) -> dict[str, list[Any]]:
    """What each rank's functions of these names, of a module, return; an error as its message."""
    here, source = Path(__file__).parents[1], Path(rankup.__file__).parents[1]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (source, here))),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
        "PYTHONFAULTHANDLER": "1",  # to see what a process that is aborted was doing
    }
    command = [sys.executable, "-m", "helpers.ranks", str(folder), module, *jobs]
    ranks = [
        subprocess.Popen([*command, str(rank)], env=env, stderr=subprocess.PIPE, text=True)
        for rank in range(SIZE)
    ]
    try:
        errors = [rank.communicate(timeout=180)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(rank.returncode for rank in ranks), errors
    found = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(SIZE)]
    return {job: [each[job] for each in found] for job in jobs}


def main(folder: str, module: str, *jobs_and_rank: str) -> None:
    *jobs, rank = jobs_and_rank
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=int(rank), world_size=SIZE
    )
    found = {}
    for job in jobs:
        try:
            found[job] = getattr(importlib.import_module(module), job)(int(rank))
        except rankup.RankupError as error:
            found[job] = f"refused: {error}"
        except Exception:
            found[job] = traceback.format_exc()
        torch.distributed.barrier()
    torch.save(found, Path(folder) / f"{rank}.pt")
    gc.collect()  # what jobs leave in cycles, as torch's wrapper, must not outlive the group
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
