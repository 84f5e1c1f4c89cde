"""Running what a table lacks, cell after cell, so that it can be stopped and gone on with at any
time, on one machine or on several."""

from __future__ import annotations

import datetime
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from rankup.cli_options import Device
from rankup.compare import failure_in_one_line, release
from rankup.errors import RankupError
from rankup.launch import Launch
from rankup.paper.cells import Cell
from rankup.paper.results import Result, Results
from rankup.replicas import run_seeds
from rankup.report.runs import read_run
from rankup.run import OnProgress

WORK = ".work"  # runs that have not come to their end, in the folder of results


class Runner:
    """
    Args:
        command: what was asked for, as results note it.
    """

    def __init__(self, results: Results, device: Device, data: Path | None, command: str) -> None:
        self.results, self.device, self.data, self.command = results, device, data, command

    def left(self, cells: Sequence[Cell]) -> list[Cell]:
        return [cell for cell in cells if self.results.missing(cell)]

    def run(self, cell: Cell, on_progress: OnProgress | None, note: Callable[[str], None]) -> str:
        """Run the seeds of a cell that were not run; give back why some failed, if they did."""
        missing = self.results.missing(cell)
        work = {seed: self._work(cell, seed) for seed in missing}
        started = time.perf_counter()
        launch = Launch(cell.request(self.device, self.data))
        seeds = launch.of(cell.method, cell.options(), work)
        try:
            failures = run_seeds(seeds, on_progress=on_progress, note=note)
        except RankupError:
            raise
        except Exception as error:
            failures = dict.fromkeys(missing, failure_in_one_line(error))
        seconds = (time.perf_counter() - started) / len(missing)
        for seed in missing:
            self.results.add(cell, [self._result(cell, seed, failures.get(seed, ""), seconds)])
            shutil.rmtree(work[seed], ignore_errors=True)
        release(str(cell), launch.device, "the same command")
        return next(iter(failures.values()), "")

    def _work(self, cell: Cell, seed: int) -> Path:
        return self.results.root / WORK / cell.folder() / f"seed-{seed}"

    def _result(self, cell: Cell, seed: int, failed: str, seconds: float) -> Result:
        run = None if failed else read_run(self._work(cell, seed))
        return Result(
            known=cell.known(),
            seed=seed,
            config=run.config if run else {},
            accuracy=run.matrix.rows if run else [],
            parameters=run.parameters if run else 0.0,
            buffer=run.buffer if run else 0.0,
            seconds=seconds,
            date=datetime.date.today().isoformat(),
            machine=machine(self.device),
            command=self.command,
            failed=failed,
        )


def machine(device: Device) -> str:
    if device is not Device.cpu and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def share(cells: Sequence[Cell], part: str) -> list[Cell]:
    """Every n-th cell, for one of several processes or machines.

    >>> from rankup.paper.cells import cell
    >>> len(share([cell("p-mnist"), cell("r-mnist"), cell("s-cifar100")], "1/2"))
    2
    """
    try:
        own, parts = (int(number) for number in part.split("/"))
        if not 1 <= own <= parts:
            raise ValueError
    except ValueError:
        raise RankupError(f"a share is written as 1/4, the first of four; got {part!r}") from None
    return list(cells[own - 1 :: parts])
