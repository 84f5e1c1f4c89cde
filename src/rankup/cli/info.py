"""The command `rankup info`."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankup.cli.network import NetworkPath, network_folder

if TYPE_CHECKING:
    from rankup.storage.manifest import Manifest


def info(
    path: NetworkPath,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Show what a network is made of: its layers with the rank of their factors, and what each task
    stores.

    Example: rankup info nets/shop
    """
    from rich.console import Console
    from rich.text import Text

    from rankup.layers.spec import FactoredSpec
    from rankup.net.size import kept_from_module, stored_by_task
    from rankup.report.tables import print_line, print_table, right_aligned
    from rankup.storage.manifest import Manifest

    manifest = Manifest.read(network_folder(path))
    if as_json:
        print(json.dumps(_told(manifest)))
        return
    console = Console()
    rank = manifest.options.rank
    print_line(console, f"{manifest.model['model'] or manifest.model['class']}, {rank}")
    layers = right_aligned("layer", "outputs", "inputs", "seeded", "first", "step")
    for spec in manifest.specs:
        if isinstance(spec, FactoredSpec):
            numbers = (spec.outputs, spec.inputs, spec.rank.seeded, spec.rank.first, spec.rank.step)
            layers.add_row(Text(spec.name), *map(str, numbers))
    print_table(console, layers)
    tasks = right_aligned("task", "classes", "numbers stored", "bytes of file")
    counts = stored_by_task(manifest.specs, manifest.task_list())
    for (task, file), count in zip(manifest.tasks, counts, strict=True):
        tasks.add_row(Text(task.name), str(task.classes), f"{count:,}", f"{file.size:,}")
    if base := manifest.base:
        kept = kept_from_module(manifest.specs)
        tasks.add_row("of the module", "", f"{kept:,}", f"{base.size:,}")
        counts = [*counts, kept]
    print_table(console, tasks)
    form = "" if manifest.options.store == "full" else f" as {manifest.options.store}"
    size = sum(file.size for _, file in manifest.tasks) + (base.size if base else 0)
    number = len(manifest.tasks)
    console.print(
        f"{number} task{'s' if number != 1 else ''}, {sum(counts):,} numbers stored{form} in "
        f"{size:,} bytes of files"
    )


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
        for (task, file), count in zip(manifest.tasks, counts, strict=True)
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
