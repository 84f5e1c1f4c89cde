"""The test matrix, and what else holds for every built-in method."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankup
from helpers.methods import EXPECTED, STORED, answers, make
from helpers.runs import config_for
from helpers.zoo import GPU
from rankup.data.streams import Stream, make_stream
from rankup.methods import METHODS
from rankup.metrics import Footprint
from rankup.runs.many_seeds import run_seeds
from rankup.runs.seed_run import SeedRun
from rankup.testing import Expected, MethodTests, accuracy, learn, make_method, split_digits


@pytest.mark.parametrize("name", METHODS)
class TestEveryMethod(MethodTests):
    def expected_of(self, name: str) -> Expected:
        return EXPECTED[name]

    @pytest.mark.parametrize("net", [pytest.param("mlp", marks=pytest.mark.slow), "convnet"])
    def test_loaded_method_goes_on_the_same(self, name: str, net: str, tmp_path: Path) -> None:
        """With batch norms all that is stored is more than with plain layers."""
        super().test_loaded_method_goes_on_the_same(name, net, tmp_path)


@pytest.fixture(scope="module")
def stream() -> Stream:
    return make_stream("p-digits", tasks=2)


@pytest.fixture(scope="module")
def short(stream: Stream) -> Stream:
    """A third of it."""
    tasks = (replace(t, train_x=t.train_x[:500], train_y=t.train_y[:500]) for t in stream)
    return Stream(stream.name, tuple(tasks))


class Drawing(nn.Module):
    """Takes an image's rows as channels of a sequence, initialises its own layers, including the
    head, and has one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Conv1d(8, 16, 3, padding=1)
        self.norm = nn.BatchNorm1d(16)
        self.hidden, self.spare = nn.Linear(128, 32), nn.Linear(64, 8)
        self.head = nn.Linear(32, 10)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in (self.hidden, self.head):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.rows(x.flatten(1, 2))).relu()
        return self.head(self.hidden(x.flatten(1)).relu())


@pytest.mark.parametrize("name", METHODS)
def test_learns_with_a_module_of_ones_own(name: str, short: Stream) -> None:
    expected = EXPECTED[name]
    recipe = {"epochs": 5, **expected.recipe}
    method = make_method(name, short, Drawing(), options=expected.options, **recipe)
    learn(method, short, 1)
    before = answers(method, short, 0)
    learn(method, short, 2)
    assert accuracy(method, short, 1) > 0.3
    if expected.never_forgets:
        assert torch.equal(answers(method, short, 0), before)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_learns_with_resnet18(name: str, stream: Stream) -> None:
    expected = EXPECTED[name]
    module = rankup.models.resnet18(width=4, image_size=8, channels=1)
    method = make_method(name, stream, module, options=expected.options, **expected.recipe)
    learn(method, stream, 1)
    before = answers(method, stream, 0)
    learn(method, stream, 2)
    assert accuracy(method, stream, 1) > 0.3
    if expected.never_forgets:
        assert torch.equal(answers(method, stream, 0), before)


@pytest.mark.parametrize("name", METHODS)
def test_torchs_default_dtype_changes_nothing(name: str) -> None:
    stream, module = split_digits(1), rankup.models.mlp(64, hidden=[8])

    def first() -> Tensor:
        expected = EXPECTED[name]
        recipe = {"epochs": 4, **expected.recipe}
        method = make_method(name, stream, module, options=expected.options, **recipe)
        learn(method, stream, 1)
        return answers(method, stream, 0)

    wanted = first()
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(first(), wanted)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", METHODS)
def test_what_is_stored_is_counted(name: str, stream: Stream) -> None:
    method = make(name, stream, epochs=1)
    learn(method, stream, 2)
    parameters, buffer = STORED[name]
    wanted = parameters(method) if callable(parameters) else parameters
    assert method.footprint() == Footprint(wanted, buffer)


def seeds_of(name: str, net: str, out: Path, **recipe: Any) -> list[SeedRun]:
    seeds = []
    chosen = {"epochs": 15, "batch": 50, **METHODS[name].recipe, **EXPECTED[name].recipe, **recipe}
    for seed in range(2):
        config = replace(
            config_for(make_stream("s-digits", seed=seed), name, **chosen),
            options=dict(EXPECTED[name].options),
            net=net,
            width=32 if net == "mlp" else 4,
            seed=seed,
            device="cuda",
        )
        seeds.append(SeedRun(config, None, out / f"seed-{seed}"))
    return seeds


@GPU
@pytest.mark.parametrize("net", ["mlp", "resnet18"])
@pytest.mark.parametrize("name", METHODS)
def test_seeds_are_captured_together(name: str, net: str, tmp_path: Path) -> None:
    assert run_seeds(seeds_of(name, net, tmp_path), note=pytest.fail) == {}


@GPU
@pytest.mark.parametrize("name", ["rank", "finetune"])
def test_seeds_with_squared_error_are_captured_together(name: str, tmp_path: Path) -> None:
    assert run_seeds(seeds_of(name, "mlp", tmp_path, loss="mse"), note=pytest.fail) == {}


@pytest.mark.parametrize("name", ["finetune", "packnet", "rank"])
@pytest.mark.parametrize("mode", [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_modes_of_torch_make_no_difference(
    name: str, mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    stream = split_digits(1)
    usual, method = make(name, stream), make(name, stream)
    learn(usual, stream, 1)
    with mode():
        learn(method, stream, 1)
    assert torch.equal(answers(method, stream, 0), answers(usual, stream, 0))


def test_a_file_of_another_width_is_refused(tmp_path: Path) -> None:
    """Even where torch would broadcast its numbers."""
    stream = split_digits(1)
    narrow = make_method("finetune", stream, rankup.models.mlp(64, hidden=[1]))
    narrow.save(tmp_path)
    wide = make_method("finetune", stream, rankup.models.mlp(64, hidden=[7]))
    with pytest.raises(rankup.StoreError, match="does not hold what this method, network"):
        type(wide).load(tmp_path, wide.setting)
