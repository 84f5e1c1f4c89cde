"""Tests of the promises that every method keeps.

class TestMine(MethodTests):
    method = "mine"
    expected = Expected(accuracy=0.9, forgetting=(0.0, 0.1), options={"strength": 3.0})
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import pytest
import safetensors.torch
import torch

from rankup.errors import StoreError
from rankup.methods import method_class, method_info, method_options
from rankup.methods.base import Method
from rankup.methods.search import trials
from rankup.methods.settings import apart
from rankup.metrics import AccuracyMatrix
from rankup.storage.manifest import MANIFEST
from rankup.testing.setup import NETS, accuracy, answers, learn, make_method, split_digits
from rankup.training.checkpoint import Checkpoint
from rankup.training.loop import Epoch, TaskFailed
from rankup.training.recipe import Recipe


class Expected(NamedTuple):
    """What a method reaches on five tasks of two digits with a small MLP, in 15 epochs.

    Args:
        accuracy: the least average accuracy after all tasks.
        forgetting: its least and most; of a method that never forgets (0, 0), the default: then
            no answer for an old task may change in a single bit.
        options: what the method is run with, besides its defaults.
        recipe: the same for fields of the recipe.
    """

    accuracy: float = 0.9
    forgetting: tuple[float, float] = (0.0, 0.0)
    options: Mapping[str, Any] = MappingProxyType({})
    recipe: Mapping[str, Any] = MappingProxyType({})

    @property
    def never_forgets(self) -> bool:
        return self.forgetting == (0.0, 0.0)


class MethodTests:
    """Derive a class of tests and name the method, or parametrise it by `name` and override
    `expected_of`."""

    method: str
    expected = Expected()

    @pytest.fixture
    def name(self) -> str:
        return self.method

    def expected_of(self, name: str) -> Expected:
        return self.expected

    def make(self, name: str, tasks: int = 3, net: str = "mlp", epochs: int = 3) -> Method:
        expected = self.expected_of(name)
        recipe = {"epochs": epochs, **expected.recipe}
        return make_method(
            name, split_digits(tasks), NETS[net](), options=expected.options, **recipe
        )

    def test_learns(self, name: str) -> None:
        stream, expected = split_digits(5), self.expected_of(name)
        method, matrix = self.make(name, 5, epochs=15), AccuracyMatrix()
        for index in range(5):
            learn(method, stream, index + 1)
            matrix.add([accuracy(method, stream, task) for task in range(index + 1)])
        least, most = expected.forgetting
        assert matrix.average_accuracy() >= expected.accuracy
        assert least <= matrix.forgetting() <= most

    @pytest.mark.parametrize("net", NETS)
    def test_loaded_method_goes_on_the_same(self, name: str, net: str, tmp_path: Path) -> None:
        stream, method = split_digits(3), self.make(name, net=net, epochs=6)
        learn(method, stream, 2)
        before = [answers(method, stream, task) for task in range(2)]
        method.save(tmp_path)
        assert method_class(name).is_in(tmp_path)
        loaded = method_class(name).load(tmp_path, self.make(name, net=net, epochs=6).setting)
        assert loaded.learned == method.learned >= 2
        assert loaded.footprint() == method.footprint()
        for old, task in zip(before, range(2), strict=True):
            assert torch.equal(answers(loaded, stream, task), old)
        for one in (method, loaded):
            learn(one, stream, 3)
        for task in range(3):
            assert torch.equal(answers(method, stream, task), answers(loaded, stream, task))
        assert accuracy(method, stream, 2) > 0.7  # of 0.5 by chance
        if self.expected_of(name).never_forgets:
            for task, old in enumerate(before):
                assert torch.equal(answers(method, stream, task), old)

    def test_continues_from_a_checkpoint(self, name: str) -> None:
        stream = split_digits(3)
        whole, late, last = (self.make(name, net="convnet", epochs=4) for _ in range(3))
        methods = [whole, late, last]
        if method_info(name).continual:
            for method in methods:
                learn(method, stream, 1)
        checkpoints: list[Checkpoint] = []

        def keep(_: Epoch, checkpoint: Checkpoint) -> None:
            state = {key: tensor.clone() for key, tensor in checkpoint.state.items()}
            checkpoints.append(Checkpoint(checkpoint.epoch, state))

        whole.learn(stream[whole.learned], None, keep)
        for method, checkpoint in zip((late, last), checkpoints[2:], strict=True):
            method.learn(stream[method.learned], checkpoint, None)
        # The next task tells whether what is kept between tasks is the same, too.
        for method in methods:
            learn(method, stream, 3)
            for task in range(3):
                assert torch.equal(answers(method, stream, task), answers(whole, stream, task))

    def test_failed_task_leaves_it_as_it_was(self, name: str, tmp_path: Path) -> None:
        stream, method = split_digits(3), self.make(name)
        if method_info(name).continual:
            learn(method, stream, 1)
        method.save(tmp_path / "before")
        before = [answers(method, stream, task) for task in range(method.learned)]
        learned, footprint = method.learned, method.footprint()

        def fail(epoch: Epoch, checkpoint: Checkpoint) -> NoReturn:
            raise TaskFailed("on purpose")

        with pytest.raises(TaskFailed, match="on purpose"):
            method.learn(stream[learned], None, fail)
        assert (method.learned, method.footprint()) == (learned, footprint)
        for task, old in enumerate(before):
            assert torch.equal(answers(method, stream, task), old)
        method.save(tmp_path / "after")
        saved, again = (tensors_in(tmp_path / folder) for folder in ("before", "after"))
        assert saved.keys() == again.keys()
        assert all(torch.equal(tensor, again[key]) for key, tensor in saved.items())

    def test_footprint_is_what_is_saved(self, name: str, tmp_path: Path) -> None:
        method = self.make(name, epochs=1)
        learn(method, split_digits(3), 2)
        method.save(tmp_path)
        saved = sum(tensor.nbytes for tensor in tensors_in(tmp_path).values())
        footprint = method.footprint()
        assert footprint.parameters + footprint.buffer == saved / 4

    def test_damaged_files_are_refused(self, name: str, tmp_path: Path) -> None:
        method = self.make(name, epochs=1)
        learn(method, split_digits(3), 1)
        method.save(tmp_path)
        manifests = [*tmp_path.rglob(MANIFEST)]
        if not manifests:
            pytest.skip("it saves files in a way of its own")
        for path in [*manifests, *tmp_path.rglob("*.safetensors")]:
            content = path.read_bytes()
            for place in (1, len(content) // 2, len(content) - 3):
                changed = bytes([content[place] ^ 1])
                path.write_bytes(content[:place] + changed + content[place + 1 :])
                with pytest.raises(StoreError) as caught:
                    method_class(name).load(tmp_path, method.setting)
                assert "\n" not in str(caught.value)
            path.write_bytes(content)
        assert method_class(name).load(tmp_path, method.setting).learned == method.learned

    def test_trials_are_settings_it_has(self, name: str) -> None:
        tried = trials(name)
        assert tried
        for settings in tried:
            recipe, options = apart(settings)
            Recipe(**recipe)
            method_options(name, options)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """All saved tensors, by file and name."""
    return {
        f"{path.relative_to(folder)}/{key}": tensor
        for path in sorted(folder.rglob("*.safetensors"))
        for key, tensor in safetensors.torch.load_file(path).items()
    }
