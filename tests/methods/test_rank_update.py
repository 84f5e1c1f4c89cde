"""Options of the paper's method: only the last layers, and tasks that reuse nothing."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import rankup
from helpers.little import make
from helpers.zoo import GPU
from rankup.cli.main import app
from rankup.data import make_stream
from rankup.layers import FactoredLayer
from rankup.methods.rank import RankUpdate
from rankup.training.engine.select import Engine
from rankup.training.loop import learn


def factored(method: RankUpdate) -> dict[str, FactoredLayer]:
    return {p.spec.name: p for p in method.net.parts if isinstance(p, FactoredLayer)}


def learned(net: str, options: dict[str, object], device: str = "cpu") -> RankUpdate:
    """The method after three tasks."""
    stream = make_stream("p-digits", tasks=3)
    epochs = 8 if net == "mlp" else 2
    method: RankUpdate = make("rank", stream, net, device, options, epochs=epochs, lr=1e-2)
    engine = Engine(pytest.fail)
    for task in stream.to(device):
        assert learn([method], [task], engine) == [None]
    return method


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_tasks_that_reuse_nothing_select_only_from_their_own_factors(device: str) -> None:
    apart, reusing = learned("mlp", {"reuse": False}, device), learned("mlp", {}, device)
    for layer in factored(apart).values():
        assert layer.S.shape == (3, 5)
        own = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]], device=device)
        assert torch.equal(layer.S != 0, own.bool())
    assert all(bool((layer.S[2] != 0).all()) for layer in factored(reusing).values())
    assert apart.footprint() == reusing.footprint()


@pytest.mark.parametrize("net", ["mlp", "resnet18"])
def test_the_last_layers_alone_go_on_learning(net: str) -> None:
    method = learned(net, {"last": 1})
    (layer,) = factored(method).values()
    assert layer.spec.rank.used(2) > layer.spec.rank.used(0)
    whole = learned(net, {})
    assert len(factored(whole)) > 1
    assert list(factored(whole))[-1] == layer.spec.name


def test_a_run_takes_the_last_layers_from_its_options(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = f"run --tasks 1 --epochs 1 --last 1 --no-reuse --device cpu --out {out}".split()
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 0, answer.output
    net = rankup.load(out / "net", rankup.models.mlp(64, hidden=[256, 256]))
    assert [p.spec.name for p in net.parts if isinstance(p, FactoredLayer)] == ["hidden.1"]


def test_more_last_layers_than_there_are_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    words = ["run", "--stream", "p-digits", "--last", "99", "--out", str(tmp_path / "run")]
    with pytest.raises(rankup.RankupError, match="last=99 must be from 1 to 2, the number of"):
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert not (tmp_path / "run").exists()
