"""Traces of modules by torch.fx: in which order layers run, and what reads their outputs."""

import builtins
import inspect
import operator
import threading
from collections.abc import Collection
from functools import singledispatch
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from rankup import seeds
from rankup.errors import RankupError
from rankup.growing.copying import copy_of, unregistered
from rankup.growing.readers import readings_in
from rankup.growing.supported import WEIGHTED, computes_as_torchs_own, has_hooks
from rankup.layers import CONVOLUTIONS, TaskLayer

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

# Python's `len` must return a number, so torch.fx cannot trace it. While tracing, it is replaced by
# a function that records the call.
_len, _recorded_len = len, singledispatch(len)
_recorded_len.register(fx.Proxy, lambda x: x.tracer.create_proxy("call_function", _len, (x,), {}))


class Trace:
    """The calls of a module's layers in the order in which they run.

    Args:
        graph: what torch.fx recorded; None if it cannot trace the module.
        constant: whether every run takes the same path; if not, only the order is known.
        kept: names of nodes whose outputs the module stores, such as in `self.features`.
    """

    def __init__(
        self,
        module: nn.Module,
        graph: fx.Graph | None,
        constant: bool = False,
        kept: Collection[str] = (),
    ) -> None:
        self.failed = graph is None
        graph = graph or fx.Graph()
        self._modules = dict(module.named_modules())
        self._kept = kept
        self._calls = [node for node in graph.nodes if node.op == "call_module"]
        self.order = [str(node.target) for node in self._calls]
        self.path = str(graph) if constant else None
        # Layers whose weights the forward reads directly, besides calling the layer.
        self.read = {
            str(node.target).rpartition(".")[0]
            for node in graph.nodes
            if node.op == "get_attr" and not all(_reads_kind(user, node) for user in node.users)
        }
        self.readings = readings_in(graph)
        self._graph = graph
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        # With options, such as a mask, the module may take another path.
        self._input = inputs[0] if constant and len(inputs) == 1 else None

    def position(self, name: str) -> int:
        """When a layer first runs; after all others if it never does."""
        return self.order.index(name) if name in self.order else len(self.order)

    def answers(self) -> list[str]:
        """The layers with parameters whose outputs reach the module's output without another such
        layer in between, in the order in which they run."""
        left = [node for node in self._graph.nodes if node.op == "output"]
        found: dict[str, None] = {}
        seen = set(left)
        while left:
            for node in left.pop().all_input_nodes:
                layer = self._called(node)
                if layer is not None and any(True for _ in layer.parameters()):
                    found[str(node.target)] = None
                elif node not in seen:
                    seen.add(node)
                    left.append(node)
        return sorted(found, key=self.position)

    def runs_once(self, name: str) -> bool:
        """Whether a layer runs exactly once, every time, and nothing else reads its weights."""
        once = self.path is not None and self.order.count(name) == 1
        return once and name not in self.read

    def feeds_batch_norm(self, name: str) -> bool:
        """Whether only batch norms read a layer."""
        readers = [user for node in self._calls if node.target == name for user in node.users]
        return bool(readers) and all(map(self._is_batch_norm, readers))

    def folds(self) -> list[tuple[str, str]]:
        """Pairs of a convolution and a batch norm that can be folded into it.

        Each runs once, and only the norm reads the convolution's output. Not those after a Linear,
        whose outputs may be in another dimension than the norm's channels. None in a module with
        options, which may take another path.
        """
        return [
            (str(conv.target), str(norm.target))
            for conv in (self._calls if self._input is not None else [])
            if len(conv.users) == 1 and conv.name not in self._kept
            for norm in conv.users
            if self._is_batch_norm(norm) and self._folds_into(str(conv.target), str(norm.target))
        ]

    def reads_inputs(self) -> str | None:
        """The name of the Linear that is the only reader of the module's input, as it is or with
        each sample flattened."""
        node = self._first_reader()
        if node is None or not self._is_linear(node):
            return None
        name = str(node.target)
        return name if self.order.count(name) == 1 else None

    def chain(self) -> list[str] | None:
        """The names of the Linears of a module that is nothing but Linears with ReLUs between them,
        whose inputs may be flattened first; None for other modules."""
        names: list[str] = []
        node = self._first_reader()
        while node is not None and self._is_linear(node) and node.target not in names:
            names.append(str(node.target))
            reader = _only_reader(node)
            if reader is None or not self._is_relu(reader):
                # The output must be the last Linear's and not, say, a dict with it.
                whole = reader is not None and reader.op == "output" and reader.args == (node,)
                return names if whole else None
            node = _only_reader(reader)
        return None

    def seen_through_relu(self, name: str) -> str | None:
        """The name of the layer whose output the given layer, and nothing else, reads through a
        ReLU, if both run once."""
        if self.path is None or self.order.count(name) != 1:
            return None
        relu = self._calls[self.order.index(name)].all_input_nodes[0]
        if not self._is_relu(relu):
            return None
        layer = relu.all_input_nodes[0]
        alone = len(relu.users) == len(layer.users) == 1 == self.order.count(str(layer.target))
        return str(layer.target) if alone and layer.op == "call_module" else None

    def _first_reader(self) -> fx.Node | None:
        """The only reader of the module's input, after any flattening of each sample."""
        node = self._input
        while node is not None and (reader := _only_reader(node)):
            if not self._flattens(reader, node):
                return reader
            node = reader
        return None

    def _folds_into(self, conv: str, norm: str) -> bool:
        layer, after = self._modules[conv], self._modules[norm]
        same_dimensions = any(
            isinstance(layer, conv_class) and isinstance(after, norm_class)
            for conv_class, norm_class in zip(CONVOLUTIONS, _BATCH_NORMS, strict=True)
        )
        return (
            same_dimensions
            and computes_as_torchs_own(layer)
            and not has_hooks(layer)
            and self.runs_once(conv)
            and self.runs_once(norm)
        )

    def _called(self, node: fx.Node) -> nn.Module | None:
        return self._modules[str(node.target)] if node.op == "call_module" else None

    def _is_linear(self, node: fx.Node) -> bool:
        return isinstance(self._called(node), nn.Linear)

    def _is_batch_norm(self, node: fx.Node) -> bool:
        return isinstance(self._called(node), _BATCH_NORMS)

    def _is_relu(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return type(self._called(node)) is nn.ReLU
        return node.target in (torch.relu, F.relu, "relu")

    def _flattens(self, node: fx.Node, x: fx.Node) -> bool:
        """Whether a node computes `x.flatten(1)`. `x.view(-1, n)` is taken for that, too, though it
        is so only for samples of n numbers, which is not known before there is data."""
        if node.op == "call_module":
            layer = self._called(node)
            return isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1)
        if node.target in (torch.flatten, "flatten"):
            arguments = dict(zip(("input", "start_dim", "end_dim"), node.args, strict=False))
            expected = {"input": x, "start_dim": 1, "end_dim": -1}
            return {"end_dim": -1, **arguments, **node.kwargs} == expected
        if node.target not in (torch.reshape, "reshape", "view") or node.kwargs:
            return False
        _, *sizes = node.args
        shape: Any = sizes[0] if isinstance(sizes[0], list | tuple) else sizes
        if node.args[0] is not x or len(shape) != 2 or not isinstance(shape[1], int):
            return False
        return _counts_samples(shape[0], x) or (shape[0] == -1 and shape[1] > 0)


def trace(module: nn.Module, *, training: bool = True) -> Trace:
    """Trace a module in training or in evaluation mode, where its path may differ."""
    # A copy, because a forward may write to its module and its buffers. It shares parameters and
    # the tables of task layers.
    shared: dict[int, Any] = {
        id(buffer): buffer
        for layer in module.modules()
        if isinstance(layer, TaskLayer)
        for buffer in layer.buffers()
    }
    shared |= {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in module.parameters()}
    copied = copy_of(module, shared)
    # One thread at a time: torch.fx patches methods of all modules while it traces.
    with seeds.seeded_rng(torch.device("cpu"), 0):
        before = seeds.rng_states()
        try:
            copied.train(training)
            graph = _Tracer(module).trace(copied, _simple_defaults(copied))
        except _RunsOriginal:
            raise
        except Exception:  # Tracing runs the module's own code: anything may be raised.
            return Trace(module, None)
        # A module that draws may take another path next time.
        constant = seeds.rng_states() == before
    kept = {value.node.name for _, value in unregistered(copied) if isinstance(value, fx.Proxy)}
    return Trace(module, graph, constant, kept)


class _RunsOriginal(RankupError):
    """The forward of a module's copy calls layers of the original."""


class _Tracer(fx.Tracer):
    """Records calls of known layers and of task layers. By itself torch.fx would trace into them if
    their class is not torch's own."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self._originals = {*original.modules()}
        self._thread = threading.get_ident()

    def trace(self, *args: Any, **kwargs: Any) -> fx.Graph:
        builtins.len = _recorded_len
        try:
            return super().trace(*args, **kwargs)
        finally:
            builtins.len = _len

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:  # torch.fx patches calls in all threads
            return forward(*args, **kwargs)
        if m in self._originals and m not in (self.submodule_paths or {}):
            raise _RunsOriginal(
                "the module's forward calls a function that would run the given module's layers, "
                "not those of a network, such as a lambda that uses self: make it a method"
            )
        return super().call_module(m, forward, args, kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if super().is_leaf_module(m, module_qualified_name) or isinstance(m, TaskLayer):
            return True
        # A Linear or convolution even if it has its own forward: it may be the head.
        return isinstance(m, WEIGHTED) or computes_as_torchs_own(m)


def _simple_defaults(module: nn.Module) -> dict[str, Any]:
    """The defaults of a forward's arguments that torch.fx can treat as constants. A proxy in place
    of None would not be None, and could lead to another path."""
    arguments = inspect.signature(module.forward).parameters.values()
    simple = str | bool | int | float | None
    return {
        argument.name: argument.default
        for argument in arguments
        if argument.default is not argument.empty and isinstance(argument.default, simple)
    }


def _only_reader(x: fx.Node) -> fx.Node | None:
    """The node that alone reads `x`, not counting sizes of `x` that only this node reads."""
    for reader in x.users:
        sizes = [size for size in reader.all_input_nodes if size is not x]
        sizes += [shape for size in sizes for shape in size.all_input_nodes if shape is not x]
        if all(set(node.users) <= {reader, *sizes} for node in (x, *sizes)):
            return reader
    return None


def _counts_samples(size: Any, x: fx.Node) -> bool:
    """Whether a size is `len(x)`, `x.size(0)`, `x.shape[0]` or `x.size()[0]`."""
    if not isinstance(size, fx.Node):
        return False
    arguments = (*size.args, *size.kwargs.values())
    if size.target is operator.getitem and isinstance(arguments[0], fx.Node):
        shape = arguments[0].target, arguments[0].args
        return bool(arguments[1] == 0 and shape in ((getattr, (x, "shape")), ("size", (x,))))
    return (size.target, arguments) in ((_len, (x,)), ("size", (x, 0)))


def _reads_kind(call: fx.Node, tensor: fx.Node) -> bool:
    """Whether a call reads only the dtype, device or shape of a tensor, not its values."""
    if call.op == "call_method" and call.target in ("to", "type_as"):
        return call.args[0] is not tensor  # another tensor is converted to its dtype and device
    if call.op == "call_method":
        return call.target in ("size", "dim", "numel", "is_floating_point")
    return call.target is getattr and call.args[1] in ("dtype", "device", "shape", "ndim")
