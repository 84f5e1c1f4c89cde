"""Ray on two nodes of this machine, a CPU and a thread each: speed, own cost, and faults.

python benchmarks/ray_cluster.py speed --repeat 3    # 12 settings of `rankup paper`
python benchmarks/ray_cluster.py scale --repeat 3    # its model on one and on two workers
python benchmarks/ray_cluster.py cost                # of a run of 10 s on a warm worker
python benchmarks/ray_cluster.py nodes --repeat 20   # a node removed in the middle
python benchmarks/ray_cluster.py drivers --repeat 20 # the driver killed in the middle
"""

import argparse
import hashlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common import write_result
from scale import makespan

from rankup.paper.experiment import Experiment
from rankup.paper.results import Results
from rankup.paper.runner import Runner, phases
from rankup.runs.ray_pool import Needs, RayPool
from rankup.runs.request import Device

os.environ.update(RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1")

STORE = 80 * 2**20


def cluster() -> Any:
    """Two nodes that work, beside a head that does not."""
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        made.add_node(num_cpus=1, object_store_memory=STORE)
    made.wait_for_nodes()
    ray.init(made.address, log_to_driver=False, logging_level="error")
    return made


def shut_down(made: Any) -> None:
    import ray

    ray.shutdown()
    made.shutdown()


def _experiments(*epochs: int) -> list[Experiment]:
    """A dozen small settings of `rankup paper`, the longest first."""
    of = partial(Experiment.of, "p-digits", tasks=10, seeds=1)
    methods = ("rank", "finetune", "ewc", "parallel")
    return [of(method, epochs=each) for method in methods for each in epochs]


def _run_all(
    experiments: Sequence[Experiment], pool: RayPool | None
) -> tuple[float, dict[Experiment, float]]:
    """The seconds of all of them, and of each."""
    runner = Runner(Results(Path(tempfile.mkdtemp())), Device.cpu, None, "benchmark")
    begun = time.perf_counter()
    ended = list(runner.run_all(experiments, lambda _: None, jobs=2, pool=pool))
    took = time.perf_counter() - begun
    assert not any(each.failed for each in ended)
    return took, {each.experiment: each.seconds for each in ended}


def speed(repeat: int) -> dict[str, object]:
    experiments = _experiments(20, 25, 30)
    begun = time.perf_counter()
    made = cluster()
    started = time.perf_counter() - begun
    pool = RayPool("ray")
    _run_all(experiments, pool)  # warm
    ratios, rows = [], []
    try:
        for _ in range(repeat):  # in turn: others may use the cores, too
            jobs, _ = _run_all(experiments, None)
            on_ray, _ = _run_all(experiments, pool)
            ratios.append(jobs / on_ray)
            rows.append({"jobs": round(jobs, 2), "ray": round(on_ray, 2)})
            print(f"--jobs 2: {jobs:.1f} s, Ray: {on_ray:.1f} s, ratio {ratios[-1]:.2f}")
    finally:
        shut_down(made)
    return {
        "start_of_cluster_s": round(started, 1),
        "seconds": rows,
        "throughput_over_jobs_2": round(statistics.median(ratios), 3),
    }


def scale(repeat: int) -> dict[str, object]:
    """The model of benchmarks/scale.py, from the times of each setting on one worker, against the
    time of all on one and on two."""
    import ray

    experiments = _experiments(8, 10, 12)
    rows, made = [], cluster()
    try:
        pool = RayPool("ray")
        _run_all(experiments[:6], pool)  # warm
        for _ in range(repeat):
            occupied = ray.remote(num_cpus=1)(Idle).remote()  # so that one worker is left
            ray.get(occupied.ready.remote())
            one, seconds = _run_all(experiments, pool)
            ray.kill(occupied)
            two, _ = _run_all(experiments, pool)
            ((_, order),) = phases(experiments, 2)
            expected = [makespan([seconds[each] for each in order], count) for count in (1, 2)]
            rows.append([round(expected[0] / one, 3), round(expected[1] / two, 3)])
            print(f"one worker: {expected[0]:.1f} by the model, {one:.1f} s measured; ", end="")
            print(f"two: {expected[1]:.1f}, {two:.1f} s", flush=True)
    finally:
        shut_down(made)
    medians = [statistics.median(each) for each in zip(*rows, strict=True)]
    return {"model_over_measured_1_and_2_workers": rows, "medians": medians}


class Idle:
    def ready(self) -> None: ...


def cost(repeat: int) -> dict[str, object]:
    made = cluster()
    try:
        pool = RayPool("ray")

        def once(seconds: float) -> float:
            begun = time.perf_counter()
            hear: Callable[[Any], None] = lambda _: None  # noqa: E731
            ((_, took),) = pool.run(_sleep, [seconds], needs=Needs(), hear=hear, lost="")
            return time.perf_counter() - begun - took

        once(0.1), once(0.1)
        costs = [once(10.0) for _ in range(repeat)]
    finally:
        shut_down(made)
    print("cost of a run of 10 s: " + ", ".join(f"{each:.3f}" for each in costs))
    return {"cost_s": [round(each, 3) for each in costs], "median": statistics.median(costs)}


def _sleep(seconds: float) -> float:
    begun = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - begun


RUN = ["run", "--stream", "s-digits", "--tasks", "5", "--epochs", "40", "--seeds", "4"]
RUN += ["--threads", "1"]


def _rankup(*words: str, **env: str) -> subprocess.Popen[bytes]:
    pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
    command = [sys.executable, "-m", "rankup", *words]
    return subprocess.Popen(command, env={**os.environ, **env}, stdout=quiet, stderr=pipe)


def _must_end_well(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"{process.args} ended with {process.returncode}:\n{errors.decode()}")


def _nets(root: Path) -> dict[str, str]:
    files = [path for path in root.rglob("net/**/*") if path.is_file() and path.name != ".lock"]
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def _learned(root: Path) -> dict[str, int]:
    """How many tasks each seed has learned."""
    return {path.parent.name: path.read_text().count("\n") for path in root.glob("*/metrics.jsonl")}


def _first_lines(root: Path) -> dict[str, list[str]]:
    return {p.parent.name: p.read_text().splitlines() for p in root.glob("*/metrics.jsonl")}


def _faults(repeat: int, fault: Callable[[Any, Path, int], int]) -> dict[str, object]:
    """Runs that are hit in the middle end with the same networks, and no line of a task that was
    finished before is ever written anew: how many are, the fault returns. Ctrl-C ends the series
    with what was found so far."""
    folder = Path(tempfile.mkdtemp())
    _must_end_well(_rankup(*RUN, "--out", str(folder / "whole")))
    expected = _nets(folder / "whole")
    made = cluster()
    count = same = again = 0
    try:
        for count in range(1, repeat + 1):
            out = folder / str(count)
            again += fault(made, out, count - 1)
            same += _nets(out) == expected
            print(f"{same} of {count} with the same networks, {again} tasks again", flush=True)
    except KeyboardInterrupt:
        count -= 1
    finally:
        shut_down(made)
    return {"faults": count, "same_networks": same, "finished_tasks_run_again": again}


def _written_anew(before: dict[str, list[str]], out: Path) -> int:
    after = _first_lines(out)
    return sum(lines != after[seed][: len(lines)] for seed, lines in before.items())


def nodes(repeat: int) -> dict[str, object]:
    def remove(made: Any, out: Path, number: int) -> int:
        driver = _rankup(*RUN, "--out", str(out), "--on", "ray", RAY_ADDRESS=made.address)
        while sum(_learned(out).values()) < 1 + number % 8 and driver.poll() is None:
            time.sleep(0.05)
        before = _first_lines(out)
        assert driver.poll() is None, "it was over before"
        made.remove_node(sorted(made.worker_nodes, key=lambda node: node.unique_id)[number % 2])
        made.add_node(num_cpus=1, object_store_memory=STORE)
        _must_end_well(driver)
        return _written_anew(before, out)

    return _faults(repeat, remove)


def drivers(repeat: int) -> dict[str, object]:
    def kill(made: Any, out: Path, number: int) -> int:
        options = ("--out", str(out), "--on", "ray")
        driver = _rankup(*RUN, *options, RAY_ADDRESS=made.address)
        while sum(_learned(out).values()) < 1 + number % 8 and driver.poll() is None:
            time.sleep(0.05)
        assert driver.poll() is None, "it was over before"
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        time.sleep(1)  # its workers end, too
        before = _first_lines(out)
        _must_end_well(_rankup("run", "--resume", *options, RAY_ADDRESS=made.address))
        return _written_anew(before, out)

    return _faults(repeat, kill)


PARTS = {"speed": speed, "scale": scale, "cost": cost, "nodes": nodes, "drivers": drivers}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--repeat", type=int, default=3)
    asked = parser.parse_args()
    measured = PARTS[asked.part](asked.repeat)
    print(measured)
    write_result("ray", {asked.part: measured}, threads="1", merge=True)
