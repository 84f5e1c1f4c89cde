"""The ranks of torch's process group: dividing batches, averaging, and checking that all ranks have
the same tensors."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rankup.errors import RankupError, TaskStateError

Value = TypeVar("Value")


@dataclass(frozen=True)
class Ranks:
    """This process among those of torch's default process group, which has more than one."""

    rank: int
    size: int

    def part(self, length: int) -> slice:
        """This rank's part of `length` samples; parts differ by one sample at most.

        >>> [Ranks(rank, 3).part(8) for rank in range(3)]
        [slice(0, 2, None), slice(2, 5, None), slice(5, 8, None)]
        """
        if length < self.size:
            raise RankupError(
                f"a batch of {length} samples cannot be divided among {self.size} processes"
            )
        return slice(length * self.rank // self.size, length * (self.rank + 1) // self.size)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add up all ranks' tensors, in place."""
        dist.all_reduce(tensor)
        return tensor

    def average_(self, gradient: Tensor, weight: float | None = None) -> Tensor:
        """Average all ranks' gradients, in place.

        Args:
            weight: of this rank; weights sum to 1 and are equal by default.
        """
        return self.sum_(gradient.mul_(1 / self.size if weight is None else weight))

    def of_first(self, value: Value) -> Value:
        """The first rank's value, on all ranks."""
        values: list[Any] = [value]
        dist.broadcast_object_list(values)
        first: Value = values[0]
        return first

    def copy_first_(self, tensors: Iterable[Tensor]) -> None:
        """Copy the first rank's tensors into those of the others."""
        for tensor in tensors:
            dist.broadcast(tensor, 0)

    def gathered(self, value: Value) -> list[Value]:
        """The values of all ranks, in their order."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def refuse_different(self, tensors: Mapping[str, Tensor], why: str) -> None:
        """Raise `TaskStateError` on every rank unless all have tensors of the same bits.

        Args:
            why: the end of the error's sentence.
        """
        digests = {name: _digest(tensor) for name, tensor in tensors.items()}
        everyone = self.gathered(digests)
        for name in {**everyone[0], **digests}:
            if len({each.get(name) for each in everyone}) > 1:
                raise TaskStateError(f"processes have different values of {name}: {why}")


def current() -> Ranks | None:
    """The ranks of torch's process group, if it is initialised and has more than one."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    return Ranks(dist.get_rank(), dist.get_world_size())


def _digest(tensor: Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    shape = f"{tensor.dtype} {list(tensor.shape)} ".encode()
    return hashlib.sha256(shape + content.tobytes()).hexdigest()


def merged_moments(
    parts: Iterable[tuple[int, Tensor, Tensor]],
) -> tuple[int, Tensor, Tensor]:
    """Merge the counts, means and sums of squared distances from the mean of several parts of the
    samples, as Chan et al. do, without differences of large squares.

    >>> one = 2, torch.tensor([1.0]), torch.tensor([2.0])  # 0 and 2
    >>> other = 1, torch.tensor([4.0]), torch.tensor([0.0])
    >>> merged_moments([one, other])
    (3, tensor([2.]), tensor([8.]))
    """
    (count, mean, squares), *others = parts
    for new, other_mean, other_squares in others:
        if not new:
            continue
        total, apart = count + new, other_mean - mean
        squares = squares + other_squares + apart**2 * (count * new / total)
        mean = mean + apart * (new / total)
        count = total
    return count, mean, squares


class _PooledNorm(torch.autograd.Function):
    """Batch norm by the statistics of all ranks' batches together, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
        over = [dim for dim in range(x.dim()) if dim != 1]
        wide = torch.promote_types(x.dtype, torch.float32)
        var, mean = torch.var_mean(x.to(wide), over, correction=0)
        count = x.numel() // x.shape[1]
        sent = torch.cat([mean, var * count, mean.new_tensor([count])])
        everyone = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, sent)
        channels = len(mean)
        total, mean, squares = merged_moments(
            (int(each[-1]), each[:channels], each[channels:-1]) for each in everyone
        )
        scale = torch.rsqrt(squares / total + eps)
        shape = [1, -1] + [1] * (x.dim() - 2)
        normal = (x.to(wide) - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normal, scale, weight)
        ctx.count, ctx.total, ctx.over, ctx.shape = count, total, over, shape
        ctx.has_bias, ctx.dtype = bias is not None, x.dtype
        y = normal if weight is None else normal * weight.to(wide).view(shape)
        return (y if bias is None else y + bias.to(wide).view(shape)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        normal, scale, weight = ctx.saved_tensors
        grad = grads[0].to(normal.dtype)
        to_bias, to_weight = grad.sum(ctx.over), (grad * normal).sum(ctx.over)
        # Losses are means over each rank's own samples, and weigh as much in the mean of all.
        sums = torch.stack([to_bias, to_weight]) * ctx.count
        dist.all_reduce(sums)
        sums /= ctx.count * ctx.total
        affine = 1 if weight is None else weight.to(normal.dtype).view(ctx.shape)
        to_normal = grad - sums[0].view(ctx.shape) - normal * sums[1].view(ctx.shape)
        to_x = (to_normal * affine * scale.view(ctx.shape)).to(ctx.dtype)
        return (
            to_x,
            None if weight is None else to_weight.to(weight.dtype),
            to_bias.to(ctx.dtype) if ctx.has_bias else None,
            None,
        )


def pooled_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Batch norm over the batches of all ranks, as if they were one."""
    y: Tensor = _PooledNorm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
    return y
