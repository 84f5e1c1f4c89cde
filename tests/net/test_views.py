"""Answers from four turned views: an average by hand, and what a network promises of any task."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import rankup
from helpers.zoo import assert_same_bits
from rankup.data.transforms import all_turns
from rankup.interop.lora_export import to_lora
from rankup.net.routers.base import run_for
from rankup.testing import split_digits
from rankup.testing.setup import convnet

X = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))
VIEWS = {"one": 1, "four": 4, "wide": 4, "upright": 1}
CLASSES = {"one": 3, "four": 2, "wide": 5, "upright": 4}


def add(net: rankup.IncrementalNet, name: str) -> None:
    """A task of random numbers, learned with rotations or, if it is upright, without."""
    net.begin_task(name, CLASSES[name], rotations=name != "upright", views=VIEWS[name])
    draw = torch.Generator().manual_seed(len(net.tasks))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
    net.commit_task(calibrate=[torch.rand(32, 1, 8, 8, generator=draw, dtype=net.dtype)])


def taught(*names: str, double: bool = False, **options: object) -> rankup.IncrementalNet:
    module = convnet().double() if double else convnet()
    net = rankup.grow(module, rankup.Rank(4, 1), **options).eval()
    for name in names or VIEWS:
        add(net, name)
    return net


@torch.no_grad()
def by_hand(net: rankup.IncrementalNet, name: str) -> Tensor:
    """The mean over turns, from a plain module with all rows of the head."""
    module = net.merged(name)
    module._forward_pre_hooks.clear()
    module._forward_hooks.clear()
    count = CLASSES[name]
    each = [
        module(torch.rot90(X, turn, (2, 3)))[:, turn * count : (turn + 1) * count]
        for turn in range(4)
    ]
    return (each[0] + each[1] + each[2] + each[3]) / 4


def test_four_views_are_the_average_over_turns_of_each_turns_rows() -> None:
    net = taught()
    assert net(X, "four").shape == (12, 2)
    torch.testing.assert_close(net(X, "four"), by_hand(net, "four"))
    assert not torch.allclose(net(X, "four"), net(torch.rot90(X, 1, (2, 3)), "four"), rtol=1e-2)


def test_all_rows_are_stored_and_counted_with_four_views_and_no_others_with_one() -> None:
    net = taught()
    assert [net.size(name).heads for name in VIEWS] == [49 * rows for rows in (3, 8, 20, 4)]
    assert net.classes == CLASSES
    assert [net.describe(name).views for name in VIEWS] == [1, 4, 4, 1]


def test_an_open_task_answers_as_it_will() -> None:
    net = taught("upright")
    for name, views in (("one", 1), ("four", 4)):
        net.begin_task(name, 3, rotations=True, views=views)
        logits = net.train()(X, name)
        assert logits.shape == (12, 3)
        rows = {id(p): p for layer in net.layers for p in layer.parameters() if p.shape[0] == 12}
        grads = torch.autograd.grad(logits.square().sum(), list(rows.values()))
        used = {int(grad.flatten(1).any(1).sum()) for grad in grads if grad.dim() == 2}
        assert used == {3 * views}  # of twelve rows
        net.abandon_task()


@pytest.mark.parametrize("store", ["full", "float16", "int8"])
def test_bits_stay_as_tasks_come_and_as_they_are_saved(store: str, tmp_path: Path) -> None:
    net = taught("four", store=store)
    before = net(X, "four")
    for name in ("one", "wide", "upright"):
        add(net, name)
    assert_same_bits([before], [net(X, "four")])
    rankup.save(net, tmp_path)
    assert rankup.verify(tmp_path)
    loaded = rankup.load(tmp_path, module=convnet())
    assert_same_bits([net(X, name) for name in VIEWS], [loaded(X, name) for name in VIEWS])
    assert loaded.size() == net.size()
    some = rankup.load(tmp_path, module=convnet(), tasks=["four"])
    assert_same_bits([before], [some(X, "four")])
    tasks = json.loads((tmp_path / "manifest.json").read_text())["tasks"]
    assert [task.get("views") for task in tasks] == [4, None, 4, None]
    for task in tasks:  # so that no file passes for that of another task
        with safe_open(tmp_path / task["file"], "pt") as file:
            assert json.loads(file.metadata()["task"]).get("views") == task.get("views")


@pytest.mark.parametrize(
    "names", [("four", "one", "wide", "upright"), ("four",), ("one", "upright")]
)
def test_mixed_batches_equal_one_task_after_another(names: tuple[str, ...]) -> None:
    net = taught(*names, double=True)
    x, tasks = X.double(), [names[row % len(names)] for row in range(len(X))]
    mixed, widest = net(x, tasks), max(CLASSES[name] for name in names)
    assert mixed.shape == (12, widest)
    for row, name in enumerate(tasks):
        torch.testing.assert_close(mixed[row, : CLASSES[name]], net(x, name)[row])
        assert mixed[row, CLASSES[name] :].isneginf().all()
    assert net(x[:0], torch.zeros(0, dtype=torch.long)).shape == (0, widest)


def test_merged_modules_answer_from_four_views_and_keep_their_class() -> None:
    net = taught()
    for name in VIEWS:
        merged = net.merged(name)
        assert type(merged) is type(convnet())
        assert merged.state_dict().keys() == convnet().state_dict().keys()
        for module in (merged, net.merged(name, fold=True), pickle.loads(pickle.dumps(merged))):
            torch.testing.assert_close(module(X), net(X, name), atol=1e-5, rtol=1e-5)


def test_merged_modules_can_be_exported() -> None:
    net = taught("four")
    shapes = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(net.merged("four"), (X,), dynamic_shapes=shapes)
    torch.testing.assert_close(program.module()(X[:5]), net(X[:5], "four"))


def test_mixed_batches_can_be_exported_for_any_number_of_samples() -> None:
    net, tasks = taught("four", "one"), torch.arange(12) % 2

    class Mixed(torch.nn.Module):
        def forward(self, x: Tensor, tasks: Tensor) -> Tensor:
            return net(x, task=tasks)

    batch = torch.export.Dim("batch")
    program = torch.export.export(Mixed(), (X, tasks), dynamic_shapes=({0: batch}, {0: batch}))
    found, expected = program.module()(X[:5], tasks[:5]), net(X[:5], tasks[:5])
    torch.testing.assert_close(found, expected)


def test_tasks_with_four_views_are_removed_and_joined() -> None:
    net = rankup.grow(module := convnet(), rankup.Rank(4, 1), base="keep")
    other = rankup.grow(module, rankup.Rank(4, 1), base="keep")
    for each, name in ((net, "four"), (other, "wide")):
        each.begin_task(name, CLASSES[name], uses="own", rotations=True, views=4)
        each.eval().commit_task(calibrate=[X])
    answers = {"four": net(X, "four"), "wide": other(X, "wide")}
    net.join(other)
    assert_same_bits([*answers.values()], [net(X, name) for name in answers])
    mixed = net(X, [*answers] * 6)
    torch.testing.assert_close(mixed[1::2], answers["wide"][1::2])
    net.remove_task("four")
    assert_same_bits([answers["wide"]], [net(X, "wide")])


def test_guesses_are_made_from_four_views() -> None:
    stream = split_digits(3)
    net = rankup.grow(convnet(), rankup.Rank(4, 1), router="energy, mahalanobis=0.1")
    recipe = rankup.Recipe(epochs=2, batch=32, rotations=True, views=4)
    for task in stream:
        rankup.fit(net, task, recipe)
    seen = run_for(net.eval(), X, 1, {})
    assert_same_bits([net(X, 1)], [seen.logits])
    plain = net._run_for(1, X, {})  # features are those of the image as it is
    head = next(layer for layer in net.layers if layer.spec.kind == "head").added(1)
    torch.testing.assert_close(plain, seen.features @ head["weight"].T + head["bias"])
    logits, guessed = net(X)
    assert logits.shape == (12, 6)
    assert guessed.shape == (12,)
    torch.testing.assert_close(logits.exp().sum(1), torch.ones(12))


def test_what_four_views_cannot_is_refused(tmp_path: Path) -> None:
    net = taught("four", "one", base="keep")
    with pytest.raises(rankup.RankupError, match="only square images can be turned, got 4×8"):
        net(X[..., :4], "four")
    with pytest.raises(rankup.RankupError, match="takes images alone, got 'mask', too"):
        net(X, "four", mask=None)
    with pytest.raises(rankup.RankupError, match="from four turned views, which no adapter can"):
        to_lora(net, "four", tmp_path)
    with pytest.raises(rankup.RankupError, match="got 3 task indices for 12 samples"):
        net(X, torch.zeros(3, dtype=torch.long))


def test_turns_are_counter_clockwise_and_keep_the_memory_format() -> None:
    x = torch.rand(3, 2, 5, 5)
    turned = all_turns(x.contiguous(memory_format=torch.channels_last))
    assert turned.is_contiguous(memory_format=torch.channels_last)
    assert all_turns(x).is_contiguous()
    for turn in range(4):
        assert torch.equal(turned[3 * turn : 3 * turn + 3], torch.rot90(x, turn, (2, 3)))
