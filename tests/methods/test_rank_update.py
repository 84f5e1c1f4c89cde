"""Options of the paper's method: only the last layers, and tasks that reuse nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch

import rankup
from helpers.calling import Call
from helpers.zoo import GPU
from rankup.layers import FactoredLayer
from rankup.rank import Place
from rankup.testing import NETS, make_method, split_digits
from rankup.training.engine.select import Engine
from rankup.training.loop import learn


def learned(net: str = "mlp", device: str = "cpu", **options: Any) -> Any:
    """The method after three tasks."""
    stream = split_digits(3).to(device)
    method = make_method("rank", stream, NETS[net]().to(device), options=options, epochs=8)
    engine = Engine(pytest.fail)
    for task in stream:
        assert learn([method], [task], engine) == [None]
    return method


def factored(net: rankup.IncrementalNet) -> dict[str, FactoredLayer]:
    return {p.spec.name: p for p in net.parts if isinstance(p, FactoredLayer)}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_without_reuse_tasks_select_their_own_factors(device: str) -> None:
    apart, reusing = learned(device=device, reuse=False), learned(device=device)
    for layer in factored(apart.net).values():
        own = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]], device=device)
        assert torch.equal(layer.S != 0, own.bool())
    assert all(bool((layer.S[2] != 0).all()) for layer in factored(reusing.net).values())
    assert apart.footprint() == reusing.footprint()


@pytest.mark.parametrize("net", NETS)
def test_only_the_last_layers_go_on_learning(net: str) -> None:
    (layer,) = factored(learned(net, last=1).net).values()
    assert layer.spec.rank.used(Place.number(2)) > layer.spec.rank.used(Place.number(0))
    whole = factored(learned(net).net)
    assert len(whole) > 1
    assert list(whole)[-1] == layer.spec.name


@pytest.mark.usefixtures("no_plots")
def test_a_run_takes_the_last_layers_from_its_options(call: Call, tmp_path: Path) -> None:
    words = ("--tasks", 1, "--epochs", 1, "--device", "cpu", "--out", tmp_path / "run")
    done = call("run", *words, "--last", 1, "--no-reuse")
    assert done.code == 0, done.err
    net = rankup.load(tmp_path / "run" / "net", rankup.models.mlp(64, hidden=[256, 256]))
    assert list(factored(net)) == ["hidden.1"]


def test_too_many_last_layers_are_refused(call: Call, tmp_path: Path) -> None:
    done = call("run", "--last", 99, "--out", tmp_path / "run")
    assert "last=99 must be from 1 to 2, the number of" in done.err
    assert not (tmp_path / "run").exists()
