"""Published models learn several tasks at once as they learn each alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import helpers.published  # noqa: F401 (makes timm importable beside torch's CPU build)
import rankup

RECIPE = rankup.Recipe(epochs=8, batch=16)


def bert() -> nn.Module:
    pytest.importorskip("transformers")
    from rankup.models import from_hf

    config = {
        "model_type": "bert",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 50,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return from_hf.make({"config": config, "kind": "text", "head": "mean", "pad": 0})


def vit() -> nn.Module:
    timm = pytest.importorskip("timm")
    small = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
    module: nn.Module = timm.create_model("vit_tiny_patch16_224", num_classes=5, **small)
    return module


def texts(y: Tensor, draw: torch.Generator) -> Tensor:
    x = torch.randint(10, 50, (len(y), 8), generator=draw)
    x[:, 2], x[:, 6:] = y + 1, 0  # a word of each class, and padding
    return x


def images(y: Tensor, draw: torch.Generator) -> Tensor:
    centres = torch.randn(5, 3, 16, 16, generator=draw, dtype=torch.float64)
    return centres[y] + 0.3 * torch.randn(len(y), 3, 16, 16, generator=draw)


@pytest.mark.parametrize(("make", "inputs"), [(bert, texts), (vit, images)])
def test_ends_as_alone(
    make: Callable[[], nn.Module], inputs: Callable[[Tensor, torch.Generator], Tensor]
) -> None:
    torch.manual_seed(0)
    module = make().double()
    alone, both = (rankup.grow(module, rankup.Rank(2, 1), base="keep") for _ in range(2))
    draw, tasks = torch.Generator().manual_seed(0), []
    for name, samples, classes in (("a", 64, 3), ("b", 40, 4), ("c", 64, 3)):
        y = torch.arange(samples) % classes
        x = inputs(y, draw)
        tasks.append(rankup.Task(name, classes, x, y, x[:9], y[:9]))
    for task in tasks:
        rankup.fit(alone, task, RECIPE, uses="own")
    assert rankup.fit_together(both, tasks, RECIPE) == {}
    for task in tasks:
        answers = (net(task.test_x, task.name) for net in (alone, both))
        torch.testing.assert_close(*answers, rtol=0, atol=1e-9)
