"""The kinds of torch layers that a network knows, whether a part is just one of them, and which
tensors it holds."""

from collections.abc import Iterable, Iterator
from itertools import chain

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rankup.layers import CONVOLUTIONS
from rankup.layers.spec import NormOver

WEIGHTED = (nn.Linear, *CONVOLUTIONS)
NORMS: dict[type[nn.Module], NormOver] = {
    nn.BatchNorm1d: "batch1d",
    nn.BatchNorm2d: "batch2d",
    nn.BatchNorm3d: "batch3d",
    nn.LayerNorm: "layer",
    nn.RMSNorm: "rms",
    nn.GroupNorm: "group",
}

# What the known kinds compute with, and a derived class or a layer could override.
_COMPUTE_BY = ("__call__", "forward", "_conv_forward", "_check_input_dim", "weight", "bias")
_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}


def kind_of(part: nn.Module) -> type[nn.Module] | None:
    return next((kind for kind in (*WEIGHTED, *NORMS) if isinstance(part, kind)), None)


def computes_as_torchs_own(part: nn.Module) -> bool:
    """Whether a part is of a known kind, or of a derived class that does not change what is
    computed."""
    kind = kind_of(part)
    return kind is not None and not any(
        name in vars(part) or getattr(type(part), name, None) is not getattr(kind, name, None)
        for name in _COMPUTE_BY
    )


def is_plain(part: nn.Module) -> bool:
    """Whether nothing is lost if another layer that computes the same replaces a part."""
    known = {"weight"} if isinstance(part, nn.RMSNorm) else {"weight", "bias"}
    holds_more = (
        set(part._parameters) != known or part._modules or part._buffers.keys() - _STATISTICS
    )
    # A derived class may also have public attributes that torch's own layer does not have.
    more = {*dir(type(part))} - {*dir(kind_of(part))}
    says_more = any(not name.startswith("_") for name in more)
    return computes_as_torchs_own(part) and not holds_more and not says_more


def own_tensors(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Tensor]]:
    """Each module's own parameters and the buffers that belong to its state."""
    for name, part in modules:
        for key, tensor in chain(part._parameters.items(), part._buffers.items()):
            if tensor is not None and key not in part._non_persistent_buffers_set:
                yield f"{name}.{key}".lstrip("."), tensor


def uninitialised(module: nn.Module) -> list[str]:
    """The names of lazy parts that have not run yet, so that their shapes are not known."""
    return [
        name
        for name, part in module.named_modules()
        if any(is_lazy(tensor) for _, tensor in own_tensors([(name, part)]))
    ]
