"""A mixed batch through a Linear with a kept weight: `x W₀ᵀ + ((x Vᵀ) · S[task] + E[task]) [U; B]`,
three products for all tasks. Each task's bias, a row of B, is like a factor whose hidden channel is
always 1 and which that task alone selects, by its row of the unit matrix E."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rankup.layers.dispatch import joins_hidden
from rankup.layers.mixed_call import MixedTables
from rankup.layers.tables import Tables

_UNIT = 16  # the number of factors is padded to a multiple of this, which is fast on a GPU


def tables(
    given: Tables, dtype: torch.dtype, own_bias: bool, shared_bias: Tensor | None, may_copy: bool
) -> MixedTables:
    """What `answer` reads, with K factors after padding.

    The rows are selectors and, with biases per task, the rows of E, each `[T, K]`. The constant
    tensors are V `[in, K]`, U `[K, out]` and, if present, the bias that all tasks share and a copy
    of the kept weight: `[in, out]` if it has another dtype, `[in + K, out]` if U is joined to it.

    Args:
        may_copy: whether there is memory for a copy of the kept weight.
    """
    U, V, S, B, base = given
    known, rank = S.shape
    biases = known if own_bias else 0
    more = -(rank + biases) % _UNIT
    rows = [F.pad(S, (0, biases + more))]
    if own_bias:
        own = torch.eye(known, dtype=S.dtype, device=S.device)
        rows.append(F.pad(own, (rank, more)))
    U = torch.cat([U[:rank], B]) if own_bias else U[:rank]  # steps on a GPU may have padded it
    U, V = F.pad(U, (0, 0, 0, more)).to(dtype), F.pad(V[:rank], (0, 0, 0, biases + more)).to(dtype)
    kept = [] if shared_bias is None else [shared_bias.to(dtype)]
    if base is not None and may_copy:
        if joins_hidden(len(base.t()), len(base), U.device.type):
            kept.append(torch.cat([base.to(dtype), U.t()], 1).t())
        elif base.dtype != dtype:
            kept.append(base.to(dtype).t())
    return MixedTables([row.to(dtype) for row in rows], (V.t(), U, *kept))


def answer(
    x: Tensor, gathered: MixedTables, base: Tensor, shares_bias: bool, dtype: torch.dtype
) -> Tensor:
    """The layer's output `[N, out]` for `x [N, in]`, the positions of sample after sample.

    Args:
        gathered: what `tables` gave, with the rows of the batch's samples.
    """
    rows, (V, U, *others) = gathered
    bias = others.pop(0) if shares_bias else None
    kept = others[0] if others else base.to(dtype).t()
    if len(kept) > len(V):
        return _times(_beside_hidden(x, V, rows, dtype), kept, bias)
    x = x.to(dtype)
    hidden = _per_sample(torch.mm(x, V), rows)
    selected = _selected(hidden, rows, out=None if _is_recorded(x) else hidden)
    return _times(x, kept, bias).addmm_(selected.view(-1, len(U)), U)


def _beside_hidden(x: Tensor, V: Tensor, rows: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """`x` and, beside it, the hidden channels times selectors: `[N, in + K]`."""
    inputs, rank = V.shape
    if _is_recorded(x):
        x = x.to(dtype)
        hidden = _selected(_per_sample(torch.mm(x, V), rows), rows, None)
        return torch.cat([x, hidden.view(-1, rank)], 1)
    wide = x.new_empty(x.shape[0], inputs + rank, dtype=dtype)
    seen, beside = wide[:, :inputs], wide[:, inputs:]
    seen.copy_(x)
    _selected(_per_sample(torch.mm(seen, V), rows), rows, out=_per_sample(beside, rows))
    return wide


def _per_sample(hidden: Tensor, rows: Sequence[Tensor]) -> Tensor:
    samples, _, rank = rows[0].shape
    return hidden.view(samples, hidden.shape[0] // max(1, samples), rank)  # [B, positions, K]


def _selected(hidden: Tensor, rows: Sequence[Tensor], out: Tensor | None) -> Tensor:
    """Hidden channels times each sample's selectors, plus its row of E."""
    if len(rows) == 1:
        return torch.mul(hidden, rows[0], out=out)
    return torch.addcmul(rows[1], hidden, rows[0], out=out)


def _times(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, matrix) if bias is None else torch.addmm(bias, x, matrix)


def _is_recorded(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad
