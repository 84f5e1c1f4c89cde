"""The example of a method in a file of its own: Synaptic Intelligence."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import vector_to_parameters

from helpers.calling import Call
from helpers.outside import NEW_METHOD, only_built_in
from rankup.methods import METHODS
from rankup.runs.records import read_config, read_lines
from rankup.testing import Expected, MethodTests, learn, make_method, split_digits

SMALL = ("--stream", "s-digits", "--width", 16, "--device", "cpu", "--threads", 1)


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with only_built_in(monkeypatch, NEW_METHOD):
        yield


class TestSynapticIntelligence(MethodTests):
    method = "si"
    expected = Expected(accuracy=0.9, forgetting=(0.0, 0.1), options={"strength": 1.0})


def test_importance_is_the_path_integral() -> None:
    """Against plain gradient descent on the loss and the penalty, a step per epoch."""
    stream, options = split_digits(2), {"strength": 20.0, "damping": 0.1}
    sgd = {"optimiser": "sgd", "schedule": "constant", "lr": 0.2, "batch": 400, "epochs": 25}
    method: Any = make_method("si", stream, options=options, **sgd)
    importance = torch.zeros_like(method.weights())
    for task in range(2):
        anchor, path = method.weights(), torch.zeros_like(importance)
        learner = method.begin(stream[task])
        shared = {name: learner.body.get_parameter(name) for name in method.shared_parameters()}
        others = list(learner.body.head.parameters())
        for _ in range(25):
            loss = learner({"rows": torch.arange(len(stream[task].train_y))})
            grads = torch.autograd.grad(loss, [*shared.values(), *others])
            slope = torch.cat([grad.flatten() for grad in grads[: len(shared)]])
            before = method.weights()
            step = -0.2 * (slope + 2 * 20 * importance * (before - anchor))
            path -= slope * step
            vector_to_parameters(before + step, shared.values())
            with torch.no_grad():
                for parameter, grad in zip(others, grads[len(shared) :], strict=True):
                    parameter -= 0.2 * grad
        weights = method.weights()
        importance = (importance + path / ((weights - anchor).square() + 0.1)).relu()
        method.abandon()
        learn(method, stream, task + 1)
        torch.testing.assert_close(method.weights(), weights, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(method.kept["importance"], importance, rtol=1e-3, atol=1e-5)
    assert importance.max() > 0.05


def test_without_strength_it_is_finetune() -> None:
    stream = split_digits(2)
    plain: Any = make_method("finetune", stream)
    method: Any = make_method("si", stream, options={"strength": 0.0})
    for one in (plain, method):
        learn(one, stream, 2)
    for name, tensor in plain.shared_parameters().items():
        assert torch.equal(method.shared_parameters()[name], tensor)


def test_commands_know_it(call: Call) -> None:
    assert call("methods", "--plain").out.split() == [*METHODS]
    assert "si" in METHODS
    shown = call("run", "--help").out
    assert "ewc (100), icarl (1), der (0.3), hat (0.75), si (10)" in " ".join(
        line.strip("│ ").rpartition("  ")[2] for line in shown.splitlines()
    )


def test_processes_and_resume_know_it(
    call: Call, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr("rankup.cli.run.show_runs", lambda *_: None)  # its plots take longest
    options = ("--method", "si", "--strength", 2, "--damping", 0.2)
    begun = call("run", *options, *SMALL, "--epochs", 6, "--seeds", 2, "--out", "r")
    assert begun.code == 0, begun.err
    config = read_config(Path("r/seed-1/config.json"))
    assert config["options"] == {"strength": 2.0, "damping": 0.2}
    METHODS.pop("si")
    request.getfixturevalue("one_process")  # what other processes know was seen
    with only_built_in(monkeypatch, NEW_METHOD):
        again = call("run", "--resume", "--out", "r")
    assert again.code == 0, again.err
    with only_built_in(monkeypatch):
        lost = call("run", "--resume", "--out", "r")
    assert lost.code == 1
    assert "there is no method 'si', only rank, finetune" in lost.err


def test_it_forgets_less_than_finetune(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankup.report.comparison.page.write_comparison_plots", lambda *_: [])
    names = ("--methods", "si,finetune", "--strength", 10, "--epochs", 15)
    done = call("compare", *names, *SMALL, "--out", "c")
    assert done.code == 0, done.err
    si, finetune = (read_lines(Path(f"c/{name}/seed-0"))[-1] for name in ("si", "finetune"))
    assert si["forgetting"] < 0.7 * finetune["forgetting"]
    assert si["average_accuracy"] > finetune["average_accuracy"]


def test_tune_chooses_its_settings(call: Call) -> None:
    tried = ("--try", "strength=1", "--try", "damping=0.1")  # one trial, in this process
    done = call("tune", "--methods", "si", *SMALL, "--first", 2, "--epochs", 4, *tried)
    assert done.code == 0, done.err
    assert Path("runs/tune-s-digits/si.json").exists()
