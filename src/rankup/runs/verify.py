"""Checking the files of runs: settings, metrics, checkpoints and networks."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankup.errors import RankupError
from rankup.methods import method_class
from rankup.methods.shared.weights_file import has_weights, verify_weights
from rankup.runs.checkpoints import checkpoint_problems
from rankup.runs.comparison import is_comparison, read_index
from rankup.runs.records import (
    CONFIG,
    METRICS,
    NET,
    is_sealed,
    raw_lines,
    read_config,
    read_json,
    read_lines,
    refuse_mixed_up,
    runs_below,
    saved_tasks,
)
from rankup.storage.manifest import is_of_network
from rankup.storage.seal import opened
from rankup.storage.store import Verification
from rankup.storage.store import verify as verify_network


@dataclass(frozen=True)
class _WithoutSeals(Verification):
    """The result for a run that version 0.1 began."""

    def __str__(self) -> str:
        whole = super().__str__()
        return whole if self.problems else f"{whole}, as far as can be told without seals"


def verify_all(path: Path) -> Iterator[Verification]:
    """Check each run below a folder, and the files of comparisons and trials beside their runs. In
    a folder without runs, check its network."""
    runs = list(runs_below(path))
    if not runs and not is_comparison(path):
        yield verify_network(path)
        return
    if problems := _problems_beside(path):
        yield Verification(path, (), tuple(problems))
    yield from map(verify_run, runs)


def verify_run(run: Path) -> Verification:
    """Check every file of a run, even if one is broken."""
    problems, config, lines = list[str](), None, None
    try:
        config = read_config(run / CONFIG)
    except RankupError as error:
        problems.append(str(error))
    try:
        lines = raw_lines(run / METRICS) if config is None else read_lines(run)
    except RankupError as error:
        problems.append(str(error))
    saved = saved_tasks(run)  # right after its lines, because it may be learning more
    problems += checkpoint_problems(run)
    in_network = _network_problems(run / NET)
    if lines is not None and not in_network:
        in_network = _missing(run, config, saved, len(lines))
    problems += in_network
    kind = Verification if problems or is_sealed(run) else _WithoutSeals
    return kind(run, tuple(str(line["task"]) for line in lines or ()), tuple(problems))


def _missing(run: Path, config: dict[str, Any] | None, saved: int, learned: int) -> list[str]:
    """The problems of a run with `saved` tasks in its network and `learned` ones in its metrics."""
    if not learned:
        return []
    try:
        if config and saved:  # version 0.1 did not say how many tasks were in weights
            refuse_mixed_up(run, config["method"], saved, learned)
    except RankupError as error:
        return [str(error)]
    try:
        kind = method_class(config["method"]) if config else None
    except RankupError:  # a method from outside that is not installed here
        return []
    has_net = kind.is_in(run / NET) if kind else (run / NET).exists()
    return [] if has_net else [f"{run / NET} holds nothing, but {METRICS} lists {learned} tasks"]


def _network_problems(net: Path) -> list[str]:
    if not is_of_network(net):
        homes = [net, *sorted(path for path in net.glob("*") if path.is_dir())]  # one per task
        return [problem for home in homes if has_weights(home) for problem in verify_weights(home)]
    return list(verify_network(net).problems)


def _problems_beside(path: Path) -> list[str]:
    problems = []
    try:
        if is_comparison(path):
            read_index(path)
    except RankupError as error:
        problems.append(str(error))
    for file in sorted(path.glob("*.json")):
        if not (path / file.stem).is_dir():  # where the trials of a choice are
            continue
        try:
            choice = read_json(file, f"{file} is truncated or edited: it is not JSON")
            opened(choice if isinstance(choice, dict) else {}, file, file)
        except RankupError as error:
            problems.append(str(error))
    return problems
