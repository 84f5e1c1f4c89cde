"""Plans of networks: what becomes of each layer of a module, or why it is refused, before anything
is changed."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from rankup.errors import RankupError
from rankup.growing.copying import refuse_hidden_layers
from rankup.growing.options import GrowOptions
from rankup.growing.roles import Role, choose_head, role_of, tied_parameters
from rankup.growing.supported import (
    BATCH_STATISTICS,
    NORMS,
    WEIGHTED,
    obstacle,
    own_tensors,
    refuse_head,
    refuse_module,
)
from rankup.growing.trace import trace
from rankup.layers import CONVOLUTIONS, at_least_float32
from rankup.layers.spec import (
    ConvGeometry,
    DenseSpec,
    FactoredSpec,
    HeadSpec,
    LayerSpec,
    NormSpec,
    Spec,
    TensorSpec,
    WeightSpec,
)
from rankup.layers.substitute import STATISTICS
from rankup.rank import LayerRank, Shape, capped, is_match, resolve

_NORMS: tuple[type[nn.Module], ...] = tuple(NORMS)


@dataclass(frozen=True)
class Plan:
    """What a network is made of."""

    layers: tuple[LayerSpec, ...]  # what each layer becomes
    dense: DenseSpec  # what is left
    folds: tuple[tuple[str, str], ...]  # a convolution and the batch norm that is its only reader
    capped: tuple[str, ...]  # layers that a task gives less rank than was asked for
    # The Linear that reads the inputs as they are, if there is one and it is factored.
    first: str | None
    # The layers of a module that is nothing but factored Linears, a ReLU after each, and a head.
    chain: tuple[str, ...] | None
    # The torch.fx graph in training and in evaluation mode, as text; None if the module cannot be
    # traced or does not take the same path every time.
    paths: tuple[str | None, str | None]
    dtype: torch.dtype
    device: torch.device

    @property
    def substitutes(self) -> bool:
        """Whether modules read a task's tensors in place of their own: one task at a time."""
        return bool(self.substituted)

    @property
    def substituted(self) -> list[str]:
        return [spec.name for spec in self.layers if is_substituted(spec)]

    @property
    def specs(self) -> tuple[Spec, ...]:
        return (*self.layers, self.dense)

    def warn(self, options: GrowOptions) -> None:
        """Warn at the line of the caller's caller where less is learned than was asked for."""
        self._warn_if_capped()
        chosen = options.include is None and options.last is None
        left = [name for name in self.dense.trained if not options.excludes(name)]
        if chosen and left and options.base == "new":
            warnings.warn(
                "trained with the first task and constant after it, because they are neither "
                f"matrices nor vectors or belong to several layers: {folded(left)}; exclude them "
                "to say that this is meant",
                stacklevel=3,
            )

    def _warn_if_capped(self) -> None:
        """Warn at the line of the caller's caller."""
        if self.capped:
            warnings.warn(
                "one task cannot add more rank than a layer's weight has: capped in "
                + ", ".join(self.capped),
                stacklevel=4,
            )


def folded(names: Sequence[str], most: int = 8) -> str:
    """Names with their numbers replaced by a star, so that those of many blocks are one.

    >>> folded(["blocks.0.norm.weight", "blocks.1.norm.weight", "pos"])
    'blocks.*.norm.weight, pos'
    """
    patterns = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
    shown = ", ".join(list(patterns)[:most])
    return shown if len(patterns) <= most else f"{shown} and {len(patterns) - most} more"


def is_substituted(spec: Spec) -> bool:
    """Whether a module reads what the spec describes in place of a tensor of its own."""
    return isinstance(spec, WeightSpec | TensorSpec) or spec.name.endswith(f".{STATISTICS}")


def make_plan(module: nn.Module, options: GrowOptions) -> Plan:
    """Decide what becomes of each layer of a module, or refuse the module."""
    refuse_module(module)
    refuse_hidden_layers(module)
    return _Planner(module, options).plan()


class _Planner:
    """Chooses the head first, then the layers to factor and the norms to keep per task."""

    def __init__(self, module: nn.Module, options: GrowOptions) -> None:
        self.options = options
        self.modules = dict(module.named_modules())
        self.training = trace(module, training=True)
        self.evaluation = trace(module, training=False)
        self.tied = tied_parameters(self.modules)
        self.head = choose_head(self.modules, options.head, self.training, self.evaluation)
        self._check_patterns()

    def plan(self) -> Plan:
        refuse_head(self.modules, self.head, self.training.read)
        factored, norms = self._choose_factored(), self._choose_norms()
        dtype, device = self._dtype_and_device()
        early = self._early_norms(factored, norms)
        if self.options.base == "keep":
            # What runs before the factored layers stays as it was given, norms included.
            norms = [name for name in norms if name not in early]
        shapes = {name: self._matrix(name) for name in factored}
        asked = resolve(self.options.rank, shapes)
        ranks = {name: capped(asked[name], shapes[name]) for name in factored}
        layers: list[LayerSpec] = []
        for name, layer in self.modules.items():
            if name == self.head:
                layers.append(_head_spec(name, layer))
            elif name in ranks:
                feeds_norm = self.training.feeds_batch_norm(name)
                layers.append(_factored_spec(name, layer, shapes[name], ranks[name], feeds_norm))
            elif name in norms:
                layers.append(_norm_spec(name, layer, shared=name in early))
            elif not (isinstance(layer, WEIGHTED) and self._is_plain(name)):  # else left out
                layers += self._substituted(name, layer, ranks, factored)
        reader, chain = self.training.reads_inputs(), self.training.chain()
        owners = {spec.name.rpartition(".")[0] for spec in layers if is_substituted(spec)}
        also = self.evaluation.folds()
        folds = [fold for fold in self.training.folds() if fold in also]
        return Plan(
            layers=tuple(layers),
            dense=self._dense({spec.name for spec in layers}),
            folds=tuple(fold for fold in folds if fold[0] not in owners and fold[1] in norms),
            capped=tuple(name for name in factored if ranks[name] != asked[name]),
            first=reader if reader in factored else None,
            chain=tuple(chain[:-1]) if chain == [*factored, self.head] else None,
            paths=(self.training.path, self.evaluation.path),
            dtype=dtype,
            device=device,
        )

    def _check_patterns(self) -> None:
        names = [*self.modules, *(name for name, _ in own_tensors(self.modules.items()))]
        options = {"include": self.options.include or (), "exclude": self.options.exclude}
        for option, patterns in options.items():
            for pattern in patterns:
                if not any(is_match(name, pattern) for name in names):
                    raise RankupError(f"{option}={pattern!r} matches nothing in the module")
        if self.options.excludes(self.head):
            raise RankupError(f"the head {self.head!r} cannot be excluded")

    def _choose_factored(self) -> list[str]:
        """The layers to factor, in the order in which they run."""
        chosen: list[str] = []
        for name, layer in self.modules.items():
            if name == self.head:
                continue
            if isinstance(layer, WEIGHTED) and self._is_plain(name):
                chosen += [name] if self.options.chooses(name) else []
            else:
                chosen += (n for n, role in self._roles(name, layer).items() if role == "matrix")
        if not chosen:
            raise RankupError(
                "the module has nothing to factor: besides its head it needs a Linear or a "
                "convolution that include and exclude do not rule out"
            )
        chosen.sort(key=self._position)
        last = self.options.last
        if last is None:
            return chosen
        if self.training.failed:
            raise RankupError(
                f"last={last} needs the order in which layers run, but torch.fx cannot trace the "
                "module: name the layers with include instead"
            )
        if not 1 <= last <= len(chosen):
            raise RankupError(
                f"last={last} must be from 1 to {len(chosen)}, the number of layers to choose from"
            )
        return chosen[-last:]

    def _choose_norms(self) -> list[str]:
        return [
            name
            for name, layer in self.modules.items()
            if isinstance(layer, _NORMS) and not self.options.excludes(name)
            if self._is_plain(name)
            # One without tensors is the same for all tasks, unless it looks at the whole batch.
            if isinstance(layer, _BatchNorm) or any(True for _ in own_tensors([(name, layer)]))
        ]

    def _is_plain(self, name: str) -> bool:
        return obstacle(name, self.modules, self.training.read) is None

    def _position(self, name: str) -> int:
        """When a layer, or that of a parameter, first runs."""
        layer = name if name in self.modules else name.rpartition(".")[0]
        return self.training.position(layer)

    def _matrix(self, name: str) -> Shape:
        outputs, *inputs = self._parameter(f"{name}.weight" if name in self.modules else name).shape
        return Shape(outputs, torch.Size(inputs).numel())

    def _parameter(self, name: str) -> nn.Parameter:
        whole: nn.Module = self.modules[""]
        return whole.get_parameter(name)

    def _roles(self, name: str, layer: nn.Module) -> dict[str, Role]:
        """What becomes of each parameter of a layer that runs its own forward, by full name."""
        roles: dict[str, Role] = {}
        for key, parameter in layer._parameters.items():
            full = f"{name}.{key}".lstrip(".")
            if parameter is None or self.options.excludes(full) or id(parameter) in self.tied:
                continue
            role = role_of(layer, key, parameter)
            if role == "matrix" and not self.options.chooses(full):
                role = "frozen"
            roles[full] = role
        return roles

    def _substituted(
        self, name: str, layer: nn.Module, ranks: dict[str, LayerRank], factored: Sequence[str]
    ) -> list[LayerSpec]:
        """What becomes of a layer that runs its own forward with a task's tensors."""
        if self.options.last and self.training.position(name) < self._position(factored[0]):
            return []
        specs: list[LayerSpec] = []
        kept = self.options.base == "keep"
        for full, role in self._roles(name, layer).items():
            shape = tuple(self._parameter(full).shape)
            if role == "matrix" and full in ranks:
                size, rank = self._matrix(full), ranks[full]
                if rank.first * (size.outputs + size.inputs) < size.outputs * size.inputs:
                    specs.append(
                        WeightSpec(full, size.outputs, size.inputs, False, rank, False, None, shape)
                    )
                    continue
                role = "vector"  # factors would take more numbers than the weight itself
            if role == "vector":
                specs.append(TensorSpec(full, shape, kept))
        if isinstance(layer, _BatchNorm) and not self.options.excludes(name):
            statistics, shape = f"{name}.{STATISTICS}", (layer.num_features,)
            specs.append(NormSpec(statistics, "batch2d", shape, layer.eps, 1, False, False, False))
        return specs

    def _early_norms(self, factored: Sequence[str], norms: Sequence[str]) -> set[str]:
        """The norms that run before the last layers, if only these are factored."""
        if not self.options.last:
            return set()
        first = self.training.position(factored[0])
        return {name for name in norms if self.training.position(name) < first}

    def _dtype_and_device(self) -> tuple[torch.dtype, torch.device]:
        weights = list(self.modules[""].parameters())
        dtypes = {weight.dtype for weight in weights}
        devices = {weight.device for weight in weights}
        if len(dtypes) > 1 or len(devices) > 1:
            raise RankupError(
                "the module's weights must have one dtype and be on one device, got "
                + ", ".join(sorted(map(str, dtypes if len(dtypes) > 1 else devices)))
            )
        dtype, store = dtypes.pop(), self.options.store
        if not dtype.is_floating_point:
            raise RankupError(f"the module's weights must be real numbers, got {dtype}")
        if devices == {torch.device("meta")}:
            raise RankupError(
                "the module is on the device 'meta', which holds no values: create it again on "
                "another device"
            )
        if store != "full" and dtype not in (torch.float32, torch.float64):
            raise RankupError(
                f"store={store!r} is for modules in float32 or float64, but this one is in "
                f"{str(dtype).removeprefix('torch.')}"
            )
        return dtype, devices.pop()

    def _dense(self, replaced: set[str]) -> DenseSpec:
        left = ((name, layer) for name, layer in self.modules.items() if name not in replaced)
        statistics = {n.removesuffix(STATISTICS) for n in replaced if n.endswith(f".{STATISTICS}")}
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in own_tensors(left):
            owner, _, key = name.rpartition(".")
            if name in replaced or (f"{owner}." in statistics and key in BATCH_STATISTICS):
                continue
            if kind := _unstorable(tensor):
                raise RankupError(
                    f"{name!r} is a {kind} tensor, which cannot be stored: make it a plain one, or "
                    "register it with persistent=False"
                )
            if not any(tensor is other for other in tensors.values()):
                tensors[name] = tensor
        return DenseSpec(
            tensors=tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items()),
            # A frozen parameter is as good as a buffer.
            trained=tuple(name for name, tensor in tensors.items() if tensor.requires_grad),
            kept=self.options.base == "keep",
        )


def _unstorable(tensor: torch.Tensor) -> str | None:
    """The kind of a tensor that no file of a network can hold, else None."""
    if tensor.layout != torch.strided:
        return "sparse"
    if tensor.is_quantized:
        return "quantised"
    if tensor.dtype in (torch.complex32, torch.complex128):
        return str(tensor.dtype).removeprefix("torch.")
    return None


def _head_spec(name: str, layer: Any) -> HeadSpec:
    return HeadSpec(name, layer.in_features, layer.bias is not None)


def _factored_spec(
    name: str, layer: Any, shape: Shape, rank: LayerRank, feeds_norm: bool
) -> FactoredSpec:
    geometry = None
    if isinstance(layer, CONVOLUTIONS):
        geometry = ConvGeometry(
            layer.in_channels,
            layer.kernel_size,
            layer.stride,
            layer.padding,
            layer.dilation,
            layer.padding_mode,
        )
    has_bias = layer.bias is not None
    return FactoredSpec(name, shape.outputs, shape.inputs, has_bias, rank, feeds_norm, geometry)


def _norm_spec(name: str, layer: Any, shared: bool) -> NormSpec:
    over = next(over for kind, over in NORMS.items() if isinstance(layer, kind))
    shapes = {"layer": "normalized_shape", "rms": "normalized_shape", "group": "num_channels"}
    shape = getattr(layer, shapes.get(over, "num_features"))
    return NormSpec(
        name,
        over,
        shape if isinstance(shape, tuple) else (shape,),
        # An RMSNorm may take it from the dtype that torch computes in.
        torch.finfo(at_least_float32(layer.weight.dtype)).eps if layer.eps is None else layer.eps,
        getattr(layer, "num_groups", 1),
        layer.weight is not None,
        getattr(layer, "bias", None) is not None,
        shared,
    )
