"""What torch.fx tells about a module: in which order its layers run and who reads whom."""

import inspect
import threading
from collections.abc import Collection
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from rankup import seeds
from rankup.growing.copying import copy_of, leaves
from rankup.growing.fx_patterns import flattens, only_reader, recorded_lengths
from rankup.growing.kinds import computes_as_torchs_own
from rankup.layers import CONVOLUTIONS, TaskLayer
from rankup.utils.torch_modes import has_hooks

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Tracer(fx.Tracer):
    """Takes known layers as a whole: torch.fx steps into every class that is not torch's own, even
    one that only says how a known layer is made, and into layers of a network."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    # While it traces, torch.fx replaces every module's call, in all threads.

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = isinstance(m, TaskLayer) or computes_as_torchs_own(m)
        return known or super().is_leaf_module(m, module_qualified_name)


class Trace:
    """The calls of a module's layers in the order in which they run.

    Args:
        constant: whether every run takes the same path; if not, only the order is known.
        kept: names of nodes whose outputs the module keeps, such as `self.features`.
    """

    def __init__(
        self, module: nn.Module, graph: fx.Graph, constant: bool, kept: Collection[str]
    ) -> None:
        self._modules = dict(module.named_modules())
        self._constant = constant
        self._kept = kept
        self._graph = graph
        self._calls = [node for node in graph.nodes if node.op == "call_module"]
        self.order = [str(node.target) for node in self._calls]
        self.way = str(graph) if constant else None

    def position(self, name: str) -> int:
        """When a layer first runs; after all others if it never does."""
        return self.order.index(name) if name in self.order else len(self.order)

    def reads_weights_of(self, name: str) -> bool:
        """Whether the forward uses a layer's weights directly, besides calling the layer. Checking
        whether they exist, or what dtype they have, does not count."""
        return any(
            node.op == "get_attr"
            and str(node.target).startswith(f"{name}.")
            and not all(_looks_at_kind(user, node) for user in node.users)
            for node in self._graph.nodes
        )

    def runs_once(self, name: str) -> bool:
        """Whether a layer runs exactly once, every time, and nothing else reads its weights."""
        once = self._constant and self.order.count(name) == 1
        return once and not self.reads_weights_of(name)

    def feeds_batch_norm(self, name: str) -> bool:
        """Whether only batch norms read a layer."""
        readers = [user for node in self._calls if node.target == name for user in node.users]
        return bool(readers) and all(self._batch_norm(reader) for reader in readers)

    def folds(self) -> list[tuple[str, str]]:
        """Convolutions and the batch norms that can be folded into them: each runs once, nothing
        else reads the convolution or its weights, and nothing keeps its output. After a Linear the
        norm's channels may be another dimension than the layer's outputs, so those stay apart."""
        folds = []
        for node, name in zip(self._calls, self.order, strict=True):
            readers = list(node.users)
            norm = self._batch_norm(readers[0]) if len(readers) == 1 else None
            if norm and node.name not in self._kept and self._folds_into(name, norm):
                folds.append((name, norm))
        return folds

    def reads_inputs(self) -> str | None:
        """The Linear that is the only reader of the module's input, with each sample flattened or
        as it is."""
        before, *others = self._inputs()
        while self._constant and not others and (node := only_reader(before)):
            if self._linear(node):
                name = str(node.target)
                return name if self.order.count(name) == 1 else None
            if not self._flattens(node, before):
                return None
            before = node
        return None

    def chain(self) -> list[str] | None:
        """The Linears of a module that is nothing but Linears with a ReLU between them, its inputs
        flattened or as they are."""
        names: list[str] = []
        before, *others = self._inputs()
        after_linear = False
        while self._constant and not others and (node := only_reader(before)):
            if node.op == "output":  # of the last Linear alone, not of a dict with it
                whole = after_linear and node.args == (before,)
                return names if whole and len(set(names)) == len(names) else None
            if self._linear(node) and not after_linear:
                names.append(str(node.target))
                after_linear = True
            elif self._relu(node) and after_linear:
                after_linear = False
            elif names or not self._flattens(node, before):
                return None
            before = node
        return None

    def seen_through_relu(self, name: str) -> str | None:
        """The layer whose outputs another layer, and nothing else, reads through a ReLU; both run
        once."""
        if not self._constant or self.order.count(name) != 1:
            return None
        relu = self._calls[self.order.index(name)].all_input_nodes[0]
        if not self._relu(relu):
            return None
        layer = relu.all_input_nodes[0]
        alone = len(relu.users) == len(layer.users) == 1 == self.order.count(str(layer.target))
        return str(layer.target) if alone and layer.op == "call_module" else None

    def _folds_into(self, name: str, norm: str) -> bool:
        part, after = self._modules[name], self._modules[norm]
        over_the_same = any(
            isinstance(part, conv) and isinstance(after, over)
            for conv, over in zip(CONVOLUTIONS, _BATCH_NORMS, strict=True)
        )
        return (
            over_the_same
            and computes_as_torchs_own(part)
            and not has_hooks(part)
            and self.runs_once(name)
            and self.runs_once(norm)
        )

    def _inputs(self) -> list[fx.Node]:
        return [node for node in self._graph.nodes if node.op == "placeholder"]

    def _part(self, node: fx.Node) -> nn.Module | None:
        return self._modules[str(node.target)] if node.op == "call_module" else None

    def _linear(self, node: fx.Node) -> bool:
        return isinstance(self._part(node), nn.Linear)

    def _relu(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return type(self._part(node)) is nn.ReLU
        return node.target in (torch.relu, F.relu, "relu")

    def _flattens(self, node: fx.Node, x: fx.Node) -> bool:
        part = self._part(node)
        if isinstance(part, nn.Flatten):
            return (part.start_dim, part.end_dim) == (1, -1)
        return flattens(node, x)

    def _batch_norm(self, node: fx.Node) -> str | None:
        name = str(node.target)
        return name if isinstance(self._part(node), _BATCH_NORMS) else None


def _looks_at_kind(call: fx.Node, tensor: fx.Node) -> bool:
    if call.op == "call_method" and call.target in ("to", "type_as"):
        return call.args[0] is not tensor  # another is made of its kind
    if call.op == "call_method":
        return call.target in ("size", "dim", "numel", "is_floating_point")
    return call.target is getattr and call.args[1] in ("dtype", "device", "shape", "ndim")


def trace(module: nn.Module, *, training: bool = True, given: Collection[str] = ()) -> Trace | None:
    """What torch.fx records of a module in training or in evaluation, where its path may differ;
    None if it cannot be traced.

    Args:
        given: arguments that are given something other than their defaults.
    """
    try:
        # A copy, because a forward may write to its module and its buffers; parameters stay shared,
        # and so does all that our layers hold, which are not run.
        layers = [part for part in module.modules() if isinstance(part, TaskLayer)]
        tensors = chain(module.parameters(), *(layer.buffers() for layer in layers))
        own = copy_of(module, {id(tensor): tensor for tensor in tensors})
        own.train(training)
        # One thread at a time, too: torch.fx patches methods of all modules while it traces, and
        # two at once would leave patches behind.
        with seeds.drawing(torch.device("cpu"), 0), recorded_lengths(own):
            before = seeds.drawn_from()
            defaults = {key: value for key, value in defaults_of(own).items() if key not in given}
            graph, again = (Tracer().trace(own, defaults) for _ in range(2))
            # A module that draws may take another path next time, whatever it did twice.
            constant = str(graph) == str(again) and seeds.drawn_from() == before
        held = (leaf for part in own.modules() for leaf in leaves(vars(part)))
        kept = {leaf.node.name for leaf in held if isinstance(leaf, fx.Proxy)}
        return Trace(module, graph, constant, kept)
    except Exception:  # Tracing runs the module's own code: anything may be raised.
        return None


def defaults_of(module: nn.Module) -> dict[str, Any]:
    """Defaults of a forward's arguments that torch.fx can take as constants: a stand-in for None is
    not None, and leads to another path."""
    arguments = inspect.signature(module.forward).parameters.values()
    simple = str | bool | int | float | None
    return {
        argument.name: argument.default
        for argument in arguments
        if argument.default is not argument.empty and isinstance(argument.default, simple)
    }
