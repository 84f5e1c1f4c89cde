"""Kernels compute what the operations they stand for do."""

import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":  # Triton then runs kernels in Python, far from fast but the same.
    os.environ["TRITON_INTERPRET"] = "1"
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("Triton in Python needs an older NumPy", allow_module_level=True)
pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

# Outputs, channels, height and width, old factors, new ones. The last has many.
LAYERS = [
    (40, 12, 3, 3, 0, 3),
    (20, 3, 1, 1, 24, 1),
    (40, 12, 3, 3, 64, 17),
    (70, 5, 1, 3, 16, 16),
    (36, 4, 3, 3, 600, 2),
]


def test_kernels_and_their_gradients_are_those_of_the_sums() -> None:
    from rankup.kernels.build import Builder, Factors

    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(DEVICE)

    layers = []
    for outputs, channels, height, width, old, new in LAYERS:
        inputs = channels * height * width
        learned = random(new, outputs), random(new, inputs), random(old + new)
        kernel = channels, height, width
        frozen = random(old, outputs), random(old, inputs)
        layers.append(Factors(*frozen, *(t.requires_grad_() for t in learned), kernel))
    build = Builder(layers)
    for _ in range(2):  # the numbers change, the addresses do not
        with torch.no_grad():
            for layer in layers:
                for tensor in (*layer.learned, layer.U, layer.V):
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
    # Off by one in the last of bfloat16's eight bits: Triton in Python does not round but cut.
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=2e-2)
    wanted = torch.autograd.grad(expected, layer.learned, towards.float())
    for grad, want in zip(grads, wanted, strict=True):
        assert float((grad - want).norm() / want.norm()) < 2e-3


IMAGES = [(64, 20, 32, 32), (6, 40, 5, 7), (3, 8, 1, 1)] if DEVICE.type == "cuda" else []


def of_channels(count: int, *values: float) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [(value + torch.rand(count, generator=draw)).to(DEVICE) for value in values]


@pytest.mark.parametrize("keeps", [True, False], ids=["running", "of the batch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5, 20, 9, 11), (2, 4, 1, 1), *IMAGES], ids=str)
def test_batch_norms_are_torchs_own(
    shape: tuple[int, ...], dtype: torch.dtype, keeps: bool
) -> None:
    from rankup.kernels import norm

    draw = torch.Generator().manual_seed(0)
    # Far from zero: sums of squares would lose what deviates from the mean.
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


def test_a_mode_exchanges_the_norms_that_fit_and_no_others() -> None:
    from rankup.kernels import norm

    images = torch.randn(4, 8, 5, 5, device=DEVICE)
    last = images.contiguous(memory_format=torch.channels_last)
    layer = torch.nn.BatchNorm2d(8).to(DEVICE)
    for x, training, expected in ((last, True, True), (last, False, False), (images, True, False)):
        layer.train(training)
        with norm.OurNorms():
            y = layer(x)
        assert (type(y.grad_fn).__name__ == "_BatchNormBackward") is expected
        torch.testing.assert_close(y, layer.train(training)(x), rtol=1e-4, atol=1e-4)
    with norm.OurNorms():  # three channels of a row are not aligned
        odd = torch.nn.BatchNorm2d(3).to(DEVICE)(
            last[:, :3].contiguous(memory_format=torch.channels_last)
        )
    assert type(odd.grad_fn).__name__ != "_BatchNormBackward"
