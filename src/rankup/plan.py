"""What becomes of each part of a module: decided, or refused in one sentence, before anything is
changed."""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

from rankup.closures import refuse_functions_of
from rankup.errors import RankupError
from rankup.kinds import NORMS, WEIGHTED, is_plain, kind_of
from rankup.layers import CONVOLUTIONS, TaskLayer, at_least_float32
from rankup.modes import has_hooks
from rankup.packing import STORES, Store
from rankup.rank import RankRule, Shape, as_whole, capped, resolve
from rankup.specs import (
    ConvGeometry,
    DenseSpec,
    FactoredSpec,
    HeadSpec,
    LayerSpec,
    NormSpec,
    Spec,
)
from rankup.trace import trace

_UNINITIALISED = "not initialised yet"
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Growth:
    """How a network is grown from a module: the arguments of `grow`, checked."""

    rank: RankRule
    base: Literal["new", "keep"] = "new"
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    last: int | None = None
    head: str | None = None
    seed: int = 0
    store: Store = "full"

    def __post_init__(self) -> None:
        if self.base not in ("new", "keep"):
            raise RankupError(f"base must be 'new' or 'keep', got {self.base!r}")
        if self.store not in STORES:
            raise RankupError(f"store must be one of {', '.join(STORES)}, got {self.store!r}")
        for option, patterns in (("include", self.include or ()), ("exclude", self.exclude)):
            for pattern in patterns:
                if not isinstance(pattern, str):
                    raise RankupError(f"{option} takes names or patterns of them, got {pattern!r}")
        for option in ("last", "seed"):
            value = getattr(self, option)
            if value is not None:
                object.__setattr__(self, option, as_whole(option, value))


@dataclass(frozen=True)
class Plan:
    """`layers` say what each layer becomes, `dense` what is left; `folds` are pairs of a
    convolution and the batch norm that alone reads it; `capped` names the layers that a task gives
    less rank than was asked for; `first` is the Linear that reads the inputs as they are, if one
    is factored and does; `chain` are the layers of a module that is nothing but factored Linears
    with a ReLU after each, and a head."""

    layers: tuple[LayerSpec, ...]
    dense: DenseSpec
    folds: tuple[tuple[str, str], ...]
    capped: tuple[str, ...]
    first: str | None
    chain: tuple[str, ...] | None
    dtype: torch.dtype
    device: torch.device

    @property
    def specs(self) -> tuple[Spec, ...]:
        return (*self.layers, self.dense)

    def warn_if_capped(self) -> None:
        """For the one that called whoever calls this."""
        if self.capped:
            warnings.warn(
                "one task cannot add more rank than a layer's weight has: capped in "
                + ", ".join(self.capped),
                stacklevel=3,
            )


def make_plan(module: nn.Module, growth: Growth) -> Plan:
    if not isinstance(module, nn.Module):
        raise RankupError(f"grow takes an nn.Module, got {type(module).__name__}")
    if any(isinstance(part, TaskLayer) for part in module.modules()):
        raise RankupError("the module is a grown network already: begin_task teaches it more")
    plan = _Planner(module, growth).plan()
    refuse_functions_of(module)
    return plan


class _Planner:
    def __init__(self, module: nn.Module, growth: Growth) -> None:
        self.growth = growth
        self.modules = dict(module.named_modules())
        self.trace = trace(module)
        self.head = self._find_head()
        self._check_patterns(module)

    def plan(self) -> Plan:
        factored = self._choose_factored()
        norms = self._choose_norms()
        self._refuse_what_cannot_be(set(factored) | set(norms))
        dtype, device = self._dtype_and_device()
        if self.growth.store != "full" and dtype not in (torch.float32, torch.float64):
            raise RankupError(
                f"store={self.growth.store!r} is for modules in float32 or float64, this one is in "
                f"{str(dtype).removeprefix('torch.')}"
            )
        shared = set()
        if self.growth.last and self.trace is not None:
            first = self.trace.position(factored[0])
            shared = {name for name in norms if self.trace.position(name) < first}
        if self.growth.base == "keep":
            # What lies before the factored layers stays as it was given, norms included.
            norms = [name for name in norms if name not in shared]
        shapes = {name: _matrix(self.modules[name]) for name in factored}
        asked = resolve(self.growth.rank, shapes)
        ranks = {name: capped(asked[name], shapes[name]) for name in factored}
        specs: list[LayerSpec] = []
        for name, part in self.modules.items():
            if name == self.head and isinstance(part, nn.Linear):
                specs.append(HeadSpec(name, part.in_features, part.bias is not None))
            elif name in shapes:
                specs.append(
                    FactoredSpec(
                        name,
                        shapes[name].outputs,
                        shapes[name].inputs,
                        part.bias is not None,
                        ranks[name],
                        self.trace is not None and self.trace.feeds_batch_norm(name),
                        _geometry(part),
                    )
                )
            elif name in norms:
                specs.append(_norm_spec(name, part, shared=name in shared))
        left = self._dense({spec.name for spec in specs})
        short = tuple(name for name in factored if ranks[name] != asked[name])
        reader = self.trace.reads_inputs() if self.trace is not None else None
        chain = self.trace.chain() if self.trace is not None else None
        return Plan(
            layers=tuple(specs),
            dense=left,
            folds=tuple((conv, norm) for conv, norm in self._folds() if norm in norms),
            capped=short,
            first=reader if reader in factored else None,
            chain=tuple(chain[:-1]) if chain == [*factored, self.head] else None,
            dtype=dtype,
            device=device,
        )

    def _folds(self) -> list[tuple[str, str]]:
        """What can be folded as the module trains and as it answers."""
        training = self.trace.folds() if self.trace is not None else []
        answering = trace(self.modules[""], training=False) if training else None
        found = answering.folds() if answering is not None else []
        return [pair for pair in training if pair in found]

    def _find_head(self) -> str:
        linears = [name for name, part in self.modules.items() if isinstance(part, nn.Linear)]
        if self.growth.head is not None:
            if self.growth.head not in linears:
                raise RankupError(
                    f"head={self.growth.head!r} is no Linear of the module, which has "
                    + (", ".join(linears) or "none")
                )
            return self.growth.head
        if not linears:
            raise RankupError("the module has no Linear that could be the head")
        if self.trace is None:
            refuse_functions_of(self.modules[""])  # which naming a head would not help
            raise RankupError(
                "torch.fx cannot trace the module, so which Linear runs last is not known: "
                "say it with head='name'"
            )
        for name in reversed(self.trace.order):
            if name in linears:
                return name
            if any(True for _ in self.modules[name].parameters()):
                raise RankupError(
                    f"the module has no Linear that could be the head: {name!r} runs after the "
                    "last of them; say which it is with head='name'"
                )
        raise RankupError("the module runs no Linear that could be the head")

    def _check_patterns(self, module: nn.Module) -> None:
        names = [*self.modules, *(name for name, _ in _tensors(module.named_modules()))]
        given = {"include": self.growth.include or (), "exclude": self.growth.exclude}
        for option, patterns in given.items():
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise RankupError(f"{option}={pattern!r} matches nothing in the module")
        if self._excluded(self.head):
            raise RankupError(f"the head {self.head!r} cannot be excluded")

    def _excluded(self, name: str) -> bool:
        return any(_matches(name, pattern) for pattern in self.growth.exclude)

    def _included(self, name: str) -> bool:
        include = self.growth.include
        return include is None or any(_matches(name, pattern) for pattern in include)

    def _choose_factored(self) -> list[str]:
        """The layers to factor, in the order in which they run."""
        chosen = [
            name
            for name, part in self.modules.items()
            if isinstance(part, WEIGHTED)
            and name != self.head
            and not self._excluded(name)
            and self._included(name)
        ]
        if not chosen:
            raise RankupError(
                "the module has nothing to factor: besides its head it needs a Linear or a "
                "convolution that include and exclude leave"
            )
        if self.trace is not None:
            chosen.sort(key=self.trace.position)
        last = self.growth.last
        if last is None:
            return chosen
        if self.trace is None:
            raise RankupError(
                f"last={last} needs the order in which layers run, and torch.fx cannot trace the "
                "module: name the layers with include instead"
            )
        if not 1 <= last <= len(chosen):
            raise RankupError(f"last={last} must be from 1 to {len(chosen)}, the layers there are")
        return chosen[-last:]

    def _choose_norms(self) -> list[str]:
        return [
            name
            for name, part in self.modules.items()
            if kind_of(part) in NORMS
            and not self._excluded(name)
            # One without tensors is the same for all tasks, unless it looks at the whole batch.
            and (isinstance(part, _BatchNorm) or any(True for _ in _tensors([("", part)])))
        ]

    def _refuse_what_cannot_be(self, replaced: set[str]) -> None:
        replaced = replaced | {self.head}
        problems: dict[str, str] = {}
        for name, part in self.modules.items():
            if any(_matches(name, problem) for problem in problems) or self._excluded(name):
                continue
            if name in replaced:
                if reason := self._obstacle(name, part):
                    problems[name] = reason
            elif _has_inner_layers(part):
                problems[name] = type(part).__name__
            elif type(part).__module__.startswith("torch.nn.") or is_plain(part):
                if any(True for _ in _tensors([("", part)])) and not isinstance(part, WEIGHTED):
                    problems[name] = type(part).__name__
            else:
                for key, parameter in part._parameters.items():
                    own = f"{name}.{key}".lstrip(".")
                    if parameter is not None and not self._excluded(own):
                        problems[own] = "a parameter of its own"
        if _UNINITIALISED in problems.values():
            lazy = [name for name, reason in problems.items() if reason == _UNINITIALISED]
            raise RankupError(
                f"layers of the module are not initialised yet ({', '.join(lazy)}): run it once on "
                "an input"
            )
        if self.head in problems:
            raise RankupError(
                f"the head {self.head!r} must be a plain Linear with a weight of its own "
                f"({problems[self.head]}): replace it, or name another layer with head="
            )
        if problems:
            listed = ", ".join(f"{name!r} ({reason})" for name, reason in problems.items())
            what_becomes = (
                "leave them as they are"
                if self.growth.base == "keep"
                else "train them with the first task and leave them constant after it"
            )
            raise RankupError(
                f"cannot factor {listed}; pass exclude={[*self.growth.exclude, *problems]} to "
                f"{what_becomes}"
            )

    def _obstacle(self, name: str, part: nn.Module) -> str | None:
        """Why a layer of a known kind cannot be replaced."""
        kind = kind_of(part)
        if kind is not None and not is_plain(part):
            return f"a {type(part).__name__}, which is not a plain {kind.__name__}"
        if any(isinstance(p, UninitializedParameter) for p in part.parameters()):
            return _UNINITIALISED
        if isinstance(part, CONVOLUTIONS) and part.groups != 1:
            return f"a grouped convolution, groups={part.groups}"
        if has_hooks(part):
            return "it has hooks"
        if self.trace is not None and self.trace.reads_weights_of(name):
            return "the module's forward reads its weights directly"
        owned = {id(p) for p in part.parameters()}
        for other, other_part in self.modules.items():
            if other != name and any(id(p) in owned for p in other_part._parameters.values()):
                return f"it shares a weight with {other!r}"
        return None

    def _dtype_and_device(self) -> tuple[torch.dtype, torch.device]:
        weights = list(self.modules[""].parameters())
        dtypes = {p.dtype for p in weights}
        devices = {p.device for p in weights}
        if len(dtypes) > 1 or len(devices) > 1:
            raise RankupError(
                "the module's weights must have one dtype and be on one device, got "
                + ", ".join(sorted(map(str, dtypes if len(dtypes) > 1 else devices)))
            )
        return dtypes.pop(), devices.pop()

    def _dense(self, replaced: set[str]) -> DenseSpec:
        left = ((name, part) for name, part in self.modules.items() if name not in replaced)
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in _tensors(left):
            if not any(tensor is other for other in tensors.values()):
                tensors[name] = tensor
        return DenseSpec(
            tensors=tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items()),
            # A frozen parameter is as good as a buffer.
            trained=tuple(name for name, tensor in tensors.items() if tensor.requires_grad),
            kept=self.growth.base == "keep",
        )


def _matches(name: str, pattern: str) -> bool:
    """Whether the pattern matches the name or something that contains it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[: i + 1]), pattern) for i in range(len(parts)))


def _has_inner_layers(part: nn.Module) -> bool:
    """torch's own composite layers read their inner layers' weights: none can be replaced."""
    return (
        type(part).__module__.startswith("torch.nn.")
        and not isinstance(part, _CONTAINERS)
        and any(True for _ in part.children())
        and any(True for _ in part.parameters())
    )


def _tensors(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each module's own parameters and the buffers that belong to its state."""
    for name, part in modules:
        for key, tensor in chain(part._parameters.items(), part._buffers.items()):
            if tensor is not None and key not in part._non_persistent_buffers_set:
                yield f"{name}.{key}".lstrip("."), tensor


def _matrix(part: Any) -> Shape:
    outputs, *inputs = part.weight.shape
    return Shape(outputs, torch.Size(inputs).numel())


def _geometry(part: Any) -> ConvGeometry | None:
    if not isinstance(part, CONVOLUTIONS):
        return None
    return ConvGeometry(
        part.in_channels,
        part.kernel_size,
        part.stride,
        part.padding,
        part.dilation,
        part.padding_mode,
    )


def _norm_spec(name: str, part: Any, shared: bool) -> NormSpec:
    over = next(over for kind, over in NORMS.items() if isinstance(part, kind))
    shapes = {"layer": "normalized_shape", "rms": "normalized_shape", "group": "num_channels"}
    shape = getattr(part, shapes.get(over, "num_features"))
    return NormSpec(
        name,
        over,
        shape if isinstance(shape, tuple) else (shape,),
        # An RMSNorm may leave it to the dtype that torch computes in.
        torch.finfo(at_least_float32(part.weight.dtype)).eps if part.eps is None else part.eps,
        getattr(part, "num_groups", 1),
        part.weight is not None,
        getattr(part, "bias", None) is not None,
        shared,
    )
