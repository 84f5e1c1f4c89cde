"""Tasks are checked when they are made; part of their training data can be held out."""

import pytest
import torch
from torch import Tensor

import rankup
from rankup.data import DataError, Permutation, Task, make_stream
from rankup.data.heldout import hold_out


def parts(**changed: object) -> dict[str, object]:
    x, y = torch.rand(6, 1, 4, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    return {"classes": 3, "train_x": x, "train_y": y, "test_x": x, "test_y": y, **changed}


def with_nan() -> Tensor:
    x = torch.rand(6, 1, 4, 4)
    x[4, 0, 1, 2] = float("nan")
    return x


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"classes": 1}, "has 1 classes, expected at least 2"),
        ({"classes": True}, "has True classes"),
        ({"classes": 10**9}, "has 1,000,000,000 classes, expected at most 1,048,576"),
        ({"classes": 2}, "training label 2 is outside its 2 classes, 0 to 1"),
        ({"test_y": torch.tensor([0, 1, -1, 0, 1, 2])}, "test label -1 is outside its 3 classes"),
        ({"train_y": torch.zeros(6, dtype=torch.int64)}, "every training label is 0"),
        ({"train_y": torch.tensor([0, 1])}, "has 6 training inputs but 2 labels"),
        ({"train_y": torch.rand(6)}, r"training labels are torch.float32 \[6\], expected int64"),
        ({"train_y": torch.zeros(6, 1, dtype=torch.int64)}, r"labels are torch.int64 \[6, 1\]"),
        (
            {"test_x": torch.rand(0, 1, 4, 4), "test_y": torch.zeros(0, dtype=torch.int64)},
            r"is empty: its test inputs are of shape \[0, 1, 4, 4\]",
        ),
        ({"train_x": with_nan()}, "training input 4 holds NaN or infinity"),
        ({"test_x": with_nan() / 0}, "test input 0 holds NaN or infinity"),
        (
            {"test_x": torch.rand(6, 3, 4, 4)},
            r"training inputs of shape \[1, 4, 4\] but test inputs of shape \[3, 4, 4\]",
        ),
        ({"test_x": torch.zeros(6, 1, 4, 4, dtype=torch.uint8)}, "test inputs of type torch.uint8"),
        ({"train_x": torch.zeros(6, 4, dtype=torch.int32)}, "training inputs are torch.int32"),
        ({"train_x": torch.rand(6)}, r"training inputs are torch.float32 \[6\], expected"),
    ],
)
def test_bad_tasks_are_refused(changed: dict[str, object], message: str) -> None:
    Task("fine", **parts())
    with pytest.raises(DataError, match=f"^task 'mine'.*{message}") as caught:
        Task("mine", **parts(**changed))
    assert "\n" not in str(caught.value)


def test_task_without_a_name_is_refused() -> None:
    with pytest.raises(DataError, match="a task needs a name, got ''"):
        Task("", **parts())


def test_task_moves_whole() -> None:
    task = Task("mine", **parts(transform=Permutation(torch.randperm(16))))
    moved = task.to("cpu")
    assert (moved.name, moved.classes) == ("mine", 3)
    assert torch.equal(moved.transform(moved.test_x), task.transform(task.test_x))


def test_tasks_know_the_names_of_their_classes() -> None:
    x, y = torch.rand(6, 4), torch.arange(6) % 3
    named = Task("mine", 3, x, y, x, y, class_names=("ant", "bee", "cow"))
    assert named.to("cpu").class_names == ("ant", "bee", "cow")
    with pytest.raises(DataError, match="task 'mine' has 3 classes, but 2 names for them"):
        Task("mine", 3, x, y, x, y, class_names=("ant", "bee"))
    names = [name for task in make_stream("s-digits") for name in task.class_names]
    assert sorted(names) == [str(digit) for digit in range(10)]


def test_held_out_data_is_not_trained_on() -> None:
    whole = make_stream("p-digits", tasks=3)
    divided = hold_out(whole, 0.25, seed=5)
    for before, after in zip(whole, divided, strict=True):
        joined = torch.cat([after.train_x, after.test_x]).flatten(1)
        assert len(after.test_y) == round(0.25 * len(before.train_y))
        # All of the training data, each sample once, and nothing else.
        assert sorted(joined.tolist()) == sorted(before.train_x.flatten(1).tolist())
        assert after.transform is before.transform
    assert divided[0].train_x is divided[2].train_x
    assert not torch.equal(divided[0].test_x, hold_out(whole, 0.25, seed=6)[0].test_x)
    with pytest.raises(rankup.RankupError, match="between 0 and 1, got 1.5"):
        hold_out(whole, 1.5, seed=0)
