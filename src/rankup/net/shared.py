"""The tensors that all tasks share: those that are neither factored nor kept per task."""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from rankup.errors import TaskStateError
from rankup.growing.reinit import drawing_of
from rankup.growing.supported import frozen_parts
from rankup.layers import Selection, Start, Tensors, row_by_row
from rankup.layers.spec import DenseSpec

_Place = tuple[nn.Module, str]  # a module and the name of one of its tensors
_NORMS = nn.modules.batchnorm._NormBase


class SharedTensors:
    """The tensors of a `DenseSpec`, which stay in the modules that they belong to.

    They are trained with the first task or kept from the given module, and constant from then on.
    All of them are buffers, except that parameters are parameters while the first task trains them.
    The methods for the stages of a task are those of `TaskLayer`.

    Args:
        module: the network's module.
        copy: whether the tensors are copied.

    Attributes:
        came_with_module: names of tensors that cannot be drawn again from the network's seed.
        self_updating: names of buffers that their modules change in a forward.
    """

    def __init__(self, spec: DenseSpec, module: nn.Module, *, copy: bool = True) -> None:
        self.spec = spec
        self.count = 0  # committed tasks
        named = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        tensors = dict(named)
        # Where each tensor is; one that several modules share has several places.
        self._places: dict[str, list[_Place]] = {
            name: list(dict.fromkeys(_place(module, n) for n, t in named if t is tensors[name]))
            for name, _ in spec.tensors
        }
        self._buffers = [name for name, _ in spec.tensors if name not in spec.trained]
        self._norms = [m for m in module.modules() if isinstance(m, _NORMS)]
        frozen = frozen_parts(module)
        self._frozen = [m for m in map(module.get_submodule, frozen) if m._buffers]
        self.came_with_module = [
            name
            for name, _ in spec.tensors
            if name.rpartition(".")[0] in frozen
            or not _is_drawn(self._places[name][0][0], tensors[name], name in spec.trained)
        ]
        self.self_updating: set[str] = set()
        self._before: Tensors = {}
        self._fix({name: tensor.detach() for name, tensor in self._values().items()}, copy)

    @property
    def is_constant(self) -> bool:
        return self.count > 0 or self.spec.kept

    @property
    def buffer_names(self) -> list[str]:
        """The names of those that are buffers of the given module, which its forward may change."""
        return self._buffers

    def constants(self) -> dict[int, Tensor]:
        """All others, by their ids: tensors that a copy of the module may share."""
        values = self._values()
        return {id(values[name]): values[name] for name in values if name not in self._buffers}

    def hold_modes(self) -> None:
        """Put frozen modules into eval mode, and shared norms and self-updating modules once their
        values are fixed."""
        held = list(self._frozen)
        if self.is_constant:
            held += self._norms
            held += (m for name in self.self_updating for m, _ in self._places[name])
        for module in held:
            module.training = False

    def start(self, classes: int, start: Start) -> Tensors:
        if self.is_constant:
            return {}
        values = self._values()
        return {name: values[name].clone() for name in self.spec.trained}

    def open(self, values: Tensors, start: Start | None = None) -> None:
        self._before = {name: value.clone() for name, value in self._values().items()}
        for name, value in values.items():
            parameter = nn.Parameter(value)
            for module, key in self._places[name]:
                del module._buffers[key]
                module.register_parameter(key, parameter)
                _refresh(module)

    def learned(self) -> Tensors:
        if not self.is_constant:
            self.self_updating.update(self._changed(self._buffers))
            return {name: tensor.detach().clone() for name, tensor in self._values().items()}
        if changed := self._changed(self._places):
            self._restore(changed)
            raise TaskStateError(
                f"the module changed its {changed[0]!r} while it learned, although earlier answers "
                "depend on it; it is held constant from now on: call abandon_task and learn the "
                "task again"
            )
        return {}

    def undo_trial(self) -> None:
        """Restore the values that a trial run of the module has changed."""
        self._restore(self._changed(self._places if self.is_constant else self._buffers))
        values = self._values()
        for name in self._changed(self._places):  # parameters, if the forward itself changes them
            values[name].data.copy_(self._before[name])

    def unchanged(self) -> set[str]:
        """Names of buffers that the open task has not changed. They may hold any values, such as
        those of a mask of −inf."""
        return {*self._buffers} - {*self._changed(self._buffers)}

    def close(self) -> None:
        self._fix(self._before)
        self._before = {}

    def extended(self, *added: Tensors, selections: Sequence[Selection] = (None,)) -> Tensors:
        return {name: tensor for tensors in added for name, tensor in tensors.items()}

    def install(self, tables: Tensors, selections: Sequence[Selection] = (None,)) -> None:
        self._fix(tables)
        self.count += len(selections)

    def without(self, task: int) -> Tensors:
        return {}

    def drop(self, task: int, tables: Tensors) -> None:
        self.count -= 1

    def added(self, task: int) -> Tensors:
        return {} if task or self.spec.kept else self._values()

    def base(self) -> Tensors:
        return self._values() if self.spec.kept else {}

    def load_base(self, base: Tensors) -> None:
        self._fix(base)

    def tie(self) -> None:
        """Put one tensor in all its places again, after torch has moved each of them by itself."""
        for (first, name), *others in self._places.values():
            for module, key in others:
                if key in module._buffers and module._buffers[key] is not getattr(first, name):
                    module._buffers[key] = getattr(first, name)
                    _refresh(module)

    def _changed(self, names: Iterable[str]) -> list[str]:
        """Which of these tensors have changed since the task began."""
        values, before = self._values(), self._before
        # The network may have been moved since.
        return [n for n in names if not _equal(values[n], before[n].to(values[n].device))]

    def _restore(self, names: Collection[str]) -> None:
        self.self_updating.update(names)
        self._fix({name: self._before[name] for name in names})
        self.hold_modes()

    def _values(self) -> Tensors:
        return {name: getattr(*places[0]) for name, places in self._places.items()}

    def _fix(self, values: Tensors, copy: bool = True) -> None:
        """Make buffers of these values."""
        for name, value in values.items():
            old = getattr(*self._places[name][0])
            # Copied into fresh memory of the old one's device: see "bits" in docs/method.md.
            constant = row_by_row(value, old.device, old.dtype, copy)
            for module, key in self._places[name]:
                module._parameters.pop(key, None)
                module.register_buffer(key, constant)
                _refresh(module)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether all values are equal, nan being equal to nan."""
    if one.shape != other.shape or torch.equal(one, other):
        return one.shape == other.shape
    return one.is_floating_point() and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _place(module: nn.Module, name: str) -> _Place:
    owner, _, key = name.rpartition(".")
    return module.get_submodule(owner), key


def _is_drawn(module: nn.Module, tensor: Tensor, trained: bool) -> bool:
    """Whether a module's `reset_parameters` sets a tensor. Of buffers, those of norms."""
    if isinstance(tensor, nn.Parameter):
        return trained and drawing_of(module) is not None
    return isinstance(module, _NORMS)


def _refresh(module: nn.Module) -> None:
    # Recurrent layers keep a list of their weights, which `_apply` makes anew.
    module._apply(lambda tensor: tensor, recurse=False)  # type: ignore[no-untyped-call]


def make_trainable(module: nn.Module, spec: DenseSpec) -> None:
    """Turn a merged module's shared tensors back into parameters."""
    shared = SharedTensors(spec, module)
    values = shared._values()
    shared.open({name: values[name] for name in spec.trained})
