"""The command `rankup learn`."""

import json
import shlex
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankup.cli.network import AsJson, refuse_address
from rankup.cli.progress import bars
from rankup.cli.sentences import say, tell
from rankup.errors import RankupError
from rankup.training.logs import Tool

if TYPE_CHECKING:
    from rankup.life.samples import Found
    from rankup.net.network import IncrementalNet
    from rankup.net.tasks import Uses

_SHOWN = 5  # names in a line about what was found


def learn(
    path: Annotated[
        Path, typer.Argument(metavar="NETWORK", help="A network's folder, or one to be made.")
    ],
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="A folder with a folder of images for each class, or a CSV or parquet file with "
            "columns image and label; for a network of texts, with columns text and label.",
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="The task's name, else that of the folder of data.")
    ] = None,
    title: Annotated[str, typer.Option(help="A name for people.")] = "",
    uses: Annotated[
        str,
        typer.Option(
            help="The tasks from whose factors it selects: all, own (none but its own, so that it "
            "can go to other networks), or names with commas."
        ),
    ] = "all",
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the data, else by its kind.", min=1)
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Samples per step.", min=1)] = None,
    lr: Annotated[float | None, typer.Option(help="Peak of the learning rate.")] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads that compute.", min=1, max=1024)
    ] = None,
    log: Annotated[
        Tool | None, typer.Option(help="Draw its curves with this, in the folder logs.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what was found, and learn nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Teach a network a task, from a folder per class or a table of images or texts.

    Every fifth sample of a class is held out to test with, unless there are folders train and
    test. Files that are no images, or broken, are named and left out. If the network does not
    exist yet, a ResNet18 for images of 64×64 pixels is made; `rankup new` makes others. Nothing is
    written before the task is learned: one that was stopped has left nothing behind.

    Example: rankup learn nets/shop photos/shoes

    Example: rankup learn nets/shop photos/bags --name bags --uses shoes --epochs 20
    """
    import torch

    from rankup.life.learning import Progress
    from rankup.life.learning import learn as teach
    from rankup.life.samples import find
    from rankup.net.tasks import checked_name
    from rankup.storage.atomic import refuse_unwritable
    from rankup.storage.store import save
    from rankup.training.logs import Log, check_tool
    from rankup.training.recipe import Recipe

    if threads is not None:
        torch.set_num_threads(threads)
    if log is not None:
        check_tool(log)
    given = {"epochs": epochs, "batch": batch, "lr": lr}
    options: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    Recipe(**options)  # refuses wrong numbers before anything is read
    began = time.monotonic()
    net, is_new = _network(path)
    name = checked_name(name if name is not None else data.resolve().stem, ())
    if name in net.tasks:
        raise RankupError(
            f"{path} knows a task {name!r} already: give this one another name with --name, or "
            f"remove that one first with `rankup remove {path} {shlex.quote(name)}`"
        )
    selected = _uses(uses, net)
    found = find(data, net.inputs)
    told: dict[str, Any] = {
        "network": str(path),
        "task": name,
        "classes": found.counts,
        "train": len(found.train),
        "test": len(found.test),
        "odd": list(found.odd),
    }
    if not as_json:
        if is_new:
            what = "would be" if dry_run else "will be"
            say(f"{path} {what} a new network, resnet18, of {net.inputs}")
        _describe(found)
    if dry_run:
        text = f"{name!r} would be learned; nothing was written"
        tell(told, text, as_json)
        return
    refuse_unwritable(path)
    assert net.inputs is not None  # else nothing was found
    curves = None if log is None else Log(log, name=f"{path.resolve().name}/{name}")
    with bars("nothing was written") as shown, curves or nullcontext():
        line = shown.add_task("", state="")

        def show(now: Progress) -> None:
            count = f"{now.done:,} of {now.total:,}"
            state = count if now.loss is None else f"{count} epochs, loss {now.loss:.3f}"
            shown.update(
                line, description=now.stage, completed=now.done, total=now.total, state=state
            )

        learned = teach(
            net,
            name,
            found,
            net.inputs,
            uses=selected,
            title=title,
            tell=show,
            log=curves,
            recipe_options=options,
        )
    save(net, path)
    seconds = time.monotonic() - began
    numbers = net.size(name).total
    if as_json:
        told |= {"broken": list(learned.broken), "accuracy": learned.accuracy}
        told |= {"epochs": learned.epochs, "numbers": numbers, "seconds": round(seconds, 3)}
        print(json.dumps(told))
        return
    if learned.broken:
        say(f"Left out: {_some(learned.broken)}")
    say(
        f"Learned {name!r} in {seconds:.1f} s: {learned.accuracy:.1%} of {len(found.test):,} "
        f"held-out {found.what} are right; it added {numbers:,} numbers"
    )
    if len(net.tasks) == 1:
        what = "TEXT" if found.what == "texts" else "IMAGE"
        say(f"Ask it: rankup predict {path} {what}")


def _network(path: Path) -> "tuple[IncrementalNet, bool]":
    """The network of a folder, or a new one if there is nothing."""
    from rankup.life.making import new_network
    from rankup.storage.store import load

    refuse_address(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        return load(path), False
    return new_network(), True


def _uses(given: str, net: "IncrementalNet") -> "Uses":
    if given in ("all", "own"):
        return given
    names = given.split(",")
    if unknown := [each for each in names if each not in net.tasks]:
        known = ", ".join(net.tasks) or "none"
        raise RankupError(f"--uses names a task {unknown[0]!r}, but the network knows {known}")
    return names


def _describe(found: "Found") -> None:
    counts = [f"{name} ({count:,})" for name, count in found.counts.items()]
    say(
        f"{found.root}: {len(found):,} {found.what} of {len(counts)} classes, {_some(counts)}; "
        f"{len(found.train):,} to learn from, {len(found.test):,} held out"
    )
    if found.odd:
        say(f"No images, left out: {_some(found.odd)}")


def _some(names: "list[str] | tuple[str, ...]") -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest:,} more" if rest > 0 else "")
