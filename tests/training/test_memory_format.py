"""Images in channels-last memory format: faster, and only for modules that support it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import rankup
from helpers.zoo import GPU
from rankup.growing.options import GrowOptions
from rankup.methods import METHODS, method_class, method_options
from rankup.methods.base import Setting
from rankup.net.network import IncrementalNet
from rankup.rank import Rank
from rankup.training import memory_format
from rankup.training.engine.select import Engine
from rankup.training.loop import learn
from rankup.training.recipe import Recipe

DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
GROWTH = GrowOptions(Rank(3, 1))
SAMPLE = ("rank", "finetune", "icarl")
SHORT = Recipe(epochs=5, batch=32, lr=0.02)


def coloured(number: int = 0) -> rankup.Task:
    """Which of three colours is the strongest."""
    draw = torch.Generator().manual_seed(number)
    x = torch.rand(240, 3, 6, 6, generator=draw)
    y = torch.arange(240) % 3
    x[torch.arange(240), (y + number) % 3] += 0.5
    return rankup.Task(f"{number}", 3, x, y, x[:90], y[:90])


class Net(nn.Module):
    """Flattens as a subclass says."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.register_buffer("runs", torch.zeros(()), persistent=False)
        self.head = nn.Linear(8 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.head(self.flat(self.norm(self.first(x)).relu()))

    def flat(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class Viewing(Net):
    def flat(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1)


class ViewingInAnswers(Net):
    def flat(self, x: Tensor) -> Tensor:
        return x.flatten(1) if self.training else x.view(len(x), -1)


class ViewingInTraining(Net):
    def flat(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1) if self.training else x.flatten(1)


def seen_by(body: nn.Module) -> dict[bool, set[bool]]:
    """Whether its norm's inputs are channels-last, in answers (False) and in training."""
    seen: dict[bool, set[bool]] = {False: set(), True: set()}

    def look(part: nn.Module, inputs: tuple[Tensor]) -> None:
        if len(inputs[0]) > 2:  # a trial has two samples
            last = inputs[0].is_contiguous(memory_format=torch.channels_last)
            seen[body.training].add(last)

    body.get_submodule("norm").register_forward_pre_hook(look)
    return seen


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "in_answers", "in_training", "precision"),
    [
        (Net, True, True, "bfloat16"),
        (Viewing, False, False, "float32"),
        (ViewingInAnswers, False, True, "float32"),
        (ViewingInTraining, True, False, "float32"),
    ],
)
def test_network_learns_however_it_flattens(
    kind: type[Net], in_answers: bool, in_training: bool, precision: str, device: str
) -> None:
    net = rankup.grow(kind().to(device), Rank(3, 1))
    seen = seen_by(net.body)
    for number in range(2):
        rankup.fit(net, coloured(number), replace(SHORT, precision=precision))
        x, y = coloured(number).test_x.to(device), coloured(number).test_y.to(device)
        assert float((net.eval()(x, number).argmax(1) == y).float().mean()) > 0.8
    assert seen[True] == {in_training}
    if device == "cpu":  # the other is from our own call of the network
        assert seen[False] == {in_answers, False}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name",
    [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.slow) for name in METHODS],
)
def test_every_method_learns_a_module_with_views(name: str, device: str) -> None:
    tasks = [coloured(number).to(device) for number in range(2)]
    recipe = Recipe(**{**METHODS[name].recipe, "epochs": 2, "batch": 32})
    setting = Setting(Viewing().to(device), GROWTH, recipe, 0, tasks, method_options(name, {}))
    method = method_class(name)(setting)
    for task in tasks:
        if method.learned < len(tasks):
            learn([method], [task], Engine(pytest.fail))
    assert method.predict(tasks[0].test_x, 0).shape == (90, 3)


def test_module_may_refuse_channels_last_by_any_error() -> None:
    class Refusing(Net):
        def forward(self, x: Tensor) -> Tensor:
            if not x.is_contiguous():
                raise AssertionError("images lie as they come")
            return super().forward(x)

    net = rankup.grow(Refusing(), Rank(3, 1), head="head")
    assert rankup.fit(net, coloured(), SHORT).tasks == [coloured().name]


def test_trial_changes_nothing() -> None:
    body = Net().train()
    before = {name: tensor.clone() for name, tensor in body.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    assert memory_format.takes_channels_last(
        body, torch.rand(5, 3, 6, 6, generator=torch.Generator())
    )
    assert torch.equal(torch.rand(4), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in body.state_dict().items())
    assert body.runs == 0
    assert body.training


def test_format_is_tried_once_for_each_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[bool] = []
    answers = memory_format._runs

    def counted(body: nn.Module, x: Tensor) -> bool:
        tried.append(body.training)
        return answers(body, x)

    monkeypatch.setattr(memory_format, "_runs", counted)
    net = rankup.grow(Net(), Rank(3, 1))
    for number in range(2):
        rankup.fit(net, coloured(number), SHORT)
    assert sorted(tried) == [False, True]


def test_steps_agree_in_both_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    def learned() -> IncrementalNet:
        torch.manual_seed(0)
        net = rankup.grow(Net().double(), Rank(3, 1))
        for number in range(2):
            task = coloured(number)
            task = replace(task, train_x=task.train_x.double(), test_x=task.test_x.double())
            rankup.fit(net, task, replace(SHORT, epochs=3))
        return net.eval()

    last = learned()
    monkeypatch.setattr(memory_format, "_runs", lambda *_: False)
    plain = learned()
    x = coloured().test_x.double()
    for task in range(2):
        torch.testing.assert_close(last(x, task), plain(x, task), rtol=1e-8, atol=1e-8)


def test_accuracy_of_an_unknown_task_is_refused() -> None:
    net = rankup.grow(Net(), Rank(3, 1))
    with pytest.raises(rankup.RankupError, match="there is no task '0', none was learned yet"):
        rankup.accuracy(net, coloured())
    rankup.fit(net, coloured(), SHORT)
    with pytest.raises(rankup.RankupError, match="there is no task '1', only '0'"):
        rankup.accuracy(net, coloured(1))
    assert rankup.accuracy(net, coloured()) > 0.8


def test_inputs_without_images_keep_their_format() -> None:
    assert not memory_format.takes_channels_last(nn.Linear(3, 3), torch.rand(4, 3))
    one_dimension = nn.Sequential(nn.Conv1d(3, 4, 3))
    assert not memory_format.takes_channels_last(one_dimension, torch.rand(4, 3, 8))


class Positions(nn.Module):
    """A module whose view works with channels last only if there is a single position."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).relu()
        samples, channels, height, width = y.shape
        means = y.view(samples * channels, height * width).mean(1)
        answer: Tensor = self.head(means.view(samples, channels))
        return answer


def of_size(side: int) -> rankup.Task:
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(128) % 2
    x = torch.rand(128, 3, side, side, generator=draw) * (1 - 0.5 * y[:, None, None, None])
    return rankup.Task(f"of {side}", 2, x, y, x, y)


def test_format_is_tried_for_each_size() -> None:
    net = rankup.grow(Positions(), Rank(4, 1), head="head")
    for side in (3, 8):
        rankup.fit(net, of_size(side), Recipe(epochs=15, batch=32, lr=0.04))
    assert net.tasks == ["of 3", "of 8"]


def test_failed_trial_in_both_formats_is_not_cached() -> None:
    body = rankup.grow(Positions(), Rank(4, 1), head="head").body
    assert not memory_format.takes_channels_last(body, torch.rand(4, 1, 8, 8))
    assert body not in memory_format._TRIED or not memory_format._TRIED[body]
