"""Work on a Ray cluster: outcomes, errors, lost nodes and workers, packing, folders not shared."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

import rankup
from helpers import ray_jobs
from helpers.calling import Call
from helpers.cluster import STORE, two_nodes
from helpers.experiments import tiny
from helpers.runs import outcome
from rankup.errors import RankupError
from rankup.paper.results import Results
from rankup.paper.runner import WORK, Runner
from rankup.runs import mirror, ray_pool
from rankup.runs.ray_pool import Needs, RayPool
from rankup.runs.request import Device

ONE = Needs(cpus=1)
_PATIENCE = 300  # seconds to wait for what takes a few where nothing else runs

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with two_nodes(num_gpus=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pool(cluster: Any) -> Iterator[RayPool]:
    with RayPool("ray") as pool:
        yield pool


def work(pool: RayPool, job: Any, *items: Any, needs: Needs = ONE) -> list[tuple[Any, Any]]:
    return list(pool.run(job, items, needs=needs, hear=lambda _: None, lost="it is lost"))


def test_outcomes_and_messages_arrive_from_both_nodes(pool: RayPool) -> None:
    told: list[str] = []
    done = pool.run(ray_jobs.double, range(4), needs=ONE, hear=told.append, lost="")
    assert sorted(done) == [(number, 2 * number) for number in range(4)]
    assert told
    assert {*told} <= {f"at {number}" for number in range(4)}
    assert len({node for _, node in work(pool, ray_jobs.node_of, 0.5, 0.5)}) == 2
    assert work(pool, ray_jobs.double) == []


def test_an_error_ends_all_work_and_is_raised_as_it_was(pool: RayPool) -> None:
    with pytest.raises(ValueError, match=r"^3 is bad$"):
        work(pool, ray_jobs.fail, 3)


def test_work_that_is_lost_again_and_again_says_so(
    pool: RayPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_pool, "_MOST_TRIES", 2)
    with pytest.raises(RankupError, match=r"^it is lost \(.*died"):
        work(pool, ray_jobs.leave_at_once, 1)


def test_killed_worker_goes_on_where_it_was(pool: RayPool, tmp_path: Path) -> None:
    item = ray_jobs.InFolder(tmp_path / "run", most=3, dies_at=2)
    assert work(pool, ray_jobs.count, item) == [(item, [3])]


def test_folders_that_nodes_do_not_see_come_back(
    pool: RayPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RayPool, "_all_see", lambda *_: False)
    folder = tmp_path / "run"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "count").write_text("1")
    item = ray_jobs.InFolder(folder, most=4)
    assert work(pool, ray_jobs.count, item) == [(item, [2, 3, 4])]
    assert (folder / "deep" / "count").read_text() == "4"


@pytest.mark.slow  # each of both is above
def test_worker_that_dies_elsewhere_leaves_what_it_sent(
    pool: RayPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RayPool, "_all_see", lambda *_: False)
    # When it dies, what was written is sent.
    item = ray_jobs.InFolder(tmp_path / "run", most=3, dies_at=2, rest=1.2)
    assert work(pool, ray_jobs.count, item) == [(item, [3])]


@pytest.mark.slow  # its process ends with it, as above
def test_work_of_a_node_that_is_removed_goes_on_elsewhere(
    pool: RayPool, cluster: Any, tmp_path: Path
) -> None:
    third = cluster.add_node(num_cpus=1, object_store_memory=STORE)
    cluster.wait_for_nodes()
    removed = []

    def remove(node: str) -> None:
        if node == third.node_id and not removed:
            removed.append(node)
            cluster.remove_node(third)

    items = [ray_jobs.InFolder(tmp_path / str(number), most=30, pause=0.1) for number in range(3)]
    done = dict(pool.run(ray_jobs.count, items, needs=ONE, hear=remove, lost=""))
    assert removed
    assert sorted(counted[-1] for counted in done.values()) == [30, 30, 30]
    assert sorted(counted[0] > 1 for counted in done.values()) == [False, False, True]


def test_parts_of_a_gpu_are_packed(pool: RayPool, tmp_path: Path) -> None:
    """A node has a logical GPU: with half of it, two run there at once, and a third waits."""
    items = [ray_jobs.Meeting(tmp_path, number, 2 if number < 2 else 1) for number in range(3)]
    met = [about for _, about in work(pool, ray_jobs.meet, *items, needs=Needs(0, 0.5))]
    assert max(most for most, _ in met) == 2
    assert {gpus for _, gpus in met} == {"0"}


def test_needs_that_no_node_meets_are_refused(pool: RayPool) -> None:
    with pytest.raises(RankupError, match="no node of the Ray cluster has 7 CPU"):
        work(pool, ray_jobs.double, 1, needs=Needs(cpus=7))
    with pytest.raises(RankupError, match="has 1 CPU and 2 GPU"):
        work(pool, ray_jobs.double, 1, needs=Needs(gpus=2))


def test_closing_ends_the_work(pool: RayPool, tmp_path: Path) -> None:
    items = [0.0, 60.0, 61.0]
    begun = time.perf_counter()
    with closing(pool.run(ray_jobs.node_of, items, needs=ONE, hear=print, lost="")) as ended:
        assert next(ended)[0] == 0.0
    assert len(work(pool, ray_jobs.node_of, 0.0, 0.1)) == 2  # the CPUs are free again
    assert time.perf_counter() - begun < 40


def test_what_is_sent_is_put_once(pool: RayPool) -> None:
    value = [1, 2]
    assert pool.put(value) is pool.put(value)
    assert pool.put(value) is not pool.put([1, 2])


@pytest.mark.parametrize("wrong", ["slurm", "ray://", "rays"])
def test_other_places_are_refused(wrong: str) -> None:
    with pytest.raises(RankupError, match=r"--on takes ray or ray://HOST:10001, got"):
        ray_pool.check_address(wrong)


def test_cluster_that_does_not_answer_is_refused_before_anything_is_written(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'rankup[ray]'")
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", closed)
    for on, named in (("ray", closed), (f"ray://{closed}", f"ray://{closed}")):
        done = call("run", "--on", on, "--out", tmp_path / "run")
        refused = f"rankup: cannot connect to Ray at {named}: Connection refused\n"
        assert (done.code, done.err) == (1, refused)
    assert not (tmp_path / "run").exists()


def test_missing_ray_is_one_sentence(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['ray'] = None; from rankup.cli.main import main; "
        "sys.argv = ['rankup', 'run', '--tasks', '1', '--epochs', '1', '--out', sys.argv[1], "
        "'--on', 'ray']; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "run"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == "rankup: --on ray needs Ray: pip install 'rankup[ray]'\n"
    assert not (tmp_path / "run").exists()


def test_packed_folder_unpacks_to_the_same(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    (one / "net").mkdir(parents=True)
    (one / "metrics.jsonl").write_text("a")
    (one / "net" / "manifest.json").write_text("b")
    (one / ".lock").touch()
    (one / ".half.tmp").touch()
    known: dict[str, tuple[int, int]] = {}
    files = mirror.pack(one, known)
    assert list(files) == ["metrics.jsonl", "net/manifest.json"]  # what is at the top is read first
    assert mirror.pack(one, known) == {}
    other.mkdir()
    (other / "checkpoint").write_text("old")
    mirror.unpack(other, files, whole=True)
    assert mirror.pack(other) == files


@pytest.mark.usefixtures("one_process")
def test_runs_on_a_cluster_equal_those_without(
    pool: RayPool, cluster: Any, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of nodes that do not see the folders."""
    monkeypatch.setattr("rankup.cli.run.show_runs", lambda *_: None)  # a page takes longer
    options = ("--stream", "s-digits", "--tasks", 2, "--epochs", 1, "--width", 16, "--seeds", 2)
    assert call("run", *options, "--out", tmp_path / "here").code == 0
    assert call("run", *options, "--out", tmp_path / "there", "--on", "ray").code == 0
    monkeypatch.setattr(RayPool, "_all_see", lambda *_: False)
    assert call("run", *options, "--out", tmp_path / "copied", "--on", "ray").code == 0
    for seed in ("seed-0", "seed-1"):
        expected = outcome(tmp_path / "here" / seed)
        assert outcome(tmp_path / "there" / seed) == expected
        assert outcome(tmp_path / "copied" / seed) == expected
        assert contents(tmp_path / "copied" / seed) == contents(tmp_path / "here" / seed)
        for place in ("there", "copied"):
            same = (tmp_path / name / seed / "config.json" for name in ("here", place))
            assert len({path.read_bytes() for path in same}) == 1


def contents(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return sorted(str(path.relative_to(folder)) for path in files)


def test_comparison_on_a_cluster_names_what_failed(
    pool: RayPool, tmp_path: Path, call: Call
) -> None:
    options = ("--stream", "s-digits", "--tasks", 2, "--epochs", 1, "--width", 16)
    many = (*options, "--methods", "rank,finetune", "--lr", 1e9, "--on", "ray")
    failed = call("compare", *many, "--out", tmp_path / "bad")
    assert failed.code == 1
    assert "diverged" in failed.err
    two = ("--methods", "rank,finetune", "--on", "ray")
    done = call("compare", *options, *two, "--out", tmp_path / "good")
    assert done.code == 0, done.err
    assert "rank: accuracy" in done.err


@pytest.mark.slow  # trials run as seeds do, above
@pytest.mark.usefixtures("one_process")
def test_trials_on_a_cluster_choose_the_same(pool: RayPool, tmp_path: Path, call: Call) -> None:
    options = ("--stream", "s-digits", "--tasks", 2, "--epochs", 1, "--width", 16)
    tries = ("--methods", "rank", "--try", "lr=0.001,0.01")
    assert call("tune", *options, *tries, "--out", tmp_path / "here").code == 0
    assert call("tune", *options, *tries, "--out", tmp_path / "there", "--on", "ray").code == 0
    here, there = (
        json.loads((tmp_path / name / "rank.json").read_bytes()) for name in ("here", "there")
    )
    assert here == there


@pytest.mark.usefixtures("one_process")
def test_experiments_on_a_cluster_equal_those_without(
    pool: RayPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = tiny(seeds=1, epochs=3)
    experiments = [tiny(), tiny(seeds=1, teacher=teacher), teacher]
    monkeypatch.setattr(RayPool, "_all_see", lambda *_: False)
    found = {}
    for place in ("here", "there"):
        results = Results(tmp_path / place)
        runner = Runner(results, Device.cpu, None, "rankup paper")
        on = None if place == "here" else pool
        ended = list(runner.run_all(experiments, lambda _: None, pool=on))
        assert {each.experiment for each in ended} == {*experiments}
        assert not any(each.failed for each in ended)
        found[place] = [results.of(each).runs for each in experiments]  # type: ignore[union-attr]
        assert not list((results.root / WORK).rglob("net"))
    for here, there in zip(found["here"], found["there"], strict=True):
        assert [run.accuracy for run in here] == [run.accuracy for run in there]
        assert [run.config for run in here] == [run.config for run in there]


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize(
    "sent", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_stopped_command_leaves_no_ray_behind(sent: signal.Signals, tmp_path: Path) -> None:
    """By Ctrl-C it ends as without Ray; killed, it takes the Ray that it has started with it."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'rankup[ray]'")
    sessions = tempfile.mkdtemp(prefix="r", dir="/tmp")  # sockets' names must be short
    source = str(Path(rankup.__file__).parents[1])
    env = {**os.environ, "RAY_TMPDIR": sessions, "PYTHONPATH": source}
    env.pop("RAY_ADDRESS", None)
    long = ("--tasks", "9", "--epochs", "900", "--width", "16", "--on", "ray")
    command = [sys.executable, "-m", "rankup", "run", *long, "--out", str(tmp_path / "run")]
    with subprocess.Popen(
        command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as driver:
        _wait_until(lambda: any(tmp_path.rglob("config.json")) or driver.poll() is not None)
        assert driver.poll() is None
        driver.send_signal(sent)
        _, errors = driver.communicate(timeout=_PATIENCE)
    if sent == signal.SIGINT:
        assert driver.returncode == 130, errors
        assert errors.endswith("rankup: stopped; run the same command with --resume to continue\n")
    _wait_until(lambda: not _commands_with(sessions))
    assert not _commands_with(sessions)
    shutil.rmtree(sessions, ignore_errors=True)


def _wait_until(done: Callable[[], bool]) -> None:
    until = time.monotonic() + _PATIENCE
    while not done() and time.monotonic() < until:
        time.sleep(0.1)


def _commands_with(word: str) -> list[str]:
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            commands.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [command for command in commands if word in command]
