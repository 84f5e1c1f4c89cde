"""The paper's method: factors, selectors, zero forgetting."""

from pathlib import Path
from typing import Self

from torch import Tensor

from rankup.data.tasks import Task
from rankup.manifest import MANIFEST
from rankup.methods.base import Method, Setting
from rankup.metrics import Footprint
from rankup.network import IncrementalNet
from rankup.store import load, save
from rankup.train import Checkpoint, OnEpoch, fit


class RankUpdate(Method):
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.net = IncrementalNet(setting.module, setting.growth)

    @property
    def learned(self) -> int:
        return len(self.net.tasks)

    def learn(self, task: Task, resume: Checkpoint | None, on_epoch: OnEpoch | None) -> None:
        recipe = self.setting.recipe
        fit(
            self.net.train(), task, recipe, seed=self.setting.seed, resume=resume, on_epoch=on_epoch
        )

    def predict(self, x: Tensor, task: int) -> Tensor:
        logits: Tensor = self.net.eval()(x, task)
        return logits

    def footprint(self) -> Footprint:
        return Footprint(parameters=self.net.size().total, buffer=0)

    def save(self, folder: Path) -> None:
        save(self.net, folder)

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        return (folder / MANIFEST).exists()

    @classmethod
    def load(cls, folder: Path, setting: Setting) -> Self:
        method = cls.__new__(cls)
        method.setting = setting
        method.net = load(folder, setting.module)
        method.net.to(next(setting.module.parameters()).device)
        return method
