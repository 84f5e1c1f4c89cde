"""Specs: layers as plain data, which tell the tensors that a task adds, and their shapes. A network
builds its layers from them and stores them in its folder.

All specs have two methods: `shapes` gives the shapes of what a task adds, by key, and `base_shapes`
those of what is kept of the given module.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from rankup.rank import LayerRank, Place

Shapes = dict[str, tuple[int, ...]]
Sizes = tuple[int, ...]  # one for each spatial dimension
NormOver = Literal["batch1d", "batch2d", "batch3d", "layer", "rms", "group"]


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of a layer if they are not all the network's: in which it computes, in which tasks
    learn, and in which the given module's weight is kept."""

    computes: str
    learns: str
    keeps: str


@dataclass(frozen=True)
class ConvGeometry:
    """The arguments of a convolution that are not in its spec otherwise."""

    channels: int
    kernel_size: Sizes
    stride: Sizes
    padding: Sizes | str
    dilation: Sizes
    padding_mode: str

    @property
    def dims(self) -> int:
        return len(self.kernel_size)


@dataclass(frozen=True)
class FactoredSpec:
    """A linear or convolutional layer as a sum of factors."""

    kind: ClassVar[str] = "factored"
    name: str
    outputs: int
    inputs: int  # of the weight as a matrix: a kernel's taps are inputs
    bias: bool
    rank: LayerRank
    before_batch_norm: bool
    conv: ConvGeometry | None
    dtypes: Dtypes | None = field(default=None, kw_only=True)
    # Whether all tasks use the kept bias and none learns its own.
    shared_bias: bool = field(default=False, kw_only=True)

    @property
    def dims(self) -> int:
        """How many spatial dimensions follow the channels."""
        return self.conv.dims if self.conv else 0

    def shapes(self, place: Place, classes: int) -> Shapes:
        added = self.rank.added(place)
        shapes: Shapes = {"selector": (self.rank.used(place),)}
        if added:
            shapes |= {"U": (added, self.outputs), "V": (added, self.inputs)}
        if self.has_own_bias:
            shapes["bias"] = (self.outputs,)
        return shapes

    @property
    def has_own_bias(self) -> bool:
        """Whether each task learns a bias."""
        return self.bias and not self.shared_bias

    def base_shapes(self) -> Shapes:
        shapes: Shapes = {"weight": (self.outputs, self.inputs)}
        return shapes | {"bias": (self.outputs,)} if self.bias else shapes


@dataclass(frozen=True)
class WeightSpec(FactoredSpec):
    """A parameter as a sum of factors, in a layer that runs its own forward. A parameter that
    stacks several matrices has a spec for each."""

    kind: ClassVar[str] = "weight"
    shape: tuple[int, ...] = ()  # of the parameter, or of its part that is this matrix
    transposed: bool = False  # whether the matrix is [in, out], not [out, in]
    index: int | None = None  # of the matrix, if several are stacked

    @property
    def parameter(self) -> str:
        return self.name if self.index is None else self.name.removesuffix(f"[{self.index}]")


@dataclass(frozen=True)
class TensorSpec:
    """A parameter of which every task has its own, in a layer that runs its own forward."""

    kind: ClassVar[str] = "tensor"
    name: str
    shape: tuple[int, ...]
    kept: bool  # whether tasks start from the given module's values
    dtypes: Dtypes | None = field(default=None, kw_only=True)

    def shapes(self, place: Place, classes: int) -> Shapes:
        return {"value": self.shape}

    def base_shapes(self) -> Shapes:
        return {"value": self.shape} if self.kept else {}


@dataclass(frozen=True)
class NormSpec:
    """A normalisation layer. A shared one is trained with the first task and serves all."""

    kind: ClassVar[str] = "norm"
    name: str
    over: NormOver
    shape: tuple[int, ...]
    eps: float
    groups: int
    weight: bool
    bias: bool
    shared: bool
    dtypes: Dtypes | None = field(default=None, kw_only=True)

    @property
    def is_batch(self) -> bool:
        return self.over.startswith("batch")

    @property
    def is_over_last(self) -> bool:
        """Whether it normalises the last dimensions, not channels."""
        return self.over in ("layer", "rms")

    def shapes(self, place: Place, classes: int) -> Shapes:
        if self.shared and not place.is_first:
            return {}
        statistics = dict.fromkeys(("mean", "var"), self.shape) if self.is_batch else {}
        return self.base_shapes() | statistics

    def base_shapes(self) -> Shapes:
        present = {"weight": self.weight, "bias": self.bias}
        return {key: self.shape for key, is_there in present.items() if is_there}


@dataclass(frozen=True)
class HeadSpec:
    """An output layer, of which every task has its own."""

    kind: ClassVar[str] = "head"
    name: str
    inputs: int  # of the weight as a matrix: a kernel's taps are inputs
    bias: bool
    taps: Sizes = ()  # the kernel size, if it is a convolution
    own_forward: bool = False  # whether the layer's own forward runs, with the task's weights
    dtypes: Dtypes | None = field(default=None, kw_only=True)
    prune: bool = field(default=False, kw_only=True)  # whether tasks drop numbers of it

    def shapes(self, place: Place, classes: int) -> Shapes:
        shapes: Shapes = {"weight": (classes, self.inputs)}
        return shapes | {"bias": (classes,)} if self.bias else shapes

    def base_shapes(self) -> Shapes:
        return {}


@dataclass(frozen=True)
class DenseSpec:
    """All tensors that are neither factored nor per task. They are trained with the first task or
    kept from the given module, and constant from then on."""

    kind: ClassVar[str] = "dense"
    name: ClassVar[str] = "dense"
    tensors: tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes
    trained: tuple[str, ...]  # names of those that learn: not buffers and frozen parameters
    kept: bool

    def shapes(self, place: Place, classes: int) -> Shapes:
        return dict(self.tensors) if place.is_first and not self.kept else {}

    def base_shapes(self) -> Shapes:
        return dict(self.tensors) if self.kept else {}


LayerSpec = FactoredSpec | NormSpec | HeadSpec | TensorSpec
Spec = LayerSpec | DenseSpec


def trained_with_first(specs: Sequence[Spec]) -> str | None:
    """The name of a tensor or norm that is trained with the first task and serves all, or None."""
    for spec in specs:
        if isinstance(spec, DenseSpec) and spec.tensors and not spec.kept:
            return spec.tensors[0][0]
        if isinstance(spec, NormSpec) and spec.shared:
            return spec.name
    return None


def learned_dtype(spec: Spec, network: str) -> str:
    """The dtype of what a task adds, in a network of dtype `network`."""
    return network if isinstance(spec, DenseSpec) or spec.dtypes is None else spec.dtypes.learns


def kept_dtype(spec: Spec, key: str, network: str) -> str:
    """The dtype of what is kept of the given module. Weights of factored layers may be kept in
    fewer bits. Other tensors have the dtype of tasks, which start from them."""
    if isinstance(spec, FactoredSpec) and key == "weight" and spec.dtypes is not None:
        return spec.dtypes.keeps
    return learned_dtype(spec, network)


def tensor_name(spec: Spec, key: str) -> str:
    """A tensor's name in a file. No module is called `dense/…`: names of modules have no slash."""
    return f"dense/{key}" if isinstance(spec, DenseSpec) else f"{spec.name}.{key}"


# Fields that older versions did not have, with defaults, which are not written.
_LATER = {"taps": (), "own_forward": False, "transposed": False, "index": None, "dtypes": None}
_LATER |= {"shared_bias": False, "prune": False}


def to_json(spec: Spec) -> dict[str, Any]:
    known = asdict(spec)
    if isinstance(spec, FactoredSpec) and not spec.rank.prune:
        del known["rank"]["prune"]
    said = {k: v for k, v in known.items() if k not in _LATER or v != _LATER[k]}
    return {"kind": spec.kind, **said}


def from_json(data: dict[str, Any]) -> Spec:
    """The inverse of `to_json`; JSON has no tuples."""
    fields = {key: _tupled(value) for key, value in data.items()}
    kind = fields.pop("kind")
    if "dtypes" in fields:
        fields["dtypes"] = Dtypes(**fields["dtypes"])
    if kind in (FactoredSpec.kind, WeightSpec.kind):
        fields["rank"] = LayerRank(**fields["rank"])
        if fields["conv"] is not None:
            geometry = {key: _tupled(value) for key, value in fields["conv"].items()}
            fields["conv"] = ConvGeometry(**geometry)
        return (FactoredSpec if kind == FactoredSpec.kind else WeightSpec)(**fields)
    others = (NormSpec, HeadSpec, TensorSpec, DenseSpec)
    kinds: dict[str, type[Spec]] = {spec.kind: spec for spec in others}
    return kinds[kind](**fields)


def check_parts(specs: Sequence[Spec]) -> None:
    """Raise `ValueError` if specs contradict themselves or each other."""
    names = Counter(spec.name for spec in specs)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"it has two parts of the name {min(twice)!r}")
    if not isinstance(specs[-1], DenseSpec) or not any(isinstance(s, HeadSpec) for s in specs):
        raise ValueError("it must have a head, and the dense part last")
    for spec in specs:
        if isinstance(spec, FactoredSpec) and (conv := spec.conv) is not None:
            lengths = {len(conv.stride), len(conv.dilation), conv.dims}
            if not isinstance(conv.padding, str):
                lengths.add(len(conv.padding))
            if len(lengths) > 1 or math.prod(conv.kernel_size) * conv.channels != spec.inputs:
                raise ValueError(f"the geometry of {spec.name!r} does not fit its inputs")
        if isinstance(spec, WeightSpec) and math.prod(spec.shape) != spec.outputs * spec.inputs:
            raise ValueError(f"the shape of {spec.name!r} does not fit its matrix")
        if isinstance(spec, HeadSpec) and spec.inputs % math.prod(spec.taps):
            raise ValueError(f"the kernel of the head {spec.name!r} does not fit its inputs")
        if isinstance(spec, NormSpec):
            over_channels = not spec.is_over_last
            if over_channels and (len(spec.shape) > 1 or spec.shape[0] % spec.groups):
                raise ValueError(f"the shape of the norm {spec.name!r} does not fit its kind")
        if isinstance(spec, DenseSpec):
            known = [name for name, _ in spec.tensors]
            if len(set(known)) < len(known) or not {*spec.trained} <= {*known}:
                raise ValueError("the dense part names tensors twice, or trains unknown ones")


def _tupled(value: Any) -> Any:
    return tuple(_tupled(entry) for entry in value) if isinstance(value, list) else value
