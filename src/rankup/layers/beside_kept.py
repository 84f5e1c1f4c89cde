"""A mixed batch through a Linear that keeps a weight: one product with it and one pair with all
factors, for all tasks. A task's bias is one more factor, whose hidden channel is 1 and which that
task alone selects."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rankup.layers.dispatch import joins_hidden
from rankup.layers.mixed_call import MixedTables
from rankup.layers.tables import Tables

_UNIT = 16  # factors are a multiple of so many, which a GPU multiplies fast


def tables(
    given: Tables, dtype: torch.dtype, own_bias: bool, shared_bias: Tensor | None, may_copy: bool
) -> MixedTables:
    """Selectors and, if tasks have biases, those of biases, `[T, K]`; V and U as the right sides of
    products, `[in, K]` and `[K, out]`; the bias that all tasks share; and, if it may be copied, the
    kept weight where it has another dtype, `[in, out]`, or is joined with U, `[in + K, out]`."""
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
    x: Tensor, own: MixedTables, base: Tensor, shares_bias: bool, dtype: torch.dtype
) -> Tensor:
    """The layer's outputs `[N, out]` for `x [N, in]`, whose rows are each sample's positions."""
    rows, (V, U, *others) = own
    bias = others.pop(0) if shares_bias else None
    kept = others[0] if others else base.to(dtype).t()
    if len(kept) > len(V):
        return _times(_beside_hidden(x, V, rows, dtype), kept, bias)
    x = x.to(dtype)
    hidden = _per_sample(torch.mm(x, V), rows)
    selected = _selected(hidden, rows, out=None if _is_recorded(x) else hidden)
    return _times(x, kept, bias).addmm_(selected.view(-1, len(U)), U)


def _beside_hidden(x: Tensor, V: Tensor, rows: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """`x` in that dtype and, beside it, the hidden channels: `[N, in + K]`."""
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
    """Hidden channels by each sample's selectors, plus what it selects of biases."""
    if len(rows) == 1:
        return torch.mul(hidden, rows[0], out=out)
    return torch.addcmul(rows[1], hidden, rows[0], out=out)


def _times(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, matrix) if bias is None else torch.addmm(bias, x, matrix)


def _is_recorded(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad
