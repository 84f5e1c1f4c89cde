"""Data: sources (built-in digits, parquet, image folders), tasks, streams of them, and inputs.

Names load when they are first used, so that listing the streams needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankup.data.cache import cache_folder
    from rankup.data.inputs import ImageInput, TensorInput, TextInput
    from rankup.data.sources import Source, Split, digits, load_source
    from rankup.data.streams import STREAMS, Stream, StreamInfo, make_stream
    from rankup.data.tasks import Task
    from rankup.data.transforms import Permutation, Rotation, Transform, to_float
    from rankup.errors import DataError

_HOME = {
    "STREAMS": "streams",
    "DataError": "rankup.errors",
    "ImageInput": "inputs",
    "Permutation": "transforms",
    "Rotation": "transforms",
    "Source": "sources",
    "Split": "sources",
    "Stream": "streams",
    "StreamInfo": "streams",
    "Task": "tasks",
    "TensorInput": "inputs",
    "TextInput": "inputs",
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
    "ImageInput",
    "Permutation",
    "Rotation",
    "Source",
    "Split",
    "Stream",
    "StreamInfo",
    "Task",
    "TensorInput",
    "TextInput",
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
