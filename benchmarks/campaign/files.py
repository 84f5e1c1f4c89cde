"""Damage to files of a run: flipped bits, what a loss of power leaves, and other kinds of files."""

import os
import random
from pathlib import Path

from campaign import users
from campaign.cases import done
from campaign.world import COMPARISON, World

CHECKPOINT = "checkpoint.safetensors"
SPARSE = 6 << 30


def flips(world: World, draw: random.Random, folder: Path) -> None:
    """One bit of one file."""
    name = draw.choice(world.damaged)
    run = world.copy(name, folder)
    file = draw.choice(contents(run))
    content = bytearray(file.read_bytes())
    at, bit = draw.randrange(len(content)), draw.randrange(8)
    content[at] ^= 1 << bit
    file.write_bytes(content)
    done(f"bit {bit} of byte {at} of {file.relative_to(run)} of {name}")
    use(world, draw, name, run)


def zeros(world: World, draw: random.Random, folder: Path) -> None:
    """Blocks that never reached the disk are zeros or missing; checkpoints are not even synced."""
    name = draw.choice(world.damaged)
    run = world.copy(name, folder)
    files = contents(run)
    if (run / CHECKPOINT).exists():
        files += [run / CHECKPOINT] * len(files)
    file = draw.choice(files)
    content = file.read_bytes()
    lost = without_blocks(content, draw)
    file.write_bytes(lost)
    done(f"{len(lost)} bytes of {file.relative_to(run)} of {name}")
    use(world, draw, name, run)


def without_blocks(content: bytes, draw: random.Random) -> bytes:
    size = draw.choice((512, 4096))
    at = min(len(content) - 1, draw.randrange(0, len(content), size))
    match draw.choice(("block", "tail", "all", "cut", "cut at block", "longer")):
        case "block":
            zeroed = min(size, len(content) - at)
            return content[:at] + bytes(zeroed) + content[at + zeroed :]
        case "tail":
            return content[:at] + bytes(len(content) - at)
        case "all":
            return bytes(len(content))
        case "cut":
            return content[: draw.randrange(len(content))]
        case "cut at block":
            return content[:at]
        case _:
            return content + bytes(size)


def kinds_of_files(world: World, draw: random.Random, folder: Path) -> None:
    """Something that is no file in place of one, or of one that is yet to be written."""
    name = draw.choice(world.damaged)
    run = world.copy(name, folder)
    written = [path.with_name(f".{path.name}.tmp") for path in contents(run)]
    locks = [run / ".lock", run / "net" / ".lock"] if name != COMPARISON else []
    file = draw.choice([*contents(run), *written, *locks])
    kind = draw.choice(("fifo", "zeros", "folder", "dangling", "sparse", "empty", "loop"))
    replace(file, kind)
    done(f"{kind} as {file.relative_to(run)} of {name}")
    use(world, draw, name, run)


def replace(file: Path, kind: str) -> None:
    file.parent.mkdir(exist_ok=True, parents=True)
    file.unlink(missing_ok=True)
    match kind:
        case "fifo":
            os.mkfifo(file)
        case "zeros":
            file.symlink_to("/dev/zero")
        case "folder":
            file.mkdir()
        case "dangling":
            file.symlink_to("nothing")
        case "sparse":
            with open(file, "wb") as made:
                made.truncate(SPARSE)
        case "empty":
            file.touch()
        case "loop":
            file.symlink_to(file.name)


def contents(run: Path) -> list[Path]:
    """The files that a run is read from."""
    return sorted(
        path
        for path in run.rglob("*")
        if path.is_file() and path.suffix in (".json", ".jsonl", ".safetensors")
    )


def use(world: World, draw: random.Random, name: str, run: Path) -> None:
    """Do with a run what a user may; it must end well."""
    choices = ["resume", "report"] + (["predict", "load"] if name == "rank" else [])
    way = "report" if name == COMPARISON else draw.choice(choices)
    done(f"then {way}")
    match way:
        case "resume":
            users.check_resume(run, world.endings[name])
        case "predict":
            assert world.predicted is not None
            users.check_predict(run, world.image, world.predicted)
        case "load":
            users.check_load(run / "net", world.answers[name], world.inputs[name])
        case _:
            users.check_report(run, world.reports[name], lambda: world.without_last_line(name, run))
