"""Kernels compute what the operations they stand for do."""

import os

import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":  # Triton then runs kernels in Python, far from fast but the same.
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")


@pytest.mark.parametrize("old", [0, 24, 64])
@pytest.mark.parametrize("size", [(1, 1), (3, 3)], ids=["1x1", "3x3"])
def test_a_kernel_and_its_gradients_are_those_of_the_sum(old: int, size: tuple[int, int]) -> None:
    from rankup.kernels.build import build_kernel

    outputs, channels, new = 40, 12, 3
    inputs = channels * size[0] * size[1]
    draw = torch.Generator().manual_seed(old)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(DEVICE)

    U, V = random(old, outputs), random(old, inputs)
    learned = [random(new, outputs), random(new, inputs), random(old + new)]
    ours, plain = ([t.clone().requires_grad_() for t in learned] for _ in range(2))
    found = build_kernel(U, V, *ours, (channels, *size))
    all_U, all_V = torch.cat([U, plain[0]]), torch.cat([V, plain[1]])
    weight = (all_U * plain[2][:, None]).t() @ all_V
    expected = weight.view(outputs, channels, *size)
    assert found.dtype == torch.bfloat16
    assert found.is_contiguous(memory_format=torch.channels_last)
    # Off by one in the last of bfloat16's eight bits: Triton in Python does not round but cut.
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=1e-2)
    towards = random(outputs, channels, *size).bfloat16()
    grads = torch.autograd.grad(found, ours, towards)
    wanted = torch.autograd.grad(expected, plain, towards.float())
    for grad, want in zip(grads, wanted, strict=True):
        assert float((grad - want).norm() / want.norm()) < 2e-3
