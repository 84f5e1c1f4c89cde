"""What a network neither factors nor keeps per task: trained with the first task or kept from the
given module, then constant."""

import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain

import torch
from torch import Tensor, nn

from rankup.errors import TaskStateError
from rankup.growing.kinds import own_tensors
from rankup.growing.reinit import drawing_of, frozen_parts
from rankup.layers import Start, TaskLayer, Tensors, row_by_row
from rankup.layers.spec import DenseSpec

_ONE_AT_A_TIME = threading.RLock()


class SharedTensors:
    """The tensors of a `DenseSpec`, read and written where they are: in modules that this project
    did not write.

    They go through a task's stages as a layer does. All are buffers, except while the first task
    trains them as parameters.
    """

    def __init__(self, spec: DenseSpec, body: nn.Module) -> None:
        self.spec = spec
        self.count = 0
        everywhere = list(
            chain(
                body.named_parameters(remove_duplicate=False),
                body.named_buffers(remove_duplicate=False),
            )
        )
        here = dict(everywhere)
        # A tensor shared by several modules has several places, one of a module with several names
        # only one.
        self._owners = {
            name: list(
                dict.fromkeys(_owner(body, other) for other, t in everywhere if t is here[name])
            )
            for name, _ in spec.tensors
        }
        # Non-persistent buffers are not saved, so they are not part of what a task learns.
        self._passing = [
            (module, key)
            for module in body.modules()
            if not isinstance(module, TaskLayer)
            for key in module._non_persistent_buffers_set
        ]
        self._before: Tensors = {}
        self._passing_before: list[Tensor | None] = []
        self._own = [name for name, _ in spec.tensors if name not in spec.trained]
        frozen = frozen_parts(body)
        # These change no buffers either: frozen parts answer as they were given.
        self.frozen = [part for part in map(body.get_submodule, frozen) if part._buffers]
        # What no seed can restore: what is frozen, and what its module does not draw.
        self.brought = [
            name
            for name, _ in spec.tensors
            if name.rpartition(".")[0] in frozen
            or not _is_drawn(_owner(body, name)[0], here[name], name in spec.trained)
        ]
        self._updating: set[str] = set()  # buffers that their modules change by themselves
        self._constant({name: tensor.detach() for name, tensor in self._values().items()})

    def start(self, classes: int, start: Start) -> Tensors:
        if self.count or self.spec.kept:
            return {}
        values = self._values()
        return {name: values[name].clone() for name in self.spec.trained}

    def open(self, values: Tensors) -> None:
        # Also if there is nothing to train: a module may change its own buffers while it learns.
        self._before = {name: value.clone() for name, value in self._values().items()}
        buffers = (owner._buffers[key] for owner, key in self._passing)
        self._passing_before = [None if t is None else t.clone() for t in buffers]
        for name, value in values.items():
            parameter = nn.Parameter(value)
            for owner, key in self._owners[name]:
                del owner._buffers[key]
                owner.register_parameter(key, parameter)
                _refresh(owner)

    def learned(self) -> Tensors:
        self.refuse_reshaped()
        if not self.count and not self.spec.kept:
            self._updating.update(self._changed())
            return {name: tensor.detach().clone() for name, tensor in self._values().items()}
        if changed := self.undo():
            raise TaskStateError(
                f"the module changed its {self._called(changed[0])} while it learned, although "
                "earlier answers depend on it; it is held constant from now on: call abandon_task "
                "and learn the task again"
            )
        return {}

    def undo(self) -> list[str]:
        """Restore buffers as they were when the task began; return the names of changed ones."""
        changed = self._changed()
        self._updating.update(changed)
        self._constant({name: self._before[name] for name in changed})
        self._undo_passing()
        return changed

    def undo_trial(self) -> None:
        """Restore everything after a trial run of the module."""
        self.undo()
        values = self._values()
        for name in self._changed(self._owners):
            values[name].data.copy_(self._before[name])

    def refuse_restless(self) -> None:
        """Refuse a module that has changed something by just answering, before any step: its next
        answer would differ."""
        if changed := self._changed(self._owners):
            raise TaskStateError(
                f"the module changes its {self._called(changed[0])} even when it only answers, so "
                "no answer would stay the same: have it check self.training"
            )

    def refuse_made(self, body: nn.Module) -> None:
        """Refuse a module that has made a tensor while it ran: no task would know of it."""
        known = {(id(owner), key) for places in self._owners.values() for owner, key in places}
        others = {
            name: part for name, part in body.named_modules() if not isinstance(part, TaskLayer)
        }
        for name, _ in own_tensors(others.items()):
            owner, _, key = name.rpartition(".")
            if (id(others[owner]), key) not in known:
                raise TaskStateError(
                    f"the module created {name!r} while it ran, but a network grown before that "
                    "does not know about it: run the module once, then grow it"
                )

    def refuse_reshaped(self) -> None:
        """Refuse a module that has given a tensor another shape: the module as given could not
        load it."""
        values = self._values()
        for name, shape in self.spec.tensors:
            if (now := tuple(values[name].shape)) != shape:
                raise TaskStateError(
                    f"the module changed the shape of its {self._called(name)} from {list(shape)} "
                    f"to {list(now)} while it learned, so it could not be loaded: have it keep its "
                    "shape, or register it with persistent=False"
                )

    def as_given(self) -> set[str]:
        """What no task has changed, so it may hold any values, such as a mask of −inf."""
        return {*self._own} - {*self._changed()}

    @property
    def updating(self) -> list[nn.Module]:
        """Modules that change their buffers by themselves, which they must stop once these are
        constant."""
        return [owner for name in self._updating for owner, _ in self._owners[name]]

    @property
    def updating_names(self) -> Collection[str]:
        return self._updating

    def know_updating(self, names: Collection[str]) -> None:
        """Restore in a loaded network what was known when it was saved."""
        self._updating.update(names)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, the module answers for constant tasks in training mode. Buffers that it changes
        are then restored, and remembered as `updating`. Threads take turns, or one would find
        what another has changed."""
        with _ONE_AT_A_TIME if self._own or self._passing else nullcontext():
            moving = {
                name: getattr(*self._owners[name][0]).clone()
                for name in self._own
                if any(owner.training for owner, _ in self._owners[name])
            }
            passing = [
                (owner, key, buffer.clone())
                for owner, key in self._passing
                if owner.training and (buffer := owner._buffers.get(key)) is not None
            ]
            try:
                yield
            finally:
                values = self._values() if moving else {}
                changed = {name: t for name, t in moving.items() if not _equal(values[name], t)}
                self._updating.update(changed)
                self._constant(changed)
                _put_back(passing)

    def close(self) -> None:
        self._constant(self._before)
        self._undo_passing()
        self._before, self._passing_before = {}, []

    def extended(self, *added: Tensors) -> Tensors:
        return {name: tensor for own in added for name, tensor in own.items()}

    def install(self, tables: Tensors, tasks: int = 1) -> None:
        self._constant(tables)
        self.count += tasks

    def added(self, task: int) -> Tensors:
        return {} if task or self.spec.kept else self._values()

    def base(self) -> Tensors:
        return self._values() if self.spec.kept else {}

    def load_base(self, base: Tensors) -> None:
        self._constant(base)

    def tie(self) -> None:
        """Share one tensor again among all places of a name: torch moves buffers one by one."""
        for (first, name), *others in self._owners.values():
            for owner, key in others:
                if key in owner._buffers and owner._buffers[key] is not getattr(first, name):
                    owner._buffers[key] = getattr(first, name)
                    _refresh(owner)

    def _changed(self, among: Collection[str] | None = None) -> list[str]:
        """What has changed since the task began, among all that no step changes or `among`."""
        if among is None:
            among = self._owners if self.count or self.spec.kept else self._own
        values, before = self._values(), self._before
        # The network may have been moved since.
        return [
            name for name in among if not _equal(values[name], before[name].to(values[name].device))
        ]

    def _called(self, name: str) -> str:
        return f"{'buffer' if name in self._own else 'parameter'} {name!r}"

    def _undo_passing(self) -> None:
        """Restore non-persistent buffers: a loaded network has them as given, so no answer
        may depend on other values. One that has grown is a cache, not an average, and stays."""
        pairs = zip(self._passing, self._passing_before, strict=False)
        _put_back((*place, before) for place, before in pairs if before is not None)

    def _values(self) -> Tensors:
        return {name: getattr(*places[0]) for name, places in self._owners.items()}

    def _constant(self, values: Tensors) -> None:
        for name, value in values.items():
            old = getattr(*self._owners[name][0])
            # Copied into fresh memory of the old one's device: see "bits" in docs/method.md.
            constant = row_by_row(value, old.device, old.dtype)
            for owner, key in self._owners[name]:
                owner._parameters.pop(key, None)
                owner.register_buffer(key, constant)
                _refresh(owner)


def _equal(one: Tensor, other: Tensor) -> bool:
    """To the bit, with nan equal to nan."""
    if torch.equal(one, other):
        return True
    nan = one.isnan()
    return torch.equal(nan, other.isnan()) and torch.equal(one[~nan], other[~nan])


def _put_back(passing: Iterable[tuple[nn.Module, str, Tensor]]) -> None:
    for owner, key, before in passing:
        now = owner._buffers.get(key)
        if now is not None and now.shape == before.shape:
            owner._buffers[key] = before.to(now.device, copy=True)


def _owner(body: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, key = name.rpartition(".")
    return body.get_submodule(owner), key


def _is_drawn(owner: nn.Module, tensor: Tensor, trained: bool) -> bool:
    """Whether a module draws a tensor of its own. Of buffers, norms are known to reset theirs."""
    if isinstance(tensor, nn.Parameter):
        return trained and drawing_of(owner) is not None
    return isinstance(owner, nn.modules.batchnorm._NormBase)


def _refresh(owner: nn.Module) -> None:
    # Recurrent layers also keep a list of their weights, and rebuild it here.
    owner._apply(lambda tensor: tensor, recurse=False)  # type: ignore[no-untyped-call]


def make_trainable(module: nn.Module, spec: DenseSpec) -> None:
    """Turn a merged module's dense tensors back into parameters."""
    parts = SharedTensors(spec, module)
    values = parts._values()
    parts.open({name: values[name] for name in spec.trained})
