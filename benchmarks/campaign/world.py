"""What the campaign damages: runs and networks, made once, and how they look when whole."""

import importlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import rankup
import rankup.runs.checkpoints as in_folders
from campaign import users
from rankup.data.streams import make_stream

# As tests/version-0.1/README.md.
SETTINGS = {
    "rank": ("--width", 12, "--epochs", 6, "--rank", "4,1"),
    "hat": ("--width", 24, "--epochs", 40),
    "orthog": ("--width", 24, "--epochs", 40),
}
USUAL = ("--width", 12, "--epochs", 6)
RIVALS = (
    *("finetune", "ewc", "agem", "er-ring", "icarl", "multitask", "parallel"),
    *("hat", "ibpwf", "nscl", "orthog", "packnet", "supsup"),
)
COMPARISON = "comparison"
DAMAGED = ("rank", "stopped-rank", "stopped-ewc", "stopped-er-ring", "hat", COMPARISON)
SMALL = ("rank", "stopped-ewc")
KILLED = ("rank", "ewc", "er-ring", "parallel")
NETWORKS = ("keep", "seeded", "int8", "float16", "resnet18")

# What commands import only when they are called. In its fork each would do so anew, which would
# take most of its time.
_LATE = (
    *("jinja2", "matplotlib.backends.backend_agg", "sklearn.datasets", "rankup.life.asking"),
    *("rankup.cli.network", "rankup.cli.predict", "rankup.cli.report", "rankup.methods.rank"),
    *("rankup.report.page", "rankup.runs.launch", "rankup.runs.many_seeds", "rankup.runs.predict"),
    *("rankup.runs.run", "rankup.training.fit"),
)

_STOP_TASK, _STOP_EPOCH = 3, 2  # of five, of at least six


def words(method: str) -> tuple[object, ...]:
    """The command that makes a run of a method, without --out."""
    chosen = SETTINGS.get(method, USUAL)
    return ("run", "--stream", "s-digits", "--method", method, *chosen, "--batch", 32, *_ONE)


_ONE = ("--threads", 1)


class World:
    """Folders by name: METHOD and stopped-METHOD for runs, `comparison`, and networks.

    Args:
        small: whether only a few methods are damaged, which takes a tenth of the time to make.
    """

    def __init__(self, root: Path, small: bool = False) -> None:
        self.root = root
        self.damaged = SMALL if small else DAMAGED
        self.killed = ("rank",) if small else KILLED
        self.rivals = ("ewc",) if small else RIVALS
        self.image = root / "seven.png"
        self.endings: dict[str, users.Ending] = {}
        self.reports: dict[str, tuple[users.Said, bytes]] = {}
        self.answers: dict[str, list[Tensor]] = {}
        self.inputs: dict[str, Tensor] = {}
        self.predicted: users.Said | None = None

    def copy(self, name: str, into: Path) -> Path:
        return Path(shutil.copytree(self.root / name, into / "run", symlinks=True))

    def make(self, names: Iterable[str]) -> None:
        """Make what is not there yet."""
        torch.set_num_threads(1)  # a process that is forked has none of its parent's threads
        os.environ["RANKUP_CACHE"] = str(self.root / "cache")
        for module in _LATE:
            importlib.import_module(module)
        for name in names:
            if (self.root / name).exists():
                continue
            if name == COMPARISON:
                self._compare()
            elif name in NETWORKS:
                self._network(name)
            elif name.startswith("stopped-"):
                self._stop(name.removeprefix("stopped-"))
            else:
                self._run(name)

    def _run(self, method: str) -> None:
        out = self.root / method
        _in_fork(lambda: users.command(*words(method), "--out", out))
        self.endings[method] = users.ending(out)
        if method in self.damaged:
            self.reports[method] = self._report(out)
        if method == "rank":
            net, self.inputs[method] = rankup.load(out / "net"), torch.rand(5, 64)
            self.answers[method] = users.answers(net, self.inputs[method])
            pixels = make_stream("s-digits")[1].test_x[0].reshape(8, 8).to(torch.uint8)
            Image.fromarray(pixels.numpy()).save(self.image)
            self.predicted = _in_fork(lambda: users.predict(out, self.image))

    def _stop(self, method: str) -> None:
        """A run that was killed in its fourth task, of which it has a checkpoint."""
        out = self.root / f"stopped-{method}"
        self.make([method])
        _in_fork(lambda: _stopping(method, out), dies=True)
        assert (out / in_folders.CHECKPOINT).exists()
        self.endings[out.name] = self.endings[method]
        if out.name in self.damaged:
            self.reports[out.name] = self._report(out)

    def _compare(self) -> None:
        out = self.root / COMPARISON
        chosen = ("--methods", "rank,finetune", "--seeds", 2, "--width", 12, "--epochs", 6)
        asked = ("compare", "--stream", "s-digits", *chosen, "--batch", 32, *_ONE, "--out", out)
        line = [sys.executable, "-m", "rankup", *map(str, asked)]
        done = subprocess.run(line, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        self.reports[COMPARISON] = self._report(out)

    def _network(self, name: str) -> None:
        module = rankup.models.mlp(6, hidden=[8, 7])
        shape: tuple[int, ...] = (6,)
        if name == "resnet18":
            module, shape = rankup.models.resnet18(2, image_size=8), (3, 8, 8)
        options = {
            "keep": {"base": "keep"},
            "seeded": {},
            "int8": {"store": "int8"},
            "float16": {"store": "float16"},
            "resnet18": {},
        }[name]
        rule = rankup.Rank(2, 1, seeded=8 if name == "seeded" else 0)
        net = rankup.grow(module, rule, **options)
        draw = torch.Generator().manual_seed(7)
        for index, classes in enumerate((3, 2, 4)):
            _teach(net, f"task {index}", classes, torch.rand(24, *shape, generator=draw))
        rankup.save(net, self.root / name)
        self.inputs[name] = torch.rand(5, *shape, generator=draw)
        self.answers[name] = users.answers(rankup.load(self.root / name), self.inputs[name])

    def _report(self, folder: Path) -> tuple[users.Said, bytes]:
        shown = _in_fork(lambda: users.report(folder))
        assert shown[0].code == 0, shown[0].err
        return shown

    def without_last_line(self, name: str, damaged: Path) -> users.Said:
        """How that would be shown if the metrics that are damaged lacked just their last line."""
        out = self.root / "shorter" / name
        shutil.copytree(self.root / name, out, dirs_exist_ok=True)
        for path in out.rglob("metrics.jsonl"):
            whole = path.read_bytes()
            if (damaged / path.relative_to(out)).read_bytes() != whole:
                path.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
        return users.Said(*_in_fork(lambda: users.report(out)[0]))


def _teach(net: rankup.IncrementalNet, name: str, classes: int, x: Tensor) -> None:
    net.begin_task(name, classes)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(3):
        optimiser.zero_grad()
        F.cross_entropy(net(x, task=name), torch.arange(len(x)) % classes).backward()
        optimiser.step()
    net.commit_task(calibrate=[x])


def _stopping(method: str, out: Path) -> None:
    at = 0 if method == "multitask" else _STOP_TASK
    keep = in_folders.Checkpoints.keep

    def keep_and_die(self: object, out: Path, task: Any, checkpoint: object) -> None:
        keep(self, out, task, checkpoint)
        if (task.index, checkpoint.epoch) == (at, _STOP_EPOCH):
            os.kill(os.getpid(), signal.SIGKILL)

    in_folders.SHARE = 0  # a checkpoint after every epoch
    in_folders.Checkpoints.keep = keep_and_die
    users.command(*words(method), "--out", out)


def _in_fork(work: Callable[[], Any], dies: bool = False) -> Any:
    """What a function returns in a process of its own, which a command changes in many ways."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(pickle.dumps(work()))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        content = pipe.read()
    os.waitpid(child, 0)
    if dies:
        return None
    assert content, "what the campaign needs could not be made"
    return pickle.loads(content)
