"""The command `rankup info`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankup.cli.network import AsJson, NetworkPlace, network_place
from rankup.cli.sentences import say

if TYPE_CHECKING:
    from rankup.net.kept_factors import KeptFactors
    from rankup.rank import Rank
    from rankup.storage.manifest import Manifest


def info(
    path: NetworkPlace,
    as_json: AsJson = False,
) -> None:
    """Show what a network is made of: its layers, and what each task stores.

    Of each layer: the rank of its factors, as the first and each later task add them. Where tasks
    drop factors, the range of the shares that they kept of a layer, and that a task kept of its
    layers; all of them with --json.

    Example: rankup info nets/shop
    """
    from rich.console import Console
    from rich.text import Text

    from rankup.layers.spec import FactoredSpec
    from rankup.net.size import kept_from_module, stored_by_task
    from rankup.report.tables import print_table, right_aligned
    from rankup.storage.manifest import Manifest

    manifest = Manifest.read(Path(network_place(path)))
    if as_json:
        print(json.dumps(_told(manifest)))
        return
    console = Console()
    takes = f"takes {manifest.inputs}" if manifest.inputs else "its files do not say what it takes"
    say(f"{manifest.model['model'] or manifest.model['class']}, {takes}")
    rules = manifest.options.rank
    for pattern, rank in rules.items() if isinstance(rules, Mapping) else [("", rules)]:
        say(f"{pattern}: {_rule(rank)}" if pattern else _rule(rank))
    kept = _kept(manifest)
    more = ["% kept"] if any(kept) else []
    layers = right_aligned("layer", "outputs", "inputs", "seeded", "first", "step", *more)
    for spec in manifest.specs:
        if isinstance(spec, FactoredSpec):
            numbers = (spec.outputs, spec.inputs, spec.rank.seeded, spec.rank.first, spec.rank.step)
            shares = [_range([task[spec.name] for task in kept if spec.name in task])][: len(more)]
            layers.add_row(Text(spec.name), *map(str, numbers), *shares)
    print_table(console, layers)
    tasks = right_aligned("task", "classes", *more, "numbers stored", "bytes of file")
    counts = stored_by_task(manifest.specs, manifest.task_list())
    for (task, file), count, by_layer in zip(manifest.tasks, counts, kept, strict=True):
        shares = [_range([*by_layer.values()])][: len(more)]
        cells = str(task.classes), *shares, f"{count:,}", f"{file.size:,}"
        tasks.add_row(Text(task.name), *cells)
    if base := manifest.base:
        of_module = kept_from_module(manifest.specs)
        tasks.add_row("of the module", "", *[""] * len(more), f"{of_module:,}", f"{base.size:,}")
        counts = [*counts, of_module]
    print_table(console, tasks)
    form = "" if manifest.options.store == "full" else f" as {manifest.options.store}"
    size = sum(file.size for _, file in manifest.tasks) + (base.size if base else 0)
    number = len(manifest.tasks)
    console.print(
        f"{number} task{'s' if number != 1 else ''}, {sum(counts):,} numbers stored{form} in "
        f"{size:,} bytes of files"
    )


def _rule(rank: "Rank") -> str:
    """What a task adds to each layer, in words.

    >>> from rankup.rank import Rank
    >>> _rule(Rank(0.1, 0.02, seeded="4x", of_outputs=True))
    "The first task adds rank 0.1 of a layer's outputs, later ones 0.02; seeded factors: 4x"
    """
    share = " of a layer's outputs" if rank.of_outputs else ""
    text = f"The first task adds rank {rank.first:g}{share}, later ones {rank.step:g}"
    text += f"; seeded factors: {rank.seeded}" if rank.seeded else ""
    return text + ("; tasks drop factors that they can do without" if rank.prune else "")


def _kept(manifest: "Manifest") -> "list[dict[str, KeptFactors]]":
    """What each task kept of the layers that may drop factors."""
    from rankup.net.kept_factors import kept_of_layers

    known = manifest.task_list()
    return [kept_of_layers(manifest.specs, known, i) for i in range(len(known.tasks))]


def _range(kept: "list[KeptFactors]") -> str:
    """The lowest and the highest share that was kept of what was there, in percent."""
    shares = [f"{100 * each.factors / each.of:.0f}" for each in kept if each.of]
    if not shares:
        return "–"
    least, most = min(shares, key=int), max(shares, key=int)
    return least if least == most else f"{least}–{most}"


def _told(manifest: "Manifest") -> dict[str, Any]:
    from rankup.layers.spec import FactoredSpec
    from rankup.net.size import kept_from_module, stored_by_task

    counts = stored_by_task(manifest.specs, manifest.task_list())
    layers = [
        {"name": spec.name, "outputs": spec.outputs, "inputs": spec.inputs}
        | {"seeded": spec.rank.seeded, "first": spec.rank.first, "step": spec.rank.step}
        for spec in manifest.specs
        if isinstance(spec, FactoredSpec)
    ]
    tasks = [
        {"name": task.name, "classes": task.classes, "numbers": count, "bytes": file.size}
        | ({"kept": {name: vars(factors) for name, factors in kept.items()}} if kept else {})
        for (task, file), count, kept in zip(manifest.tasks, counts, _kept(manifest), strict=True)
    ]
    base = manifest.base and {
        "numbers": kept_from_module(manifest.specs),
        "bytes": manifest.base.size,
    }
    return {
        "model": manifest.model,
        "store": manifest.options.store,
        "inputs": manifest.inputs and manifest.inputs.to_json(),
        "layers": layers,
        "tasks": tasks,
        "base": base,
    }
