"""Making the plan of a network: what becomes of each layer of a module, or why it is refused."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from rankup.errors import RankupError
from rankup.growing.copying import refuse_hidden_layers
from rankup.growing.dtypes import choose_dtypes, with_dtypes
from rankup.growing.heads import choose_heads, head_spec
from rankup.growing.options import GrowOptions
from rankup.growing.plan import Plan, is_substituted, owner_of
from rankup.growing.readers import Reading, readings_in_run
from rankup.growing.roles import (
    EMBEDDINGS,
    Form,
    Role,
    attention_parts,
    depends_on_reading,
    form_of,
    places_of,
    role_of,
)
from rankup.growing.specs import factored_spec, norm_spec, statistics_spec, weight_specs
from rankup.growing.supported import (
    BATCH_STATISTICS,
    NORMS,
    WEIGHTED,
    obstacle,
    own_tensors,
    refuse_module,
)
from rankup.growing.trace import trace
from rankup.layers.spec import DenseSpec, LayerSpec, TensorSpec
from rankup.layers.substitute import STATISTICS
from rankup.rank import LayerRank, Shape, capped, is_match, resolve

_NORMS: tuple[type[nn.Module], ...] = tuple(NORMS)
_ATTENTION = "attention"  # a preset of include


def make_plan(module: nn.Module, options: GrowOptions) -> Plan:
    """Decide what becomes of each layer of a module, or refuse the module."""
    refuse_module(module)
    refuse_hidden_layers(module)
    return _Planner(module, options).plan()


class _Planner:
    """Chooses a module's heads, the layers to factor and the norms to keep per task."""

    def __init__(self, module: nn.Module, options: GrowOptions) -> None:
        self.modules = dict(module.named_modules())
        self.options = self._with_presets(options)
        self.training = trace(module, training=True)
        self.evaluation = trace(module, training=False)
        self.places = places_of(self.modules)
        self.readings = self._readings()
        heads = choose_heads(self.modules, options.heads, self.training, self.evaluation)
        self._check_patterns(heads)
        self.heads = {name: head_spec(name, self.modules, self.training.read) for name in heads}

    @property
    def shares_vectors(self) -> bool:
        return self.options.vectors == "shared"

    def _is_shared_norm(self, layer: nn.Module) -> bool:
        """Whether a norm stays as it was given. A batch norm without running statistics cannot,
        because its output for a sample depends on the whole batch."""
        if not isinstance(layer, _BatchNorm):
            return self.shares_vectors
        has_statistics = layer.running_mean is not None
        return self.shares_vectors and self.options.batch_norms == "shared" and has_statistics

    def plan(self) -> Plan:
        factored, norms = self._choose_factored(), self._choose_norms()
        dtype, device = choose_dtypes(self.modules[""], self.options), self._device()
        early = self._early_norms(factored, norms)
        if self.options.base == "keep":
            # What runs before the factored layers stays as it was given, norms included.
            norms = [name for name in norms if name not in early]
        shapes = {name: self._matrix(name) for name in factored}
        asked = resolve(self.options.rank, shapes)
        ranks = {name: capped(asked[name], shapes[name]) for name in factored}
        layers = self._specs(ranks, norms, early)
        reader, chain = self.training.reads_inputs(), self.training.chain()
        owners = {owner_of(spec) for spec in layers if is_substituted(spec)}
        also = self.evaluation.folds()
        folds = [fold for fold in self.training.folds() if fold in also]
        return Plan(
            layers=tuple(with_dtypes(spec, self.modules, dtype) for spec in layers),
            dense=self._dense(layers),
            folds=tuple(fold for fold in folds if fold[0] not in owners and fold[1] in norms),
            capped=tuple(name for name in factored if ranks[name] != asked[name]),
            first=reader if reader in factored else None,
            chain=tuple(chain[:-1]) if chain == [*factored, *self.heads] and not owners else None,
            paths=(self.training.path, self.evaluation.path),
            dtype=dtype.network,
            device=device,
        )

    def _specs(
        self, ranks: dict[str, LayerRank], norms: Sequence[str], early: Collection[str]
    ) -> list[LayerSpec]:
        """The specs of all layers, in the order of `modules`.

        Args:
            ranks: of the layers and parameters to factor, in the order in which they run.
            norms: the norms to replace.
            early: those of them that are trained with the first task and shared.
        """
        prunes = any(rank.prune for rank in ranks.values())
        specs: list[LayerSpec] = []
        for name, layer in self.modules.items():
            if name in ranks:
                feeds_norm = self.training.feeds_batch_norm(name)
                size, rank, shares = self._matrix(name), ranks[name], self.shares_vectors
                specs.append(factored_spec(name, layer, size, rank, feeds_norm, shares))
            elif name in norms:
                specs.append(norm_spec(name, layer, shared=name in early))
            elif name in self.heads:
                specs.append(replace(self.heads[name], prune=prunes))
                specs += self._substituted(name, layer, ranks)
            elif not self._is_left_out(name):
                specs += self._substituted(name, layer, ranks)
        return specs

    def _with_presets(self, options: GrowOptions) -> GrowOptions:
        if options.include is None or _ATTENTION not in options.include:
            return options
        named = attention_parts(self.modules)
        if not named:
            raise RankupError("include='attention' matches nothing in the module")
        others = [pattern for pattern in options.include if pattern != _ATTENTION]
        return replace(options, include=(*others, *named))

    def _readings(self) -> dict[str, set[Reading]]:
        """How parameters are read, where their layers' classes do not tell their roles."""
        if not self.training.failed:
            return self.training.readings
        unknown = [
            full
            for places in self.places.values()
            for full, layer, key in places
            if (parameter := layer._parameters[key]) is not None
            if depends_on_reading(layer, key, parameter)
        ]
        return readings_in_run(self.modules[""], unknown) if unknown else {}

    def _check_patterns(self, heads: Sequence[str]) -> None:
        parameters = {full for places in self.places.values() for full, _, _ in places}
        names = [*self.modules, *(name for name, _ in own_tensors(self.modules.items()))]
        options = {"include": self.options.include or (), "exclude": self.options.exclude}
        for option, patterns in options.items():
            for pattern in patterns:
                if not any(is_match(name, pattern) for name in names):
                    raise RankupError(f"{option}={pattern!r} matches nothing in the module")
        for pattern in self.options.per_task:
            alone = replace(self.options, per_task=(pattern,))
            if not any(alone.keeps_per_task(name) for name in parameters):
                raise RankupError(f"per_task={pattern!r} matches no parameter of the module")
        for head in heads:
            if self.options.excludes(head):
                raise RankupError(f"the head {head!r} cannot be excluded")

    def _choose_factored(self) -> list[str]:
        """The layers to factor, in the order in which they run."""
        chosen: list[str] = []
        for name, layer in self.modules.items():
            if isinstance(layer, WEIGHTED) and self._is_plain(name):
                chosen += [name] if self.options.chooses(name) and name not in self.heads else []
            else:
                chosen += (n for n, role in self._roles(name, layer).items() if role == "matrix")
        if not chosen:
            raise RankupError(
                "the module has nothing to factor: besides its head it needs a Linear or a "
                "convolution that include and exclude do not rule out"
            )
        chosen.sort(key=self._position)
        last = self.options.last
        if last is None:
            return chosen
        if self.training.failed:
            raise RankupError(
                f"last={last} needs the order in which layers run, but torch.fx cannot trace the "
                "module: name the layers with include instead"
            )
        if not 1 <= last <= len(chosen):
            raise RankupError(
                f"last={last} must be from 1 to {len(chosen)}, the number of layers to choose from"
            )
        return chosen[-last:]

    def _choose_norms(self) -> list[str]:
        return [
            name
            for name, layer in self.modules.items()
            if isinstance(layer, _NORMS) and not self._is_shared_norm(layer)
            if not self.options.excludes(name)
            if self._is_plain(name)
            # One without tensors is the same for all tasks, unless it looks at the whole batch.
            if isinstance(layer, _BatchNorm) or any(True for _ in own_tensors([(name, layer)]))
        ]

    def _is_plain(self, name: str) -> bool:
        """Whether a layer can be replaced by one of ours, and need not run its own forward."""
        is_weighted = isinstance(self.modules[name], WEIGHTED)
        if is_weighted and self.options.keeps_per_task(f"{name}.weight"):
            return False
        return obstacle(name, self.modules, self.training.read) is None

    def _is_left_out(self, name: str) -> bool:
        """Whether a layer that could have been factored was not chosen."""
        return isinstance(self.modules[name], WEIGHTED) and self._is_plain(name)

    def _position(self, name: str) -> int:
        """When a layer, or the layer of a parameter, first runs."""
        layer = name if name in self.modules else name.rpartition(".")[0]
        return self.training.position(layer)

    def _matrix(self, name: str) -> Shape:
        """The shape of a layer's weight as a matrix, or of each matrix in a parameter."""
        if name in self.modules:
            return Form().matrix(self._tensor(f"{name}.weight").shape)
        return self._form(name).matrix(self._tensor(name).shape)

    def _form(self, full: str) -> Form:
        owner, _, key = full.rpartition(".")
        read = self.readings.get(full, ())
        return form_of(self.modules[owner], key, self._tensor(full), read)

    def _tensor(self, full: str) -> Tensor:
        owner, _, key = full.rpartition(".")
        tensor: Tensor = getattr(self.modules[owner], key)
        return tensor

    def _roles(self, name: str, layer: nn.Module) -> dict[str, Role]:
        """The role of each parameter of a layer that runs its own forward, by full name."""
        roles: dict[str, Role] = {}
        for key, tensor in _read_by(layer):
            full = f"{name}.{key}".lstrip(".")
            if name in self.heads and key in ("weight", "bias"):
                continue
            places = self.places.get(id(tensor), [(full, layer, key)])
            if full == places[0][0] and not any(self.options.excludes(at) for at, _, _ in places):
                roles[full] = self._role(tensor, places)
        return roles

    def _role(self, tensor: Tensor, places: Sequence[tuple[str, nn.Module, str]]) -> Role:
        """The role of a tensor, given all the places where layers have it."""
        names = [full for full, _, _ in places]
        if any(map(self.options.keeps_per_task, names)):
            return "vector"
        if tensor.dim() > 1 and any(map(self.options.names, names)):
            return "matrix"
        if any(isinstance(layer, EMBEDDINGS) for _, layer, _ in places):
            return "frozen"
        roles: set[Role] = {
            role_of(layer, key, tensor, self.readings.get(full, ())) for full, layer, key in places
        }
        if "matrix" in roles:
            return "matrix" if any(map(self.options.chooses, names)) else "frozen"
        if roles == {"vector"} and not all(self._is_shared_norm(layer) for _, layer, _ in places):
            return "vector"
        return "frozen"

    def _substituted(
        self, name: str, layer: nn.Module, ranks: dict[str, LayerRank]
    ) -> list[LayerSpec]:
        """The specs for a layer that runs its own forward and reads tensors of the active task."""
        first = next(iter(ranks))
        if self.options.last and self.training.position(name) < self._position(first):
            return []
        specs: list[LayerSpec] = []
        kept = self.options.base == "keep"
        for full, role in self._roles(name, layer).items():
            shape = tuple(self._tensor(full).shape)
            if role == "matrix" and full in ranks:
                size, rank = self._matrix(full), ranks[full]
                if rank.first * (size.outputs + size.inputs) < size.outputs * size.inputs:
                    specs += weight_specs(full, shape, self._form(full), rank)
                    continue
                role = "vector"  # factors would take more numbers than the weight itself
            if role == "vector":
                specs.append(TensorSpec(full, shape, kept))
        is_own = not self._is_shared_norm(layer) and not self.options.excludes(name)
        if isinstance(layer, _BatchNorm) and is_own:
            specs.append(statistics_spec(name, layer))
        return specs

    def _early_norms(self, factored: Sequence[str], norms: Sequence[str]) -> set[str]:
        """The norms that run before the last layers, if only these are factored."""
        if not self.options.last:
            return set()
        first = self._position(factored[0])
        return {name for name in norms if self.training.position(name) < first}

    def _device(self) -> torch.device:
        devices: set[torch.device] = {p.device for p in self.modules[""].parameters()}
        if len(devices) > 1:
            raise RankupError("the module's weights must be on one device, got " + _listed(devices))
        if devices == {torch.device("meta")}:
            raise RankupError(
                "the module is on the device 'meta', which holds no values: create it again on "
                "another device"
            )
        return devices.pop()

    def _dense(self, layers: Sequence[LayerSpec]) -> DenseSpec:
        """All tensors of the module that no other spec describes."""
        whole = {spec.name for spec in layers if not is_substituted(spec)}
        read = [spec for spec in layers if is_substituted(spec)]
        statistics = {owner_of(s) for s in read if s.name.endswith(f".{STATISTICS}")}
        replaced = {getattr(spec, "parameter", spec.name) for spec in read}
        replaced |= {f"{name}.{key}" for name in self.heads for key in ("weight", "bias")}
        places = (name.rpartition(".") for name in replaced)
        made = {id(getattr(self.modules[owner], key, None)) for owner, _, key in places}
        tensors: dict[str, Tensor] = {}
        left = ((name, layer) for name, layer in self.modules.items() if name not in whole)
        for name, tensor in own_tensors(left):
            owner, _, key = name.rpartition(".")
            if id(tensor) in made or (owner in statistics and key in BATCH_STATISTICS):
                continue
            if _made_from(name) in replaced:
                continue
            if kind := _unstorable(tensor):
                raise RankupError(
                    f"{name!r} is a {kind} tensor, which cannot be stored: make it a plain one, or "
                    "register it with persistent=False"
                )
            if not any(tensor is other for other in tensors.values()):
                tensors[name] = tensor
        return DenseSpec(
            tensors=tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items()),
            # A frozen parameter is treated like a buffer.
            trained=tuple(name for name, tensor in tensors.items() if tensor.requires_grad),
            kept=self.options.base == "keep",
        )


def _read_by(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """The parameters that a layer's forward reads: its own and what parametrizations make."""
    if is_parametrized(layer):
        for key in layer.parametrizations:  # type: ignore[union-attr]
            yield key, getattr(layer, key)
    yield from ((key, p) for key, p in layer._parameters.items() if p is not None)


def _made_from(name: str) -> str:
    """The name of the weight that a parametrization makes of a parameter."""
    layer, _, rest = name.partition("parametrizations.")
    return layer + rest.partition(".")[0]


def _unstorable(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot be stored in a network's files: its kind, or None if it can be."""
    if tensor.layout != torch.strided:
        return "sparse"
    if tensor.is_quantized:
        return "quantised"
    if tensor.dtype in (torch.complex32, torch.complex128):
        return str(tensor.dtype).removeprefix("torch.")
    return None


def _listed(given: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, given)))
