"""A training step as in the authors' notebook, written out plainly."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NotebookLayer(nn.Module):
    """A factored layer as in the notebook: W is built from all factors at every step."""

    old_U: Tensor
    old_V: Tensor

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.register_buffer("old_U", torch.randn(outputs, rank - 1))
        self.register_buffer("old_V", torch.randn(inputs, rank - 1))
        self.U = nn.Parameter(torch.randn(outputs, 1))
        self.V = nn.Parameter(torch.randn(inputs, 1))
        self.old_s = nn.Parameter(torch.zeros(rank - 1))
        self.s = nn.Parameter(torch.ones(1))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        old = self.old_U @ torch.diag(self.old_s) @ self.old_V.t()
        weight = old + self.U @ torch.diag(self.s) @ self.V.t()
        return x @ weight.t() + self.bias


def notebook(
    rank: int, x: Tensor, y: Tensor, classes: int, device: torch.device | str = "cpu"
) -> Callable[[Tensor], None]:
    """Batches gathered in numpy and copied, W rebuilt, squared error of the softmax, predictions
    copied back for the running accuracy: at every step."""
    inputs = x[0].numel()
    net = nn.Sequential(
        NotebookLayer(inputs, 256, rank),
        nn.ReLU(),
        NotebookLayer(256, 256, rank),
        nn.ReLU(),
        nn.Linear(256, classes),
        nn.Softmax(1),
    ).to(device)
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-4)
    pixels = x.cpu().flatten(1).numpy().astype(np.float32)
    labels = y.cpu().numpy()
    wanted = np.eye(classes, dtype=np.float32)[labels]
    right = 0

    def step(rows: Tensor) -> None:
        nonlocal right
        index = rows.numpy()
        optimiser.zero_grad()
        output = net(torch.tensor(pixels[index]).to(device))
        F.mse_loss(output, torch.tensor(wanted[index]).to(device)).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        right += int((output.detach().cpu().numpy().argmax(1) == labels[index]).sum())

    return step
