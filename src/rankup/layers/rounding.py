"""The forms in which a task's numbers are stored: in full precision, in half precision, or as bytes
with a scale for every row.

Numbers are rounded once, when the task is committed. From then on the network computes with the
rounded ones, and packing and unpacking them changes no bit.
"""

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from rankup.layers import Tensors, pruned
from rankup.layers.spec import DenseSpec, NormSpec, Spec

Store = Literal["full", "float16", "int8"]
STORES: tuple[Store, ...] = get_args(Store)

_STEPS = 127  # the largest value of a byte
_SMALLEST_SCALE = 2.0**-100  # smaller ones would approach float32's subnormal numbers
_SCALE = ".scale"  # suffix of a scale's name
_MOST_MOVED = 0.01  # standard deviations by which rounding may move a norm's mean


class Layout(NamedTuple):
    """The shape and dtype of a tensor in a file."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] | None  # allowed ones; None: any


def rounded(spec: Spec, values: Tensors, store: Store) -> Tensors:
    """Values as they will be read from a file."""
    packed = _packed(spec, values, store)
    back = {key: unpack(spec, key, packed, value.dtype) for key, value in values.items()}
    return pruned.zeroed(back, pruned.masks_of(spec, packed))


def stored(spec: Spec, values: Tensors) -> Tensors:
    """Values, which must be rounded already, without those that a task has dropped."""
    masks = pruned.masks_of(spec, values)
    return {key: value[masks[key]] if key in masks else value for key, value in values.items()}


def pack(spec: Spec, values: Tensors, store: Store) -> Tensors:
    """Tensors in the form in which a file holds them, by name. Those in bytes have a scale beside
    them. Of those with dropped numbers only the others are there, and a bit mask beside them."""
    packed = _packed(spec, values, store)
    for key, mask in pruned.masks_of(spec, packed).items():
        if mask.all():
            continue
        for name in (key, key + _SCALE):
            if name in packed and pruned.covers(mask, packed[name].shape):
                packed[name] = packed[name][mask]
        if key not in pruned.OWN:
            packed[key + pruned.KEPT] = pruned.to_bits(mask)
    return packed


def _packed(spec: Spec, values: Tensors, store: Store) -> Tensors:
    packed: Tensors = {}
    for key, value in values.items():
        form = _form(spec, key, tuple(value.shape), store)
        if form == "int8":
            scale = _scale(value)
            packed[key] = (value / _over(scale, value)).round().to(torch.int8)
            packed[key + _SCALE] = scale
        else:
            packed[key] = value if form == "full" else _half(value)
    if isinstance(spec, NormSpec) and _moves(packed, values, spec.eps):
        packed["mean"] = values["mean"]
    return packed


def _half(value: Tensor) -> Tensor:
    half = value.to(torch.float16)
    return half if bool(half.isfinite().all()) else value


def _moves(packed: Tensors, values: Tensors, eps: float) -> bool:
    """Whether rounding moves a norm's mean by so many standard deviations that its output would
    change, as it may if inputs are far from zero."""
    if packed.get("mean") is values.get("mean"):  # not rounded: no need to wait for a GPU
        return False
    off = (packed["mean"].double() - values["mean"].double()).abs()
    return bool((off > _MOST_MOVED * (packed["var"].double() + eps).sqrt()).any())


def unpack(spec: Spec, key: str, packed: Tensors, dtype: torch.dtype) -> Tensor:
    value = packed[key]
    if isinstance(spec, DenseSpec):
        return value
    if key + _SCALE in packed:
        return value.to(dtype) * _over(packed[key + _SCALE], value)
    return value.to(dtype)


def layouts(
    spec: Spec, key: str, shape: tuple[int, ...], store: Store, dtype: torch.dtype
) -> dict[str, Layout]:
    """The layouts of what a file holds for a tensor of this shape, by name. `dtype` is that of what
    tasks learn."""
    if isinstance(spec, DenseSpec):  # such as a module's own counters and tables
        return {key: Layout(shape, None)}
    form = _form(spec, key, shape, store)
    if form == "int8":
        return {
            key: Layout(shape, (torch.int8,)),
            key + _SCALE: Layout(shape[:1] if len(shape) > 1 else (), (torch.float32,)),
        }
    return {key: Layout(shape, (torch.float16, dtype) if form == "float16" else (dtype,))}


def bytes_of(spec: Spec, values: Tensors, store: Store) -> int:
    """How many bytes `pack` makes of the values. They are not packed where shapes tell the size."""
    if pruned.keys_of(spec):
        return sum(tensor.nbytes for tensor in pack(spec, values, store).values())
    total, uncertain = 0, Tensors()
    for key, value in values.items():
        for layout in layouts(spec, key, tuple(value.shape), store, value.dtype).values():
            if layout.dtypes is not None and len(layout.dtypes) == 1:
                total += math.prod(layout.shape) * layout.dtypes[0].itemsize
            else:
                uncertain[key] = value
    return total + sum(tensor.nbytes for tensor in _packed(spec, uncertain, store).values())


def bytes_of_each(spec: Spec, key: str, value: Tensor, store: Store) -> int:
    """How many bytes each number of a tensor takes, without scales."""
    form = _form(spec, key, tuple(value.shape), store)
    return {"full": value.itemsize, "float16": 2, "int8": 1}[form]


def _form(spec: Spec, key: str, shape: tuple[int, ...], store: Store) -> Store:
    """The form of one tensor. Bytes are for matrices and selectors alone: biases and norms are few,
    and need more precision. Dense tensors are stored once and stay as they are."""
    if store == "full" or isinstance(spec, DenseSpec) or 0 in shape:
        return "full"
    byte = key == "selector" or (len(shape) > 1 and not isinstance(spec, NormSpec))
    return "int8" if store == "int8" and byte else "float16"


def _scale(value: Tensor) -> Tensor:
    """The scale of each row, or of a selector as a whole. Unpacked values have the same scale, as
    was checked for every float32 number."""
    rows = value.flatten(1) if value.dim() > 1 else value
    scale = (rows.abs().amax(-1) / _STEPS).float()
    return torch.where(scale > _SMALLEST_SCALE, scale, 1.0)


def _over(scale: Tensor, value: Tensor) -> Tensor:
    """Scales per row, shaped to broadcast over the rows of `value`."""
    return scale.view(*scale.shape, *(1,) * (value.dim() - scale.dim()))
