"""Every method keeps the same promises; each registered method is tested here."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import rankup
from helpers.methods import (
    CPU,
    EXPECTED,
    NETS,
    NONE,
    answers,
    make,
)
from helpers.runs import config_for
from helpers.zoo import GPU
from rankup.data.streams import Stream, make_stream
from rankup.methods import METHODS, method_class
from rankup.methods.base import Method
from rankup.metrics import AccuracyMatrix
from rankup.runs.many_seeds import Seed, run_seeds
from rankup.training.batches import Feed
from rankup.training.checkpoint import Checkpoint
from rankup.training.evaluate import share_right
from rankup.training.loop import Epoch


@pytest.fixture(scope="module")
def stream() -> Stream:
    return make_stream("p-digits", tasks=3)


def test_all_methods_are_expected() -> None:
    assert list(EXPECTED) == list(METHODS)


@pytest.fixture(scope="module")
def short() -> Stream:
    """With few samples, where only bits are compared."""
    return make_stream("s-digits").first(3)


def learn_all(method: Method, stream: Stream) -> AccuracyMatrix:
    matrix = AccuracyMatrix()
    for index, task in enumerate(stream):
        if method.learned == index:  # one that is not continual learns all of them at once
            method.learn(task, None, None)
        row = []
        for j in range(index + 1):
            feed = Feed(stream[j], method.setting.recipe, CPU)
            row.append(share_right(lambda x, j=j: method.predict(x, j), feed.test()))
        matrix.add(row)
    return matrix


@pytest.mark.parametrize("name", METHODS)
def test_it_learns_and_forgets_as_expected(name: str) -> None:
    stream, expected = make_stream("s-digits"), EXPECTED[name]
    matrix = learn_all(make(name, stream, epochs=15), stream)
    least, most = expected.forgetting
    assert matrix.average_accuracy() >= expected.accuracy
    assert least <= matrix.forgetting() <= most


class Drawing(torch.nn.Module):
    """Initialises its own layers, including the head, and has one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = torch.nn.Flatten()
        self.hidden, self.spare = torch.nn.Linear(64, 32), torch.nn.Linear(64, 8)
        self.head = torch.nn.Linear(32, 10)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in (self.hidden, self.head):
            torch.nn.init.xavier_uniform_(layer.weight)
            torch.nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.flatten(x)).relu())


@pytest.mark.parametrize("name", METHODS)
def test_it_learns_with_a_module_of_ones_own(
    name: str, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NETS, "own", Drawing)
    method = make(name, stream, "own", epochs=5)
    assert learn_all(method, stream).rows[-1][-1] > 0.3


@pytest.mark.parametrize("name", METHODS)
def test_torchs_default_dtype_changes_nothing(
    name: str, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = NETS["mlp"]()
    monkeypatch.setitem(NETS, "mlp", lambda: copy.deepcopy(given))

    def first() -> torch.Tensor:
        method = make(name, stream, epochs=1)
        method.learn(stream[0], None, None)
        return answers(method, stream, 0)

    wanted = first()
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(first(), wanted)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", METHODS)
def test_it_learns_with_convolutions_and_norms(name: str, stream: Stream) -> None:
    method = make(name, stream, "resnet18")
    matrix = learn_all(method, stream)
    assert method.learned == 3
    assert all(row[-1] > 0.3 for row in matrix.rows)  # each task when it was learned
    if EXPECTED[name].forgetting == NONE:
        assert matrix.forgetting() == 0


def over_rows() -> torch.nn.Module:
    """An image's rows as channels of a sequence."""
    return torch.nn.Sequential(
        torch.nn.Flatten(1, 2),
        torch.nn.Conv1d(8, 16, 3, padding=1),
        torch.nn.BatchNorm1d(16),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(128, 10),
    )


@pytest.mark.parametrize("name", METHODS)
def test_it_learns_with_convolutions_over_one_dimension(
    name: str, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NETS, "over rows", over_rows)
    matrix = learn_all(make(name, stream, "over rows", epochs=5), stream)
    assert all(row[-1] > 0.3 for row in matrix.rows)
    if EXPECTED[name].forgetting == NONE:
        assert matrix.forgetting() == 0


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", METHODS)
def test_what_it_saves_comes_back_bit_for_bit(
    name: str, net: str, short: Stream, tmp_path: Path
) -> None:
    method = make(name, short, net, epochs=6)
    while method.learned < 2:
        method.learn(short[method.learned], None, None)
    method.save(tmp_path / "net")
    loaded = method_class(name).load(tmp_path / "net", make(name, short, net, epochs=6).setting)
    assert loaded.learned == method.learned >= 2
    assert loaded.footprint() == method.footprint()
    for one in (method, loaded):
        if one.learned == 2:
            one.learn(short[2], None, None)
    for task in range(3):
        assert torch.equal(answers(method, short, task), answers(loaded, short, task))


@pytest.mark.parametrize("name", METHODS)
def test_it_goes_on_from_a_checkpoint_as_if_nothing_had_happened(name: str, short: Stream) -> None:
    whole, again = make(name, short, "resnet18", epochs=6), make(name, short, "resnet18", epochs=6)
    if METHODS[name].continual:
        for method in (whole, again):
            method.learn(short[0], None, None)
    kept: list[Checkpoint] = []

    def keep(_: Epoch, checkpoint: Checkpoint) -> None:
        state = {key: tensor.clone() for key, tensor in checkpoint.state.items()}
        kept.append(Checkpoint(checkpoint.epoch, state))

    whole.learn(short[whole.learned], None, keep)
    again.learn(short[again.learned], kept[1], None)
    for task in range(whole.learned):
        assert torch.equal(answers(whole, short, task), answers(again, short, task))


@pytest.mark.parametrize("name", METHODS)
def test_a_task_that_fails_leaves_it_as_it_was(name: str, stream: Stream) -> None:
    method = make(name, stream)
    if METHODS[name].continual:
        method.learn(stream[0], None, None)
    before = [answers(method, stream, task) for task in range(method.learned)]
    learned, footprint = method.learned, method.footprint()

    def interrupt(epoch: Epoch, checkpoint: Checkpoint) -> None:
        raise rankup.TaskFailed("on purpose")

    with pytest.raises(rankup.TaskFailed):
        method.learn(stream[learned], None, interrupt)
    assert method.learned == learned
    for task, logits in enumerate(before):
        assert torch.equal(answers(method, stream, task), logits)
    assert method.footprint() == footprint


@pytest.mark.parametrize("name", METHODS)
def test_what_is_stored_is_counted(name: str) -> None:
    stream = make_stream("p-digits", tasks=2)
    method = make(name, stream, epochs=1)
    while method.learned < 2:
        method.learn(stream[method.learned], None, None)
    stored = EXPECTED[name].stored
    assert method.footprint().parameters == (stored(method) if callable(stored) else stored)
    assert method.footprint().buffer == EXPECTED[name].buffer


def seeds_of(name: str, net: str, device: str, out: Path, **given: Any) -> list[Seed]:
    seeds = []
    own = {"epochs": 15, "batch": 50, **METHODS[name].recipe, **EXPECTED[name].recipe, **given}
    for seed in range(2):
        config = replace(
            config_for(make_stream("s-digits", seed=seed), name, **own),
            options=dict(EXPECTED[name].options),
            net=net,
            width=32 if net == "mlp" else 4,
            seed=seed,
            device=device,
        )
        seeds.append(Seed(config, None, out / f"seed-{seed}", False))
    return seeds


@GPU
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", METHODS)
def test_seeds_of_it_are_captured_together_on_a_gpu(name: str, net: str, tmp_path: Path) -> None:
    assert run_seeds(seeds_of(name, net, "cuda", tmp_path), note=pytest.fail) == {}


@GPU
@pytest.mark.parametrize("name", ["rank", "finetune"])
def test_seeds_that_learn_by_squared_error_are_captured_together(name: str, tmp_path: Path) -> None:
    assert run_seeds(seeds_of(name, "mlp", "cuda", tmp_path, loss="mse"), note=pytest.fail) == {}


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(rankup.RankupError, match="there is no method 'magic', only rank, finetune"):
        method_class("magic")


@pytest.mark.parametrize("name", ["finetune", "packnet", "rank"])
@pytest.mark.parametrize("inside", [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_modes_of_torch_that_somebody_is_in_make_no_difference(
    name: str, inside: Callable[[], AbstractContextManager[Any]], stream: Stream
) -> None:
    usual, method = make(name, stream), make(name, stream)
    usual.learn(stream[0], None, None)
    with inside():
        method.learn(stream[0], None, None)
    assert torch.equal(answers(method, stream, 0), answers(usual, stream, 0))


def test_a_file_of_a_network_of_another_width_is_refused(tmp_path: Path, stream: Stream) -> None:
    """Even where torch would broadcast its numbers."""
    narrow = make("finetune", stream)
    module = rankup.models.mlp(64, hidden=[1])
    narrow = type(narrow)(replace(narrow.setting, module=module))
    narrow.saving(tmp_path)()
    wide = replace(narrow.setting, module=rankup.models.mlp(64, hidden=[7]))
    with pytest.raises(rankup.StoreError, match="does not hold what this method, network"):
        type(narrow).load(tmp_path, wide)
