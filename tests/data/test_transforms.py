"""Transforms of images: permutations, rotations, flips and crops."""

import numpy as np
import pytest
import torch
from scipy.ndimage import rotate
from torch.nn.functional import pad as padded

from rankup.data import DataError, Permutation, Rotation
from rankup.data.transforms import augment, crop, draw_augmentation, flip, to_float


def test_permutation_moves_pixels_and_keeps_the_shape() -> None:
    x = torch.rand(5, 3, 4, 2)
    index = torch.randperm(24)
    for inputs in (x, (x * 255).to(torch.uint8), x.flatten(1)):
        result = Permutation(index)(inputs)
        assert result.shape == inputs.shape
        assert torch.equal(result.flatten(1), inputs.flatten(1)[:, index])


@pytest.mark.parametrize(("samples", "threads"), [(0, 1), (1, 2), (10_001, 1), (10_001, 3)])
def test_bytes_are_permuted_by_several_threads(samples: int, threads: int) -> None:
    x = torch.randint(0, 256, (samples, 1, 2, 3), dtype=torch.uint8)
    index, before = torch.randperm(6), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        result = Permutation(index)(x)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(result.flatten(1), x.flatten(1)[:, index])


@pytest.mark.parametrize("angle", [0.0, 12.5, 90.0, 133.7, -30.0])
@pytest.mark.parametrize("size", [(8, 8), (9, 14)])
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


def test_flip_mirrors_where_the_coin_is_true() -> None:
    x = torch.arange(12.0).view(2, 1, 2, 3)
    flipped = flip(x, torch.tensor([True, False]))
    assert flipped[0, 0].tolist() == [[2, 1, 0], [5, 4, 3]]
    assert torch.equal(flipped[1], x[1])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(("shape", "pad"), [((40, 3, 8, 8), 2), ((40, 1, 5, 9), 4)])
def test_crop_is_a_window_of_the_reflected_image(
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


def test_crop_at_the_padding_leaves_the_image() -> None:
    x = torch.rand(4, 2, 6, 6)
    assert torch.equal(crop(x, 3, torch.full((4, 2), 3)), x)


def test_draws_cover_every_offset_and_repeat() -> None:
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


@pytest.mark.parametrize(
    ("call", "message"),
    [
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
