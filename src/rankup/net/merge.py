"""A plain module for one task, made of torch's layers."""

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
    """A network's body for a committed task, with dense layers in place of its own."""
    layers = [layer for layer in layers if not is_substituted(layer.spec)]
    plain: dict[str, Any] = {layer.spec.name: layer.merged(task).eval() for layer in layers}
    for conv, norm in _folds(body, plan) if fold else ():
        unfolded: Any = plain.get(conv) or copy_of(body.get_submodule(conv))
        unfolded.eval()
        plain[conv] = fuse_conv_bn_eval(unfolded, plain[norm])
        plain[norm] = _nothing_like(plain[norm])
    own = {name: body.get_submodule(name) for name in plain}
    for name, part in plain.items():
        if has_hooks(own[name]):
            copy_hooks(own[name], part)
    for layer in layers:
        layer.hand_attributes(plain[layer.spec.name])
    module = copy_of(body, {id(own[name]): part for name, part in plain.items()})
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
    """Convolutions and batch norms to fuse: not if either has hooks, and none if the module takes
    another path than when it was grown, such as by a flag that was set since."""
    now = trace(body, training=False) if plan.folds else None
    if now is None or now.path != plan.paths[1]:
        return
    for pair in plan.folds:
        if not any(has_hooks(body.get_submodule(name)) for name in pair):
            yield pair
