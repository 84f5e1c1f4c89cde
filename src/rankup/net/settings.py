"""Settings of a module that say how many classes it has, such as `num_labels`. While the module
runs they are those of the active task.

Modules of transformers compute a loss from `num_labels` and `config.problem_type`, and their
forward writes the latter. What it writes lasts for that call, and threads that run other tasks do
not see it.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from rankup.layers import TaskHead, active_task
from rankup.utils.derived import derived_class
from rankup.utils.per_thread import PerThread, set_to

_COUNTS = ("num_labels", "num_classes")
_KEPT = "_counts_of_task"  # a module's attribute with the names of settings that are the task's

_DERIVED = "_derived_by_rankup"  # marks the classes made here

_written = PerThread[dict[str, Any]]()  # what the forward in this thread has written to configs


class TaskSettings:
    """Lets a network's body read settings of the active task."""

    def __init__(self, body: nn.Module, heads: Sequence[TaskHead], given: nn.Module) -> None:
        head = heads[0]
        classes = _width(given.get_submodule(head.spec.name))
        for module in body.modules():
            counts = [key for key in _COUNTS if vars(module).get(key) == classes]
            if counts:
                vars(module)[_KEPT] = counts
                _derive(module, {key: _count(key, head) for key in counts})
        self.configs = _configs(body)
        for config in self.configs:
            _derive(config, {"num_labels": _count("num_labels", head), "problem_type": _WRITTEN})

    def of_one_call(self) -> AbstractContextManager[None]:
        return set_to(_written, {}) if self.configs else nullcontext()


def give_back(module: nn.Module, classes: int) -> None:
    """Give a merged module plain settings again, with a task's number of classes."""
    for inner in module.modules():
        for key in vars(inner).pop(_KEPT, ()):
            _underive(inner)
            setattr(inner, key, classes)
    for config in _configs(module):
        _underive(config)
        config.num_labels = classes


def config_for(body: nn.Module, classes: int) -> Any:
    """A copy of the body's config with that number of classes."""
    config: Any = body.config
    if config not in _configs(body):
        return config
    kind: Any = type(config).__mro__[1]
    own = kind.from_dict(config.to_dict())
    own.num_labels = classes
    return own


def _configs(body: nn.Module) -> list[Any]:
    """The configs of all transformers modules in a body, each once."""
    found = (vars(module).get("config") for module in body.modules())
    known = (c for c in found if hasattr(c, "num_labels") and hasattr(c, "problem_type"))
    return list({id(config): config for config in known}.values())


def _width(head: Any) -> int | None:
    return getattr(head, "out_features", getattr(head, "out_channels", None))


def _count(key: str, head: TaskHead) -> property:
    """A property: the number of classes of the active task, or the object's own if there is
    none."""

    def read(self: Any) -> Any:
        if active_task() is not None:
            return head.out_features
        own = vars(self)
        return own[key] if key in own else len(self.id2label or ())

    def write(self: Any, value: Any) -> None:
        own_property = getattr(type(self).__mro__[1], key, None)
        if isinstance(own_property, property):
            own_property.__set__(self, value)
        else:
            vars(self)[key] = value

    return property(read, write)


def _read_problem(config: Any) -> Any:
    written = _written.value
    return vars(config).get("problem_type") if written is None else written.get("problem_type")


def _write_problem(config: Any, value: Any) -> None:
    written = _written.value
    (vars(config) if written is None else written)["problem_type"] = value


_WRITTEN = property(_read_problem, _write_problem)


def _derive(thing: Any, attributes: dict[str, Any]) -> None:
    """Give an object a class of its own with these attributes."""
    thing.__class__ = derived_class(type(thing), attributes | {_DERIVED: True})


def _underive(thing: Any) -> None:
    kinds = type(thing).__mro__
    thing.__class__ = next(kind for kind in kinds if not vars(kind).get(_DERIVED))
