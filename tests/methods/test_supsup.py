"""SupSup: masks of exactly the stated share over weights that exist only as a seed."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import rankup
from helpers.rivals import (
    KINDS,
    answer,
    net,
    right,
    toys,
)
from rankup.growing.options import GrowOptions
from rankup.layers import TaskHead, TaskNorm, active
from rankup.methods import method_options
from rankup.methods.base import Setting
from rankup.methods.finetune import FineTune
from rankup.methods.supsup import MaskedWeight, SupSup, largest
from rankup.rank import Rank
from rankup.training.recipe import Recipe

GROWTH = GrowOptions(Rank(1, 1))


def make(
    kind: str = "mlp",
    seed: int = 0,
    grow_options: GrowOptions = GROWTH,
    device: str = "cpu",
    **options: float,
) -> SupSup:
    recipe = Recipe(epochs=8, batch=16, weight_decay=0.1)
    chosen, tasks = method_options("supsup", options), toys(*KINDS[kind])
    return SupSup(Setting(net(kind).to(device), grow_options, recipe, seed, tasks, chosen))


def layers(method: SupSup) -> list[MaskedWeight]:
    return [part for part in method.parts if isinstance(part, MaskedWeight)]


@pytest.mark.parametrize("count", [1, 7, 30, 59, 60])
@pytest.mark.parametrize("different", [1, 2, 5, 1000])
def test_largest_keeps_ties(count: int, different: int) -> None:
    draw = torch.Generator().manual_seed(different)
    scores = torch.randint(different, (6, 10), generator=draw).float() - different // 2
    mask = largest(scores, count)
    least = sorted(scores.flatten().tolist(), reverse=True)[count - 1]
    assert torch.equal(mask, scores >= least)


@pytest.mark.parametrize("share", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_each_layers_mask_keeps_the_stated_share(kind: str, share: float) -> None:
    method = make(kind, share=share)
    method.learn(method.setting.tasks[0], None, None)
    for layer in layers(method):
        mask = layer.mask(0)
        assert int(mask.sum()) == round(share * mask.numel())


def test_gradient_goes_straight_through() -> None:
    method = make()
    method.begin(method.setting.tasks[0])
    x, layer = torch.rand(5, 64), layers(method)[0]
    mask = largest(layer.new_scores.detach(), layer.kept)
    plain = (layer.random * mask).requires_grad_()
    wanted = (x @ plain.t()).square().sum()
    wanted.backward()
    with active(0):
        got = layer(x).square().sum()
    got.backward()
    assert torch.equal(got, wanted)
    assert torch.equal(layer.new_scores.grad, plain.grad * layer.random)
    assert bool((layer.new_scores.grad[~mask] != 0).any())


def test_weights_are_seeded_signs_of_kaimings_size() -> None:
    for layer in layers(make("convolutions", share=0.25)):
        fan_in = layer.spec.inputs
        size = torch.full(layer.shape, math.sqrt(2 / (0.25 * fan_in)))
        torch.testing.assert_close(layer.random.abs(), size)
        assert 0.2 < float((layer.random > 0).float().mean()) < 0.8
    first, again, other = (layers(make(seed=seed))[0].random for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first.sign(), other.sign())


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_old_answers_never_change(kind: str) -> None:
    method = make(kind)
    before = [layer.random.clone() for layer in layers(method)]
    kept: list[Tensor] = []
    tasks = method.setting.tasks
    for index, each in enumerate(tasks):
        method.learn(each, None, None)
        assert all(
            torch.equal(layer.random, old)
            for layer, old in zip(layers(method), before, strict=True)
        )
        assert right(method, each, index) > 0.8
        kept.append(answer(method, each, index))
        assert all(torch.equal(answer(method, tasks[j], j), old) for j, old in enumerate(kept))


def test_open_task_answers_as_once_learned() -> None:
    method = make()
    (task, *_) = method.setting.tasks
    method.begin(task)
    open_ = answer(method, task, 0)
    method.end()
    assert torch.equal(answer(method, task, 0), open_)


@pytest.mark.parametrize("kind", KINDS)
def test_file_holds_masks_but_no_weights(kind: str, tmp_path: Path) -> None:
    method = make(kind)
    for each in method.setting.tasks[:2]:
        method.learn(each, None, None)
    method.save(tmp_path)
    saved = safetensors.torch.load((tmp_path / "weights-0001.safetensors").read_bytes())
    masked = {layer.spec.name: layer for layer in layers(method)}
    for name, tensor in saved.items():
        layer = name.split("/")[1].rpartition(".")[0]
        if layer in masked:
            count = math.prod(masked[layer].shape)
            assert name.endswith(".mask")
            assert tensor.dtype == torch.uint8
            assert len(tensor) == math.ceil(count / 8)
        else:
            part = method.body.get_submodule(layer)
            assert isinstance(part, TaskHead | TaskNorm)
    assert len([name for name in saved if name.endswith(".mask")]) == 2 * len(masked)


def test_what_another_seed_or_method_saved_is_refused(tmp_path: Path) -> None:
    method = make(seed=1)
    method.learn(toys(64)[0], None, None)
    method.save(tmp_path)
    with pytest.raises(rankup.StoreError, match="to SupSup with seed 1, not to SupSup with seed 0"):
        SupSup.load(tmp_path, make(seed=0).setting)
    setting = replace(make(seed=1).setting, options=method_options("finetune", {}))
    with pytest.raises(rankup.StoreError, match="to SupSup with seed 1, not to FineTune"):
        FineTune.load(tmp_path, setting)
    assert SupSup.load(tmp_path, make(seed=1).setting).learned == 1


@pytest.mark.parametrize("kind", KINDS)
def test_layers_compute_as_torchs_own(kind: str) -> None:
    method = make(kind)
    method.begin(method.setting.tasks[0])
    for layer in layers(method):
        plain = copy.deepcopy(method.setting.module.get_submodule(layer.spec.name))
        mask = largest(layer.new_scores.detach(), layer.kept)
        plain.weight = nn.Parameter((layer.random * mask).view_as(plain.weight))
        plain.bias = None
        shape = (2, layer.spec.conv.channels, 9, 9) if layer.spec.conv else (2, layer.spec.inputs)
        x = torch.rand(shape)
        with active(0):
            assert torch.equal(layer(x), plain(x))


def test_weights_that_tasks_would_share_are_refused() -> None:
    grow_options = GrowOptions(Rank(1, 1), exclude=("hidden.1",))
    with pytest.raises(rankup.RankupError, match="hidden.1.weight, hidden.1.bias would be shared"):
        make(grow_options=grow_options)
