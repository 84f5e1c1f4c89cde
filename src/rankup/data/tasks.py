"""Tasks: each has a name, classes, and data to learn from and to test on."""

from dataclasses import dataclass, replace
from numbers import Integral

import torch
from torch import Tensor

from rankup.data.transforms import Transform
from rankup.errors import DataError

MOST_CLASSES = 2**20  # of a task, since each takes memory for a row of its head and for logits


@dataclass(frozen=True, eq=False)
class Task:
    """A unit of learning. Tensors of several tasks may share memory.

    Args:
        name: the name under which the network will know the task.
        classes: how many classes it has, at least 2 and at most 2²⁰.
        train_x: inputs to learn from, `[N, C, H, W]` or `[N, D]`: uint8 (0 … 255 for 0 … 1),
            floating point, or int64 (indices, such as tokens).
        train_y: their classes, int64 `[N]`.
        test_x: inputs to test with, of the same kind.
        test_y: their classes.
        transform: applied to all its inputs, such as a permutation or a rotation.
        class_names: the names of the classes, in order, if known.

    >>> x, y = torch.rand(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    >>> Task("mine", 3, x, y, x, y)
    Task('mine', 3 classes, 6 training and 6 test samples of [4])
    >>> Task("mine", 2, x, y, x, y)
    Traceback (most recent call last):
    rankup.errors.DataError: task 'mine': training label 2 is outside its 2 classes, 0 to 1
    """

    name: str
    classes: int
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    transform: Transform | None = None
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise DataError(f"a task needs a name, got {self.name!r}")
        count = self.classes
        if isinstance(count, bool) or not isinstance(count, Integral) or count < 2:
            raise DataError(f"task {self.name!r} has {count!r} classes, expected at least 2")
        if count > MOST_CLASSES:
            raise DataError(
                f"task {self.name!r} has {count:,} classes, expected at most {MOST_CLASSES:,}"
            )
        object.__setattr__(self, "classes", int(count))  # it may be NumPy's
        object.__setattr__(self, "class_names", tuple(self.class_names))
        if len(self.class_names) not in (0, self.classes):
            raise DataError(
                f"task {self.name!r} has {self.classes} classes, but {len(self.class_names)} names "
                "for them"
            )
        self._check_split("training", self.train_x, self.train_y)
        self._check_split("test", self.test_x, self.test_y)
        for what, train, test in (
            ("inputs of shape", list(self.train_x.shape[1:]), list(self.test_x.shape[1:])),
            ("inputs of type", self.train_x.dtype, self.test_x.dtype),
            ("inputs on", self.train_x.device, self.test_x.device),
        ):
            if train != test:
                raise DataError(
                    f"task {self.name!r} has training {what} {train} but test {what} {test}"
                )

    def __repr__(self) -> str:
        # Without the tensors, which would fill the screen.
        return (
            f"Task({self.name!r}, {self.classes} classes, {len(self.train_y):,} training and "
            f"{len(self.test_y):,} test samples of {list(self.train_x.shape[1:])})"
        )

    def to(self, device: torch.device | str) -> "Task":
        """The task on a device."""
        return self.moved(device, {})

    def moved(self, device: torch.device | str, there: dict[Tensor, Tensor]) -> "Task":
        """The task on a device. `there` has the tensors that were moved before and their copies,
        which are used again; new ones are added to it."""
        for tensor in (self.train_x, self.train_y, self.test_x, self.test_y):
            if tensor not in there:
                there[tensor] = tensor.to(device)
        return replace(
            self,
            train_x=there[self.train_x],
            train_y=there[self.train_y],
            test_x=there[self.test_x],
            test_y=there[self.test_y],
            transform=self.transform and self.transform.to(device),
        )

    def _check_split(self, split: str, x: Tensor, y: Tensor) -> None:
        task = f"task {self.name!r}"
        for what, value in (("inputs", x), ("labels", y)):
            if not isinstance(value, Tensor):
                raise DataError(
                    f"{task}: {split} {what} must be a tensor, got {type(value).__name__}"
                )
        whole = x.dtype in (torch.uint8, torch.int64)
        if x.dim() < 2 or not (whole or x.is_floating_point()):
            raise DataError(
                f"{task}: {split} inputs are {x.dtype} {list(x.shape)}, expected uint8, floating "
                "point or, as indices, int64 of shape [N, C, H, W] or [N, D]"
            )
        if y.dtype != torch.int64 or y.dim() != 1:
            raise DataError(
                f"{task}: {split} labels are {y.dtype} {list(y.shape)}, expected int64 of shape [N]"
            )
        if len(x) != len(y):
            raise DataError(f"{task} has {len(x)} {split} inputs but {len(y)} labels")
        if not x.numel():
            raise DataError(f"{task} is empty: its {split} inputs are of shape {list(x.shape)}")
        lowest, highest = (int(label) for label in y.aminmax())
        for label in (lowest, highest):
            if not 0 <= label < self.classes:
                raise DataError(
                    f"{task}: {split} label {label} is outside its {self.classes} classes, 0 to "
                    f"{self.classes - 1}"
                )
        if split == "training" and lowest == highest:
            raise DataError(
                f"{task}: every training label is {lowest}, expected at least 2 different ones"
            )
        if x.is_floating_point() and not x.isfinite().all():
            first = int((~x.isfinite()).flatten(1).any(1).nonzero()[0])
            raise DataError(f"{task}: {split} input {first} holds NaN or infinity")
