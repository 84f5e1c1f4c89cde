"""Networks and runs written by version 0.1.0 load, verify, resume and answer with the same bits."""

import hashlib
import json
import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import rankup
from helpers.calling import Call

OLD = Path(__file__).parents[1] / "version-0.1"
NETWORKS = sorted(path.name for path in (OLD / "networks").iterdir() if path.is_dir())
RUNS = sorted(path.parent.relative_to(OLD / "runs") for path in OLD.glob("runs/**/config.json"))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(torch.softmax(q @ k.transpose(1, 2), -1) @ v)
        return self.head(x.mean(1))


class Averaging(nn.Module):
    """Keeps a running mean of its inputs in a buffer, as norms of one's own do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.into = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.head(torch.relu(self.into(x - self.mean)))


MODULES = {"attention": Attention, "averaging": Averaging}
SHAPES = {"mlp": (6,), "resnet18": (3, 8, 8), "averaging": (6,)}


def inputs(kind: str) -> Tensor:
    draw = torch.Generator().manual_seed(7)
    if kind == "attention":
        return torch.randint(11, (6, 5), generator=draw)
    return torch.randn(6, *SHAPES[kind], generator=draw)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_there_are_old_networks_and_runs() -> None:
    assert (len(NETWORKS), len(RUNS)) == (9, 19)


@pytest.mark.parametrize("name", NETWORKS)
def test_network_answers_with_same_bits(name: str) -> None:
    folder, kind = OLD / "networks" / name, name.split("-")[0]
    assert not rankup.verify(folder).problems
    net = rankup.load(folder, module=MODULES[kind]() if kind in MODULES else None)
    known = safetensors.torch.load_file(OLD / "networks" / f"{name}.answers.safetensors")
    x = inputs(kind)
    with torch.no_grad():
        for task in net.tasks:
            assert torch.equal(net(x, task=task), known[task])
        mixed = net(x, task=[index % 3 for index in range(len(x))])
    torch.testing.assert_close(mixed, known["mixed"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_saving_old_network_again_writes_same_files(name: str, tmp_path: Path) -> None:
    folder, kind = OLD / "networks" / name, name.split("-")[0]
    net = rankup.load(folder, module=MODULES[kind]() if kind in MODULES else None)
    rankup.save(net, tmp_path / "again")
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    assert len(files) >= 4
    for file in files:
        assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes()


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize("run", [Path(name) for name in ("rank", "hat", "seeds/seed-1", "int8")])
def test_run_is_reported_as_before(run: Path, tmp_path: Path, call: Call) -> None:
    last = (OLD / "runs" / run / "metrics.jsonl").read_text().splitlines()[-1]
    out = tmp_path / "page.html"
    said = call("report", OLD / "runs" / run, "--out", out)
    assert said.code == 0, said.err
    assert f"{100 * json.loads(last)['average_accuracy']:.2f}" in out.read_text()


def copied(run: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD / "runs" / run, tmp_path / run))


def says_unsealed(run: Path) -> AbstractContextManager[object]:
    """Of other methods than the rank update, once, that its weights have no hashes."""
    if list(run.glob("net/**/weights.safetensors")):
        return pytest.warns(UserWarning, match="saved by version 0.1, without hashes")
    return nullcontext()


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize("run", [str(run) for run in RUNS if run.parts[0].isalpha()])
def test_finished_run_resumes_as_finished(run: str, tmp_path: Path, call: Call) -> None:
    folder = copied(run, tmp_path)
    before = (folder / "metrics.jsonl").read_bytes()
    with says_unsealed(folder):
        said = call("run", "--resume", "--out", folder)
    assert said.code == 0, said.err
    assert (folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize("method", ["rank", "ewc"])
def test_stopped_run_goes_on_to_same_bits(method: str, tmp_path: Path, call: Call) -> None:
    folder = copied(f"stopped-{method}", tmp_path)
    assert (folder / "checkpoint.safetensors").exists()
    with says_unsealed(folder):
        said = call("run", "--resume", "--out", folder)
    assert said.code == 0, said.err
    for line in (OLD / "runs" / f"resumed-{method}.sha256").read_text().splitlines():
        known, file = line.split()
        (now,) = (folder / "net").glob(file.replace("weights", "weights-*"))
        assert hashlib.sha256(now.read_bytes()).hexdigest() == known
