"""Plans of networks: what becomes of each layer of a module, or why it is refused, before anything
is changed."""

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
from rankup.growing.supported import NORMS, WEIGHTED, own_tensors, refuse_layers, refuse_module
from rankup.growing.trace import Trace, trace
from rankup.layers import CONVOLUTIONS, at_least_float32
from rankup.layers.spec import (
    ConvGeometry,
    DenseSpec,
    FactoredSpec,
    HeadSpec,
    LayerSpec,
    NormSpec,
    Spec,
)
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
    def specs(self) -> tuple[Spec, ...]:
        return (*self.layers, self.dense)

    def warn_if_capped(self) -> None:
        """Warn at the line of the caller's caller."""
        if self.capped:
            warnings.warn(
                "one task cannot add more rank than a layer's weight has: capped in "
                + ", ".join(self.capped),
                stacklevel=3,
            )


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
        self.head = self._choose_head()
        self._check_patterns()

    def plan(self) -> Plan:
        factored, norms = self._choose_factored(), self._choose_norms()
        replaced = {*factored, *norms, self.head}
        refuse_layers(self.modules, replaced, self.head, self.options, self.training.read)
        dtype, device = self._dtype_and_device()
        early = self._early_norms(factored, norms)
        if self.options.base == "keep":
            # What runs before the factored layers stays as it was given, norms included.
            norms = [name for name in norms if name not in early]
        shapes = {name: _matrix(self.modules[name]) for name in factored}
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
        reader, chain = self.training.reads_inputs(), self.training.chain()
        also = self.evaluation.folds()
        folds = [fold for fold in self.training.folds() if fold in also]
        return Plan(
            layers=tuple(layers),
            dense=self._dense({spec.name for spec in layers}),
            folds=tuple(fold for fold in folds if fold[1] in norms),
            capped=tuple(name for name in factored if ranks[name] != asked[name]),
            first=reader if reader in factored else None,
            chain=tuple(chain[:-1]) if chain == [*factored, self.head] else None,
            paths=(self.training.path, self.evaluation.path),
            dtype=dtype,
            device=device,
        )

    def _choose_head(self) -> str:
        """The Linear that is named, or runs last."""
        linears = [name for name, layer in self.modules.items() if isinstance(layer, nn.Linear)]
        if self.options.head is not None:
            if self.options.head not in linears:
                raise RankupError(
                    f"head={self.options.head!r} is not a Linear of the module, which has "
                    + (", ".join(linears) or "none")
                )
            return self.options.head
        if not linears:
            raise RankupError(
                "the module has no Linear that could be the head: give it one, for example on "
                "x.permute(0, 2, 3, 1) in place of a 1×1 convolution"
            )
        if self.training.failed:
            raise RankupError(
                "torch.fx cannot trace the module, so it is not known which Linear runs last: name "
                "it with head='name'"
            )
        head = self._last_linear(self.training, linears)
        if not self.evaluation.failed:
            other = self._last_linear(self.evaluation, linears)
            if other != head:
                raise RankupError(
                    f"the Linear that runs last is {head!r} in training and {other!r} in "
                    "evaluation: name the head with head='name'"
                )
        return head

    def _last_linear(self, trace: Trace, linears: Sequence[str]) -> str:
        for name in reversed(trace.order):
            if name in linears:
                return name
            if any(True for _ in self.modules[name].parameters()):
                raise RankupError(
                    f"the module has no Linear that could be the head: {name!r} runs after the "
                    "last of them; name the head with head='name'"
                )
        raise RankupError("the module runs no Linear that could be the head")

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
        chosen = [
            name
            for name, layer in self.modules.items()
            if isinstance(layer, WEIGHTED) and name != self.head and self.options.chooses(name)
        ]
        if not chosen:
            raise RankupError(
                "the module has nothing to factor: besides its head it needs a Linear or a "
                "convolution that include and exclude do not rule out"
            )
        chosen.sort(key=self.training.position)
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
            # One without tensors is the same for all tasks, unless it looks at the whole batch.
            if isinstance(layer, _BatchNorm) or any(True for _ in own_tensors([(name, layer)]))
        ]

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
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in own_tensors(left):
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


def _matrix(layer: Any) -> Shape:
    outputs, *inputs = layer.weight.shape
    return Shape(outputs, torch.Size(inputs).numel())


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
