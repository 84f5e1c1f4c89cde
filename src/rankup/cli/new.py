"""The command `rankup new`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rankup.cli.network import AsJson
from rankup.cli.sentences import say
from rankup.errors import RankupError


def new(
    path: Annotated[Path, typer.Argument(help="A folder that is new or empty.")],
    net: Annotated[
        str,
        typer.Option(
            help="The network: mlp, resnet18, timm:NAME or, of transformers, hf:NAME_OR_PATH."
        ),
    ] = "resnet18",
    pretrained: Annotated[
        bool, typer.Option("--pretrained", help="Keep the weights that come with --net.")
    ] = False,
    size: Annotated[
        int | None,
        typer.Option(
            help="Pixels each way of its images: 64, or what a published network was made for.",
            min=1,
            max=4096,
        ),
    ] = None,
    width: Annotated[
        int | None, typer.Option(help="Hidden units (256), or ResNet18's channels (20).", min=1)
    ] = None,
    rank: Annotated[
        str | None,
        typer.Option(
            help="Rank added by the first and each later task: 11,1 or, as shares of a layer's "
            "outputs, 0.1,0.02."
        ),
    ] = None,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune",
            help="Tasks keep the fewest factors, biases and weights of heads with which their "
            "accuracy and loss on a held-out tenth of the training data stay the same.",
        ),
    ] = False,
    router: Annotated[
        str | None,
        typer.Option(
            help="How tasks are guessed where none is named: energy, mahalanobis, means, analytic, "
            "or several with weights; analytic,patches for photographs. See docs/guessing.md."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be made, and write nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a network that knows nothing yet, to be taught with `rankup learn`.

    Networks of the same options and seed are alike, so that tasks can go from one to another with
    `rankup join`.

    Example: rankup new nets/shop --net resnet18 --size 64

    Example: rankup new nets/shop --net timm:resnet18 --pretrained
    """
    from rankup.data.inputs import TextInput
    from rankup.life.making import new_network
    from rankup.storage.manifest import is_of_network
    from rankup.storage.store import save

    if is_of_network(path):
        raise RankupError(f"{path} holds a network already: name another folder")
    made = new_network(
        net, pretrained=pretrained, size=size, width=width, rank=rank, prune=prune, seed=seed
    )
    made.router = router
    takes = str(made.inputs or "inputs that it does not know")
    if not dry_run:
        save(made, path)
    if as_json:
        print(json.dumps({"network": str(path), "net": net, "inputs": takes, "seed": seed}))
        return
    say(f"{path} {'would be' if dry_run else 'is'} a new network, {net}, of {takes}")
    if not dry_run:
        data = "FILE.csv" if isinstance(made.inputs, TextInput) else "FOLDER"
        say(f"Teach it a task: rankup learn {path} {data}")
