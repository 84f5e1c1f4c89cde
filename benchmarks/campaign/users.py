"""What users do with a folder, and whether it ends as it must: in the same bits as without damage,
or in one sentence."""

import hashlib
import io
import os
import sys
import tempfile
import unicodedata
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

import rankup
import rankup.cli.run
from campaign.cases import MEMORY, NEWLINE, TRACEBACK, WRONG, Fault
from rankup.cli.main import main
from rankup.errors import RankupError
from rankup.net.network import IncrementalNet
from rankup.runs.records import read_config, read_lines
from rankup.storage.atomic import write_file

UNLISTED = "of which metrics.jsonl lists"
MOST_FOR_NETWORKS = 1 << 26  # bytes beyond their files, for those of strangers


class Said(NamedTuple):
    code: int
    out: str
    err: str


class Ending(NamedTuple):
    """What a run has left: settings, lines without times, hashes of its network's files."""

    config: dict[str, Any]
    lines: list[dict[str, Any]]
    files: dict[str, str]


def command(*words: object) -> Said:
    """`rankup` in this process; what it says is held back."""
    sys.argv = ["rankup", *map(str, words)]
    os.environ["COLUMNS"] = "80"
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        return _held_back(out, err)


def _held_back(*held: IO[bytes]) -> Said:
    for number, file in zip((1, 2), held, strict=True):
        os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(os.fdopen(number, "wb", closefd=False), write_through=True)
        for number in (1, 2)
    )
    code = 0
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    sys.stdout.flush()
    sys.stderr.flush()
    texts = []
    for file in held:
        file.seek(0)
        texts.append(file.read().decode(errors="replace"))
    return Said(code, *texts)


def resume(run: Path) -> Said:
    """`rankup run --resume`, with an empty page at its end: plots take longer than all else."""
    rankup.cli.run.show_runs = lambda _, page: write_file(page, b"")
    return command("run", "--resume", "--out", run)


def report(folder: Path) -> tuple[Said, bytes]:
    """The table and the page, neither of which depends on where the folder is."""
    page = folder.with_name("page.html")
    said = command("report", folder, "--out", page)
    content = page.read_bytes() if page.exists() else b""
    page.unlink(missing_ok=True)
    own = str(folder.parent)
    cleared = said._replace(out=said.out.replace(own, "…"))
    return cleared, content.replace(own.encode(), "…".encode())


def predict(run: Path, image: Path) -> Said:
    return command("predict", run, image, "--task", "2", "--plain")


def ending(run: Path) -> Ending:
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in read_lines(run)]
    files = {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((run / "net").rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }
    return Ending(read_config(run / "config.json"), lines, files)


def check_said(said: Said) -> None:
    """Raise unless a command said nothing but sentences, each on a line of its own."""
    if "Traceback" in said.err:
        raise Fault(TRACEBACK, said.err)
    if "too little memory" in said.err:
        raise Fault(MEMORY, said.err)
    for line in said.err.splitlines():
        if not line.startswith("rankup: "):
            raise Fault(NEWLINE, said.err)
        check_sentence(line)
    if said.code not in (0, 1):
        raise Fault(WRONG, f"it ended with status {said.code}: {said.err}")
    if said.code and not said.err:
        raise Fault(WRONG, "it failed without a word")


def check_sentence(text: str) -> None:
    if any(unicodedata.category(char) in ("Cc", "Zl", "Zp") for char in text):
        raise Fault(NEWLINE, repr(text))


def check_resume(run: Path, wanted: Ending) -> bool:
    """Resume a run; whether it went on to its end, which must be the wanted one."""
    said = resume(run)
    check_said(said)
    if said.code:
        return False
    check_ending(run, wanted)
    return True


def check_ending(run: Path, wanted: Ending) -> None:
    found = ending(run)
    for name, one, other in zip(Ending._fields, found, wanted, strict=True):
        if one != other:
            raise Fault(WRONG, f"its {name} differ: {one} instead of {other}")


def check_report(folder: Path, wanted: tuple[Said, bytes], shorter: Callable[[], Said]) -> None:
    """Show a folder: as wanted; with less on the page, or as before its last line was written, if a
    warning says so; or not at all."""
    said, page = report(folder)
    check_said(said)
    if said.code:
        return
    known = shorter() if UNLISTED in said.err else wanted[0]
    if said.out != known.out:
        raise Fault(WRONG, f"it shows {said.out} instead of {wanted[0].out}")
    if not said.err and page != wanted[1]:
        raise Fault(WRONG, "its page differs, and no warning says so")


def check_predict(run: Path, image: Path, wanted: Said) -> None:
    said = predict(run, image)
    check_said(said)
    if said.code == 0 and said.out != wanted.out:
        raise Fault(WRONG, f"it predicts {said.out} instead of {wanted.out}")


def check_load(folder: Path, wanted: list[Tensor], x: Tensor, resealed: bool = False) -> None:
    """Load and verify: both refuse in sentences, or neither does and the answers are the same. A
    manifest that was sealed again may leave the last tasks out."""
    refused = None
    net: IncrementalNet | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            net = rankup.load(folder, most_memory=MOST_FOR_NETWORKS)
        except RankupError as error:
            refused = str(error)
            check_sentence(refused)
        verdict = rankup.verify(folder, most_memory=MOST_FOR_NETWORKS)
    for problem in verdict.problems:
        check_sentence(problem)
    if bool(verdict) != (net is not None):
        raise Fault(WRONG, f"verify says {str(verdict)!r}, load {refused or 'loads it'!r}")
    if net is not None and resealed:
        wanted = wanted[: len(net.tasks)]
    if net is not None and not same(answers(net, x), wanted):
        raise Fault(WRONG, "it answers differently")


def answers(net: IncrementalNet, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [net(x.to(net.dtype), task=task) for task in range(len(net.tasks))]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))
