"""The network that a server serves. It follows its folder: tasks that another process saves there
are added while the server runs."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rankup import models
from rankup.data.inputs import Input, TensorInput
from rankup.errors import RankupError
from rankup.inference.sharing import factor_shares
from rankup.net.network import IncrementalNet
from rankup.storage.refresh import Signature, refresh, signature
from rankup.storage.store import load

_POLL = 0.25  # seconds between looks at the folder


@dataclass(frozen=True)
class TaskCard:
    """The description of a task.

    Attributes:
        name: of the task.
        title: for people; the name if it has none.
        classes: their number.
        class_names: one for each class.
        inputs: how its inputs are prepared, if known.
        kind: equal for tasks with equal inputs, for which an input is prepared once.
        about: the entry of the task in the answer to `GET /tasks`.
    """

    name: str
    title: str
    classes: int
    class_names: tuple[str, ...]
    inputs: Input | None
    kind: int
    about: dict[str, Any]


class Snapshot:
    """A network with a fixed list of tasks and their descriptions. A request can go on using it
    while the server replaces it by a newer one."""

    def __init__(self, net: IncrementalNet, known: "Snapshot | None" = None) -> None:
        """
        Args:
            known: an older snapshot of the same network, whose descriptions are used again where
                nothing has changed.
        """
        self.net = net
        self.tasks: dict[str, TaskCard] = dict(known.tasks) if known else {}
        self._kinds: dict[Input | None, int] = dict(known._kinds) if known else {}
        self._descriptions = {
            task.name: (task.about, net.notes.get(task.name)) for task in net._tasks.tasks
        }
        for name, description in self._descriptions.items():
            if known is None or known._descriptions.get(name) != description:
                self.tasks[name] = _card(net, name, self._kinds)

    def task(self, name: object) -> TaskCard:
        if not isinstance(name, str):
            raise RankupError(f"a task is given by its name, got {name!r:.60}")
        if name not in self.tasks:
            known = ", ".join(map(repr, list(self.tasks)[:8])) or "none yet"
            more = f" and {len(self.tasks) - 8} more" if len(self.tasks) > 8 else ""
            raise RankupError(f"there is no task {name[:80]!r}, only {known}{more}")
        return self.tasks[name]

    @cached_property
    def guesses(self) -> bool:
        """Whether a question need not name its task: the network guesses it."""
        kinds = {card.kind for card in self.tasks.values()}
        return self.net.routing is not None and len(self.tasks) > 1 and len(kinds) == 1

    @cached_property
    def listing(self) -> bytes:
        """The answer to `GET /tasks`."""
        size = self.net.size()
        cards = [card.about for card in self.tasks.values()]
        network = {
            "tasks": len(cards),
            "numbers": size.total,
            "bytes": size.bytes,
            "guesses": self.guesses,
            "inputs": sorted({card["inputs"]["kind"] for card in cards if card["inputs"]}),
        }
        return json.dumps({"network": network, "tasks": cards}, ensure_ascii=False).encode()

    @cached_property
    def sharing(self) -> bytes:
        """The answer to `GET /sharing`."""
        shares = factor_shares(self.net)[: len(self.tasks)]
        return json.dumps(
            {"tasks": list(self.tasks), "shares": shares}, ensure_ascii=False
        ).encode()


class Served:
    """The current snapshot of the network in a folder.

    Args:
        folder: where the network is, and where tasks are added to it.
        changed: called with every new network, in the thread that follows the folder.
    """

    def __init__(
        self, folder: Path, changed: Callable[[IncrementalNet], None] = lambda _: None
    ) -> None:
        self.folder, self.changed = folder, changed
        self.failure: str | None = None  # why the folder's last change could not be loaded
        self._seen: Signature | None = signature(folder)
        self.now = Snapshot(load(folder))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="rankup-follow", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> list[str]:
        """Check the folder once and load what has changed; returns the names of new tasks."""
        if (there := signature(self.folder)) == self._seen or there is None:
            return []
        before = self.now
        try:
            refresh(before.net, self.folder)
            self.now = Snapshot(before.net, before)
        except RankupError:  # more has changed than new tasks
            try:
                self.now = Snapshot(load(self.folder))
            except RankupError as error:
                # The old network goes on answering, and is replaced after the folder's next change.
                self.failure, self._seen = str(error), there
                return []
            self.changed(self.now.net)
        self.failure, self._seen = None, there
        return [name for name in self.now.tasks if name not in before.tasks]

    def _follow(self) -> None:
        while not self._ended.wait(_POLL):
            self.look()


def _card(net: IncrementalNet, name: str, kinds: dict[Input | None, int]) -> TaskCard:
    known = net.describe(name)
    names = tuple(known.class_names) or tuple(map(str, range(known.classes)))
    inputs = known.inputs or _numbers_of(net)
    title = known.title or name
    about = {
        "name": name,
        "title": title,
        "description": known.description,
        "tags": list(known.tags),
        "classes": list(names),
        "accuracy": known.accuracy,
        "samples": known.samples,
        "numbers": known.numbers,
        "uses": list(known.uses),
        "inputs": None if inputs is None else {**inputs.to_json(), "text": str(inputs)},
    }
    kind = kinds.setdefault(inputs, len(kinds))
    return TaskCard(name, title, known.classes, names, inputs, kind, about)


def _numbers_of(net: IncrementalNet) -> Input | None:
    """Plain numbers in the shape that a built-in model takes; None for other models."""
    about = models.describe(net.body)
    if about["model"] == "mlp":
        return TensorInput((about["options"]["inputs"],))
    if about["model"] == "resnet18":
        options = about["options"]
        return TensorInput((options["channels"], options["image_size"], options["image_size"]))
    return None
