"""The command `rankup push`."""

import json
import sys
from typing import Annotated, Any

import typer

from rankup.cli.network import AsJson, NetworkPath, network_folder
from rankup.cli.sentences import say, tell
from rankup.cli.transfer import DryRun, Yes
from rankup.errors import RankupError


def push(
    path: NetworkPath,
    repository: Annotated[
        str, typer.Argument(metavar="USER/NAME", help="A repository, which need not exist.")
    ],
    private: Annotated[
        bool, typer.Option("--private", help="Let only you see a repository that is made.")
    ] = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Put a network on the Hugging Face Hub, with a page about its tasks.

    Only files that are not there yet are uploaded, in one commit together with the manifest, so
    that whoever loads the network at that moment gets the old one or the new one. Tasks that you
    removed are removed there, too, after a question. The page, README.md, is written anew unless it
    is your own. Log in before with `hf auth login`, or set HF_TOKEN.

    Others then use `rankup pull USER/NAME` or `rankup.load("hf://USER/NAME")`.

    Example: rankup push nets/shop user/shop --private
    """
    from rankup.cli.transfer import confirm_removal, hub_bars, sizes, would
    from rankup.life.pushing import local_tokenizers, plan_push

    folder = network_folder(path)
    with hub_bars():
        plan = plan_push(folder, repository)
    if private and plan.there is not None and not plan.there.is_private:
        raise RankupError(f"{repository} exists and is public: change that in its settings there")
    told: dict[str, Any] = {
        "repository": repository,
        "is_new": plan.there is None,
        "uploads": plan.uploads,
        "deletes": plan.deletes,
        "tasks_removed": plan.removed,
        "commit": None,
    }
    for tokenizer in local_tokenizers(plan.manifest):
        print(f"rankup: texts need the tokenizer in {tokenizer}, which stays here", file=sys.stderr)
    if dry_run:
        text = would(f"upload {sizes(plan.uploads)} to {repository}", plan.removed)
        tell(told, text, as_json)
        return
    confirm_removal(str(repository), plan.removed, str(path), yes)
    if plan.uploads or plan.deletes:
        with hub_bars():
            told["commit"] = plan.carry_out(private)
    if as_json:
        print(json.dumps(told))
    elif told["commit"] is None:
        say(f"{repository} holds all of {path} already")
    else:
        say(f"Pushed {path} to https://huggingface.co/{repository}: {sizes(plan.uploads)}")
