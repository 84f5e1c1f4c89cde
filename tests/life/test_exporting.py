"""Exported tasks answer as the network does, or are not written."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rankup
from helpers.calling import Call
from helpers.sampling import sampled
from rankup.data.inputs import ImageInput, TensorInput
from rankup.life import exporting
from rankup.life.asking import all_asked, asked_task
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


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The same of an MLP, which is exported in a tenth of the time."""
    net = rankup.grow(rankup.models.mlp(12, [16]), rankup.Rank(2, 1))
    net.inputs = TensorInput((12,))
    for name, classes in (("a", 2), ("b", 3)):
        net.begin_task(name, classes)
        net.commit_task()
    rankup.save(net, tmp_path / "small")
    return tmp_path / "small"


@pytest.mark.parametrize(("task", "to"), sampled(["a", "b"], ["onnx", "torch"]))
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
    def off(module: nn.Module, given: dict[str, Tensor], file: Path) -> Callable[..., Tensor]:
        file.write_bytes(b"something")
        return lambda inputs: module(inputs).detach() * 1.0001

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


def test_both_kinds_of_files_share_what_is_said_of_a_task(
    folder: Path, tmp_path: Path, call: Call
) -> None:
    said = tmp_path / "a.json"
    asked = ("export", folder, "--task", "a", "--to", "torch", "--out", tmp_path / "a.pt2")
    assert call(*asked).code == 0
    (tmp_path / "a.pt2").unlink()
    assert call(*asked, "--dry-run").code == 0
    said.write_text(said.read_text() + " ")  # somebody else's
    assert "a.json exists already" in call(*asked, "--dry-run").err


@pytest.mark.filterwarnings("ignore")
def test_all_tasks_in_one_file_answer_as_in_the_network(
    small: Path, tmp_path: Path, call: Call
) -> None:
    ort = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    out = tmp_path / "out" / "all.onnx"
    assert "Would write" in call("export", small, "--all", "--out", out, "--dry-run").out
    assert not out.parent.exists()
    done = call("export", small, "--all", "--out", out, "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["tasks"] == ["a", "b"]
    assert told["gap"] <= 1e-5
    net, session = rankup.load(small), ort.InferenceSession(str(out))
    x, tasks = torch.rand(5, 12), torch.tensor([1, 0, 0, 1, 0])
    (said,) = session.run(None, {"inputs": x.numpy(), "task": tasks.numpy()})
    for row, task in enumerate(tasks.tolist()):
        expected = net(x[row : row + 1], task=task)[0]
        own = torch.from_numpy(said[row, : len(expected)])
        assert (own - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert (said[row, len(expected) :] == -math.inf).all()
    about = json.loads(out.with_suffix(".json").read_text())
    assert [task["task"] for task in about["tasks"]] == ["a", "b"]


def test_file_of_all_tasks_that_mixes_them_up_is_refused(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mixed_up(module: nn.Module, given: dict[str, Tensor], file: Path) -> Callable[..., Tensor]:
        file.write_bytes(b"something")
        return lambda inputs, task: module(inputs, 1 - task).detach()

    monkeypatch.setattr(exporting, "_to_onnx", mixed_up)
    with pytest.raises(rankup.RankupError, match="cannot be exported to onnx: its logits would"):
        exporting.export_all(all_asked(small), tmp_path / "out" / "all.onnx")
    assert list((tmp_path / "out").iterdir()) == []


def test_tasks_of_other_sizes_are_exported_one_by_one(small: Path, tmp_path: Path) -> None:
    net = rankup.load(small)
    net.annotate("b", inputs=TensorInput((6, 2)))
    rankup.save(net, small)
    with pytest.raises(rankup.RankupError, match="inputs of 2 sizes cannot be in one file"):
        exporting.export_all(all_asked(small), tmp_path / "all.onnx")
