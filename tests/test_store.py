"""A network folder is whole or says in one sentence what is wrong with it."""

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import rankup
from rankup.manifest import _seal
from rankup.rank import Rank
from zoo import KINDS, assert_same_bits, inputs, logits, module, taught, teach


def hashes(folder: Path) -> dict[str, str]:
    """Every file that belongs to the network, with its hash."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def run(code: str, *args: object) -> subprocess.Popen[str]:
    """Python code in a process of its own, with the tests' modules at hand."""
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


@pytest.mark.parametrize("base", ["new", "keep"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_network_goes_on_as_the_saved_one_would(
    kind: str, base: str, tmp_path: Path
) -> None:
    net = taught(kind, rank=Rank(1, 1, seeded=5), base=base, seed=3)
    rankup.save(net, tmp_path / "net")
    loaded = rankup.load(tmp_path / "net", module(kind)).eval()
    assert loaded.tasks == net.tasks
    assert loaded.classes == net.classes
    assert loaded.size() == net.size()
    x = inputs(kind, seed=8)
    assert_same_bits(logits(net, x), logits(loaded, x))
    for one in (net, loaded):
        teach(one, "next", x, selectors="previous", norms="previous")
    assert_same_bits(logits(net, x), logits(loaded, x))
    rankup.save(loaded, tmp_path / "net")
    rankup.save(net, tmp_path / "from the start")
    assert hashes(tmp_path / "net") == hashes(tmp_path / "from the start")


@pytest.mark.parametrize("kind", ["mlp", "resnet18"])
def test_built_in_models_come_back_from_the_manifest_alone(kind: str, tmp_path: Path) -> None:
    net = taught(kind, dtype=torch.float64, rank=Rank.proportional(0.5, 0.25, seeded="2x"))
    rankup.save(net, tmp_path / "net")
    state = torch.get_rng_state()
    loaded = rankup.load(tmp_path / "net").eval()
    assert torch.equal(torch.get_rng_state(), state)
    x = inputs(kind, dtype=torch.float64)
    assert_same_bits(logits(net, x), logits(loaded, x))


def test_other_modules_must_be_passed_and_must_fit(tmp_path: Path) -> None:
    rankup.save(taught("transformer"), tmp_path / "net")
    with pytest.raises(rankup.StoreError, match="a module of your own, a Transformer: pass one"):
        rankup.load(tmp_path / "net")
    with pytest.raises(rankup.StoreError, match="does not fit .* differ in .*attention.out"):
        rankup.load(tmp_path / "net", module("head_first"))
    with pytest.raises(rankup.StoreError, match="is in torch.float64, the network in"):
        rankup.load(tmp_path / "net", module("transformer", torch.float64))


def test_one_more_task_writes_one_file_and_touches_no_old_one(saved: Path) -> None:
    before = hashes(saved)
    times = {path: path.stat().st_mtime_ns for path in saved.rglob("*.safetensors")}
    net = rankup.load(saved)
    teach(net, "fine birds: 5", inputs("mlp"))
    rankup.save(net, saved)
    after = hashes(saved)
    assert set(after) - set(before) == {"tasks/0004-fine_birds__5.safetensors"}
    assert {name for name in before if before[name] != after[name]} == {"manifest.json"}
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())
    assert rankup.load(saved).tasks[-1] == "fine birds: 5"


def test_saving_again_without_a_new_task_writes_nothing(saved: Path) -> None:
    times = {path: path.stat().st_mtime_ns for path in saved.rglob("*") if path.is_file()}
    net = rankup.load(saved)
    rankup.save(net, saved)
    after = {path: path.stat().st_mtime_ns for path in saved.rglob("*") if path.is_file()}
    del times[saved / ".lock"], after[saved / ".lock"]
    assert after == times


def test_equal_networks_have_equal_folders(tmp_path: Path) -> None:
    for name in ("one", "two"):
        rankup.save(taught("resnet18", rank=Rank(1, 1, seeded=4)), tmp_path / name)
    assert hashes(tmp_path / "one") == hashes(tmp_path / "two")
    text = (tmp_path / "one" / "manifest.json").read_text()
    assert str(tmp_path) not in text


def test_a_network_without_tasks_can_be_saved(tmp_path: Path) -> None:
    rankup.save(rankup.grow(module("mlp"), Rank(2, 1)), tmp_path / "net")
    net = rankup.load(tmp_path / "net")
    assert net.tasks == []
    teach(net, "first", inputs("mlp"))


def test_one_network_in_two_folders_of_different_age(tmp_path: Path) -> None:
    net = taught("mlp", tasks=[3])
    rankup.save(net, tmp_path / "old")
    teach(net, "second", inputs("mlp"))
    rankup.save(net, tmp_path / "new")
    rankup.save(net, tmp_path / "old")
    assert hashes(tmp_path / "old") == hashes(tmp_path / "new")


def first_task(folder: Path) -> Path:
    return folder / "tasks" / "0001-task_0.safetensors"


def edit_manifest(folder: Path, change: Callable[[dict], None], reseal: bool = True) -> None:
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    del data["sha256"]
    seal = _seal(data)
    change(data)
    path.write_text(json.dumps({**data, "sha256": _seal(data) if reseal else seal}))


def flip_a_bit(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def swap_tasks(folder: Path) -> None:
    def change(data: dict) -> None:
        data["tasks"].reverse()

    edit_manifest(folder, change)


def swap_names_too(folder: Path) -> None:
    """The first two tasks change places, with everything that only names them made to fit."""

    def change(data: dict) -> None:
        one, two = data["tasks"][:2]
        data["tasks"][:2] = [
            {**two, "file": "tasks/0001-task_1.safetensors"},
            {**one, "file": "tasks/0002-task_0.safetensors"},
        ]

    tasks = folder / "tasks"
    (tasks / "0001-task_0.safetensors").rename(tasks / "0002-task_0.safetensors")
    (tasks / "0002-task_1.safetensors").rename(tasks / "0001-task_1.safetensors")
    edit_manifest(folder, change)


def replace_by_foreign(folder: Path) -> None:
    other = folder.parent / "other"
    rankup.save(taught("mlp", seed=9), other)
    first_task(folder).write_bytes(first_task(other).read_bytes())


def point_outside(folder: Path) -> None:
    (folder.parent / "x.safetensors").write_bytes(first_task(folder).read_bytes())
    edit_manifest(folder, lambda data: data["tasks"][0].update(file="../x.safetensors"))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated task": (
        lambda f: os.truncate(first_task(f), 100),
        "0001-task_0.safetensors is truncated: 100 of",
    ),
    "edited task": (
        lambda f: flip_a_bit(first_task(f)),
        "0001-task_0.safetensors is not the file that was saved",
    ),
    "missing task": (lambda f: first_task(f).unlink(), "0001-task_0.safetensors is missing"),
    "foreign task": (replace_by_foreign, "0001-task_0.safetensors is not the file that was saved"),
    "truncated manifest": (
        lambda f: os.truncate(f / "manifest.json", 300),
        "manifest.json is truncated or edited",
    ),
    "empty manifest": (
        lambda f: os.truncate(f / "manifest.json", 0),
        "manifest.json is truncated or edited",
    ),
    "foreign manifest": (
        lambda f: (f / "manifest.json").write_text('{"name": "a web app"}'),
        "manifest.json is not the manifest of a rankup network",
    ),
    "a list for a manifest": (
        lambda f: (f / "manifest.json").write_text("[]"),
        "manifest.json is not the manifest of a rankup network",
    ),
    "missing manifest": (
        lambda f: (f / "manifest.json").unlink(),
        "there is no network in .*: it has no manifest.json",
    ),
    "newer format": (
        lambda f: edit_manifest(f, lambda data: data.update(version=2)),
        "format version 2 and this rankup reads version 1: it was written by a newer one",
    ),
    "edited seed": (
        lambda f: edit_manifest(f, lambda d: d["growth"].update(seed=1), reseal=False),
        "manifest.json was edited",
    ),
    "edited seed, resealed": (
        lambda f: edit_manifest(f, lambda d: d["growth"].update(seed=1)),
        "seed 1 does not give the seeded factors that the network was trained with",
    ),
    "edited hash of the seeded factors": (
        lambda f: edit_manifest(f, lambda d: d["seeded"].update(sha256="0" * 64)),
        "seed 0 does not give the seeded factors",
    ),
    "unknown generator": (
        lambda f: edit_manifest(f, lambda d: d["seeded"].update(version=2)),
        "unknown generator",
    ),
    "edited hash of a task": (
        lambda f: edit_manifest(f, lambda d: d["tasks"][0].update(sha256="0" * 64)),
        "0001-task_0.safetensors is not the file that was saved",
    ),
    "tasks in another order": (swap_tasks, "task 1 is 'task 2', its file cannot be"),
    "tasks in another order, renamed": (swap_names_too, "'hidden.0.selector' is .*, not"),
    "a file outside the folder": (point_outside, "its file cannot be '../x.safetensors'"),
    "a part left out": (
        lambda f: edit_manifest(f, lambda d: d["parts"].pop(0)),
        "holds what the network has no place for|does not give the seeded factors",
    ),
    "a field left out": (
        lambda f: edit_manifest(f, lambda d: d.pop("growth")),
        "manifest.json is not a valid manifest: 'growth'",
    ),
    "other classes": (
        lambda f: edit_manifest(f, lambda d: d["tasks"][0].update(classes=9)),
        r"0001-task_0.safetensors: 'head.weight' is \[3, 7\], not \[9, 7\]",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused_in_one_sentence(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "net"
    rankup.save(taught("mlp", rank=Rank(1, 1, seeded=5)), folder)
    assert rankup.verify(folder)
    change, message = BROKEN[case]
    change(folder)
    with pytest.raises(rankup.StoreError, match=message) as caught:
        rankup.load(folder)
    assert "\n" not in str(caught.value)
    found = rankup.verify(folder)
    assert not found
    assert str(caught.value) in found.problems


def test_verify_names_every_broken_file(saved: Path) -> None:
    os.truncate(saved / "tasks" / "0001-task_0.safetensors", 10)
    (saved / "tasks" / "0003-task_2.safetensors").unlink()
    found = rankup.verify(saved)
    assert found.tasks == ("task 0", "task 1", "task 2")
    assert [problem.rpartition("/")[2][:4] for problem in found.problems] == ["0001", "0003"]
    assert str(found) == "\n".join(found.problems)


def test_verify_says_what_is_whole(saved: Path) -> None:
    found = rankup.verify(saved)
    assert found.problems == ()
    assert str(found) == f"{saved} is whole: 3 tasks, every file as it was written"


def test_a_kept_base_is_checked_like_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "net"
    rankup.save(taught("mlp", base="keep"), folder)
    flip_a_bit(folder / "base.safetensors")
    assert "base.safetensors is not the file" in str(rankup.verify(folder))
    with pytest.raises(rankup.StoreError, match="base.safetensors is not the file"):
        rankup.load(folder)


@pytest.mark.parametrize("place", ["empty", "nowhere", "file"])
def test_loading_what_is_no_network(place: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    with pytest.raises(rankup.StoreError, match=f"there is no network in .*{place}"):
        rankup.load(tmp_path / place)
    assert not rankup.verify(tmp_path / place)


def test_saving_refuses_what_would_be_lost(saved: Path, tmp_path: Path) -> None:
    before = hashes(saved)
    net = rankup.load(saved)
    shorter = taught("mlp", tasks=[3, 2])
    with pytest.raises(rankup.StoreError, match="holds tasks that this network has not learned"):
        rankup.save(shorter, saved)
    with pytest.raises(rankup.StoreError, match="holds another network"):
        rankup.save(taught("mlp", seed=1), saved)
    with pytest.raises(rankup.StoreError, match="holds another network"):
        rankup.save(taught("mlp", rank=Rank(3, 1)), saved)
    net.begin_task("open", 2)
    with pytest.raises(rankup.StoreError, match="task 'open' is still being learned"):
        rankup.save(net, saved)
    assert hashes(saved) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("text")
    with pytest.raises(rankup.StoreError, match="holds other files"):
        rankup.save(shorter, tmp_path / "mine")
    with pytest.raises(rankup.StoreError, match="cannot save to .*thesis.tex"):
        rankup.save(shorter, tmp_path / "mine" / "thesis.tex")


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """As on a disk with little room left: no file can grow beyond `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("too_large", ["tasks/0001-task_0.safetensors", "manifest.json"])
def test_a_full_disk_leaves_the_old_network_whole(saved: Path, too_large: str) -> None:
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


KILLED = """
    import os, signal, sys
    import rankup
    from zoo import inputs, teach

    net = rankup.load(sys.argv[1])
    teach(net, "fourth", inputs("mlp"))
    countdown = int(sys.argv[2])

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

    import rankup.store as store
    for name in ("fsync", "replace", "open", "close"):
        setattr(os, name, dies(getattr(os, name)))
    store.open = lambda *args: File(dies(open)(*args))
    rankup.save(net, sys.argv[1])
"""


def test_a_kill_at_any_moment_of_a_save_leaves_a_loadable_network(tmp_path: Path) -> None:
    net = taught("mlp")
    x = inputs("mlp", seed=5)
    expected = logits(net, x)
    moment, tasks = 0, []
    while True:
        moment += 1
        folder = tmp_path / f"{moment}"
        rankup.save(net, folder)
        process = run(KILLED, folder, moment)
        process.communicate()
        loaded = rankup.load(folder)
        assert rankup.verify(folder)
        assert_same_bits(expected, logits(loaded, x))
        tasks.append(len(loaded.tasks))
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        if len(loaded.tasks) == 3:
            teach(loaded, "another", x)
        rankup.save(loaded, folder)
        assert rankup.verify(folder)
        assert not list(folder.rglob("*.tmp"))
    # Old before the manifest is replaced, new after it, and many moments were tried.
    assert tasks == sorted(tasks)
    assert set(tasks) == {3, 4}
    assert moment > 10


RACING = """
    import sys
    import rankup
    from zoo import inputs, taught, teach

    net = taught("mlp", tasks=[3], seed=int(sys.argv[2]))
    print("ready", flush=True)
    sys.stdin.readline()
    for index in range(15):
        teach(net, f"{index}", inputs("mlp"), steps=1)
        rankup.save(net, sys.argv[1])
    print("saved")
"""


@pytest.mark.parametrize("seeds", [(1, 2), (1, 1)], ids=["different", "equal"])
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
    assert len(rankup.load(tmp_path / "net").tasks) == 16
    for error in losers:
        # Another network, or the same one further on: either way one sentence.
        assert "StoreError: " in error
        assert "holds another network" in error or "holds tasks that this network" in error
    if seeds[0] != seeds[1]:
        assert len(winners) == 1


def test_a_folder_that_is_being_saved_to_says_so(saved: Path, monkeypatch: object) -> None:
    import filelock

    import rankup.store

    taken = filelock.FileLock(saved / ".lock")
    monkeypatch.setattr(rankup.store, "_PATIENCE", 0.05)
    net = rankup.load(saved)
    with taken, pytest.raises(rankup.StoreError, match="another process is saving to"):
        rankup.save(net, saved)
    rankup.save(net, saved)
