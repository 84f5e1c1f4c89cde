"""Ray on two nodes of this machine, a CPU and a thread each: speed, own cost, and faults.

python benchmarks/ray_cluster.py speed --repeat 3    # 12 settings of `rankup paper`
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import write_result
from scale import makespan

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


def speed(repeat: int) -> dict[str, object]:
    from rankup.paper.experiment import Experiment
    from rankup.paper.results import Results
    from rankup.paper.runner import Finished, Runner
    from rankup.runs.ray_pool import RayPool
    from rankup.runs.request import Device

    experiments = [
        Experiment.of("p-digits", method, epochs=epochs, tasks=10, seeds=1)
        for method in ("rank", "finetune", "ewc", "parallel")
        for epochs in (20, 25, 30)
    ]

    def run(pool: RayPool | None) -> tuple[float, list[Finished], Path]:
        root = Path(tempfile.mkdtemp())
        runner = Runner(Results(root), Device.cpu, None, "benchmark")
        begun = time.perf_counter()
        ended = list(runner.run_all(experiments, lambda _: None, jobs=2, pool=pool))
        return time.perf_counter() - begun, ended, root

    begun = time.perf_counter()
    made = cluster()
    started = time.perf_counter() - begun
    pool = RayPool("ray")
    run(pool)  # warm
    ratios, packing, rows = [], [], []
    try:
        for _ in range(repeat):  # in turn: others may use the cores, too
            jobs, by_jobs, _ = run(None)
            on_ray, by_ray, _ = run(pool)
            ratios.append(jobs / on_ray)
            packing.append(makespan([each.seconds for each in by_ray], 2) / on_ray)
            rows.append({"jobs": round(jobs, 2), "ray": round(on_ray, 2)})
            print(f"--jobs 2: {jobs:.1f} s, Ray: {on_ray:.1f} s, ratio {ratios[-1]:.2f}, ", end="")
            print(f"packing by the model over measured: {packing[-1]:.2f}")
            assert not any(each.failed for each in (*by_jobs, *by_ray))
    finally:
        shut_down(made)
    return {
        "start_of_cluster_s": round(started, 1),
        "seconds": rows,
        "throughput_over_jobs_2": round(statistics.median(ratios), 3),
        "packing_model_over_measured": round(statistics.median(packing), 3),
    }


def cost(repeat: int) -> dict[str, object]:
    from rankup.runs.ray_pool import Needs, RayPool

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


def _faults(repeat: int, fault: Callable[[Any, Path, int], None]) -> dict[str, object]:
    """Runs that are hit in the middle end with the same networks, and no line of a task that was
    finished before is ever written anew."""
    folder = Path(tempfile.mkdtemp())
    _must_end_well(_rankup(*RUN, "--out", str(folder / "whole")))
    expected = _nets(folder / "whole")
    made = cluster()
    same = 0
    try:
        for number in range(repeat):
            out = folder / str(number)
            fault(made, out, number)
            same += _nets(out) == expected
            print(f"{number + 1}: {same} of {number + 1} with the same networks", flush=True)
    finally:
        shut_down(made)
    return {"faults": repeat, "same_networks": same}


def nodes(repeat: int) -> dict[str, object]:
    again = 0

    def remove(made: Any, out: Path, number: int) -> None:
        nonlocal again
        driver = _rankup(*RUN, "--out", str(out), "--on", "ray", RAY_ADDRESS=made.address)
        while sum(_learned(out).values()) < 1 + number % 8 and driver.poll() is None:
            time.sleep(0.05)
        before = _first_lines(out)
        assert driver.poll() is None, "it was over before"
        made.remove_node(sorted(made.worker_nodes, key=lambda node: node.unique_id)[number % 2])
        made.add_node(num_cpus=1, object_store_memory=STORE)
        _must_end_well(driver)
        after = _first_lines(out)
        again += sum(lines != after[seed][: len(lines)] for seed, lines in before.items())

    return _faults(repeat, remove) | {"finished_tasks_run_again": again}


def drivers(repeat: int) -> dict[str, object]:
    again = 0

    def kill(made: Any, out: Path, number: int) -> None:
        nonlocal again
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
        after = _first_lines(out)
        again += sum(lines != after[seed][: len(lines)] for seed, lines in before.items())

    return _faults(repeat, kill) | {"finished_tasks_run_again": again}


PARTS = {"speed": speed, "cost": cost, "nodes": nodes, "drivers": drivers}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--repeat", type=int, default=3)
    asked = parser.parse_args()
    measured = PARTS[asked.part](asked.repeat)
    print(measured)
    write_result("ray", {asked.part: measured}, threads="1", merge=True)
