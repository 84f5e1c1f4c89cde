"""The scripts in examples/ run and do what they say."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

# Lightning and transformers import torchvision, whose operators the CPU build of torch lacks.
_torchvision = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _torchvision.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs a script in this process and returns what it prints."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def percentages(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"([\d.]+)%", text)]


def test_quickstart_forgets_nothing(run) -> None:
    shown = percentages(run("quickstart.py"))
    assert len(shown) == 10
    assert shown[::2] == shown[1::2]
    assert min(shown) > 85


def test_own_loop_learns(run) -> None:
    assert min(percentages(run("own_loop.py"))) > 85


def test_pretrained_learns_turned_digits(run) -> None:
    text = run("pretrained.py")
    assert min(percentages(text)) > 80
    assert "4,800 numbers of the module itself" in text


def test_mixed_batches_agree(run) -> None:
    text = run("mixed_batches.py")
    assert percentages(text)[0] > 85
    assert "loaded: the same bits" in text


@pytest.mark.filterwarnings("ignore")  # what the tools say about themselves
def test_accelerate_resumes(run) -> None:
    pytest.importorskip("accelerate")
    text = run("accelerate_loop.py")
    assert "the same bits" in text
    assert percentages(text)[0] > 85


@pytest.mark.filterwarnings("ignore")
def test_lightning_resumes(run) -> None:
    pytest.importorskip("lightning")
    text = run("lightning_module.py")
    assert "10 epochs" in text
    assert percentages(text)[0] > 85


@pytest.mark.slow  # tests/real_modules/test_tools.py does the same in a third of the time
@pytest.mark.filterwarnings("ignore")
def test_trainer_resumes_and_forgets_nothing(run) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    text = run("transformers_trainer.py")
    assert text.count("10 epochs") == 2
    assert min(percentages(text)) > 85
    assert "the same bits" in text
