"""Whatever happens while a network is saved, what was there before stays intact."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import rankup
import rankup.runs.run
from helpers.runs import config_for
from helpers.zoo import assert_same_bits, hashes, inputs, logits, taught, teach
from rankup.data.streams import make_stream
from rankup.runs.records import read_lines
from rankup.runs.seed_run import SeedRun


def run(code: str, *args: object) -> subprocess.Popen[str]:
    """Python code in a process of its own, with access to the tests' modules."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    rankup.save(taught("mlp"), tmp_path / "net")
    return tmp_path / "net"


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """As on a disk with little room left: no file can grow beyond `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("too_large", ["tasks/task_0-d2b7b301.safetensors", "manifest.json"])
def test_full_disk_leaves_old_network_whole(saved: Path, too_large: str) -> None:
    before = hashes(saved)
    room = (saved / too_large).stat().st_size - 1
    net = rankup.load(saved)
    teach(net, "fourth", inputs("mlp"))
    with (
        pytest.raises(rankup.StoreError, match="cannot save to .*the 3 tasks saved there before"),
        largest_file(room),
    ):
        rankup.save(net, saved)
    after = hashes(saved)
    assert after.items() >= before.items()
    assert not list(saved.rglob("*.tmp"))
    assert rankup.verify(saved)
    rankup.save(net, saved)
    assert len(rankup.load(saved).tasks) == 4


def test_full_disk_costs_checkpoints_and_no_more(tmp_path: Path) -> None:
    stream, notes = make_stream("p-digits", tasks=2), list[str]()
    config = config_for(stream, "finetune", epochs=5)
    rankup.runs.run.run(config, stream, tmp_path / "whole")
    largest = (tmp_path / "whole" / "net" / "weights-0002.safetensors").stat().st_size
    with largest_file(largest):  # Adam's state is three times as large
        tried = SeedRun(config, stream, tmp_path / "full")
        assert rankup.runs.run.run_together([tried], note=notes.append) == {}
    assert len(notes) == 1
    assert notes[0].startswith(f"cannot write a checkpoint to {tmp_path / 'full'}: File too large;")
    assert len(read_lines(tmp_path / "full")) == 2
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("method", ["rank", "finetune"])
@pytest.mark.parametrize("learned", [0, 1])
def test_full_disk_while_saving_ends_run_with_sentence(
    method: str, learned: int, tmp_path: Path
) -> None:
    stream, out = make_stream("p-digits", tasks=2), tmp_path / "run"
    config = config_for(stream, method)
    if learned:
        rankup.runs.run.run(config, replace(stream, tasks=stream.tasks[:1]), out)
    tried = SeedRun(config, stream, out, resume=bool(learned))
    tried.watch = lambda *_: None  # no checkpoints
    there = "before (are|is) whole" if learned else "nothing was saved"
    message = f"^cannot save to .*net: File too large; .*{there}$"
    with pytest.raises(rankup.StoreError, match=message), largest_file(1200):  # config.json fits
        rankup.runs.run.run_together([tried])
    assert not list(tmp_path.rglob("*.tmp"))
    rankup.runs.run.run(config, stream, out, resume=True)
    assert len(read_lines(out)) == 2


def test_full_disk_while_writing_metrics_ends_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, out = make_stream("p-digits", tasks=2), tmp_path / "run"
    config, note = config_for(stream, "finetune"), SeedRun.note

    def full(run: SeedRun, accuracies: list[float], seconds: float) -> None:
        with largest_file(100):
            note(run, accuracies, seconds)

    monkeypatch.setattr(SeedRun, "note", full)
    with pytest.raises(rankup.RankupError, match="cannot write to .*metrics.jsonl: File too large"):
        rankup.runs.run.run(config, stream, out)
    monkeypatch.undo()
    assert not list(tmp_path.rglob("*.tmp"))
    rankup.runs.run.run(config, stream, out, resume=True)
    assert len(read_lines(out)) == 2


KILLED = """
    import os, signal, sys
    from itertools import count
    import torch
    import rankup
    import rankup.storage.atomic as files
    from helpers.zoo import inputs, taught, teach

    torch.set_num_threads(1)  # a process that is forked has none of its parent's threads

    def dies(function):
        def wrapped(*args, **kwargs):
            global countdown
            countdown -= 1
            if countdown == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return wrapped

    class File:
        # Half of what is to be written reaches the disk, then the process dies.
        def __init__(self, file): self.file = file
        def __enter__(self): self.file.__enter__(); return self
        def __exit__(self, *args): return self.file.__exit__(*args)
        def write(self, content):
            self.file.write(content[: len(content) // 2]); self.file.flush()
            dies(lambda: None)()
            self.file.write(content[len(content) // 2 :])
        def __getattr__(self, name): return getattr(self.file, name)

    net = taught("mlp")
    for moment in count(1):
        folder = f"{sys.argv[1]}/{moment}"
        rankup.save(net, folder)
        if (child := os.fork()) == 0:
            longer, countdown = rankup.load(folder), moment
            teach(longer, "fourth", inputs("mlp"))
            for name in ("fsync", "replace", "open", "close"):
                setattr(os, name, dies(getattr(os, name)))
            files.open = lambda *args: File(dies(open)(*args))
            rankup.save(longer, folder)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
        if status == 0:
            break
"""


def test_kill_during_save_leaves_loadable_network(tmp_path: Path) -> None:
    x, tasks = inputs("mlp", seed=5), []
    expected = logits(taught("mlp"), x)
    said, problem = run(KILLED, tmp_path).communicate()
    *killed, last = map(int, said.split())
    assert last == 0, problem
    assert set(killed) == {-signal.SIGKILL}
    for moment in range(1, len(killed) + 2):
        folder = tmp_path / f"{moment}"
        loaded = rankup.load(folder)
        assert rankup.verify(folder)
        assert_same_bits(expected, logits(loaded, x))
        tasks.append(len(loaded.tasks))
        if len(loaded.tasks) == 3:
            teach(loaded, "another", x)
        rankup.save(loaded, folder)
        assert rankup.verify(folder)
        assert not list(folder.rglob("*.tmp"))
    # Old before the manifest is replaced, new after it, and many moments were tried.
    assert tasks == sorted(tasks)
    assert set(tasks) == {3, 4}
    assert len(killed) > 14  # writes that were cut in two among them


RACING = """
    import sys
    import rankup
    from helpers.zoo import inputs, taught, teach

    net = taught("mlp", tasks=[3], seed=int(sys.argv[2]))
    print("ready", flush=True)
    sys.stdin.readline()
    for index in range(5):
        teach(net, f"{index}", inputs("mlp"), steps=1)
        rankup.save(net, sys.argv[1])
    print("saved")
"""


@pytest.mark.parametrize(
    "seeds",
    [(1, 2), pytest.param((1, 1), marks=pytest.mark.slow)],
    ids=["different", "equal"],
)
def test_two_processes_saving_to_one_folder(seeds: tuple[int, int], tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(RACING), str(tmp_path / "net"), str(seed)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in seeds
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    outcomes = [process.communicate() for process in processes]
    winners = [out for out, _ in outcomes if out == "saved\n"]
    losers = [err for out, err in outcomes if out != "saved\n"]
    assert winners
    assert rankup.verify(tmp_path / "net")
    assert len(rankup.load(tmp_path / "net").tasks) == 6
    for error in losers:
        # Another network, or the same one with more tasks: either way one sentence.
        assert "StoreError: " in error
        assert "holds another network" in error or "holds tasks that this network" in error
    if seeds[0] != seeds[1]:
        assert len(winners) == 1


def test_folder_that_is_being_saved_to_says_so(saved: Path, monkeypatch: object) -> None:
    import filelock

    import rankup.storage.store

    taken = filelock.FileLock(saved / ".lock")
    monkeypatch.setattr(rankup.storage.lock, "_PATIENCE", 0.05)
    net = rankup.load(saved)
    with taken, pytest.raises(rankup.StoreError, match="another process is saving to"):
        rankup.save(net, saved)
    rankup.save(net, saved)


def test_first_save_of_another_process_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "net"
    look = Path.iterdir

    def looks_too_late(path: Path) -> Iterator[Path]:
        if path == folder and not (folder / "manifest.json").exists():
            rankup.save(taught("mlp"), tmp_path / "other")
            shutil.copytree(tmp_path / "other", folder, dirs_exist_ok=True)
        return look(path)

    monkeypatch.setattr(Path, "iterdir", looks_too_late)
    rankup.save(taught("mlp"), folder)
    assert (tmp_path / "other").exists()
    assert rankup.verify(folder)
