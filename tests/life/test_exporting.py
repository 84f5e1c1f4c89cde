"""Exported tasks answer as the network does, or are not written."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rankup
from helpers.calling import Call
from rankup.data.inputs import ImageInput
from rankup.life import exporting
from rankup.life.asking import asked_task
from rankup.life.exporting import Format


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small ResNet18 of two tasks."""
    net = rankup.grow(rankup.models.resnet18(4, image_size=16), rankup.Rank(2, 1))
    net.inputs = ImageInput(16)
    for name, classes in (("a", 2), ("b", 3)):
        net.begin_task(name, classes)
        net.commit_task(calibrate=[torch.rand(8, 3, 16, 16)])
    rankup.save(net, tmp_path / "net")
    return tmp_path / "net"


@pytest.mark.parametrize("to", ["onnx", "torch"])
@pytest.mark.parametrize("task", ["a", "b"])
@pytest.mark.filterwarnings("ignore")
def test_every_task_answers_as_in_the_network(
    folder: Path, tmp_path: Path, task: str, to: Format
) -> None:
    if to == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    out = tmp_path / "out" / f"it{exporting.SUFFIXES[to]}"
    gap = exporting.export(asked_task(folder, task), to, out)
    assert gap <= 1e-5
    x = torch.rand(7, 3, 16, 16)
    if to == "torch":
        said = torch.export.load(out).module()(x)
    else:
        ort = pytest.importorskip("onnxruntime")
        said = torch.from_numpy(ort.InferenceSession(str(out)).run(None, {"inputs": x.numpy()})[0])
    expected = rankup.load(folder)(x, task=task)
    assert (said - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert {path.name for path in out.parent.iterdir()} == {out.name, "it.json"}


def test_export_that_answers_otherwise_is_refused(
    folder: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off(module: nn.Module, x: Tensor, file: Path) -> Callable[[Tensor], Tensor]:
        file.write_bytes(b"something")
        return lambda x: module(x).detach() * 1.0001

    monkeypatch.setattr(exporting, "_to_torch", off)
    out = tmp_path / "out" / "a.pt2"
    done = call("export", folder, "--task", "a", "--to", "torch", "--out", out)
    assert done.code == 1
    assert "its logits would differ by 1.0e-04 of the largest, expected at most 1e-05" in done.err
    assert list(out.parent.iterdir()) == []


def test_file_that_exists_is_kept(folder: Path, tmp_path: Path, call: Call) -> None:
    (tmp_path / "a.pt2").write_text("mine")
    done = call("export", folder, "--task", "a", "--to", "torch", "--out", tmp_path / "a.pt2")
    assert "exists already: name another file with --out" in done.err
    assert (tmp_path / "a.pt2").read_text() == "mine"
