"""Training images per second on the CPU: rankup and Avalanche on permuted MNIST, with networks of
the same widths. Medians over repeats, everyone taking turns, each time in a fresh process.

    python benchmarks/peers.py          # a table, and a dated JSON in benchmarks/results

MNIST must be there already: RANKUP_DATA names the folder that holds it. Avalanche is installed
into an environment of its own beside this file the first time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common import RESULTS, write_result

from rankup.data import Source, load_source
from rankup.errors import RankupError

HERE = Path(__file__).parent
CONSTRAINTS = HERE.parent / "constraints.txt"
ENVIRONMENT = HERE / ".venv-avalanche"
AVALANCHE = "avalanche-lib==0.6.0"
# What Avalanche needs for these measurements: less than it declares, which includes loggers,
# solvers and a torch of any build.
NEEDED = (
    "torch",
    "torchvision==0.28.0",
    "dill==0.4.1",
    "matplotlib",
    "psutil==7.2.2",
    "pytorchcv==0.0.74",
    "tensorboard==2.21.0",
    "torchmetrics==1.9.0",
    "tqdm",
)
BATCH = 128
# Threads waiting for a core make others wait: on a busy machine rates drop up to fiftyfold.
STEADY = 1.5

# A name, the script that measures it, and that script's arguments.
Peer = tuple[str, str, dict[str, str]]
PEERS: list[Peer] = [("rankup", "peer_rankup.py", {})] + [
    (
        f"Avalanche {strategy}, {feed}",
        "peer_avalanche.py",
        {"strategy": strategy, "feed": feed},
    )
    for feed in ("PermutedMNIST", "tensors")
    for strategy in ("Naive", "EWC")
]


class BenchmarkError(RankupError):
    """Nothing could be measured."""


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def avalanche_python() -> Path:
    """The interpreter of Avalanche's environment, which is made if it is missing or outdated."""
    python = ENVIRONMENT / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = ENVIRONMENT / "installed"
    wanted = "\n".join([AVALANCHE, *NEEDED, CONSTRAINTS.read_text()])
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    say("installing Avalanche into an environment of its own, once; this takes a minute")
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    pip += ["--quiet", "--constraint", str(CONSTRAINTS)]
    try:
        venv.create(ENVIRONMENT, clear=True, with_pip=True)
        subprocess.run([*pip, *NEEDED], check=True, capture_output=True, text=True)
        subprocess.run([*pip, "--no-deps", AVALANCHE], check=True, capture_output=True, text=True)
        stamp.write_text(wanted)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = last_line(getattr(error, "stderr", None)) or str(error)
        raise BenchmarkError(f"{ENVIRONMENT} cannot be made: {reason}") from error
    return python


def last_line(text: str | None) -> str:
    return text.strip().rpartition("\n")[2] if text else ""


def write_idx(folder: Path, source: Source, samples: int) -> None:
    """MNIST as torchvision expects it, with the first `samples` training images."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, split, most in (("train", source.train, samples), ("t10k", source.test, None)):
        images, labels = split.x[:most, 0], split.y[:most].astype(np.uint8)
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(as_idx(images))
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(as_idx(labels))


def as_idx(array: npt.NDArray[np.uint8]) -> bytes:
    header = bytes([0, 0, 8, array.ndim])  # 8: unsigned bytes
    return header + np.array(array.shape, dtype=">i4").tobytes() + array.tobytes()


def measure(python: Path, peer: Peer, asked: dict[str, object]) -> dict[str, Any]:
    name, script, own = peer
    command = [str(python), "-W", "ignore", str(HERE / script), json.dumps({**asked, **own})]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        reason = last_line(done.stderr) or f"exit status {done.returncode}"
        raise BenchmarkError(f"{name} could not be measured: {reason}")
    answer: dict[str, Any] = json.loads(last_line(done.stdout))
    return answer


def counted(number: int, what: str = "thread") -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def run(options: argparse.Namespace) -> None:
    data = os.environ.get("RANKUP_DATA")
    if not data or not (Path(data).expanduser() / "mnist").is_dir():
        raise BenchmarkError(
            f"RANKUP_DATA must name the folder that holds mnist, it is {data or 'not set'}"
        )
    source = load_source("mnist")
    samples = min(options.samples, len(source.train.y))
    pythons = {"peer_rankup.py": Path(sys.executable), "peer_avalanche.py": avalanche_python()}
    rates: dict[str, dict[str, list[float]]] = {
        name: {counted(threads): [] for threads in options.threads} for name, _, _ in PEERS
    }
    versions: dict[str, object] = {}
    turns = [
        (repeat, threads, peer)
        for repeat in range(1, options.repeats + 1)
        for threads in options.threads
        for peer in PEERS
    ]
    with tempfile.TemporaryDirectory() as folder:
        write_idx(Path(folder), source, samples)
        for number, (repeat, threads, peer) in enumerate(turns, 1):
            name, script, _ = peer
            say(f"{number}/{len(turns)}: repeat {repeat}, {counted(threads)}, {name}")
            asked = {
                "data": folder,
                "threads": threads,
                "tasks": options.tasks,
                "epochs": options.epochs,
                "batch": BATCH,
                "samples": samples,
            }
            answer = measure(pythons[script], peer, asked)
            trained = samples * options.tasks * options.epochs
            rates[name][counted(threads)].append(trained / answer["seconds"])
            versions["rankup" if name == "rankup" else "avalanche"] = answer["versions"]
    medians = {
        name: {threads: statistics.median(values) for threads, values in by_threads.items()}
        for name, by_threads in rates.items()
    }
    show(medians, options, samples)
    spread = max(
        max(values) / min(values) for by_threads in rates.values() for values in by_threads.values()
    )
    if spread > STEADY:
        print(f"not to be trusted: repeats differ by up to {spread:.1f}×, the machine was busy")
    measured = {
        "tasks": options.tasks,
        "epochs": options.epochs,
        "samples": samples,
        "batch": BATCH,
        "images_per_second": rates,
        "medians": medians,
        "largest_spread_of_repeats": spread,
    }
    path = write_result(
        "peers",
        measured,
        threads=" and ".join(map(str, options.threads)),
        versions=versions,
        folder=options.out,
    )
    print(f"written to {path}")


def show(medians: dict[str, dict[str, float]], options: argparse.Namespace, samples: int) -> None:
    print(
        f"permuted MNIST, {counted(options.tasks, 'task')} × {counted(options.epochs, 'epoch')} × "
        f"{samples:,} images, batch {BATCH}\nimages per second, and how many times that rankup is"
    )
    print(f"  {'':30}" + "".join(f"{counted(threads):>20}" for threads in options.threads))
    for name, by_threads in medians.items():
        cells = (
            f"{median:12,.0f} {medians['rankup'][threads] / median:6.1f}×"
            for threads, median in by_threads.items()
        )
        print(f"  {name:30}" + "".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=positive, default=2)
    parser.add_argument("--epochs", type=positive, default=1)
    parser.add_argument(
        "--samples", type=positive, default=60_000, help="training images of a task"
    )
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--threads", type=positive, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    try:
        run(options)
    except RankupError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
