"""Independent networks: task t has a network of its own, trained on its own data only.

Tasks can neither disturb nor help each other, so storage grows by a whole network per task. The
accuracy is the reference for forward transfer.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

from torch import Tensor

from rankup import seeds
from rankup.data.tasks import Task
from rankup.methods.base import Method, Setting
from rankup.methods.options import ParallelOptions, RankOptions
from rankup.methods.rank import RankUpdate
from rankup.methods.shared.dense import DenseMethod
from rankup.methods.shared.layout import Layouts
from rankup.methods.shared.weights_file import is_unsealed, warn_unsealed
from rankup.metrics import Footprint
from rankup.rank import Rank
from rankup.training.engine.learner import Learner
from rankup.training.engine.module import ModuleLearner


class FullNetwork(DenseMethod):
    """A dense network that learns one task."""

    norms = "per task"

    def kept_layouts(self, learned: int) -> Layouts:
        return {}

    @classmethod
    def load(cls, folder: Path, setting: Setting) -> Self:
        return cls._loaded(folder, setting)  # one warning for all networks is enough


class Parallel(Method):
    """A network per task, dense or of low rank, each of which is a method that learns one task.
    Networks share nothing, norms included.

    All randomness derives from the seed and the task's index, so that the result for a task does
    not depend on the tasks before it.

    Attributes:
        size: "full" for dense networks, or their rank.
        networks: one for each learned task.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting, self.size = setting, setting.options_of(ParallelOptions).size
        self.networks: list[Method] = []
        self._open: Method | None = None
        self._saved: set[Path] = set()

    @property
    def learned(self) -> int:
        return len(self.networks)

    @property
    def begins_afresh(self) -> bool:
        return True

    def begin(self, task: Task) -> Learner:
        network = self._kind()(self._own_setting(self.learned))
        learner = network.begin(task)
        assert isinstance(learner, ModuleLearner)
        learner.kind = id(self)  # one captured graph serves all networks
        self._open = network
        return learner

    def predict(self, x: Tensor, task: int) -> Tensor:
        network = self._open if task == self.learned else self.networks[task]
        assert network is not None
        return network.predict(x, 0)

    def end(self) -> None:
        assert self._open is not None
        self._open.end()
        self.networks.append(self._open)
        self._open = None

    def abandon(self) -> None:
        self._open = None

    def footprint(self) -> Footprint:
        return Footprint(sum(network.footprint().parameters for network in self.networks))

    def saving(self, folder: Path) -> Callable[[], None]:
        homes = {_home(folder, index): network for index, network in enumerate(self.networks)}
        # Learned networks never change, so each is saved once.
        left = {
            home: network.saving(home)
            for home, network in homes.items()
            if home not in self._saved or not network.is_in(home)
        }

        def write() -> None:
            for home, write_network in left.items():
                write_network()
                self._saved.add(home)

        return write

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        return any(kind.is_in(_home(folder, 0)) for kind in (FullNetwork, RankUpdate))

    @classmethod
    def load(cls, folder: Path, setting: Setting) -> Self:
        method = cls(setting)
        kind = method._kind()
        while kind.is_in(home := _home(folder, method.learned)):
            method.networks.append(kind.load(home, method._own_setting(method.learned)))
            method._saved.add(home)
        if any(map(is_unsealed, method._saved)):
            warn_unsealed(folder)
        return method

    def _kind(self) -> type[Method]:
        return FullNetwork if self.size == "full" else RankUpdate

    def _own_setting(self, index: int) -> Setting:
        seed = seeds.number(self.seed, "parallel", index)
        setting = replace(
            self.setting,
            grow_options=replace(self.setting.grow_options, seed=seed),
            seed=seed,
            tasks=self.setting.tasks[index : index + 1],
        )
        if self.size == "full":
            return setting
        rank = Rank(first=int(self.size), step=0)
        return replace(
            setting, grow_options=replace(setting.grow_options, rank=rank), options=RankOptions()
        )


def _home(folder: Path, index: int) -> Path:
    return folder / f"{index + 1:04}"
