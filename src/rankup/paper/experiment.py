"""Experiments: one setting of one method on one stream, over several seeds."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rankup.methods.settings import apart, settings_for, variant_of
from rankup.runs.request import Device, Request
from rankup.runs.tune import FIRST_SEED
from rankup.training.recipe import Recipe

SEEDS = 5
TASKS = 20  # of all streams of the paper
# The recipe of experiments whose settings are all given: none that was tuned comes below them.
COMPLETE = "complete"


@dataclass(frozen=True)
class Experiment:
    """What a number of a table is measured on. Field names are part of the results' file names."""

    stream: str
    method: str = "rank"
    net: str = "mlp"
    recipe: str = "default"
    # Recipe fields and the method's own options, on top of its tuned settings.
    settings: tuple[tuple[str, Any], ...] = ()
    rank: str | None = None
    seeded: str | None = None
    width: int | None = None
    tasks: int | None = None
    seeds: int = SEEDS
    untold: bool | None = None  # also tested without telling the task
    teacher: Experiment | None = None  # whose networks' answers are learned in place of labels
    held_out: float | None = None  # a trial: scored on this share of the training data
    first: int | None = None  # learns only so many of the stream's tasks
    timed: bool | None = None  # also measures how long an answer takes

    @classmethod
    def of(cls, stream: str, method: str = "rank", **values: Any) -> Experiment:
        """An experiment with these fields; all other values are settings.

        >>> Experiment.of("p-mnist", rank="11,4", epochs=5).settings
        (('epochs', 5),)
        """
        names = {item.name for item in fields(cls)} - {"settings"}
        settings = {name: values.pop(name) for name in values.keys() - names}
        Recipe(**apart(settings).recipe)  # refuses what no recipe may have
        return cls(stream, method, settings=tuple(sorted(settings.items())), **values)

    @property
    def epochs(self) -> int:
        epochs: int = dict(self.settings)["epochs"]
        return epochs

    @property
    def all_seeds(self) -> range:
        """Trials have seeds of their own, which no table shows."""
        start = 0 if self.held_out is None else FIRST_SEED
        return range(start, start + self.seeds)

    @property
    def learned(self) -> int:
        """How many tasks it learns."""
        return self.first or self.tasks or TASKS

    def known(self) -> dict[str, Any]:
        """All that distinguishes its runs from others, except the seed: including the method's
        tuned settings, which may change."""
        about = {k: v for k, v in vars(self).items() if k not in ("settings", "seeds")}
        about["settings"] = {**self._tuned(), **dict(self.settings)}
        about["teacher"] = self.teacher and self.teacher.known()
        return {name: value for name, value in about.items() if value is not None}

    def folder(self) -> Path:
        """Where its results are: equal runs have the same name on every machine."""
        text = json.dumps(self.known(), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        case = f"{self.stream}-{self.net}"
        if self.held_out is None:
            return Path(case) / f"{self.method}-{digest}"
        # Trials of each budget are kept apart from all others.
        budget = f"{case}-width-{self.width}-epochs-{self.epochs}"
        return Path("trials") / budget / f"{self.method}-{digest}"

    def request(self, device: Device, data: Path | None, download: bool = False) -> Request:
        """All its seeds, as the command line would ask for them."""
        return Request(
            stream=self.stream,
            net=self.net,
            width=self.width,
            rank=self.rank,
            seeded=self.seeded,
            tasks=self.tasks,
            recipe=self.recipe,
            seeds=self.seeds,
            data=data,
            download=download,
            resume=True,
            device=device,
            untold=bool(self.untold),
            recipe_options=dict(apart(dict(self.settings)).recipe),
            held_out=self.held_out or 0.0,
            first=self.first,
            is_complete=self.recipe == COMPLETE,
        )

    def _tuned(self) -> dict[str, Any]:
        if self.recipe == COMPLETE:
            return {}
        variant = variant_of(self.method, self.rank or "1", self.options())
        tuned = settings_for(self.method, self.stream, self.net, self.recipe, variant)
        return {**tuned.recipe, **tuned.options}

    def options(self) -> dict[str, Any]:
        """The method's own options that are set here."""
        return dict(apart(dict(self.settings)).options)

    def __str__(self) -> str:
        """A description in one line, to show while it runs.

        >>> print(Experiment.of("p-mnist", "ewc", epochs=5))
        p-mnist, ewc, epochs 5
        """
        parts = [] if self.held_out is None else ["trial"]
        parts += [self.stream, self.method]
        parts += [self.net] if self.net != "mlp" else []
        parts += [f"{self.recipe} recipe"] if self.recipe not in ("default", COMPLETE) else []
        names = ("rank", "seeded", "width", "tasks", "first")
        parts += [f"{n} {getattr(self, n)}" for n in names if getattr(self, n) is not None]
        parts += ["taught"] if self.teacher else []
        return ", ".join(parts + [f"{name} {value}" for name, value in self.settings])
