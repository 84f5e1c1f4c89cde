"""Elastic weight consolidation (Kirkpatrick et al., *Overcoming catastrophic forgetting in neural
networks*, PNAS 2017): every task but the first is learned with the penalty

    strength/2 · Σ_i F_i · (θ_i − θ*_i)²

over all parameters that tasks share. The importance F is the diagonal of the Fisher information,
summed over earlier tasks, and the anchor θ* is where the latest of them left the parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from rankup import seeds
from rankup.growing.trace import trace
from rankup.layers import Tensors, active
from rankup.methods.base import Setting
from rankup.methods.options import EwcOptions
from rankup.methods.shared.dense import DenseMethod
from rankup.methods.shared.layout import Layout, Layouts
from rankup.training.batches import Draws, Feed
from rankup.training.engine.learner import Learner
from rankup.training.engine.module import ModuleLearner
from rankup.utils.torch_modes import evaluating

_BYTES = 2**26  # of per-sample gradients that are computed at once
_GPU_FACTOR = 16  # more of them on a GPU, which would otherwise wait for Python


class EWC(DenseMethod):
    """One anchor for all tasks is the online form of Schwarz et al. (2018). With `anchors="all"`
    each task pulls towards its own. Even these need not be stored separately: up to a constant,
    Σₜ Fₜ (θ − θₜ)² is Σₜ Fₜ times the squared distance from the mean of the θₜ weighted by Fₜ.

    The weights, the heads and an importance for each shared weight are stored. The latest anchor is
    simply the weights between tasks; only the mean of all anchors is stored in addition.

    Norms are shared: the penalty applies to their weights, but not to their running statistics.
    With zero strength this is `finetune`, bit for bit.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.options = setting.options_of(EwcOptions)
        graph, shared = trace(setting.module), self.shared_parameters()
        uses = Counter(id(p) for layer in self.body.modules() for p in layer._parameters.values())
        self._once = {  # by name, the Linear layers that run once and share no weights
            name: layer
            for name, layer in self.body.named_modules()
            if type(layer) is nn.Linear and graph.runs_once(name)
            if all(uses[id(p)] == 1 for p in layer.parameters()) and f"{name}.weight" in shared
        }

    def learner(self, feed: Feed) -> Learner:
        if not self.learned:
            return super().learner(feed)
        weights = self.shared_parameters()
        anchor = self.kept.get("anchor", flat(weights.values()))
        return HeldLearner(
            self.body,
            feed,
            self.learned,
            list(weights),
            self.options.strength * self.kept["importance"],
            anchor,
        )

    def consolidate(self, feed: Feed) -> None:
        weights, added = flat(self.shared_parameters().values()), self.importance(feed)
        old = self.options.gamma * self.kept.get("importance", torch.zeros_like(added))
        kept = {"importance": old + added}
        if self.options.anchors == "all":
            # 0/0 for a weight that no task needs, whose anchor does not matter.
            share = (added / kept["importance"]).nan_to_num()
            kept["anchor"] = torch.lerp(self.kept.get("anchor", weights), weights, share)
        self.kept = kept

    def kept_layouts(self, learned: int) -> Layouts:
        if not learned:
            return {}
        weights = flat(self.shared_parameters().values())
        importance = {"kept/importance": Layout(weights.shape, weights.dtype, least=0)}
        if self.options.anchors == "latest":
            return importance
        return importance | {"kept/anchor": Layout(weights.shape, weights.dtype)}

    @torch.no_grad()  # `torch.func.grad` works regardless
    def importance(self, feed: Feed) -> Tensor:
        """The diagonal of the Fisher information for the open task, `[P]`: the mean over samples of
        squared gradients of log p(y | x), with y drawn from the network's own prediction. Norms are
        in eval mode, in which they neither mix samples nor update statistics."""
        index = self.learned
        rows = seeds.generator(self.seed, "importance", index)
        labels = seeds.generator(self.seed, "importance labels", index, device=self.device)
        squares = {name: torch.zeros_like(t) for name, t in self.shared_parameters().items()}
        seen = 0
        for x in feed.sample(self.options.samples, rows):
            answers = self.predict(x, index).softmax(1)
            drawn = torch.multinomial(answers, 1, generator=labels).squeeze(1)
            with evaluating(self.body), active(index):
                done = self._add_products(squares, x, drawn)
                self._add_squares(squares, x, drawn, but=done)
            seen += len(x)
        return flat(squares.values()) / seen

    def _add_products(self, squares: Tensors, x: Tensor, labels: Tensor) -> set[str]:
        """Add the squared per-sample gradients of Linear layers that see each sample once, and
        return the names of the parameters that this covers. A sample's gradient is the outer
        product of output gradient g and input x, so its square is g² ⊗ x², and the sum over samples
        is one matrix product."""
        if not self._once:
            return set()
        layer_inputs, added = dict[str, Tensor](), dict[str, Tensor]()

        def watch(name: str, _: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
            if output.dim() != 2 or len(output) != len(x):
                return output
            layer_inputs[name], added[name] = args[0].detach(), torch.zeros_like(output)
            return output + added[name].requires_grad_()

        hooks = [
            layer.register_forward_hook(partial(watch, name)) for name, layer in self._once.items()
        ]
        try:
            with torch.enable_grad():
                loss = F.cross_entropy(self.body(x), labels, reduction="sum")
        finally:
            for hook in hooks:
                hook.remove()
        if not added:
            return set()
        done = set()
        # A layer whose output is unused gets no gradient.
        gradients = torch.autograd.grad(loss, list(added.values()), materialize_grads=True)
        for (name, inputs), grads in zip(layer_inputs.items(), gradients, strict=True):
            square = grads.square()
            squares[f"{name}.weight"].addmm_(square.t(), inputs.square())
            done.add(f"{name}.weight")
            if self._once[name].bias is not None:
                squares[f"{name}.bias"] += square.sum(0)
                done.add(f"{name}.bias")
        return done

    def _add_squares(self, squares: Tensors, x: Tensor, labels: Tensor, but: set[str]) -> None:
        """Add the squared per-sample gradients of all parameters but those in `but`."""
        weights = {name: t for name, t in self.shared_parameters().items() if name not in but}
        if not weights:
            return

        def loss_of(weights: Tensors, x: Tensor, label: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(self.body, weights, (x[None],)), label[None])

        def alone(x: Tensor, label: Tensor) -> list[Tensor]:
            leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
            with torch.enable_grad():
                loss = loss_of(leaves, x, label)
            return list(torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True))

        def gradients(x: Tensor, labels: Tensor) -> Tensors:
            try:
                of_all: Tensors = vmap(grad(loss_of), in_dims=(None, 0, 0))(weights, x, labels)
                return of_all
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # what a module calls, such as `x.view`, may not work under vmap
                one_by_one = [alone(*sample) for sample in zip(x, labels, strict=True)]
                stacked = map(torch.stack, zip(*one_by_one, strict=True))
                return dict(zip(weights, stacked, strict=True))

        room = _BYTES * (_GPU_FACTOR if self.device.type == "cuda" else 1)
        at_once = max(1, room // sum(4 * weight.numel() for weight in weights.values()))
        for chunk in zip(*(torch.split(t, at_once) for t in (x, labels)), strict=True):
            for name, grads in gradients(*chunk).items():
                squares[name] += grads.square().sum(0)


class HeldLearner(ModuleLearner):
    """Adds ½ Σ stiffness · (θ − anchor)² to the loss of a module.

    Args:
        names: the parameters θ, which `flat` joins in this order.
        stiffness: `[P]`, the strength times the importance.
        anchor: `[P]`.
    """

    stiffness: Tensor
    anchor: Tensor

    def __init__(
        self,
        body: nn.Module,
        feed: Feed,
        index: int,
        names: Sequence[str],
        stiffness: Tensor,
        anchor: Tensor,
    ) -> None:
        super().__init__(body, feed, index)
        self.names = names
        self.register_input("stiffness", stiffness)
        self.register_input("anchor", anchor)

    def forward(self, draw: Draws) -> Tensor:
        # Not by get_parameter: under vmap they are not `nn.Parameter`s.
        now = dict(self.body.named_parameters())
        moved = flat(now[name] for name in self.names) - self.anchor
        return super().forward(draw) + (self.stiffness * moved.square()).sum() / 2


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """The values of all tensors, joined to a vector `[P]`."""
    return torch.cat([tensor.flatten() for tensor in tensors])
