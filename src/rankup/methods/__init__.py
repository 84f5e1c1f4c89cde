"""Ways to learn a stream: the rank update, its rivals, and methods of one's own.

`register` adds a method. Classes to build it from load torch, so they are imported when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rankup.methods.info import MethodInfo, axis
from rankup.methods.options import Options, option
from rankup.methods.registry import (
    METHODS,
    all_methods,
    method_class,
    method_info,
    method_options,
    register,
)

if TYPE_CHECKING:
    from rankup.methods.base import Method, Setting
    from rankup.methods.shared.dense import DenseMethod
    from rankup.training.batches import Draws, Feed
    from rankup.training.engine.module import ModuleLearner

_HOME = {
    "DenseMethod": "rankup.methods.shared.dense",
    "Draws": "rankup.training.batches",
    "Feed": "rankup.training.batches",
    "Method": "rankup.methods.base",
    "ModuleLearner": "rankup.training.engine.module",
    "Setting": "rankup.methods.base",
}

__all__ = [
    "METHODS",
    "DenseMethod",
    "Draws",
    "Feed",
    "Method",
    "MethodInfo",
    "ModuleLearner",
    "Options",
    "Setting",
    "all_methods",
    "axis",
    "method_class",
    "method_info",
    "method_options",
    "option",
    "register",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rankup.methods' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
