"""Streams are what their names say, the same for everyone who uses the same seed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from scipy.ndimage import rotate
from torch import Tensor
from torch.nn.functional import pad as padded

import rankup
from helpers.digests import (
    digest,
)
from rankup.data import STREAMS, DataError, Permutation, Rotation, Stream, Task, digits, make_stream
from rankup.data.heldout import hold_out
from rankup.data.transforms import augment, crop, draw_augmentation, flip, to_float


def folder_of_images(root: Path, classes: int) -> Path:
    """Images of one colour per class, so that an image tells its class."""
    for label in range(classes):
        for split, count in (("train", 3), ("test", 2)):
            folder = root / split / f"class {label:02}"
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("L", (4, 4), 10 * label).save(folder / f"{number}.png")
    return root


def python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Python code in a process of its own, with access to the tests' modules."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "11"}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKUP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RANKUP_DATA", raising=False)


# Permuted and rotated


def test_permutations_are_permutations_and_the_first_is_the_identity() -> None:
    stream = make_stream("p-digits", seed=3)
    indices = [task.transform.index for task in stream]
    assert len(indices) == 10
    assert torch.equal(indices[0], torch.arange(64))
    for index in indices:
        assert sorted(index.tolist()) == list(range(64))
    assert len({tuple(index.tolist()) for index in indices}) == 10


def test_a_permutation_moves_pixels_and_keeps_the_shape() -> None:
    x = torch.rand(5, 3, 4, 2)
    index = torch.randperm(24)
    for inputs in (x, (x * 255).to(torch.uint8), x.flatten(1)):
        result = Permutation(index)(inputs)
        assert result.shape == inputs.shape
        assert torch.equal(result.flatten(1), inputs.flatten(1)[:, index])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("samples", [0, 1, 10_001])
def test_many_bytes_are_permuted_by_several_threads(samples: int, threads: int) -> None:
    x = torch.randint(0, 256, (samples, 1, 2, 3), dtype=torch.uint8)
    index, before = torch.randperm(6), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        result = Permutation(index)(x)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(result.flatten(1), x.flatten(1)[:, index])


def test_all_permuted_tasks_share_one_copy_of_the_data_on_every_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = make_stream("p-digits", tasks=4)
    assert len({task.train_x.data_ptr() for task in stream}) == 1
    monkeypatch.setattr(Tensor, "to", lambda tensor, device: tensor.clone())  # another device
    moved = stream.to("elsewhere")
    assert {task.test_x.data_ptr() for task in moved}.isdisjoint({stream[0].test_x.data_ptr()})
    assert len({task.test_x.data_ptr() for task in moved}) == 1


def test_angles_are_spread_over_half_a_turn() -> None:
    angles = [task.transform.angle for task in make_stream("r-digits", tasks=200)]
    assert all(0 <= angle <= 180 for angle in angles)
    assert min(angles) < 5
    assert max(angles) > 175
    assert abs(np.mean(angles) - 90) < 4 * 180 / np.sqrt(12 * 200)  # four standard errors


def test_a_rotated_task_says_its_angle() -> None:
    for task in make_stream("r-digits"):
        assert task.name.endswith(f": {task.transform.angle:.1f}°")


@pytest.mark.parametrize("angle", [0.0, 12.5, 45.0, 90.0, 133.7, 180.0, -30.0])
@pytest.mark.parametrize("size", [(8, 8), (28, 28), (9, 14)])
def test_rotation_is_scipys(angle: float, size: tuple[int, int]) -> None:
    x = np.random.default_rng(0).random((2, 3, *size))
    ours = Rotation(angle)(torch.from_numpy(x).float()).numpy()
    options = {"axes": (3, 2), "order": 1, "reshape": False}
    np.testing.assert_allclose(ours, rotate(x, angle, mode="grid-constant", **options), atol=1e-4)
    # SciPy's default differs only where a pixel comes from between the border and the zeros.
    inside = rotate(np.ones_like(x), angle, **options) > 0
    fully = rotate(np.ones_like(x), angle, mode="grid-constant", **options) > 1 - 1e-6
    default = rotate(x, angle, **options)
    assert fully.mean() > 0.5
    np.testing.assert_allclose(ours[inside & fully], default[inside & fully], atol=1e-4)


def test_positive_angles_turn_counter_clockwise() -> None:
    x = torch.zeros(1, 1, 5, 5)
    x[0, 0, 2, 4] = 1  # on the right
    turned = Rotation(90.0)(x)
    assert turned[0, 0, 0, 2] > 0.999  # at the top


# Split


@pytest.mark.parametrize(("name", "tasks"), [("s-digits", None), ("s-digits", 2)])
def test_splits_are_disjoint_and_complete(name: str, tasks: int | None) -> None:
    source, stream = digits(), make_stream(name, tasks=tasks, seed=1)
    assert len(stream) == (tasks or 5)
    classes: list[int] = []
    for part in ("train", "test"):
        split = getattr(source, part)
        images = {x.tobytes(): int(y) for x, y in zip(split.x, split.y, strict=True)}
        assert sum(len(getattr(task, f"{part}_y")) for task in stream) == len(split.y)
        for task in stream:
            x, y = getattr(task, f"{part}_x"), getattr(task, f"{part}_y")
            assert sorted(set(y.tolist())) == list(range(task.classes))
            originals = [images[image.numpy().tobytes()] for image in x]
            meaning = dict(zip(y.tolist(), originals, strict=True))
            assert [meaning[label] for label in y.tolist()] == originals
            classes += [meaning[label] for label in range(task.classes)]
    # In both splits every class is in one task, and a task's labels mean the same.
    half = len(classes) // 2
    assert sorted(classes[:half]) == list(range(10))
    assert classes[:half] == classes[half:]


def test_a_folder_of_ones_own_is_split(tmp_path: Path) -> None:
    folder = folder_of_images(tmp_path / "mine", classes=6)
    stream = make_stream(f"split:{folder}", tasks=3, seed=0)
    colours = [{int(x.flatten()[0]) for x in task.train_x} for task in stream]
    assert sorted(colour for task in colours for colour in task) == [0, 10, 20, 30, 40, 50]
    assert [len(task) for task in colours] == [2, 2, 2]
    assert [task.name for task in stream] == ["split 01", "split 02", "split 03"]


def test_where_a_folder_lies_changes_nothing(tmp_path: Path) -> None:
    one = folder_of_images(tmp_path / "one", classes=8)
    two = folder_of_images(tmp_path / "there" / "two", classes=8)
    streams = [make_stream(f"split:{folder}", tasks=4, seed=5) for folder in (one, two)]
    assert digest(streams[0]) == digest(streams[1])


@pytest.mark.parametrize(("lacking", "called"), [("train", "training"), ("test", "test")])
def test_labels_without_images_are_refused(lacking: str, called: str, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    Image.new("L", (2, 2)).save(tmp_path / "i.png")
    image = {"bytes": (tmp_path / "i.png").read_bytes(), "path": None}
    names = {"info": {"features": {"label": {"names": ["a", "b", "c", "d"]}}}}
    for split in ("train", "test"):
        labels = [0, 1, 3] if split == lacking else [0, 1, 2, 3]
        table = pa.table({"image": [image] * len(labels), "label": labels})
        table = table.replace_schema_metadata({"huggingface": json.dumps(names)})
        pq.write_table(table, tmp_path / "d" / f"{split}-00000-of-00001.parquet")
    with pytest.raises(DataError, match=f"^d has no {called} images of its class 'c'$"):
        make_stream(f"split:{tmp_path / 'd'}", tasks=2)


# Seeds


def test_the_same_seed_gives_the_same_stream_in_another_process() -> None:
    names = ["p-digits", "r-digits", "s-digits"]
    code = (
        "import sys; from helpers.digests import digest; from rankup.data import make_stream; "
        "print(*(digest(make_stream(name, seed=7)) for name in sys.argv[1:]))"
    )
    other = python(code, *names)
    assert other.stdout.split() == [digest(make_stream(name, seed=7)) for name in names]
    for name in names:
        assert digest(make_stream(name, seed=8)) != digest(make_stream(name, seed=7))


def test_fewer_tasks_are_the_first_ones() -> None:
    for name in ("p-digits", "r-digits"):
        short, long = make_stream(name, tasks=2), make_stream(name, tasks=5)
        assert digest(short) == digest(Stream(name, long.tasks[:2]))


@pytest.mark.parametrize("name", ["p-digits", "r-digits", "s-digits"])
def test_task_names_are_short_unique_and_no_paths(name: str) -> None:
    names = [task.name for task in make_stream(name)]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 24 and "/" not in name for name in names)


def test_a_stream_is_a_sequence() -> None:
    stream = make_stream("s-digits")
    assert list(stream) == [stream[index] for index in range(len(stream))]


def test_listing_streams_needs_no_torch() -> None:
    listed = python("import sys; from rankup.data import STREAMS; print(*STREAMS, *sys.modules)")
    assert "s-miniimagenet" in listed.stdout.split()
    heavy = {"torch", "numpy", "pyarrow", "PIL", "sklearn", "rich"}
    assert heavy.isdisjoint(listed.stdout.split())


# Augmentation


def test_flips_mirror_where_the_coin_says_so() -> None:
    x = torch.arange(12.0).view(2, 1, 2, 3)
    flipped = flip(x, torch.tensor([True, False]))
    assert flipped[0, 0].tolist() == [[2, 1, 0], [5, 4, 3]]
    assert torch.equal(flipped[1], x[1])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(("shape", "pad"), [((40, 3, 8, 8), 2), ((40, 1, 5, 9), 4)])
def test_crops_are_windows_of_the_reflected_image(
    shape: tuple[int, ...], pad: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, shape, generator=generator).to(dtype)
    coins, offsets = draw_augmentation(len(x), pad, generator)
    offsets[:3] = torch.tensor([[0, 0], [2 * pad, 2 * pad], [0, 2 * pad]])
    around = padded(x.float(), (pad,) * 4, mode="reflect").to(dtype)
    expected = [
        image[:, top : top + shape[2], left : left + shape[3]]
        for image, (top, left) in zip(around, offsets.tolist(), strict=True)
    ]
    assert torch.equal(crop(x, pad, offsets), torch.stack(expected))
    both = augment(x, pad, (coins, offsets))
    assert torch.equal(both, crop(flip(x, coins), pad, offsets))
    assert not torch.equal(both, crop(x, pad, offsets))


def test_an_offset_of_the_padding_leaves_the_image() -> None:
    x = torch.rand(4, 2, 6, 6)
    assert torch.equal(crop(x, 3, torch.full((4, 2), 3)), x)


def test_draws_cover_every_offset_and_repeat_with_their_generator() -> None:
    coins, offsets = draw_augmentation(2000, 2, torch.Generator().manual_seed(0))
    assert {tuple(pair) for pair in offsets.tolist()} == {
        (i, j) for i in range(5) for j in range(5)
    }
    assert 0.4 < coins.float().mean() < 0.6
    again = draw_augmentation(2000, 2, torch.Generator().manual_seed(0))
    assert torch.equal(again.coins, coins)
    assert torch.equal(again.offsets, offsets)


def test_bytes_become_fractions_and_floats_stay() -> None:
    x = torch.arange(256, dtype=torch.uint8)
    assert to_float(x).dtype == torch.float32
    torch.testing.assert_close(to_float(x), torch.arange(256) / 255)
    assert (to_float(x)[0], to_float(x)[-1]) == (0, 1)
    ready = torch.tensor([0.5, 3.0])
    assert torch.equal(to_float(ready), ready)


# Tasks


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
        ({"train_x": torch.rand(6, 4).to_sparse()}, "dense numbers, got some of layout .*sparse"),
        (
            {"test_x": torch.rand(6, 4, device="meta")},
            "must be dense numbers, got some on meta",
        ),
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


def test_a_task_without_a_name_is_refused() -> None:
    with pytest.raises(DataError, match="a task needs a name, got ''"):
        Task("", **parts())


def test_a_task_moves_whole() -> None:
    task = Task("mine", **parts(transform=Permutation(torch.randperm(16))))
    moved = task.to("cpu")
    assert (moved.name, moved.classes) == ("mine", 3)
    assert torch.equal(moved.transform(moved.test_x), task.transform(task.test_x))


# Bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_stream("p-minst"), r"no stream 'p-minst' \(did you mean p-mnist\?\): exp"),
        (lambda: make_stream("zzz"), "no stream 'zzz': expected one of p-digits, .*split:PATH"),
        (lambda: make_stream("split:"), "no stream 'split:'"),
        (lambda: make_stream("p-digits", tasks=0), "at least 1, got 0"),
        (lambda: make_stream("p-digits", tasks=-2), "at least 1, got -2"),
        (lambda: make_stream("p-digits", tasks=2.5), "whole number of at least 1, got 2.5"),
        (lambda: make_stream("p-digits", tasks=True), "whole number of at least 1, got True"),
        (lambda: make_stream("p-digits", seed="a"), "seed must be a whole number, got 'a'"),
        (
            lambda: make_stream("s-digits", tasks=3),
            "the 10 classes of digits cannot be divided evenly among 3 tasks .*possible: 1, 2, 5$",
        ),
        (
            lambda: make_stream("s-digits", tasks=10),
            "at least 2 classes each; possible: 1, 2, 5",
        ),
        (lambda: make_stream("split:somewhere"), "split:somewhere needs a number of tasks"),
        (lambda: make_stream("split:nowhere", tasks=2), "no data set 'nowhere': expected digits"),
        (lambda: make_stream("p-mnist"), "mnist is not in .*--data PATH or RANKUP_DATA"),
        (lambda: Permutation(torch.tensor([0, 2])), "2 pixels holds every number from 0 to 1"),
        (lambda: Permutation(torch.tensor([0, 0])), "2 pixels holds every number from 0 to 1"),
        (lambda: Permutation(torch.tensor([0.0])), r"int64 numbers, got torch.float32 \[1\]"),
        (
            lambda: Permutation(torch.arange(5))(torch.rand(2, 1, 2, 2)),
            r"of 5 pixels cannot be applied to inputs of 4 \(1×2×2\)",
        ),
        (lambda: Rotation(float("nan")), "number of degrees, got nan"),
        (lambda: Rotation(1.0)(torch.rand(2, 16)), r"got torch.float32 \[2, 16\]"),
        (lambda: crop(torch.rand(1, 1, 4, 6), 4, torch.zeros(1, 2)), "by 0 to 3 pixels, got 4"),
        (lambda: crop(torch.rand(1, 1, 4, 6), -1, torch.zeros(1, 2)), "by 0 to 3 pixels, got -1"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call: object, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_every_stream_is_described() -> None:
    for info in STREAMS.values():
        assert info.description
        assert "\n" not in info.description
    defaults = {name: info.tasks for name, info in STREAMS.items()}
    assert defaults == {
        "p-digits": 10,
        "r-digits": 10,
        "s-digits": 5,
        "p-mnist": 20,
        "r-mnist": 20,
        "s-mnist": 5,
        "s-cifar100": 20,
        "s-miniimagenet": 20,
    }


def test_what_is_held_out_is_training_data_and_is_not_trained_on() -> None:
    whole = make_stream("p-digits", tasks=3)
    part = hold_out(whole, 0.25, seed=5)
    for task, own in zip(whole, part, strict=True):
        joined = torch.cat([own.train_x, own.test_x]).flatten(1)
        assert len(own.test_y) == round(0.25 * len(task.train_y))
        # All of the training data, each sample once, and nothing else.
        assert sorted(joined.tolist()) == sorted(task.train_x.flatten(1).tolist())
        assert own.transform is task.transform
    assert part[0].train_x is part[2].train_x
    assert not torch.equal(part[0].test_x, hold_out(whole, 0.25, seed=6)[0].test_x)
    with pytest.raises(rankup.RankupError, match="between 0 and 1, got 1.5"):
        hold_out(whole, 1.5, seed=0)


def test_streams_and_tasks_are_told_in_a_line_without_their_tensors() -> None:
    stream = make_stream("p-digits")
    assert repr(stream) == "Stream('p-digits', 10 tasks)"
    assert repr(Stream("mine", stream.tasks[:1])) == "Stream('mine', 1 task)"
    samples = "1,442 training and 355 test samples of [1, 8, 8]"
    assert repr(stream[0]) == f"Task('permutation 01', 10 classes, {samples})"


def test_tasks_know_what_their_classes_are_called() -> None:
    x, y = torch.rand(6, 4), torch.arange(6) % 3
    named = Task("mine", 3, x, y, x, y, class_names=("ant", "bee", "cow"))
    assert named.to("cpu").class_names == ("ant", "bee", "cow")
    with pytest.raises(DataError, match="task 'mine' has 3 classes, but 2 names for them"):
        Task("mine", 3, x, y, x, y, class_names=("ant", "bee"))
    names = [name for task in make_stream("s-digits") for name in task.class_names]
    assert sorted(names) == [str(digit) for digit in range(10)]
