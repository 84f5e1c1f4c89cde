"""Networks and merged modules as ONNX, with the same answers from onnxruntime."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import helpers.published as published
import rankup

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

pytestmark = pytest.mark.filterwarnings("ignore")  # what the exporter says about itself

BATCH = torch.export.Dim("batch", min=2)


def mlp() -> tuple[nn.Module, Callable[[int], Tensor]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
    return module, lambda samples: torch.randn(samples, 8)


def vit() -> tuple[nn.Module, Callable[[int], Tensor]]:
    pytest.importorskip("timm")
    model = published.timm_model("vit_tiny_patch16_224", img_size=32, depth=1)
    return model.make(), lambda samples: torch.randn(samples, 3, 32, 32)


def network(module: nn.Module) -> rankup.IncrementalNet:
    """Of three tasks with different numbers of classes, far from where they started."""
    net = rankup.grow(module, rankup.Rank(4, 2), base="keep")
    for task, classes in (("a", 3), ("b", 5), ("c", 2)):
        net.begin_task(task, classes, selectors=0.5)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
        net.commit_task()
    return net.eval()


def session(program: Any, path: Path) -> Any:
    torch.onnx.export(program, dynamo=True, verbose=False).save(path)
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def assert_same(found: Any, expected: Tensor) -> None:
    got = torch.from_numpy(found)
    is_class = expected.isfinite()
    assert torch.equal(got.isfinite(), is_class)
    error = (got - expected)[is_class].abs().max()
    assert error <= 1e-5 * expected[is_class].abs().max()


@pytest.mark.parametrize("made", [mlp, pytest.param(vit, marks=pytest.mark.slow)])
def test_merged_module_as_onnx(made: Callable[[], Any], tmp_path: Path) -> None:
    module, inputs = made()
    net = network(module)
    program = torch.export.export(net.merged("b"), (inputs(3),), dynamic_shapes=({0: BATCH},))
    run = session(program, tmp_path / "merged.onnx")
    for samples in (2, 5):
        x = inputs(samples)
        (found,) = run.run(None, {run.get_inputs()[0].name: x.numpy()})
        with torch.no_grad():
            assert_same(found, net(x, task="b"))


@pytest.mark.parametrize("made", [mlp, vit])
def test_mixed_network_as_onnx_takes_tasks(made: Callable[[], Any], tmp_path: Path) -> None:
    module, inputs = made()
    net = network(module)
    given = (inputs(3),), {"task": torch.tensor([0, 1, 2])}
    shapes = {"x": {0: BATCH}, "task": {0: BATCH}}
    program = torch.export.export(net, *given, dynamic_shapes=shapes)
    run = session(program, tmp_path / "mixed.onnx")
    assert [each.name for each in run.get_inputs()] == ["x", "task"]
    for tasks in ([2, 0], [1, 1, 0, 2, 2]):
        x = inputs(len(tasks))
        (found,) = run.run(None, {"x": x.numpy(), "task": torch.tensor(tasks).numpy()})
        with torch.no_grad():
            for row, task in enumerate(tasks):
                own = net(x[row : row + 1], task=task)[0]
                assert_same(found[row, : len(own)], own)
            assert_same(found, net(x, task=torch.tensor(tasks)))
