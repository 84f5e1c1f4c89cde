"""IBP-WF (Mehta, Liang, Verma and Carin, *Continual Learning using a Bayesian Nonparametric
Dictionary of Weight Factors*, AISTATS 2021): every layer has a dictionary of K weight factors, from
which each task selects under the prior of an Indian buffet process,

    W_t = Σ_k b_{t,k} λ_{t,k} · u_k v_kᵀ
    b_{t,k} ~ Bernoulli(π_k),  π_k = Π_{i ≤ k} v_i,  v_i ~ Beta(α, 1).

The selections b and the sticks v are learned by variational inference: the posterior of a selection
is a relaxed Bernoulli variable, that of a stick a Kumaraswamy variable, which is the next task's
prior.
"""

import math
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankup import seeds
from rankup.growing.plan import Plan
from rankup.layers import Selection, Start, Tensors, dense_is_cheaper
from rankup.layers.spec import FactoredSpec
from rankup.methods.options import IbpWfOptions
from rankup.methods.shared.bits import pack, packed_size, stray_bits, unpack
from rankup.methods.shared.layout import Layout, Layouts
from rankup.methods.shared.weights import TaskWeight, TaskWeightMethod, WeightLearner
from rankup.training.batches import Draws, Feed
from rankup.utils.per_thread import PerThread, set_to

_EDGE = 1e-6  # the least distance of a probability from 0 and 1
_LARGEST_START = 3.0  # of a selection's log-odds, in absolute value: beyond, gradients vanish
_FASTER = 30.0  # factor of the learning rate of log-odds, which have further to go than weights

_drawn = PerThread[Tensors]()


def drawn(selections: Tensors) -> AbstractContextManager[None]:
    """Inside, layers compute with these sampled selections, `[K]` from 0 to 1 by layer name."""
    return set_to(_drawn, selections)


class WeightFactors(TaskWeightMethod):
    """Stores the factors that some task selects; for each task which ones, their scales, its
    biases, its head and its norms; and the current posterior of the sticks."""

    @property
    def options(self) -> IbpWfOptions:
        return self.setting.options_of(IbpWfOptions)

    def layer(self, spec: FactoredSpec, plan: Plan) -> TaskWeight:
        return DictionaryWeight(spec, self.options, self.seed, plan.dtype, plan.device)

    def check_saved(self, tensors: Tensors, learned: int) -> None:
        super().check_saved(tensors, learned)
        for layer in self.parts:
            if isinstance(layer, DictionaryWeight):
                starts = [f"{index}/{layer.spec.name}." for index in range(learned)]
                layer.check_selections([_below(tensors, start) for start in starts])

    def learner(self, feed: Feed) -> WeightLearner:
        learner = BuffetLearner(self.body, feed, self.learned, self.options)
        if full := [layer.spec.name for layer in learner.layers if bool(layer.taken.all())]:
            warnings.warn(
                f"task {feed.task.name!r} finds none of the {self.options.dictionary} factors free "
                f"in {', '.join(full)} and learns with those of earlier tasks: a larger dictionary "
                "would leave it some of its own",
                stacklevel=2,
            )
        return learner


class DictionaryWeight(TaskWeight):
    """`W_t = Σ_k b_{t,k} λ_{t,k} · u_k v_kᵀ`, where b is 0 or 1.

    Factors that a task has selected are frozen. The others are drawn anew for each task, so that
    they need not be stored. The open task's log-odds and sticks are learned as differences from
    the prior, so that weight decay pulls towards it.

    Attributes:
        U: `[K, out]`, the factors u_k that some task has selected.
        V: `[K, in]`, the same of v_k.
        taken: `[K]`, which factors these are.
        selections: `[T, K]`, which factors each learned task selects.
        scales: `[T, K]`, λ, 0 where a factor is not selected.
        biases: `[T, out]`.
        sticks: `[2, K]`, the logarithms of a and b of each stick's Kumaraswamy posterior after all
            learned tasks.
        expected: `[K]`, the log-odds of a new task's selections under that prior.
    """

    U: Tensor
    V: Tensor
    taken: Tensor
    selections: Tensor
    scales: Tensor
    biases: Tensor
    sticks: Tensor
    expected: Tensor
    new_U: Tensor
    new_V: Tensor
    new_scales: Tensor
    new_odds: Tensor
    new_sticks: Tensor
    new_bias: Tensor

    reads = ("U", "V", "taken", "sticks", "expected")

    def __init__(
        self,
        spec: FactoredSpec,
        options: IbpWfOptions,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(spec, seed, dtype, device)
        self.factors, self.least = options.dictionary, options.keep
        sticks = torch.zeros(2, self.factors, **self._factory)
        sticks[0] = math.log(options.alpha)  # Beta(α, 1) is Kumaraswamy's (α, 1)
        mask: dict[str, Any] = {"dtype": torch.bool, "device": device}
        for name, table in {
            "U": torch.zeros(self.factors, spec.outputs, **self._factory),
            "V": torch.zeros(self.factors, spec.inputs, **self._factory),
            "taken": torch.zeros(self.factors, **mask),
            "selections": torch.empty(0, self.factors, **mask),
            "scales": torch.empty(0, self.factors, **self._factory),
            "biases": torch.empty(0, spec.outputs, **self._factory),
            "sticks": sticks,
            "expected": expected_odds(sticks),
        }.items():
            self.register_buffer(name, table)

    def weight(self, task: int) -> Tensor:
        if task < self.count:
            # Factors that later tasks add have a scale of zero.
            return _product(self.U, self.scales[task], self.V)
        return self.selecting(torch.where(self.selected(), self.odds().sigmoid(), 0))

    def bias(self, task: int) -> Tensor | None:
        if not self.spec.bias:
            return None
        return self.biases[task] if task < self.count else self.new_bias

    def forward(self, x: Tensor) -> Tensor:
        selection = (_drawn.value or {}).get(self.spec.name)
        return super().forward(x) if selection is None else self._learn(x, selection)

    def _learn(self, x: Tensor, selection: Tensor) -> Tensor:
        """The layer's outputs `[…, out]` for the open task. With few samples they are computed
        factor by factor, which costs less than forming the weight."""
        rows, shape = math.prod(x.shape[:-1]), (self.spec.inputs, self.spec.outputs)
        if self.spec.conv or dense_is_cheaper(rows, self.factors, *shape):
            return self._map(x, self.selecting(selection), self.bias(self.count))
        U, V = self._factors()
        coefficients = F.linear(x, V) * (self.new_scales * selection)
        return F.linear(coefficients, U.t(), self.bias(self.count))

    def selecting(self, selection: Tensor) -> Tensor:
        """`[out, in]`: the weight of the open task, with a selection `[K]` from 0 to 1."""
        U, V = self._factors()
        return _product(U, self.new_scales * selection, V)

    def _factors(self) -> tuple[Tensor, Tensor]:
        """`U [K, out]` and `V [K, in]` of the open task: the frozen ones, and its own elsewhere."""
        taken = self.taken[:, None]
        return torch.where(taken, self.U, self.new_U), torch.where(taken, self.V, self.new_V)

    def odds(self) -> Tensor:
        """`[K]`: the log-odds of the open task's selections."""
        return self.expected + _FASTER * self.new_odds

    def selected(self) -> Tensor:
        """`[K]`: which factors the open task would select if it ended now."""
        return self.odds().sigmoid() >= self.least

    def start(self, classes: int, start: Start) -> Tensors:
        draw, outputs = self._draw("factors"), self.spec.outputs
        # With as many factors as the prior expects, W has the standard deviation of Kaiming et al.
        length = (2 * outputs / float(self.expected.sigmoid().sum())) ** 0.25
        values = {
            "U": length * F.normalize(seeds.normal(self.factors, outputs, generator=draw)),
            "V": length * F.normalize(seeds.normal(self.factors, self.spec.inputs, generator=draw)),
            "scales": torch.ones(self.factors),
            "odds": torch.zeros(self.factors),
            "sticks": torch.zeros(2, self.factors),
        }
        if self.spec.bias:
            values["bias"] = torch.zeros(outputs)
        return {name: value.to(**self._factory) for name, value in values.items()}

    def learned(self) -> Tensors:
        """The values to store, with the selection rounded to 0 or 1. Scales are multiplied by the
        probability of their factor, which is what training used on average."""
        parts, chosen = super().learned(), self.selected()
        new_ones = chosen & ~self.taken
        learned = {
            "selection": pack(chosen.byte(), 1),
            "scales": (parts["scales"] * self.odds().sigmoid().detach())[chosen],
            "U": parts["U"][new_ones],
            "V": parts["V"][new_ones],
            "sticks": self.sticks + parts["sticks"],
        }
        return learned | {"bias": parts["bias"]} if self.spec.bias else learned

    def extended(self, *added: Tensors, selections: Sequence[Selection] = (None,)) -> Tensors:
        (new,) = added  # methods commit their tasks one at a time
        chosen = unpack(new["selection"], 1, self.factors).bool()
        new_ones = chosen & ~self.taken
        tables = {"U": self.U.clone(), "V": self.V.clone(), "taken": self.taken | chosen}
        tables["U"][new_ones], tables["V"][new_ones] = new["U"], new["V"]
        scales = torch.zeros(self.factors, **self._factory)
        scales[chosen] = new["scales"]
        tables["selections"] = torch.cat([self.selections, chosen[None]])
        tables["scales"] = torch.cat([self.scales, scales[None]])
        if self.spec.bias:
            tables["biases"] = torch.cat([self.biases, new["bias"][None]])
        if "sticks" in new:
            tables |= {"sticks": new["sticks"], "expected": expected_odds(new["sticks"])}
        return tables

    def added(self, task: int) -> Tensors:
        chosen = self.selections[task]
        new_ones = chosen & ~self.selections[:task].any(0)
        added = {
            "selection": pack(chosen.byte(), 1),
            "scales": self.scales[task, chosen],
            "U": self.U[new_ones],
            "V": self.V[new_ones],
        }
        if self.spec.bias:
            added["bias"] = self.biases[task]
        # Each task's sticks replace those before it, so only the last task stores them.
        return added | {"sticks": self.sticks} if task == self.count - 1 else added

    def layouts(self, is_last: bool) -> Layouts:
        factors, outputs, dtype = self.factors, self.spec.outputs, self.dtype
        some, bits = range(factors + 1), partial(stray_bits, count=self.factors)
        layouts = {
            "selection": Layout((packed_size(factors),), torch.uint8, wrong=bits),
            "scales": Layout((some,), dtype),
            "U": Layout((some, outputs), dtype),
            "V": Layout((some, self.spec.inputs), dtype),
        }
        if self.spec.bias:
            layouts["bias"] = Layout((outputs,), dtype)
        if is_last:
            layouts["sticks"] = Layout((2, factors), dtype, wrong=_odd_sticks)
        return layouts

    def check_selections(self, tasks: Sequence[Tensors]) -> None:
        """Refuse saved tasks with other numbers of scales or new factors than they select."""
        taken = torch.zeros(self.factors, dtype=torch.bool)
        for index, task in enumerate(tasks):
            chosen = unpack(task["selection"], 1, self.factors).bool()
            selected, new = int(chosen.sum()), int((chosen & ~taken).sum())
            for key, count in {"scales": selected, "U": new, "V": new}.items():
                if len(task[key]) != count:
                    raise ValueError(
                        f"'{index}/{self.spec.name}.{key}' has {len(task[key])} entries, expected "
                        f"{count}, as many as the task selects"
                    )
            taken |= chosen


class BuffetLearner(WeightLearner):
    """Maximises the evidence lower bound: every step samples relaxed selections and adds the
    divergence from the prior, divided by the number of training samples, to the loss."""

    def __init__(self, body: nn.Module, feed: Feed, index: int, options: IbpWfOptions) -> None:
        super().__init__(body, feed, index)
        self.options = options
        self.layers = [layer for layer in body.modules() if isinstance(layer, DictionaryWeight)]

    def sample_epoch(self, generator: torch.Generator) -> Draws:
        drawn, device = super().sample_epoch(generator), generator.device
        shape = (self.feed.steps_per_epoch, 2, len(self.layers), self.options.dictionary)
        noise = torch.rand(shape, generator=generator, device=device, dtype=self.feed.dtype)
        return drawn | {"noise": noise.clamp_(_EDGE, 1 - _EDGE)}

    def forward(self, draw: Draws) -> Tensor:
        odds = torch.stack([layer.odds() for layer in self.layers])  # [L, K]
        prior = torch.stack([layer.sticks for layer in self.layers], 1)  # [2, L, K]
        posterior = prior + torch.stack([layer.new_sticks for layer in self.layers], 1)
        for_selections, for_sticks = draw["noise"]
        price = divergence(odds, posterior, prior, for_sticks)
        selections = relaxed(odds, self.options.temperature, for_selections)
        names = [layer.spec.name for layer in self.layers]
        with drawn(dict(zip(names, selections, strict=True))):
            return self.surprise(draw) + price / len(self.feed)

    def surprise(self, draw: Draws) -> Tensor:
        """The mean loss of a batch, without the divergence."""
        return super().forward(draw)


def relaxed(odds: Tensor, temperature: float, uniform: Tensor) -> Tensor:
    """Samples from 0 to 1 of relaxed Bernoulli variables, from uniform noise of the same shape."""
    return torch.sigmoid((odds + uniform.logit()) / temperature)


def divergence(odds: Tensor, posterior: Tensor, prior: Tensor, uniform: Tensor) -> Tensor:
    """The Kullback–Leibler divergence of sticks and selections together from their prior:
    estimated from one sample of the sticks, exact in the rest.

    Args:
        odds: log-odds of the selections, `[…, K]`.
        posterior: logarithms of the sticks' a and b, `[2, …, K]`.
        prior: the same for their prior.
        uniform: uniform noise to draw the sample from, `[…, K]`.
    """
    (a, b), (c, d) = posterior.exp().unbind(), prior.exp().unbind()
    log_v = torch.log(-torch.expm1(torch.log1p(-uniform) / b)) / a
    mean_log_v = (-_EULER - torch.digamma(b + 1)) / a
    log_ratio = (posterior - prior).sum(0)
    of_sticks = log_ratio + (a - c) * mean_log_v - (b - 1) / b - (d - 1) * _log_not(c * log_v)
    return (of_sticks + logistic_divergence(log_odds(log_v.cumsum(-1)) - odds)).sum()


_EULER = 0.5772156649015329


def logistic_divergence(apart: Tensor) -> Tensor:
    """The divergence between relaxed Bernoulli variables of equal temperature (any) whose log-odds
    differ by z: z·coth(z/2) − 2, the same as between logistic variables."""
    near, far = apart.abs() < 0.1, apart.abs().clamp_min(0.1)
    # With exp(−z): exp(z) overflows where z is large, and its gradient is NaN there.
    return torch.where(
        near, apart.square() / 6, far - 2 * far * torch.exp(-far) / torch.expm1(-far) - 2
    )


def expected_odds(sticks: Tensor) -> Tensor:
    """Log-odds of the product of the sticks up to each one, all at their means, clamped."""
    a, b = sticks.exp().unbind()
    log_mean = torch.lgamma(1 + 1 / a) + torch.lgamma(1 + b) - torch.lgamma(1 + 1 / a + b)
    return log_odds(log_mean.cumsum(-1)).clamp(-_LARGEST_START, _LARGEST_START)


def _odd_sticks(sticks: Tensor) -> str | None:
    finite = bool(expected_odds(sticks).isfinite().all())
    return None if finite else "holds numbers too large for logarithms of a posterior's parameters"


def log_odds(log_p: Tensor) -> Tensor:
    return log_p - _log_not(log_p)


def _log_not(log_p: Tensor) -> Tensor:
    """log(1 − p)"""
    return torch.log(-torch.expm1(log_p.clamp_max(-_EDGE)))


def _below(tensors: Tensors, start: str) -> Tensors:
    """The tensors whose names begin with `start`, by the rest of their names."""
    return {name[len(start) :]: t for name, t in tensors.items() if name.startswith(start)}


def _product(U: Tensor, scales: Tensor, V: Tensor) -> Tensor:
    return (U * scales[:, None]).t() @ V  # [out, in]
