"""The kernels behind `build.py`: products of factors, for all layers of a network at once.

All kernels take the same arguments:

    floats, halves: pointers that the places of float32 and bfloat16 tensors are relative to.
    places: for each layer the offsets of its tensors, in the order of `Factors` and `_Buffers`.
    sizes: for each layer the numbers of `Factors.sizes`.
    tiles: for each program a layer and two indices, which say what part of the layer it computes.
    OUT, IN, RANK: how many outputs, inputs and factors a program handles at once.
    HALF: the dtype of products in sixteen bits; None for products in tf32.
    SUM: how many factors a program of `sum_parts` handles.
    EVEN: a number that outputs and inputs are multiples of.
"""

import triton
import triton.language as tl

# Columns of the table of places.
_U = tl.constexpr(0)
_V = tl.constexpr(1)
_NEW_U = tl.constexpr(2)
_NEW_V = tl.constexpr(3)
_SELECTOR = tl.constexpr(4)
_WEIGHT = tl.constexpr(5)
_GRAD_WEIGHT = tl.constexpr(6)
_GRAD_U = tl.constexpr(7)
_GRAD_V = tl.constexpr(8)
_GRAD_SELECTOR = tl.constexpr(9)
_PARTS = tl.constexpr(10)
_GRAD_MATRIX = tl.constexpr(11)
_HALF_U = tl.constexpr(12)
_HALF_V = tl.constexpr(13)
_TENSORS = tl.constexpr(14)

# Columns of the table of sizes.
_OUTPUTS = tl.constexpr(0)
_INPUTS = tl.constexpr(1)
_OLD = tl.constexpr(2)
_NEW = tl.constexpr(3)
_CHANNELS = tl.constexpr(4)
_POSITIONS = tl.constexpr(5)
_SEEDED = tl.constexpr(6)
_SIZES = tl.constexpr(7)


@triton.jit
def _tile(tiles):
    """The layer and the two indices of this program."""
    at = tiles + 3 * tl.program_id(0)
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def _pointer(base, places, layer, column: tl.constexpr):
    """A pointer to a layer's tensor. Places count in eights, so the compiler knows that tensors are
    aligned."""
    return base + tl.load(places + _TENSORS * layer + column) * 8


@triton.jit
def _size(sizes, layer, column: tl.constexpr):
    return tl.load(sizes + _SIZES * layer + column)


@triton.jit
def _even(sizes, layer, column: tl.constexpr, EVEN: tl.constexpr):
    """A size that is a multiple of `EVEN`, such that the compiler knows it."""
    return _size(sizes, layer, column) // EVEN * EVEN


@triton.jit
def _index(sizes, layer, o, i):
    """The index of entry `[o, i]` of the matrix `[out, in]` in a weight stored channels last."""
    inputs, channels, positions = (
        _size(sizes, layer, _INPUTS),
        _size(sizes, layer, _CHANNELS),
        _size(sizes, layer, _POSITIONS),
    )
    return o * inputs + (i % positions) * channels + i // positions


@triton.jit
def _product(
    us,
    vs,
    selector,
    count,
    outputs,
    inputs,
    o,
    i,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
):
    """A tile `[OUT, IN]` of Σ_r selector[r] · us[r, o] · vs[r, i], over `count` factors. In sixteen
    bits, `us` is already multiplied by the selector."""
    total = tl.zeros((OUT, IN), tl.float32)
    is_out, is_in = o < outputs, i < inputs
    for start in range(0, count, RANK):
        r = start + tl.arange(0, RANK)
        has = r < count
        u = tl.load(
            us + r[None, :] * outputs + o[:, None], mask=has[None, :] & is_out[:, None], other=0
        )
        v = tl.load(
            vs + r[:, None] * inputs + i[None, :], mask=has[:, None] & is_in[None, :], other=0
        )
        if HALF is None:
            s = tl.load(selector + r, mask=has, other=0)
            total = tl.dot(u * s[None, :], v, total, input_precision="tf32")
        else:
            total = tl.dot(u.to(HALF), v.to(HALF), total)
    return total


@triton.jit
def _rows(floats, places, sizes, layer, first, RANK: tl.constexpr):
    """`RANK` factors from `first` on, either old or new ones: pointers to the tables of their U and
    V, their indices among all factors, their rows in the tables, and which of these exist."""
    old, new = _size(sizes, layer, _OLD), _size(sizes, layer, _NEW)
    is_new = first >= old
    if is_new:
        us, vs = _pointer(floats, places, layer, _NEW_U), _pointer(floats, places, layer, _NEW_V)
    else:
        us, vs = _pointer(floats, places, layer, _U), _pointer(floats, places, layer, _V)
    at = first + tl.arange(0, RANK)
    r = at - tl.where(is_new, old, 0)
    return us, vs, at, r, r < tl.where(is_new, new, old)


@triton.jit
def _scale(floats, places, sizes, layer, at):
    """The factor between rows of `half_V`, where seeded ones are only signs, and of V."""
    size = tl.abs(tl.load(_pointer(floats, places, layer, _V)))
    return tl.where(at < _size(sizes, layer, _SEEDED), size, 1.0)


@triton.jit
def halve(
    floats,
    halves,
    places,
    sizes,
    tiles,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    SUM: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Convert factors to sixteen bits: U times the selector and V's scale, and V. The V of seeded
    factors never changes, and was converted when the buffers were made."""
    layer, first, _ = _tile(tiles)
    outputs, inputs = _even(sizes, layer, _OUTPUTS, EVEN), _even(sizes, layer, _INPUTS, EVEN)
    us, vs, at, r, has = _rows(floats, places, sizes, layer, first, RANK)
    half_U, half_V = (
        _pointer(halves, places, layer, _HALF_U),
        _pointer(halves, places, layer, _HALF_V),
    )
    selector = tl.load(_pointer(floats, places, layer, _SELECTOR) + at, mask=has, other=0)
    factor = selector * _scale(floats, places, sizes, layer, at)
    for start in range(0, outputs, OUT):
        o = start + tl.arange(0, OUT)
        there = has[:, None] & (o < outputs)[None, :]
        u = tl.load(us + r[:, None] * outputs + o[None, :], mask=there, other=0)
        tl.store(
            half_U + at[:, None] * outputs + o[None, :],
            (u * factor[:, None]).to(tl.bfloat16),
            mask=there,
        )
    seeded = _size(sizes, layer, _SEEDED)
    if first + RANK > seeded:
        learned = has & (at >= seeded)
        for start in range(0, inputs, IN):
            i = start + tl.arange(0, IN)
            there = learned[:, None] & (i < inputs)[None, :]
            v = tl.load(vs + r[:, None] * inputs + i[None, :], mask=there, other=0)
            tl.store(half_V + at[:, None] * inputs + i[None, :], v.to(tl.bfloat16), mask=there)


@triton.jit
def weights(
    floats,
    halves,
    places,
    sizes,
    tiles,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    SUM: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Compute weights, in bfloat16, from factors."""
    layer, first_o, first_i = _tile(tiles)
    outputs, inputs = _even(sizes, layer, _OUTPUTS, EVEN), _even(sizes, layer, _INPUTS, EVEN)
    old, new = _size(sizes, layer, _OLD), _size(sizes, layer, _NEW)
    o, i = first_o // OUT * OUT + tl.arange(0, OUT), first_i // IN * IN + tl.arange(0, IN)
    selector = _pointer(floats, places, layer, _SELECTOR)
    if HALF is None:
        U, V = _pointer(floats, places, layer, _U), _pointer(floats, places, layer, _V)
        weight = _product(U, V, selector, old, outputs, inputs, o, i, OUT, IN, RANK, HALF)
        U, V = _pointer(floats, places, layer, _NEW_U), _pointer(floats, places, layer, _NEW_V)
        selector += old
        weight += _product(U, V, selector, new, outputs, inputs, o, i, OUT, IN, RANK, HALF)
    else:
        U, V = _pointer(halves, places, layer, _HALF_U), _pointer(halves, places, layer, _HALF_V)
        weight = _product(U, V, selector, old + new, outputs, inputs, o, i, OUT, IN, RANK, HALF)
    tl.store(
        _pointer(halves, places, layer, _WEIGHT) + _index(sizes, layer, o[:, None], i[None, :]),
        weight.to(tl.bfloat16),
        mask=(o < outputs)[:, None] & (i < inputs)[None, :],
    )


@triton.jit
def in_order(
    floats,
    halves,
    places,
    sizes,
    tiles,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    SUM: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Copy a weight's gradient from channels last to the matrix `[out, in]`, which is read many
    times, and faster."""
    layer, first_o, first_i = _tile(tiles)
    outputs, inputs = _even(sizes, layer, _OUTPUTS, EVEN), _even(sizes, layer, _INPUTS, EVEN)
    o, i = first_o + tl.arange(0, OUT)[:, None], first_i + tl.arange(0, IN)[None, :]
    there = (o < outputs) & (i < inputs)
    grad = tl.load(
        _pointer(halves, places, layer, _GRAD_WEIGHT) + _index(sizes, layer, o, i),
        mask=there,
        other=0,
    )
    tl.store(_pointer(halves, places, layer, _GRAD_MATRIX) + o * inputs + i, grad, mask=there)


@triton.jit
def _projected(
    vs,
    grad,
    r,
    has,
    o,
    outputs,
    inputs,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    RANK: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """V times the weight's transposed gradient, for some factors and outputs: `[RANK, OUT]`."""
    projected = tl.zeros((RANK, OUT), tl.float32)
    is_out = o < outputs
    for start in range(0, inputs, IN):
        i = start + tl.arange(0, IN)
        is_in = i < inputs
        v = tl.load(
            vs + r[:, None] * inputs + i[None, :], mask=has[:, None] & is_in[None, :], other=0
        )
        g = tl.load(
            grad + o[None, :] * inputs + i[:, None],
            mask=is_out[None, :] & is_in[:, None],
            other=0,
        )
        projected = tl.dot(v.to(NUMBERS), g.to(NUMBERS), projected, input_precision="tf32")
    return projected


@triton.jit
def to_selector(
    floats,
    halves,
    places,
    sizes,
    tiles,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    SUM: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Compute the selector's gradient over some outputs, for `sum_parts`, and the gradient of new
    factors' U."""
    layer, first, part = _tile(tiles)
    outputs, inputs = _even(sizes, layer, _OUTPUTS, EVEN), _even(sizes, layer, _INPUTS, EVEN)
    old, new = _size(sizes, layer, _OLD), _size(sizes, layer, _NEW)
    us, vs, at, r, has = _rows(floats, places, sizes, layer, first, RANK)
    o = part * OUT + tl.arange(0, OUT)
    is_out = o < outputs
    grad = _pointer(halves, places, layer, _GRAD_MATRIX)
    if HALF is None:
        projected = _projected(vs, grad, r, has, o, outputs, inputs, OUT, IN, RANK, tl.float32)
    else:
        half_V = _pointer(halves, places, layer, _HALF_V)
        projected = _projected(half_V, grad, at, has, o, outputs, inputs, OUT, IN, RANK, HALF)
        projected *= _scale(floats, places, sizes, layer, at)[:, None]
    u = tl.load(
        us + r[:, None] * outputs + o[None, :], mask=has[:, None] & is_out[None, :], other=0
    )
    tl.store(
        _pointer(floats, places, layer, _PARTS) + part * (old + new) + at,
        tl.sum(u * projected, 1),
        mask=has,
    )
    s = tl.load(_pointer(floats, places, layer, _SELECTOR) + at, mask=has, other=0)
    tl.store(
        _pointer(floats, places, layer, _GRAD_U) + r[:, None] * outputs + o[None, :],
        projected * s[:, None],
        mask=(first >= old) & has[:, None] & is_out[None, :],
    )


@triton.jit
def to_V(
    floats,
    halves,
    places,
    sizes,
    tiles,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    SUM: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Compute the gradient of new factors' V."""
    layer, first_r, first_i = _tile(tiles)
    outputs, inputs = _even(sizes, layer, _OUTPUTS, EVEN), _even(sizes, layer, _INPUTS, EVEN)
    old, new = _size(sizes, layer, _OLD), _size(sizes, layer, _NEW)
    r, i = first_r + tl.arange(0, RANK), first_i + tl.arange(0, IN)
    has, is_in = r < new, i < inputs
    new_U, grad = (
        _pointer(floats, places, layer, _NEW_U),
        _pointer(halves, places, layer, _GRAD_MATRIX),
    )
    total = tl.zeros((RANK, IN), tl.float32)
    for start in range(0, outputs, OUT):
        o = start + tl.arange(0, OUT)
        is_out = o < outputs
        u = tl.load(
            new_U + r[:, None] * outputs + o[None, :], mask=has[:, None] & is_out[None, :], other=0
        )
        g = tl.load(
            grad + o[:, None] * inputs + i[None, :],
            mask=is_out[:, None] & is_in[None, :],
            other=0,
        )
        total += tl.dot(u, g.to(tl.float32), input_precision="tf32")
    s = tl.load(_pointer(floats, places, layer, _SELECTOR) + old + r, mask=has, other=0)
    tl.store(
        _pointer(floats, places, layer, _GRAD_V) + r[:, None] * inputs + i[None, :],
        total * s[:, None],
        mask=has[:, None] & is_in[None, :],
    )


@triton.jit
def sum_parts(
    floats,
    halves,
    places,
    sizes,
    tiles,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    SUM: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Sum up the parts of the selector's gradient."""
    layer, first, _ = _tile(tiles)
    outputs, rank = (
        _size(sizes, layer, _OUTPUTS),
        _size(sizes, layer, _OLD) + _size(sizes, layer, _NEW),
    )
    r = first + tl.arange(0, SUM)
    total = tl.zeros((SUM,), tl.float32)
    for part in range(0, tl.cdiv(outputs, OUT)):
        total += tl.load(
            _pointer(floats, places, layer, _PARTS) + part * rank + r, mask=r < rank, other=0
        )
    tl.store(_pointer(floats, places, layer, _GRAD_SELECTOR) + r, total, mask=r < rank)
