"""Merging: a plain module of torch's layers for one task."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from rankup.growing.copying import copy_of
from rankup.growing.plan import Plan, is_substituted
from rankup.growing.supported import copy_hooks, has_hooks
from rankup.growing.trace import trace
from rankup.layers import TaskLayer
from rankup.layers.substitute import restore
from rankup.net.shared import make_trainable


def merge(
    body: nn.Module, layers: Sequence[TaskLayer], plan: Plan, task: int, fold: bool
) -> nn.Module:
    """A copy of a network's body for a committed task, with plain layers in place of task layers.

    Args:
        fold: whether to fold batch norms into convolutions.
    """
    layers = [layer for layer in layers if not is_substituted(layer.spec)]
    plain: dict[str, Any] = {layer.spec.name: layer.merged(task).eval() for layer in layers}
    for conv, norm in _folds(body, plan) if fold else ():
        unfolded: Any = plain.get(conv) or copy_of(body.get_submodule(conv))
        unfolded.eval()
        plain[conv] = fuse_conv_bn_eval(unfolded, plain[norm])
        plain[norm] = _nothing_like(plain[norm])
    replaced = {name: body.get_submodule(name) for name in plain}
    for name, part in plain.items():
        if has_hooks(replaced[name]):
            copy_hooks(replaced[name], part)
    for layer in layers:
        layer.hand_attributes(plain[layer.spec.name])
    module = copy_of(body, {id(replaced[name]): part for name, part in plain.items()})
    made: dict[TaskLayer, nn.Parameter] = {}
    for inner in [*module.modules()]:
        restore(inner, task, made)
    make_trainable(module, plan.dense)
    module.eval()  # not chained: a module's own may return nothing
    return module


def _nothing_like(norm: Any) -> nn.Module:
    """An identity in a norm's place, with the norm's attributes."""
    nothing = nn.Identity()
    for key in norm.__constants__:
        setattr(nothing, key, getattr(norm, key))
    return nothing


def _folds(body: nn.Module, plan: Plan) -> Iterator[tuple[str, str]]:
    """Pairs of a convolution and a batch norm to fold into it. Not those with hooks, and none if
    the module now takes another path than when it was grown, as by a flag that was set since."""
    now = trace(body, training=False) if plan.folds else None
    if now is None or now.path != plan.paths[1]:
        return
    for pair in plan.folds:
        if not any(has_hooks(body.get_submodule(name)) for name in pair):
            yield pair
