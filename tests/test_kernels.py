"""Kernels compute what the operations they stand for do."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":  # Triton then runs kernels in Python, far from fast but the same.
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

# Outputs, channels, height and width, old factors, new ones.
LAYERS = [(40, 12, 3, 3, 0, 3), (20, 3, 1, 1, 24, 1), (40, 12, 3, 3, 64, 17), (70, 5, 1, 3, 16, 16)]


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
