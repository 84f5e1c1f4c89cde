"""Networks that learn one task after another and never forget one.

Every layer's weights are a sum of small frozen factors; each task only adds a little rank and its
own selector over all of them. Names load when they are first used: importing this is instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankup import data, layers, models
    from rankup.checkpoint import Checkpoint
    from rankup.data.tasks import Task
    from rankup.errors import RankupError, StoreError, TaskStateError
    from rankup.fitting import accuracy, fit
    from rankup.network import IncrementalNet, grow
    from rankup.rank import Rank
    from rankup.recipe import Recipe
    from rankup.size import Size
    from rankup.store import Verification, load, save, verify
    from rankup.train import Epoch, OnEpoch, TaskFailed

__version__ = "0.1.0"

_HOME = {
    "Checkpoint": "rankup.checkpoint",
    "Epoch": "rankup.train",
    "IncrementalNet": "rankup.network",
    "OnEpoch": "rankup.train",
    "Rank": "rankup.rank",
    "RankupError": "rankup.errors",
    "Recipe": "rankup.recipe",
    "Size": "rankup.size",
    "StoreError": "rankup.errors",
    "Task": "rankup.data.tasks",
    "TaskFailed": "rankup.train",
    "TaskStateError": "rankup.errors",
    "Verification": "rankup.store",
    "accuracy": "rankup.fitting",
    "fit": "rankup.fitting",
    "grow": "rankup.network",
    "load": "rankup.store",
    "save": "rankup.store",
    "verify": "rankup.store",
}

__all__ = [
    "Checkpoint",
    "Epoch",
    "IncrementalNet",
    "OnEpoch",
    "Rank",
    "RankupError",
    "Recipe",
    "Size",
    "StoreError",
    "Task",
    "TaskFailed",
    "TaskStateError",
    "Verification",
    "accuracy",
    "data",
    "fit",
    "grow",
    "layers",
    "load",
    "models",
    "save",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in ("data", "layers", "models"):
        return import_module(f"rankup.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'rankup' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
