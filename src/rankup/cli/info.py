"""The command `rankup info`."""

from rankup.cli.network import NetworkPath, network_folder


def info(path: NetworkPath) -> None:
    """Show what a network is made of: its tasks, its layers and what it stores."""
    from rich.console import Console
    from rich.text import Text

    from rankup.layers.spec import FactoredSpec
    from rankup.net.size import kept_from_module, stored_by_task
    from rankup.report.tables import print_line, print_table, right_aligned
    from rankup.storage.manifest import Manifest

    manifest = Manifest.read(network_folder(path))
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
