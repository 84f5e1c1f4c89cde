"""Kernels compute the same as the operations they replace."""

import copy
import os
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import rankup
from rankup.data.transforms import augment, draw_augmentation, to_float
from rankup.training.batches import scaled
from rankup.training.recipe import Recipe

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":  # Triton then runs kernels in Python: slow, but the same.
    os.environ["TRITON_INTERPRET"] = "1"
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("Triton in Python needs an older NumPy", allow_module_level=True)
pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

# Outputs, channels, height and width, seeded factors, old ones, new ones. Three have many.
LAYERS = [
    (40, 12, 3, 3, 0, 0, 3),
    (20, 3, 1, 1, 0, 24, 1),
    (40, 12, 3, 3, 0, 64, 17),
    (70, 5, 1, 3, 9, 7, 16),
    (36, 4, 3, 3, 600, 0, 2),
    (48, 8, 3, 3, 600, 0, 2),
    (136, 16, 3, 3, 520, 70, 17),
    (8, 8, 1, 1, 0, 530, 1),
]


def test_built_weights_and_gradients_are_sums_of_factors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rankup.kernels import build as building
    from rankup.kernels.build import Builder, Factors

    if DEVICE.type == "cpu":  # in Python, Triton cannot multiply 16-bit numbers
        monkeypatch.setattr(building, "_HALF", building.tl.float32)
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(DEVICE)

    layers = []
    for outputs, channels, height, width, seeded, old, new in LAYERS:
        inputs = channels * height * width
        learned = random(new, outputs), random(new, inputs), random(seeded + old + new)
        kernel = channels, height, width
        frozen = random(seeded + old, outputs), random(seeded + old, inputs)
        for table, scale in zip(frozen, (0.3, 0.7), strict=True):
            table[:seeded] = scale * table[:seeded].sign()
        layers.append(Factors(*frozen, *(t.requires_grad_() for t in learned), kernel, seeded))
    assert sum(layer.has_many for layer in layers) == 3
    build = Builder(layers)
    for _ in range(2):  # the numbers change, the addresses do not
        with torch.no_grad():
            for layer in layers:
                for tensor in (*layer.learned, layer.U[layer.seeded :], layer.V[layer.seeded :]):
                    tensor.copy_(random(*tensor.shape))
        towards = [random(layer.sizes[0], *layer.shape).bfloat16() for layer in layers]
        learned = [tensor for layer in layers for tensor in layer.learned]
        grads = torch.autograd.grad(build(), learned, towards)
        found = build()
        for number, layer in enumerate(layers):
            check(layer, found[number], towards[number], grads[3 * number : 3 * number + 3])


def check(layer: Any, found: Tensor, towards: Tensor, grads: tuple[Tensor, ...]) -> None:
    U, V = torch.cat([layer.U, layer.new_U]), torch.cat([layer.V, layer.new_V])
    weight = (U * layer.selector[:, None]).t() @ V
    expected = weight.view(-1, *layer.shape)
    assert found.dtype == torch.bfloat16
    assert found.is_contiguous(memory_format=torch.channels_last)
    # Off by one in the last of bfloat16's eight bits: Triton in Python truncates, not rounds.
    about = float(expected.detach().std())
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=0.04 * about)
    off, near = (found.float() - expected).detach(), 4e-3 if DEVICE.type == "cuda" else 1e-2
    assert float(off.norm() / expected.detach().norm()) < near
    wanted = torch.autograd.grad(expected, layer.learned, towards.float())
    for grad, want in zip(grads, wanted, strict=True):
        assert float((grad - want).norm() / want.norm()) < near


IMAGES = [(64, 20, 32, 32), (6, 40, 5, 7), (3, 8, 1, 1)] if DEVICE.type == "cuda" else []


def of_channels(count: int, *values: float) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [(value + torch.rand(count, generator=draw)).to(DEVICE) for value in values]


@pytest.mark.parametrize("keeps", [True, False], ids=["running", "of the batch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5, 20, 9, 11), (2, 4, 1, 1), *IMAGES], ids=str)
def test_batch_norm_agrees_with_torch(
    shape: tuple[int, ...], dtype: torch.dtype, keeps: bool
) -> None:
    from rankup.kernels import norm

    draw = torch.Generator().manual_seed(0)
    # Far from zero, where sums of squares would lose the deviations from the mean.
    x = (torch.randn(shape, generator=draw) + 30).to(DEVICE, dtype)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    towards = torch.randn(shape, generator=draw).to(DEVICE, dtype)
    weight, bias = (t.requires_grad_() for t in of_channels(shape[1], 0.5, -1))
    running = of_channels(shape[1], 2, 1) if keeps else [None, None]
    expected_running = [None if t is None else t.clone() for t in running]
    assert norm.fits(x, *running, weight, bias, training=True)

    found = norm.batch_norm(x, *running, weight, bias, momentum=0.3, eps=1e-3)
    own = x.detach().double().requires_grad_()
    wide = [weight.double(), bias.double()]
    kept = [None if t is None else t.double() for t in expected_running]
    expected = F.batch_norm(own, *kept, *wide, True, 0.3, 1e-3)

    assert found.dtype == dtype
    assert found.is_contiguous(memory_format=torch.channels_last)
    grads = torch.autograd.grad(found, (x, weight, bias), towards)
    wanted = torch.autograd.grad(expected, (own, weight, bias), towards.double())
    near = 2**-7 if dtype == torch.bfloat16 else 2e-5
    for one, other in zip((found, *grads, *running), (expected, *wanted, *kept), strict=True):
        if one is not None and other is not None:
            off, size = (one.detach().double() - other).norm(), other.detach().norm()
            assert float(off.detach()) <= near * float(size) + 1e-4


# Samples, inputs, outputs, height, width, sides of the kernel, stride.
CONVOLUTIONS = [
    (2, 20, 20, 7, 9, 3, 3, 1),
    (2, 3, 20, 6, 6, 3, 3, 1),
    (3, 2, 6, 5, 4, 1, 3, 1),
    (2, 30, 12, 4, 6, 1, 1, 1),
    (1, 20, 22, 5, 5, 5, 3, 1),
    (2, 20, 40, 7, 6, 3, 3, 2),
    (2, 20, 40, 6, 7, 1, 1, 2),
]
if DEVICE.type == "cuda":
    CONVOLUTIONS += [(64, 20, 20, 32, 32, 3, 3, 1), (64, 20, 20, 42, 42, 3, 3, 1)]
    CONVOLUTIONS += [(64, 20, 40, 32, 32, 3, 3, 2), (64, 20, 40, 32, 32, 1, 1, 2)]
    CONVOLUTIONS += [(64, 3, 20, 84, 84, 3, 3, 2)]


@pytest.mark.parametrize("sizes", CONVOLUTIONS, ids=str)
def test_convolution_agrees_with_torch(sizes: tuple[int, ...]) -> None:
    from rankup.kernels import conv

    count, inputs, outputs, height, width, tall, wide, stride = sizes
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:  # numbers that are exact in bfloat16
        return torch.randint(-8, 9, shape, generator=draw).div(8).to(DEVICE)

    x = random(count, inputs, height, width).contiguous(memory_format=torch.channels_last)
    kernel, about = random(outputs, inputs, tall, wide), (stride, (tall // 2, wide // 2))
    # In Python, Triton cannot multiply 16-bit numbers.
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    own = [t.to(dtype).requires_grad_() for t in (x, kernel)]
    assert conv.fits(own[0].bfloat16(), kernel.bfloat16(), None, *about)
    found = conv.conv2d(*own, None, *about)
    assert found.dtype == dtype
    assert found.is_contiguous(memory_format=torch.channels_last)
    wide_own = [t.double().requires_grad_() for t in (x, kernel)]
    expected = F.conv2d(*wide_own, None, *about)
    towards = random(*expected.shape)
    grads = torch.autograd.grad(found, own, towards.to(dtype))
    wanted = torch.autograd.grad(expected, wide_own, towards.double())
    near = 2**-8 if dtype == torch.bfloat16 else 1e-6
    for one, other in zip((found, *grads), (expected, *wanted), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=near, atol=near)


def test_unsuitable_convolutions_are_left_to_cudnn() -> None:
    from rankup.kernels import conv

    def fits(x: Tensor, kernel: Tensor, *rest: Any, **more: Any) -> bool:
        images = x.contiguous(memory_format=torch.channels_last)
        return conv.fits(images, kernel, *rest, **more)

    x = torch.zeros(2, 20, 8, 8, dtype=torch.bfloat16, device=DEVICE)
    kernel = x.new_zeros(20, 20, 3, 3)
    assert fits(x, kernel, None, 1, 1)
    assert fits(x, kernel, None, (2, 2), (1, 1))
    assert not fits(x, kernel, None, (2, 1), (1, 1))
    assert not fits(x, kernel, None, (3, 3), (1, 1))
    assert not fits(x, kernel)  # no padding: smaller than before
    assert not fits(x, kernel, x.new_zeros(20), padding=1)
    assert not fits(x, kernel, padding="same")
    assert not fits(x[:, :16], kernel[:16, :16], padding=1)  # of eights
    assert not fits(x, x.new_zeros(80, 20, 3, 3), padding=1)  # too many
    assert not conv.fits(x, kernel, padding=1)  # channels do not lie last
    assert not conv.fits(x.new_zeros(2, 1, 8, 8), kernel[:, :1], padding=1)  # or may not
    # Torch refuses these, or has another dtype for them.
    assert not fits(x, kernel.float(), padding=1)
    assert not fits(x.float(), kernel.float(), padding=1)
    assert not fits(x[:, :12], kernel, padding=1)
    # More elements than 32 bits can index.
    large = torch.empty(800, 3, 224, 224, dtype=x.dtype, device=DEVICE)
    large = torch.empty_like(large, memory_format=torch.channels_last)
    assert conv.fits(large, kernel[:, :3], padding=1)
    assert not conv.fits(large, x.new_zeros(60, 3, 1, 1))


def test_autocast_chooses_the_dtype_except_for_float64() -> None:
    from rankup.kernels import conv

    with torch.autocast(DEVICE.type, torch.bfloat16):
        for dtype, expected in ((torch.float32, True), (torch.float64, False)):
            x = torch.zeros(2, 20, 4, 4, dtype=dtype, device=DEVICE)
            x = x.contiguous(memory_format=torch.channels_last)
            assert conv.fits(x, x.new_zeros(20, 20, 3, 3), padding=1) is expected


def test_unsuitable_norms_are_left_to_torch() -> None:
    from rankup.kernels import norm

    x = torch.zeros(2, 8, 3, 3, device=DEVICE).contiguous(memory_format=torch.channels_last)
    row, pair = torch.ones(8, device=DEVICE), torch.ones(8, 2, device=DEVICE)
    assert norm.fits(x, None, None, row, row, training=True)
    for wrong in (pair[:, 0], row[:4], row.double(), row[:1].expand(8), None):
        assert not norm.fits(x, None, None, wrong, row, training=True)
        assert not norm.fits(x, None, None, row, wrong, training=True)
        assert not norm.fits(x, row, wrong, row, row, training=True)


def test_large_values_are_normalised() -> None:
    from rankup.kernels import norm

    x = 1e20 * (1 + 0.01 * torch.randn(4, 4, 3, 3, generator=torch.Generator().manual_seed(0)))
    x = x.to(DEVICE).contiguous(memory_format=torch.channels_last)
    row = torch.ones(4, device=DEVICE)
    assert norm.batch_norm(x, None, None, row, row).isfinite().all()


def test_exchange_replaces_only_norms_that_fit() -> None:
    from rankup.kernels.exchange import Exchange

    images = torch.randn(4, 8, 5, 5, device=DEVICE)
    last = images.contiguous(memory_format=torch.channels_last)
    layer = torch.nn.BatchNorm2d(8).to(DEVICE)
    for x, training, expected in ((last, True, True), (last, False, False), (images, True, False)):
        layer.train(training)
        with Exchange():
            y = layer(x)
        assert (type(y.grad_fn).__name__ == "_BatchNormBackward") is expected
        torch.testing.assert_close(y, layer.train(training)(x), rtol=1e-4, atol=1e-4)
    with Exchange():  # three channels of a row are not aligned
        odd = torch.nn.BatchNorm2d(3).to(DEVICE)(
            last[:, :3].contiguous(memory_format=torch.channels_last)
        )
    assert type(odd.grad_fn).__name__ != "_BatchNormBackward"


@pytest.mark.parametrize(
    ("shape", "channels_last", "pixels"),
    [
        ((9, 3, 6, 5), True, "unit"),
        ((9, 3, 6, 5), False, "centred"),
        ((4, 1, 28, 28), True, "raw"),
    ],
    ids=str,
)
def test_augmented_images_agree_with_torch(
    shape: tuple[int, ...], channels_last: bool, pixels: Any
) -> None:
    from rankup.kernels.augment import augmented

    draw = torch.Generator(DEVICE).manual_seed(0)
    images = torch.randint(256, shape, generator=draw, dtype=torch.uint8, device=DEVICE)
    rows = torch.randint(shape[0], (64,), generator=draw, device=DEVICE)
    drawn = draw_augmentation(64, 4, draw)
    found = augmented(images, rows, *drawn, 4, pixels, channels_last)
    plain = to_float(augment(images[rows], 4, drawn))
    assert torch.equal(found, scaled(plain, Recipe(pixels=pixels)))
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert found.is_contiguous(memory_format=layout)


SIXTEEN_BITS = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32


def module_of(kind: str) -> Any:
    if kind == "norm":
        return torch.nn.BatchNorm2d(4).to(DEVICE)
    return torch.nn.Conv2d(4, 4, 3, padding=1, bias=False).to(DEVICE, SIXTEEN_BITS)


def images() -> Tensor:
    x = torch.randn(3, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    return x.to(DEVICE, SIXTEEN_BITS).contiguous(memory_format=torch.channels_last)


def exchanged(kind: str, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """A kernel's result, even where 16-bit numbers cannot be multiplied."""
    from rankup.kernels import conv, exchange

    if DEVICE.type == "cpu":
        ours = (lambda *given: True), conv.conv2d
        monkeypatch.setitem(exchange._OURS, torch.conv2d, ours)
    with exchange.Exchange():
        y: Tensor = module_of(kind)(x)
    assert type(y.grad_fn).__name__ in ("_ConvBackward", "_BatchNormBackward")
    return y


@pytest.mark.parametrize("kind", ["convolution", "norm"])
def test_results_can_be_changed_in_place(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = images().requires_grad_()
    y = exchanged(kind, x, monkeypatch)
    y += 1
    torch.relu_(y).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("kind", ["convolution", "norm"])
def test_second_derivatives_are_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = images().requires_grad_()
    y = exchanged(kind, x, monkeypatch)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(y.float().square().sum(), x, create_graph=True)


def test_recomputed_activations_are_left_to_torch() -> None:
    from torch.utils.checkpoint import checkpoint

    from rankup.kernels.exchange import Exchange

    norm, x = module_of("norm"), images().requires_grad_()
    with Exchange():
        checkpoint(norm, x, use_reentrant=False).square().sum().backward()
    assert norm.weight.grad is not None


def test_network_learns_the_same_with_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rankup.kernels import conv, exchange

    used = dict.fromkeys(exchange._OURS, 0)

    def counted(operation: Any, fits: Any, kernel: Any) -> Any:
        def run(*given: Any, **more: Any) -> Any:
            used[operation] += 1
            return kernel(*given, **more)

        return fits, run

    def in_half(x: Tensor, weight: Tensor, *rest: Any) -> bool:
        return conv.fits(x.bfloat16(), weight.bfloat16(), *rest)

    for operation, (fits, kernel) in list(exchange._OURS.items()):
        asks = in_half if operation is torch.conv2d else fits
        monkeypatch.setitem(exchange._OURS, operation, counted(operation, asks, kernel))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    net = rankup.models.resnet18(width=20).to(DEVICE, memory_format=torch.channels_last)
    x = torch.rand(6, 3, 16, 16, device=DEVICE).contiguous(memory_format=torch.channels_last)
    found = []
    for mode in (nullcontext(), exchange.Exchange()):
        own = copy.deepcopy(net)
        with mode:
            loss = F.cross_entropy(own(x), torch.arange(6, device=DEVICE))
            grads = torch.autograd.grad(loss, list(own.parameters()))
        found.append([loss.detach(), *grads, *own.buffers()])
    assert used == {F.batch_norm: 20, torch.conv2d: 7}
    for one, other in zip(*found, strict=True):
        off = (one.double() - other.double()).norm()
        assert float(off) <= 1e-4 * float(other.double().norm()) + 1e-5
