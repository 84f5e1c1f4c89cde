"""Reading the folder of a comparison of methods: its settings, and the runs of each method with all
seeds.

compare.json    the settings, sealed
METHOD/seed-K/  a run folder for each
"""

import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rankup.errors import RankupError
from rankup.runs.read import OverSeeds, Run, read_run
from rankup.runs.records import CONFIG, read_config, read_json, read_lines
from rankup.storage.seal import opened

INDEX = "compare.json"


@dataclass(frozen=True)
class Index:
    """The content of `compare.json`.

    Attributes:
        asked: the settings that all methods have in common.
        seeds: the seeds of each method.
        methods: the names of the methods, in the order given, and whether each is continual.
        failed: why methods failed.
    """

    asked: dict[str, Any]
    seeds: list[int]
    methods: dict[str, bool]
    failed: dict[str, str]


@dataclass(frozen=True)
class Entry(OverSeeds):
    """A method of a comparison, with its results over seeds.

    Attributes:
        method: its name.
        number: its place in the order given, from 1, which determines its colour.
        continual: whether it sees one task after another.
        seeds: how many seeds it is to be run with.
        runs: the complete runs.
        configs: their settings; if there are none, those of the runs that have begun.
        failed: why some seeds have no complete run, if that is known.
    """

    method: str
    number: int
    continual: bool
    seeds: int
    runs: list[Run]
    configs: list[dict[str, Any]]
    failed: str

    @property
    def by_seed(self) -> dict[Any, float]:
        """The average accuracy over all tasks, after the last, by seed."""
        seeds = (run.config.get("seed") for run in self.runs)
        return dict(zip(seeds, self.accuracy, strict=True))

    @property
    def whole(self) -> bool:
        """Whether the runs of all seeds are complete."""
        return len(self.runs) == self.seeds

    @property
    def name(self) -> str:
        """The method's name, marked if it is not continual or lacks seeds."""
        mark = "" if self.continual else "*"
        some = f" ({len(self.runs)} of {self.seeds} seeds)" if self.runs and not self.whole else ""
        return f"{self.method}{mark}{some}"


@dataclass(frozen=True)
class Difference:
    """How much more accurate one method is than another.

    Attributes:
        mean: the mean difference over seeds.
        error: the standard error of that mean.
        seeds: the number of seeds.
    """

    mean: float
    error: float
    seeds: int

    @classmethod
    def paired(cls, one: Mapping[Any, float], other: Mapping[Any, float]) -> "Difference | None":
        """The difference between two methods' accuracies by seed, paired, so that effects of the
        seed on both methods, such as the order of classes, cancel out. None with fewer than two
        seeds in common.

        >>> Difference.paired({0: 0.75, 1: 0.5, 2: 0.9}, {1: 0.25, 0: 0.75, 3: 0.0})
        Difference(mean=0.125, error=0.125, seeds=2)
        """
        gains = [accuracy - other[seed] for seed, accuracy in one.items() if seed in other]
        if len(gains) < 2:
            return None
        error = statistics.stdev(gains) / math.sqrt(len(gains))
        return cls(statistics.mean(gains), error, len(gains))


@dataclass(frozen=True)
class Comparison:
    """The results of a comparison.

    Attributes:
        path: its folder.
        stream: the name of the stream.
        seeds: how many seeds each method is to be run with.
        entries: the methods, in the order given.
    """

    path: Path
    stream: str
    seeds: int
    entries: list[Entry]

    @property
    def shown(self) -> list[Entry]:
        """The entries that have results, in the order given."""
        return [entry for entry in self.entries if entry.runs]

    @property
    def ranked(self) -> list[Entry]:
        """The entries by falling accuracy, those without results last."""
        best = sorted(self.shown, key=lambda entry: -statistics.mean(entry.accuracy))
        return best + [entry for entry in self.entries if not entry.runs]

    @property
    def reference(self) -> Entry | None:
        """The method that others are compared with: the first in the order given with several
        complete seeds. Not the best one, because that choice would depend on the results."""
        several = [entry for entry in self.entries if len(entry.by_seed) > 1]
        return several[0] if len(several) > 1 else None

    def difference(self, entry: Entry) -> Difference | None:
        """A method's difference to the reference; None for the reference, or if it is unknown."""
        reference = self.reference
        if reference is None or entry.method == reference.method:
            return None
        return Difference.paired(entry.by_seed, reference.by_seed)

    @property
    def failed(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.failed]


def is_comparison(path: Path) -> bool:
    return os.path.lexists(path / INDEX)


def read_comparison(path: Path) -> Comparison:
    index = read_index(path)
    entries = [read_entry(path, index, method) for method in index.methods]
    return Comparison(path, str(index.asked["stream"]), len(index.seeds), entries)


def read_index(path: Path) -> Index:
    """The index of a comparison's folder, which must match its seal."""
    data, _ = opened(raw_index(path), path / INDEX, path)
    try:
        index = Index(**data)
        kinds = (dict, list, dict, dict)
        values = (getattr(index, item.name) for item in fields(Index))
        if not all(isinstance(v, kind) for v, kind in zip(values, kinds, strict=True)):
            raise TypeError
        if not all(type(seed) is int for seed in index.seeds):
            raise TypeError
        if len(set(index.seeds)) < len(index.seeds):
            raise ValueError
        index.asked["stream"]
    except (ValueError, TypeError, KeyError):
        raise RankupError(_no_index(path)) from None
    return index


def raw_index(path: Path) -> dict[str, Any]:
    """The content of `compare.json`, whether or not it matches its seal."""
    try:
        data = read_json(path / INDEX, _no_index(path))
    except FileNotFoundError as error:
        raise RankupError(f"{path / INDEX} cannot be read: {error.strerror}") from error
    if not isinstance(data, dict):
        raise RankupError(_no_index(path))
    return data


def _no_index(path: Path) -> str:
    return f"{path / INDEX} is truncated or edited: it lists no methods"


def seed_folder(path: Path, method: str, seed: int) -> Path:
    return path / method / f"seed-{seed}"


def read_entry(path: Path, index: Index, method: str) -> Entry:
    folders = [seed_folder(path, method, seed) for seed in index.seeds]
    begun = {f: read_config(f / CONFIG) for f in folders if os.path.lexists(f / CONFIG)}
    # Not the number in a run's own settings, because it may have learned more tasks since.
    tasks = {f: index.asked.get("tasks", config.get("tasks")) for f, config in begun.items()}
    runs = [read_run(f, selectors=False) for f in begun if len(read_lines(f)) == tasks[f]]
    return Entry(
        method=method,
        number=1 + list(index.methods).index(method),
        continual=index.methods[method],
        seeds=len(index.seeds),
        runs=runs,
        configs=[run.config for run in runs] or list(begun.values()),
        # A method that failed once may be complete by now.
        failed=index.failed.get(method, "") if len(runs) < len(folders) else "",
    )
