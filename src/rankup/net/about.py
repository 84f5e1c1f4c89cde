"""Facts about a task that are stored with its tensors, and people's notes on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from rankup.data.inputs import Input, from_json
from rankup.errors import RankupError
from rankup.net.kept_factors import KeptFactors, kept_of_layers

if TYPE_CHECKING:
    from rankup.net.network import IncrementalNet


@dataclass(frozen=True)
class About:
    """Facts about a task. They follow from how it was learned, so they are equal for equal
    networks, and are part of a network's hash."""

    class_names: tuple[str, ...] = ()
    inputs: Input | None = None  # how its inputs are prepared, if not as the network's
    recipe: Mapping[str, Any] | None = None
    seed: int | None = None
    samples: int | None = None  # that it was learned from
    accuracy: float | None = None  # on data that was held out, from 0 to 1

    def to_json(self) -> dict[str, Any]:
        """What is known, as plain data."""
        data = {key: value for key, value in vars(self).items() if value not in ((), None)}
        return data | ({"inputs": self.inputs.to_json()} if self.inputs else {})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> About:
        given = dict(data)
        if "inputs" in given:
            given["inputs"] = from_json(given["inputs"])
        return cls(**given | {"class_names": tuple(given.get("class_names", ()))})


@dataclass(frozen=True)
class Note:
    """People's notes on a task, and when and by which versions it was saved. They are no part of a
    network's hash."""

    title: str = ""  # a name for people
    description: str = ""
    tags: tuple[str, ...] = ()
    saved: str = ""  # when it was first saved, in UTC
    versions: Mapping[str, str] = field(default_factory=dict)  # of libraries


@dataclass(frozen=True)
class TaskDescription:
    """All that a network can tell about one of its tasks."""

    name: str
    classes: int
    class_names: tuple[str, ...]
    inputs: Input | None  # how its inputs are prepared: its own way, or the network's
    recipe: Mapping[str, Any] | None
    seed: int | None
    samples: int | None
    accuracy: float | None
    views: int  # how many turned views of an image it answers from
    uses: tuple[str, ...]  # the tasks from whose factors it selects
    kept: Mapping[str, KeptFactors]  # of each layer that may drop factors
    numbers: int  # that it added
    title: str
    description: str
    tags: tuple[str, ...]
    saved: str
    versions: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "inputs": self.inputs and self.inputs.to_json()}


def describe(net: IncrementalNet, index: int) -> TaskDescription:
    task = net._tasks.tasks[index]
    about = vars(task.about) | {"inputs": task.about.inputs or net.inputs}
    return TaskDescription(
        name=task.name,
        classes=task.classes,
        views=task.views,
        uses=net._tasks.uses(index),
        kept=kept_of_layers(net.plan.specs, net._tasks, index),
        numbers=net.size(index).total,
        **about,
        **vars(net.notes.get(task.name, Note())),
    )


def annotate(net: IncrementalNet, index: int, given: Mapping[str, Any]) -> None:
    """Change facts and notes about a task."""
    task = net._tasks.tasks[index]
    facts = {f.name for f in fields(About)}
    notes = {"title", "description", "tags"}
    if unknown := given.keys() - facts - notes:
        raise RankupError(
            f"a task has no {min(unknown)!r} to annotate, only {', '.join(sorted(facts | notes))}"
        )
    lists = {k: tuple(given[k]) for k in ("class_names", "tags") if k in given}
    given = {**given, **lists}
    about = replace(task.about, **{k: v for k, v in given.items() if k in facts})
    check_about(task.name, task.classes, about)
    net._tasks.tasks[index] = replace(task, about=about)
    if said := {k: v for k, v in given.items() if k in notes}:
        net.notes[task.name] = replace(net.notes.get(task.name, Note()), **said)


def check_about(name: str, classes: int, about: About) -> None:
    if len(about.class_names) not in (0, classes):
        raise RankupError(
            f"task {name!r} has {classes} classes, but {len(about.class_names)} names for them"
        )
    if about.accuracy is not None and not 0 <= about.accuracy <= 1:
        raise RankupError(f"an accuracy must be from 0 to 1, got {about.accuracy!r}")
