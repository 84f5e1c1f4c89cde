"""What serving costs and gains: the queue alone, the server with 64 clients on one core, latency
at a fixed rate, tasks added meanwhile, bad requests, and kills while learning.

    python benchmarks/serving.py [queue http resnet latency added bad killed peft]
    python benchmarks/serving.py queue --device cuda

The server runs on the first core, the clients on another. Rates are given by the clock and by the
server's own CPU time, which other processes on the machine disturb less.
"""

import argparse
import asyncio
import base64
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from bad_requests import archive, campaign, learn, picture, send
from common import RESULTS, device_name, write_result
from queue_alone import TASKS, Measured, mlp, peft, queue, queue_on, resnet

import rankup
from rankup.data.inputs import ImageInput
from rankup.net.network import IncrementalNet

LOAD = Path(__file__).parent / "http_load.py"
CORES = sorted(os.sched_getaffinity(0))


# --- The server


class Server:
    def __init__(self, folder: Path, *options: object) -> None:
        command = [sys.executable, "-m", "rankup", "serve", str(folder), "--port", "0"]
        self.process = subprocess.Popen(
            ["taskset", "-c", str(CORES[0]), *command, *map(str, options)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = re.findall(r"http://\S+", self.process.stdout.readline())[0]
        self.port = int(self.url.rpartition(":")[2])

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()

    def cpu(self) -> float:
        """Seconds of CPU time that it has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> float:
        """MB that it holds."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1000

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.load(answer)

    def load(self, path: str, *options: object) -> Measured:
        """What clients in a process of their own measure."""
        before = self.cpu()
        words = [sys.executable, str(LOAD), str(self.port), path, *map(str, options)]
        cores = ["taskset", "-c", ",".join(map(str, CORES[1:] or CORES))]
        done = subprocess.run([*cores, *words], capture_output=True, check=True, text=True)
        measured = json.loads(done.stdout)
        used = self.cpu() - before
        return {**measured, "per_cpu_second": sum(measured["statuses"].values()) / used}


@contextmanager
def serving(net: IncrementalNet | Path, *options: object) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net"
        if isinstance(net, IncrementalNet):
            rankup.save(net, path)
        else:
            path = net
        server = Server(path, *options)
        try:
            yield server
        finally:
            server.end()


def bodies(folder: str, shape: tuple[int, ...], count: int = 200, packed: bool = True) -> str:
    """Requests in a file: numbers packed, as one who cares for speed sends them, or as lists."""
    path = Path(folder) / f"bodies-{packed}.jsonl"
    draw = torch.Generator().manual_seed(0)
    with open(path, "w") as file:
        for index in range(count):
            drawn = (torch.rand(shape, generator=draw) * 255).to(torch.uint8)
            content = base64.b64encode(drawn.numpy().tobytes()).decode()
            numbers: Any = {"base64": content, "dtype": "uint8", "shape": list(shape)}
            numbers = numbers if packed else drawn.tolist()
            file.write(json.dumps({"task": f"t{index % TASKS:02}", "tensor": numbers}) + "\n")
    return str(path)


def in_turn(
    loads: dict[str, Callable[[], Measured]], rounds: int, over: tuple[str, str]
) -> Measured:
    """Loads in turn; the medians of their rates and of the rounds' ratios."""
    found: dict[str, list[Measured]] = {name: [] for name in loads}
    for load in loads.values():
        load()
    for _ in range(rounds):
        for name, load in loads.items():
            found[name].append(load())
    statuses: dict[str, int] = {}
    for one in (each for all_of in found.values() for each in all_of):
        for status, count in one["statuses"].items():
            statuses[status] = statuses.get(status, 0) + count
    result: Measured = {"statuses": statuses}
    for measure in ("per_second", "per_cpu_second"):
        result[measure] = {
            name: statistics.median(one[measure] for one in each) for name, each in found.items()
        }
        first, second = (found[name] for name in over)
        pairs = zip(first, second, strict=True)
        result[f"ratio by {measure}"] = statistics.median(a[measure] / b[measure] for a, b in pairs)
    return result


def http() -> Measured:
    """Over an empty endpoint of the same server."""
    with serving(mlp()) as server, tempfile.TemporaryDirectory() as folder:
        file, lists = bodies(folder, (784,)), bodies(folder, (784,), packed=False)
        loads = {
            "empty": lambda: server.load("/health", "--seconds", 3),
            "predict": lambda: server.load("/predict", "--bodies", file, "--seconds", 3),
            "lists": lambda: server.load("/predict", "--bodies", lists, "--seconds", 3),
        }
        return in_turn(loads, 5, ("predict", "empty"))


def resnet18() -> Measured:
    """Over a server that takes one request at a time."""
    net = resnet()
    with (
        serving(net) as server,
        serving(net, "--batch", 1, "--wait", 0) as single,
        tempfile.TemporaryDirectory() as folder,
    ):
        file = bodies(folder, (3, 32, 32), 100)
        loads = {
            "one at a time": lambda: single.load("/predict", "--bodies", file, "--seconds", 5),
            "batches": lambda: server.load("/predict", "--bodies", file, "--seconds", 5),
        }
        return in_turn(loads, 5, ("batches", "one at a time"))


def latency() -> Measured:
    """At 70 % of what the server takes."""
    with serving(mlp()) as server, tempfile.TemporaryDirectory() as folder:
        file = bodies(folder, (784,))
        rounds = []
        server.load("/predict", "--bodies", file)
        for _ in range(5):
            most = server.load("/predict", "--bodies", file, "--seconds", 3)["per_second"]
            words = ("--bodies", file, "--seconds", 6, "--rate", 0.7 * most)
            rounds.append({"most": most, **server.load("/predict", *words)})
        ratios = [one["p99_ms"] / one["p50_ms"] for one in rounds]
        return {"rounds": rounds, "p99 over p50": statistics.median(ratios)}


ADD = """
import sys, rankup
net = rankup.load(sys.argv[1])
for number in range(int(sys.argv[2])):
    net.begin_task(f"added {number}", 10)
    net.commit_task()
    rankup.save(net, sys.argv[1])
"""


def added(count: int = 1000) -> Measured:
    """Tasks that another process adds while clients ask."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net"
        rankup.save(mlp(TASKS, rankup.Rank(0, 0, seeded=60)), path)
        file = bodies(folder, (784,))
        with serving(path) as server:
            before = server.memory()
            adding = subprocess.Popen([sys.executable, "-c", ADD, str(path), str(count)])
            statuses: dict[str, int] = {}
            seen: list[int] = []
            while adding.poll() is None or server.get("/health")["tasks"] < TASKS + count:
                one = server.load("/predict", "--bodies", file, "--seconds", 5, "--clients", 8)
                seen.append(server.get("/health")["tasks"])
                for status, number in one["statuses"].items():
                    statuses[status] = statuses.get(status, 0) + number
                if adding.poll() not in (None, 0):
                    raise RuntimeError("the process that adds tasks failed")
            failed = sum(number for status, number in statuses.items() if status != "200")
            memory = {"before": before, "after": server.memory()}
            return {"statuses": statuses, "failed": failed, "tasks": seen, "memory_mb": memory}


def bad(count: int = 200) -> Measured:
    """Requests of every kind that must be refused, while a good client asks."""
    options = ("--patience", 2, "--token", "secret", "--body", 1, "--allow-learning")
    with serving(mlp(), *options) as server:
        return campaign(server.port, count, server.memory)


def killed(times: int = 50) -> Measured:
    """Learning through the page is killed (kill -9) at random moments, each second time with the
    server; then tasks are counted, and every file is compared with its hash."""
    draw = random.Random(0)
    ended: dict[str, int] = {"before it was saved": 0, "after": 0}
    lost = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net"
        net = mlp(3)
        net.inputs = ImageInput(28, channels=1)
        rankup.save(net, path)
        whole, server = 0.0, Server(path, "--allow-learning")
        for number in range(times + 1):
            known = rankup.load(path).tasks
            learner, began = learning(server, f"new {number}"), time.perf_counter()
            # The first is not disturbed; it tells how long it takes.
            until = began + draw.uniform(0.3, 1.2) * whole if number else math.inf
            while alive(learner) and time.perf_counter() < until:
                time.sleep(0.01)
            if not number:
                whole = time.perf_counter() - began
                continue
            doomed = [learner, server.process.pid] if number % 2 else [learner]
            for pid in filter(alive, doomed):
                os.kill(pid, signal.SIGKILL)
            if number % 2:
                server.process.wait()
                server = Server(path, "--allow-learning")
            while alive(learner):
                time.sleep(0.01)
            rankup.verify(path)
            tasks = rankup.load(path).tasks
            lost += len(set(known) - set(tasks))
            ended["after" if f"new {number}" in tasks else "before it was saved"] += 1
        server.end()
    return {"killed": times, "tasks lost": lost, "killed when": ended}


def learning(server: Server, name: str) -> int:
    """The process that learns a task of two classes of images, begun through the page."""
    draw = random.Random(name)
    images = [(f"{kind}/{n}.png", picture(draw, 28)) for kind in ("a", "b") for n in range(20)]
    while True:  # until one before it is done
        answer = asyncio.run(send(server.port, [learn(archive(*images), name)]))
        if answer.startswith(b"HTTP/1.1 202"):
            break
        if not answer.startswith(b"HTTP/1.1 409"):
            raise RuntimeError(answer.decode())
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    while not (found := children.read_text().split()):
        time.sleep(0.001)
    return int(found[0])


def alive(pid: int) -> bool:
    """Whether a process runs, and is not just waiting to be looked at."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


PARTS: dict[str, Callable[[argparse.Namespace], Measured]] = {
    "queue": lambda o: queue() if o.device == "cpu" else queue_on(o.device),
    "http": lambda _: http(),
    "resnet": lambda _: resnet18(),
    "latency": lambda _: latency(),
    "added": lambda _: added(),
    "bad": lambda o: bad(o.bad),
    "killed": lambda _: killed(),
    "peft": lambda o: peft(o.minilm),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=list(PARTS))
    parser.add_argument("--device", default="cpu", help="of the queue alone: cuda runs ResNet18")
    parser.add_argument("--bad", type=int, default=200, help="how many bad requests")
    parser.add_argument("--minilm", type=Path, help="a folder with MiniLM's weights, else random")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    measured: Measured = {}
    for name in options.parts:
        part = name if options.device == "cpu" else f"{name} on {device_name(options.device)}"
        measured[part] = PARTS[name](options)
        print(f"{part}: {json.dumps(measured[part], indent=1)}", flush=True)
    path = write_result("serving", measured, threads="1", folder=options.out, merge=True)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
