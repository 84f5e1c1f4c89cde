"""What a network neither factors nor keeps per task: trained with the first task or kept from the
module that was given, then constant."""

import copy
from contextlib import suppress
from itertools import chain

import torch
from torch import Tensor, nn

from rankup import seeds
from rankup.errors import TaskStateError
from rankup.layers import Start, Tensors
from rankup.specs import DenseSpec


def reset(
    body: nn.Module, given: nn.Module, spec: DenseSpec, seed: int, device: torch.device
) -> None:
    """New values from the network's seed, in the modules that know how to draw them.

    Args:
        given: the module as it was given: its own code may draw its layers, too, which the body has
            no more.
    """
    owners = dict.fromkeys(name.rpartition(".")[0] for name in spec.trained)
    fresh = copy.deepcopy(given) if owners else given
    for name in owners:
        with seeds.drawing(device, seeds.number(seed, "dense", name)):
            redraw(fresh.get_submodule(name))
    with torch.no_grad():
        for name in spec.trained:
            body.get_parameter(name).copy_(fresh.get_parameter(name))


def redraw(module: nn.Module) -> None:
    """Draw a module's own weights anew, where it knows how to. Attention of torch's has another
    name for that than all its other layers."""
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(draw := getattr(module, name, None)):
            with suppress(TypeError):  # one that wants arguments is for its owner to call
                draw()
            return


class DenseParts:
    """Those tensors, read and written where they are: in modules that this project did not write.

    They live through a task as a layer does. All are buffers, but parameters while the first task
    trains them.
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
        # A tensor that several modules share has several places.
        self._places = {
            name: [_place(body, other) for other, tensor in everywhere if tensor is here[name]]
            for name, _ in spec.tensors
        }
        self._before: Tensors = {}
        self._own = [name for name, _ in spec.tensors if name not in spec.trained]
        self._updating: set[str] = set()  # buffers that their modules change by themselves
        self._constant({name: tensor.detach() for name, tensor in self._values().items()})

    def start(self, classes: int, start: Start) -> Tensors:
        if self.count or self.spec.kept:
            return {}
        values = self._values()
        return {name: values[name].clone() for name in self.spec.trained}

    def open(self, values: Tensors) -> None:
        # Also where there is nothing to train: a module may change its own buffers while it learns.
        current = self._values()
        wanted = self._own if self.count or self.spec.kept else current
        self._before = {name: current[name].clone() for name in wanted}
        for name, value in values.items():
            parameter = nn.Parameter(value)
            for owner, key in self._places[name]:
                del owner._buffers[key]
                owner.register_parameter(key, parameter)
                _refresh(owner)

    def learned(self) -> Tensors:
        values = self._values()
        changed = [name for name in self._own if not _equal(values[name], self._before[name])]
        self._updating.update(changed)
        if not self.count and not self.spec.kept:
            return {name: tensor.detach().clone() for name, tensor in values.items()}
        if changed:
            self.hold()
            raise TaskStateError(
                f"the module changed its buffer {changed[0]!r} while it learned, on which earlier "
                "answers depend; it is held from now on: abandon_task, and learn the task again"
            )
        return {}

    def hold(self) -> None:
        """Have modules change their buffers no more once these are constant, by the flag that they
        look at; those inside of them go on as they are."""
        for name in self._updating:
            for owner, _ in self._places[name]:
                owner.training = False

    def close(self) -> None:
        self._constant(self._before)
        self._before = {}

    def extended(self, added: Tensors) -> Tensors:
        return added

    def install(self, tables: Tensors) -> None:
        self._constant(tables)
        self.count += 1

    def added(self, task: int) -> Tensors:
        return {} if task or self.spec.kept else self._values()

    def base(self) -> Tensors:
        return self._values() if self.spec.kept else {}

    def load_base(self, base: Tensors) -> None:
        self._constant(base)

    def _values(self) -> Tensors:
        return {name: getattr(*places[0]) for name, places in self._places.items()}

    def _constant(self, values: Tensors) -> None:
        for name, value in values.items():
            for owner, key in self._places[name]:
                old = getattr(owner, key)
                owner._parameters.pop(key, None)
                # Copied into fresh memory of the old one's device: see "bits" in docs/method.md.
                owner.register_buffer(key, value.to(old.device, old.dtype, copy=True))
                _refresh(owner)


def _equal(one: Tensor, other: Tensor) -> bool:
    """To the bit, and nan where there is nan."""
    return bool(torch.equal(one, other)) or bool(
        torch.isnan(one).any() and torch.equal(one.nan_to_num(), other.nan_to_num())
    )


def _place(body: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, key = name.rpartition(".")
    return body.get_submodule(owner), key


def _refresh(owner: nn.Module) -> None:
    # Recurrent layers keep a list of their weights beside the weights, and make it anew here.
    owner._apply(lambda tensor: tensor, recurse=False)  # type: ignore[no-untyped-call]


def make_trainable(module: nn.Module, spec: DenseSpec) -> None:
    """Turn a merged module's dense tensors back into parameters."""
    parts = DenseParts(spec, module)
    values = parts._values()
    parts.open({name: values[name] for name in spec.trained})
