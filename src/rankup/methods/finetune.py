"""Plain sequential fine-tuning: one dense network, a head per task, nothing against forgetting."""

import copy
from pathlib import Path
from typing import Self

import safetensors.torch
import torch
from torch import Tensor, nn

from rankup import seeds
from rankup.data.tasks import Task
from rankup.feed import Feed
from rankup.layers import Start, TaskHead, active
from rankup.learner import ModuleLearner
from rankup.methods.base import Method, Setting
from rankup.metrics import Footprint
from rankup.plan import make_plan
from rankup.specs import HeadSpec
from rankup.steps import Learner
from rankup.store import write_file

_FILE = "weights.safetensors"


class FineTune(Method):
    """All weights but the heads are shared and go on learning. Norms are shared too, with running
    averages as torch keeps them."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        plan = make_plan(setting.module, setting.growth)
        spec = next(layer for layer in plan.layers if isinstance(layer, HeadSpec))
        self.head = TaskHead(spec, setting.seed, plan.dtype, plan.device)
        original = setting.module.get_submodule(spec.name)
        self.body = copy.deepcopy(setting.module, {id(original): self.head})
        with seeds.forked(plan.device):
            torch.manual_seed(seeds.generator(setting.seed, "finetune").initial_seed())
            for part in self.body.modules():
                if callable(redraw := getattr(part, "reset_parameters", None)):
                    redraw()
        self._before: dict[str, Tensor] | None = None  # what abandoning the open task goes back to

    @property
    def learned(self) -> int:
        return self.head.count

    def begin(self, task: Task) -> Learner:
        self._before = copy.deepcopy(self.body.state_dict())
        self.head.open(self.head.start(task.classes, Start()))
        feed = Feed(task, self.recipe, self.head.weights.device)
        return ModuleLearner(self.body.train(), feed, self.learned)

    def predict(self, x: Tensor, task: int) -> Tensor:
        mode = self.body.training
        with active(task):
            logits: Tensor = self.body.eval()(x)
        self.body.train(mode)
        return logits

    def end(self) -> None:
        added = self.head.learned()
        self.head.close()
        self.head.install(self.head.extended(added))
        # Weights that stay parameters may be views of all that was learned.
        for parameter in self.body.parameters():
            parameter.data = parameter.data.clone()
        self._before = None

    def abandon(self) -> None:
        if self._before is not None:
            self.head.close()
            self.body.load_state_dict(self._before)
            self._before = None

    def footprint(self) -> Footprint:
        heads = sum(t.numel() for i in range(self.learned) for t in self.head.added(i).values())
        return Footprint(
            parameters=heads + sum(t.numel() for t in self._shared().values()), buffer=0
        )

    def save(self, folder: Path) -> None:
        tensors = {f"shared/{name}": tensor for name, tensor in self._shared().items()}
        for index in range(self.learned):
            tensors |= {f"{index}/{key}": t for key, t in self.head.added(index).items()}
        copies = {name: t.detach().to("cpu", copy=True) for name, t in tensors.items()}
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / _FILE, safetensors.torch.save(copies))

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        return (folder / _FILE).exists()

    @classmethod
    def load(cls, folder: Path, setting: Setting) -> Self:
        method = cls(setting)
        tensors = safetensors.torch.load((folder / _FILE).read_bytes())
        with torch.no_grad():
            for name, tensor in method._shared().items():
                tensor.copy_(tensors[f"shared/{name}"])
        device = method.head.weights.device
        index = 0
        while f"{index}/weight" in tensors:
            keys = [key for key in ("weight", "bias") if f"{index}/{key}" in tensors]
            added = {key: tensors[f"{index}/{key}"].to(device) for key in keys}
            method.head.install(method.head.extended(added))
            index += 1
        return method

    def _shared(self) -> dict[str, Tensor]:
        own = {id(t) for t in nn.Module.state_dict(self.head, keep_vars=True).values()}
        state = self.body.state_dict(keep_vars=True)
        return {name: tensor for name, tensor in state.items() if id(tensor) not in own}
