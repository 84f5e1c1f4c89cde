"""Networks that learn one task after another and never forget one.

Every layer's weights are a sum of small frozen factors; each task only adds a little rank and its
own selector over all of them. Names load when they are first used: importing this is instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankup import data, layers, models
    from rankup.data.tasks import Task
    from rankup.errors import RankupError, StoreError, TaskStateError
    from rankup.interop.lora_export import to_lora
    from rankup.interop.lora_import import from_lora
    from rankup.net.grow import grow
    from rankup.net.network import IncrementalNet
    from rankup.net.size import Size
    from rankup.rank import Rank
    from rankup.runs.launch import RunResult, run
    from rankup.storage.store import Verification, load, save, verify
    from rankup.training.checkpoint import Checkpoint
    from rankup.training.fit import accuracy, fit
    from rankup.training.logs import Log
    from rankup.training.loop import Epoch, OnEpoch, TaskFailed
    from rankup.training.recipe import Recipe
    from rankup.training.together import fit_together

__version__ = "0.1.0"

_HOME = {
    "Checkpoint": "rankup.training.checkpoint",
    "Epoch": "rankup.training.loop",
    "IncrementalNet": "rankup.net.network",
    "Log": "rankup.training.logs",
    "OnEpoch": "rankup.training.loop",
    "Rank": "rankup.rank",
    "RankupError": "rankup.errors",
    "Recipe": "rankup.training.recipe",
    "RunResult": "rankup.runs.launch",
    "Size": "rankup.net.size",
    "StoreError": "rankup.errors",
    "Task": "rankup.data.tasks",
    "TaskFailed": "rankup.training.loop",
    "TaskStateError": "rankup.errors",
    "Verification": "rankup.storage.store",
    "accuracy": "rankup.training.fit",
    "fit": "rankup.training.fit",
    "fit_together": "rankup.training.together",
    "grow": "rankup.net.grow",
    "from_lora": "rankup.interop.lora_import",
    "load": "rankup.storage.store",
    "run": "rankup.runs.launch",
    "save": "rankup.storage.store",
    "to_lora": "rankup.interop.lora_export",
    "verify": "rankup.storage.store",
}

__all__ = [
    "Checkpoint",
    "Epoch",
    "IncrementalNet",
    "Log",
    "OnEpoch",
    "Rank",
    "RankupError",
    "Recipe",
    "RunResult",
    "Size",
    "StoreError",
    "Task",
    "TaskFailed",
    "TaskStateError",
    "Verification",
    "accuracy",
    "data",
    "fit",
    "fit_together",
    "from_lora",
    "grow",
    "layers",
    "load",
    "models",
    "run",
    "save",
    "to_lora",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in ("data", "layers", "models"):
        return import_module(f"rankup.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'rankup' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOME[name]), name)
    return found


def __dir__() -> list[str]:
    return __all__
