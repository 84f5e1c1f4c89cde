"""Under autocast activations have the dtype that those of the given module have."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankup
from helpers.zoo import KINDS, inputs, module
from rankup.rank import Rank

TASKS: dict[str, int | Tensor] = {
    "committed": 0,
    "being learned": 2,
    "mixed": torch.tensor([1, 0, 1, 1, 0, 1]),
}


def dtypes(of: nn.Module, run: Callable[[], object]) -> dict[str, torch.dtype]:
    """What each part of a module answers in."""
    found: dict[str, torch.dtype] = {}
    hooks = [
        part.register_forward_hook(
            lambda _, __, y, name=name: found.update({name: y.dtype}) if hasattr(y, "dtype") else 0
        )
        for name, part in of.named_modules()
    ]
    with torch.autocast("cpu", torch.bfloat16):
        run()
    for hook in hooks:
        hook.remove()
    return found


# As torch says of its own RMSNorm.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("base", ["new", "keep"])
@pytest.mark.parametrize("kind", KINDS)
def test_activations_have_dtype_of_given_module(kind: str, base: str, task: str) -> None:
    x, given = inputs(kind), module(kind).eval()
    net = rankup.grow(given, Rank(2, 1, seeded=3), base=base)  # type: ignore[arg-type]
    for name in "abc":
        net.begin_task(name, 3)
        if name != "c":
            net.commit_task([x])
    found = dtypes(net.body, lambda: net.eval()(x, task=TASKS[task]))
    expected = dtypes(given, lambda: given(x))
    assert torch.bfloat16 in expected.values()
    assert {name: found[name] for name in expected} == expected


def test_gradient_scaler_trains_in_half_precision() -> None:
    torch.manual_seed(0)
    net = rankup.grow(rankup.models.mlp(12, [16]), Rank(2, 1))
    net.begin_task("a", 3)
    x = torch.randn(32, 12)
    y = x[:, :3].argmax(1)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.03)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    losses = []
    for _ in range(60):
        optimiser.zero_grad()
        with torch.autocast("cpu", torch.float16):
            logits = net(x, task="a")
            assert logits.dtype == torch.float16
            loss = F.cross_entropy(logits, y)
        scaler.scale(loss).backward()
        scaler.step(optimiser)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
