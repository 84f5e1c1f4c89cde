"""Building a network's module: a copy of the given one, with task layers in place of its own."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from rankup import seeds
from rankup.errors import RankupError
from rankup.growing.copying import copy_of, sharing_copy_of
from rankup.growing.options import GrowOptions
from rankup.growing.plan import Plan, is_substituted
from rankup.growing.reinit import redrawn, reset
from rankup.growing.roles import places_of
from rankup.growing.trace import trace
from rankup.layers import FactoredLinear, TaskHead, TaskLayer, TaskNorm, factored_conv
from rankup.layers.parameter_layers import FactoredWeight, TaskTensor
from rankup.layers.spec import (
    FactoredSpec,
    HeadSpec,
    LayerSpec,
    NormSpec,
    TensorSpec,
    WeightSpec,
)
from rankup.layers.substitute import HEAD, substitute


def build_module(
    original: nn.Module, plan: Plan, options: GrowOptions, *, copy: bool = True
) -> tuple[nn.Module, list[TaskLayer]]:
    """The network's module, and its task layers in the order of the plan.

    Args:
        copy: whether kept weights are copied; if not, they share the original's memory.
    """
    originals = dict(original.named_modules())
    layers = [_make_layer(spec, original, originals, plan, options, copy) for spec in plan.layers]
    replacing = [layer for layer in layers if not is_substituted(layer.spec)]
    # Layers are replaced while copying, so that every reference to one leads to its replacement.
    replaced = {id(originals[layer.spec.name]): layer for layer in replacing}
    module = (copy_of if copy else sharing_copy_of)(original, replaced)
    _refuse_left_out(module, replacing)
    if options.base == "new" and plan.dense.tensors:
        reset(module, original, plan.dense, options.seed, plan.device)
    if plan.substitutes:
        _substitute(module, original, layers, options, plan)
    else:
        _refuse_another_path(module, plan)
    for layer in replacing:  # each layer keeps the mode it was given in
        layer.training = originals[layer.spec.name].training
    return module, layers


def _substitute(
    module: nn.Module,
    original: nn.Module,
    layers: Sequence[TaskLayer],
    options: GrowOptions,
    plan: Plan,
) -> None:
    """Let modules that run their own forward read from task layers in place of their tensors."""
    with seeds.seeded_rng(plan.device, seeds.number(options.seed, "tensors")):
        start = original if options.base == "keep" else redrawn(original)
    names = {
        full: [place for place, _, _ in places]
        for places in places_of(dict(original.named_modules())).values()
        for full, _, _ in places
    }
    stand_ins: dict[str, dict[str, list[TaskLayer]]] = defaultdict(lambda: defaultdict(list))
    for layer in layers:
        spec = layer.spec
        if isinstance(layer, TaskTensor):
            layer.start_from(tensor_of(start, spec.name))
        if isinstance(spec, HeadSpec):
            if spec.own_forward:
                stand_ins[spec.name][HEAD].append(layer)
        elif is_substituted(spec):
            name = spec.parameter if isinstance(spec, WeightSpec) else spec.name
            for place in names.get(name, [name]):  # several, if layers share it
                owner, _, key = place.rpartition(".")
                stand_ins[owner][key].append(layer)
    for owner, own in stand_ins.items():
        substitute(module.get_submodule(owner), own)


def _make_layer(
    spec: LayerSpec,
    module: nn.Module,
    originals: Mapping[str, nn.Module],
    plan: Plan,
    options: GrowOptions,
    copy: bool,
) -> TaskLayer:
    layer: TaskLayer
    factory = options.seed, plan.dtype, plan.device
    if isinstance(spec, TensorSpec):
        return TaskTensor(spec, *factory)
    if isinstance(spec, WeightSpec):
        weight = FactoredWeight(spec, *factory)
        if options.base == "keep":
            whole, part = tensor_of(module, spec.parameter), spec.index or 0
            rows = slice(part * spec.shape[0], (part + 1) * spec.shape[0])
            weight.load_base(weight.base_of(whole.detach()[rows]), copy)
        return weight
    if isinstance(spec, HeadSpec) and spec.own_forward:
        return TaskHead(spec, *factory)
    if is_substituted(spec):
        return TaskNorm(spec, *factory)  # type: ignore[arg-type]
    original = originals[spec.name]
    if isinstance(spec, FactoredSpec):
        layer = (factored_conv(spec.conv) if spec.conv else FactoredLinear)(spec, *factory)
    elif isinstance(spec, NormSpec):
        layer = TaskNorm(spec, *factory)
    else:
        layer = TaskHead(spec, *factory)
    if options.base == "keep":
        shapes = spec.base_shapes()
        base = {key: getattr(original, key).reshape(size) for key, size in shapes.items()}
        layer.load_base(base, copy)
    layer.take_attributes(original)
    return layer


def tensor_of(module: nn.Module, name: str) -> Tensor:
    """A module's parameter, or the tensor that a parametrization makes."""
    owner, _, key = name.rpartition(".")
    tensor: Tensor = getattr(module.get_submodule(owner), key)
    return tensor


def _refuse_left_out(module: nn.Module, layers: Sequence[TaskLayer]) -> None:
    """Raise if the copy does not contain the layers that replace the module's own."""
    included = {id(layer) for layer in module.modules()}
    for layer in layers:
        if id(layer) not in included:
            raise RankupError(
                "grow works on a copy of the module, but the copy has a layer "
                f"{layer.spec.name!r} of its own, as when a class defines __deepcopy__: leave "
                "copying to torch"
            )


def _refuse_another_path(module: nn.Module, plan: Plan) -> None:
    """Raise if the forward takes another path with the layers that replace the module's own, as
    when it checks their class."""
    path = plan.paths[0]
    if path is not None and trace(module).path not in (None, path):
        raise RankupError(
            "the module's forward takes a different path with a network's layers in place of its "
            "own, as when it checks isinstance(layer, nn.Linear): have it check something else, "
            "such as a flag that the module sets"
        )
