"""What serving costs and gains: the queue alone, the server with 64 clients on one core, latency
at a fixed rate, tasks added meanwhile, bad requests, and kills while learning.

    python benchmarks/serving.py [queue http resnet latency added bad killed peft]

The server runs on the first core, the clients on another. Rates are given by the clock and by the
server's own CPU time, which other processes on the machine disturb less.
"""

import argparse
import asyncio
import base64
import json
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
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from bad_requests import campaign
from common import RESULTS, write_result

import rankup
from rankup.inference.answering import probabilities
from rankup.inference.batcher import Batcher
from rankup.net.network import IncrementalNet

CLIENTS = 64
TASKS = 20
LOAD = Path(__file__).parent / "http_load.py"
CORES = sorted(os.sched_getaffinity(0))
Measured = dict[str, Any]


def mlp(tasks: int = TASKS, rank: rankup.Rank | None = None) -> IncrementalNet:
    net = rankup.grow(rankup.models.mlp(784, hidden=[256, 256]), rank or rankup.Rank(11, 1))
    for number in range(tasks):
        net.begin_task(f"t{number:02}", 10)
        net.commit_task()
    return net.eval()


def resnet() -> IncrementalNet:
    net = rankup.grow(rankup.models.resnet18(20, 32), rankup.Rank(11, 1))
    for number in range(TASKS):
        net.begin_task(f"t{number:02}", 5)
        net.commit_task(calibrate=[torch.rand(8, 3, 32, 32)])
    return net.eval()


# --- The queue alone


def asked(net: Any, most: int, items: list[torch.Tensor], names: list[str], wait: float) -> float:
    """Seconds for all items, asked by 64 clients that each wait for their answer."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        with Batcher(net, most, wait, finish=probabilities, loop=loop) as batcher:

            async def client(first: int) -> None:
                for index in range(first, len(items), CLIENTS):
                    await batcher.submit(items[index], names[index])

            began = time.perf_counter()
            await asyncio.gather(*map(client, range(CLIENTS)))
            return time.perf_counter() - began

    return asyncio.run(main())


def queue() -> Measured:
    torch.set_num_threads(1)
    net = mlp()
    items = [torch.rand(784) for _ in range(4096)]
    names = [f"t{index % TASKS:02}" for index in range(len(items))]

    def bare() -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            for x, name in zip(items[:1024], names, strict=False):
                probabilities(net(x[None], task=name))
        return 4 * (time.perf_counter() - began)

    ways: dict[str, Callable[[], float]] = {
        "bare calls, one at a time": bare,
        "queue, one at a time": lambda: 4 * asked(net, 1, items[:1024], names, 0),
        "queue, batches of 64": lambda: asked(net, 64, items, names, 2),
    }
    return rates_of(ways, len(items))


def rates_of(ways: dict[str, Callable[[], float]], count: int, rounds: int = 7) -> Measured:
    """Items a second, in the best round of each way: the one that was least disturbed."""
    for way in ways.values():
        way()
    seconds = {name: min(way() for _ in range(rounds)) for name, way in ways.items()}
    rates = {name: count / best for name, best in seconds.items()}
    *others, last = rates
    ratios = {f"over {name}": rates[last] / rates[name] for name in others}
    return {"per_second": rates, "ratios": ratios}


def peft() -> Measured:
    """MiniLM's shape with random weights: 20 tasks of ours against 20 LoRA adapters, rank 8."""
    import peft as library
    import transformers

    warnings.filterwarnings("ignore", module="peft")
    torch.set_num_threads(1)
    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    module = transformers.BertForSequenceClassification(config).eval()
    net = rankup.grow(module, rankup.Rank(8, 1), base="keep")
    for number in range(TASKS):
        net.begin_task(f"t{number:02}", 2)
        net.commit_task()
    net.eval()
    options: dict[str, Any] = {"target_modules": ["query", "key", "value", "dense"], "r": 8}
    adapted: Any = library.get_peft_model(module, library.LoraConfig(**options), "t00")
    for number in range(1, TASKS):
        adapted.add_adapter(f"t{number:02}", library.LoraConfig(**options))
    adapted.eval()

    def theirs(x: torch.Tensor, task: Any) -> Any:
        names = [task] * len(x) if isinstance(task, str) else task
        return adapted(x, adapter_names=names)

    items = [torch.randint(1, 30_000, (32,)) for _ in range(128)]
    names = [f"t{index % TASKS:02}" for index in range(len(items))]
    ways = {
        "PEFT": lambda: asked(theirs, 64, items, names, 2),
        "rankup": lambda: asked(net, 64, items, names, 2),
    }
    return rates_of(ways, len(items), rounds=3)


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
            server.process.send_signal(signal.SIGTERM)
            server.process.wait()


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


def compared(
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
        return compared(loads, 5, ("predict", "empty"))


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
        return compared(loads, 5, ("batches", "one at a time"))


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
    """A process that learns and saves is killed at a random moment; the tasks are then counted."""
    draw = random.Random(0)
    lost = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net"
        rankup.save(mlp(3), path)
        for _ in range(times):
            before = len(rankup.load(path).tasks)
            code = "import sys; print(flush=True)\n" + ADD.replace(
                "added {number}", "{id(net)} {number}"
            )
            process = subprocess.Popen([sys.executable, "-c", code, str(path), "500"])
            time.sleep(draw.uniform(2, 5))
            process.kill()
            process.wait()
            whole = rankup.verify(path)
            lost += not whole or len(whole.tasks) < before
        return {"killed": times, "lost": lost, "tasks": len(rankup.load(path).tasks)}


PARTS = {
    "queue": queue,
    "http": http,
    "resnet": resnet18,
    "latency": latency,
    "added": added,
    "bad": bad,
    "killed": killed,
    "peft": peft,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=list(PARTS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    measured: Measured = {}
    for name in options.parts:
        measured[name] = PARTS[name]()
        print(f"{name}: {json.dumps(measured[name], indent=1)}", flush=True)
    path = write_result("serving", measured, threads="1", folder=options.out, merge=True)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
