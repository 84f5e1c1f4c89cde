"""Data: sources (built-in digits, Hub-layout parquet, image folders), tasks and streams of them.

Names load when they are first used, so that listing the streams needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankup.data.cache import cache_folder
    from rankup.data.sources import Source, Split, digits, load_source
    from rankup.data.streams import STREAMS, Stream, StreamInfo, make_stream
    from rankup.data.tasks import Task
    from rankup.data.transforms import Permutation, Rotation, Transform, to_float
    from rankup.errors import DataError

_HOME = {
    "STREAMS": "streams",
    "DataError": "rankup.errors",
    "Permutation": "transforms",
    "Rotation": "transforms",
    "Source": "sources",
    "Split": "sources",
    "Stream": "streams",
    "StreamInfo": "streams",
    "Task": "tasks",
    "Transform": "transforms",
    "cache_folder": "cache",
    "digits": "sources",
    "load_source": "sources",
    "make_stream": "streams",
    "to_float": "transforms",
}

__all__ = [
    "STREAMS",
    "DataError",
    "Permutation",
    "Rotation",
    "Source",
    "Split",
    "Stream",
    "StreamInfo",
    "Task",
    "Transform",
    "cache_folder",
    "digits",
    "load_source",
    "make_stream",
    "to_float",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rankup.data' has no attribute {name!r}")
    home = _HOME[name] if "." in _HOME[name] else f"rankup.data.{_HOME[name]}"
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return __all__
