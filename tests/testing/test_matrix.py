"""The public test matrix finds methods that break a promise."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.outside import only_built_in
from rankup.methods import axis, register
from rankup.methods.ewc import EWC
from rankup.methods.finetune import FineTune
from rankup.methods.options import EwcOptions, Options
from rankup.metrics import Footprint
from rankup.testing import Expected, MethodTests


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with only_built_in(monkeypatch):
        yield


def matrix_for(method: type[Any], *search: Any, **expected: Any) -> MethodTests:
    options = EwcOptions if issubclass(method, EWC) else Options
    register("broken", help="", options=options, search=search)(method)
    tests = MethodTests()
    tests.method, tests.expected = "broken", Expected(**{"forgetting": (-1.0, 1.0), **expected})
    return tests


class Plain(FineTune):
    """Keeps all promises but that of never forgetting."""


class LosesImportance(EWC):
    def _take(self, groups: Any) -> None:
        super()._take(groups)
        self.kept = {key: tensor * 0 for key, tensor in self.kept.items()}


class LeavesTraces(FineTune):
    def abandon(self) -> None:
        is_open = self._feed is not None
        super().abandon()
        self.kept = {"trace": torch.ones(1)} if is_open else self.kept


class StaysMoved(FineTune):
    def abandon(self) -> None:
        state = {key: tensor.clone() for key, tensor in self.shared_parameters().items()}
        super().abandon()
        self.body.load_state_dict(state, strict=False)


class CountsNothing(FineTune):
    def footprint(self) -> Footprint:
        return Footprint(0)


class Remembers(FineTune):
    """Answers differently once it has answered, which no loaded method has."""

    answered = 0

    def predict(self, x: Tensor, task: int) -> Tensor:
        self.answered += 1
        return super().predict(x, task) + self.answered


class CountsEpochs(FineTune):
    """Starts later epochs with a count that no checkpoint holds."""

    def learner(self, feed: Any) -> Any:
        learner, seen = super().learner(feed), []
        before = learner.sample_epoch

        def sample_epoch(generator: Any) -> Any:
            seen.append(1)
            drawn = before(generator)
            return {name: entries.roll(len(seen), 0) for name, entries in drawn.items()}

        learner.sample_epoch = sample_epoch
        return learner


def loads(tests: MethodTests, folder: Path) -> None:
    tests.test_loaded_method_goes_on_the_same("broken", "mlp", folder)


def fails(tests: MethodTests, folder: Path) -> None:
    tests.test_failed_task_leaves_it_as_it_was("broken", folder)


BROKEN: dict[str, tuple[type[Any], Callable[[MethodTests, Path], object]]] = {
    "forgets": (Plain, lambda tests, _: tests.test_learns("broken")),
    "loses state": (LosesImportance, loads),
    "remembers": (Remembers, loads),
    "leaves traces": (LeavesTraces, fails),
    "stays moved": (StaysMoved, fails),
    "counts nothing": (CountsNothing, lambda t, p: t.test_footprint_is_what_is_saved("broken", p)),
    "counts epochs": (CountsEpochs, lambda t, _: t.test_continues_from_a_checkpoint("broken")),
}


@pytest.mark.parametrize("promise", BROKEN)
def test_a_broken_promise_is_found(promise: str, tmp_path: Path) -> None:
    method, test = BROKEN[promise]
    expected = {"forgetting": (0.0, 0.0)} if promise == "forgets" else {}
    with pytest.raises(AssertionError):
        test(matrix_for(method, **expected), tmp_path)


def test_a_setting_that_it_has_not_is_found() -> None:
    with pytest.raises(Exception, match="'grip' is not an option of broken"):
        matrix_for(Plain, axis("grip", 1)).test_trials_are_settings_it_has("broken")


def test_one_that_keeps_its_promises_passes(tmp_path: Path) -> None:
    tests = matrix_for(Plain, accuracy=0.6)
    for _, test in BROKEN.values():
        test(tests, tmp_path / f"{id(test)}")
