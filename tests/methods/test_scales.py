"""VeRA and RandLoRA alike: scales of random matrices that exist only as a seed."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import rankup
from helpers.rivals import KINDS, answer, net, right, toys
from rankup.growing.options import GrowOptions
from rankup.layers import TaskHead, TaskNorm, active
from rankup.methods.shared.dense import DenseMethod
from rankup.methods.shared.scales import ScaledWeight
from rankup.rank import Rank
from rankup.testing import make_method

OPTIONS: dict[str, dict[str, Any]] = {"vera": {"directions": 40}, "randlora": {"block_rank": 3}}
both = pytest.mark.parametrize("name", OPTIONS)


def make(name: str, kind: str = "mlp", seed: int = 0, **options: Any) -> DenseMethod:
    stream = rankup.data.Stream("toys", tuple(toys(*KINDS[kind])))
    chosen = OPTIONS[name] | options
    made = make_method(name, stream, net(kind), seed=seed, options=chosen, epochs=12, batch=16)
    assert isinstance(made, DenseMethod)
    return made


def layers(method: DenseMethod) -> list[ScaledWeight]:
    return [part for part in method.parts if isinstance(part, ScaledWeight)]


def frozen(method: DenseMethod) -> list[Tensor]:
    return [layer.get_buffer(key) for layer in layers(method) for key in layer.reads]


@both
def test_matrices_are_the_same_bits_from_the_same_seed(name: str) -> None:
    first, again, other = (frozen(make(name, seed=seed)) for seed in (0, 0, 1))
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))


@both
@pytest.mark.parametrize("kind", KINDS)
def test_matrices_and_old_answers_never_change(name: str, kind: str) -> None:
    method = make(name, kind)
    before, kept = [matrix.clone() for matrix in frozen(method)], list[Tensor]()
    tasks = method.setting.tasks
    for index, task in enumerate(tasks):
        method.learn(task, None, None)
        assert all(map(torch.equal, frozen(method), before))
        assert right(method, task, index) > 0.8
        kept.append(answer(method, task, index))
        assert all(torch.equal(answer(method, tasks[j], j), old) for j, old in enumerate(kept))


@both
@pytest.mark.parametrize("kind", KINDS)
def test_file_holds_vectors_but_no_matrices(name: str, kind: str, tmp_path: Path) -> None:
    method = make(name, kind)
    for task in method.setting.tasks[:2]:
        method.learn(task, None, None)
    method.save(tmp_path)
    saved = safetensors.torch.load((tmp_path / "weights-0001.safetensors").read_bytes())
    scaled = {layer.spec.name: layer for layer in layers(method)}
    for name_of, tensor in saved.items():
        layer, _, key = name_of.split("/")[1].rpartition(".")
        if layer in scaled:
            assert tuple(tensor.shape) == scaled[layer].vectors[key]
        else:
            assert isinstance(method.body.get_submodule(layer), TaskHead | TaskNorm)
    in_layers = [name_of for name_of in saved if name_of.split("/")[1].rpartition(".")[0] in scaled]
    assert not any(key.endswith((".A", ".B")) for key in method.body.state_dict())
    assert len(in_layers) == 2 * sum(len(layer.vectors) for layer in scaled.values())


@both
def test_what_another_seed_saved_is_refused(name: str, tmp_path: Path) -> None:
    method = make(name, seed=1)
    method.learn(method.setting.tasks[0], None, None)
    method.save(tmp_path)
    with pytest.raises(rankup.StoreError, match="with seed 1, not to .* with seed 0"):
        type(method).load(tmp_path, make(name, seed=0).setting)


@both
def test_a_task_learns_all_its_vectors_and_nothing_else(name: str) -> None:
    method = make(name)
    learner = method.begin(method.setting.tasks[0])
    started = {key: p.detach().clone() for key, p in learner.learned().items()}
    method.abandon()
    method.learn(method.setting.tasks[0], None, None)
    for layer in layers(method):
        for key in layer.vectors:
            own = f"{layer.spec.name}.new_{key}"
            (first,) = (value for name_of, value in started.items() if name_of.endswith(own))
            assert torch.equal(first, torch.full_like(first, 0 if key == "bias" else 1))
            assert bool((layer.vector(key, 0) != first).any())
    learned = sum(len(layer.vectors) for layer in layers(method))
    assert len(started) == learned + 2  # and the head


@both
@pytest.mark.parametrize("kind", KINDS)
def test_layers_compute_as_torchs_own(name: str, kind: str) -> None:
    method = make(name, kind)
    method.learn(method.setting.tasks[0], None, None)
    for layer in layers(method):
        plain = copy.deepcopy(method.setting.module.get_submodule(layer.spec.name))
        plain.weight = nn.Parameter(layer.weight(0).view_as(plain.weight))
        plain.bias = nn.Parameter(layer.vector("bias", 0)) if layer.spec.bias else None
        assert (plain.bias is None) == ("bias" not in layer.vectors)
        shape = (2, layer.spec.conv.channels, 9, 9) if layer.spec.conv else (2, layer.spec.inputs)
        x = torch.rand(shape)
        with active(0):
            assert torch.equal(layer(x), plain(x))


@both
def test_a_new_weight_has_kaimings_variance(name: str) -> None:
    wide = nn.Sequential(
        nn.Conv2d(3, 60, 3), nn.BatchNorm2d(60), nn.ReLU(), nn.Flatten(), nn.Linear(60 * 49, 90),
        nn.ReLU(), nn.Linear(90, 400), nn.ReLU(), nn.Linear(400, 3),
    )  # fmt: skip
    stream = rankup.data.Stream("toys", tuple(toys(3, 9, 9)))
    method = make_method(name, stream, wide, options=OPTIONS[name])
    method.begin(stream[0])
    for layer, gain in zip(layers(method), (1, 2, 2), strict=True):
        with torch.no_grad():
            weight = layer.weight(0)
        assert weight.shape == (layer.spec.outputs, layer.spec.inputs)
        assert float(weight.std()) == pytest.approx(math.sqrt(gain / layer.spec.inputs), rel=0.1)


@both
def test_weights_that_tasks_would_share_are_refused(name: str) -> None:
    method = make(name)
    setting = replace(method.setting, grow_options=GrowOptions(Rank(1, 1), exclude=("hidden.1",)))
    with pytest.raises(rankup.RankupError, match="hidden.1.weight, hidden.1.bias would be shared"):
        type(method)(setting)
