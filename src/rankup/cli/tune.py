"""The command `rankup tune`."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankup.cli.compare import ALL, Methods, chosen_methods
from rankup.cli.options import with_request
from rankup.errors import RankupError
from rankup.methods.search import Search, trials
from rankup.runs.request import Request

if TYPE_CHECKING:
    from rich.table import Table

    from rankup.methods.info import Values
    from rankup.runs.tune import Outcome, Trial


@with_request
def tune(
    methods: Methods = ALL,
    held_out: Annotated[
        float, typer.Option(help="Share of the training data to score on.", min=0.01, max=0.9)
    ] = 0.15,
    first: Annotated[
        int | None,
        typer.Option(help="Learn only this many tasks, the stream's first, to save time.", min=1),
    ] = None,
    tries: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            metavar="NAME=A,B,…",
            help="Try these values of a setting instead of the method's own search; with several, "
            "every combination. One value holds for all trials, is no choice, and is given again "
            "with --recipe.",
        ),
    ] = None,
    search: Annotated[
        Search,
        typer.Option(
            help="grid: every trial learns all tasks. asha: after the first tasks, and again after "
            "three times as many, only the best trials go on, as Optuna's successive halving "
            "decides."
        ),
    ] = Search.grid,
    budget: Annotated[
        int | None,
        typer.Option(
            help="Epochs that each method's trials may take with --search asha, for all tasks and "
            "seeds; by default half of what those of a grid take. With more, decisions come later.",
            min=1,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Output folder, else runs/tune-STREAM[-NET].")
    ] = None,
    *,
    request: Request,
) -> None:
    """Choose each method's settings by trials, equally many for every method, or with
    `--search asha` with the same budget.

    Trials learn whole streams, or their --first tasks, with seeds from 1000 + --seed on, which no
    other command uses unless told to, and are scored on held-out training data; test data is never
    looked at. Writes METHOD.json with what was chosen and all trials. `--recipe FOLDER` of the
    other commands takes settings from there, including options of the recipe that all trials were
    given. With `--try lr=0.01,0.03 --try weight-decay=0,0.05` you choose what is tried.
    """
    if budget and search is Search.grid:
        raise RankupError("--budget is for --search asha: in a grid every trial learns all tasks")
    wanted = {method: trials(method, tries or ()) for method in chosen_methods(methods)}
    from rich.console import Console

    from rankup.cli.progress import bars, note
    from rankup.report.tables import print_line, print_table
    from rankup.runs.compare import failure_in_one_line, release
    from rankup.runs.halving import check_optuna
    from rankup.runs.launch import Launch
    from rankup.runs.process_pool import ProcessPool
    from rankup.runs.ray_pool import RayPool
    from rankup.runs.tune import FIRST_SEED, Tuning

    if search is Search.asha:
        check_optuna()
    root = out or request.folder("tune")
    seed = FIRST_SEED + request.seed
    asked = replace(request, seed=seed, held_out=held_out, first=first)
    at_once = asked.seeds * max(len(tried) for tried in wanted.values())
    tuning = Tuning(Launch(asked, at_once), wanted, root, search, budget)
    failed = list[str]()
    console = Console()
    with bars() as shown, RayPool(request.on) if request.on else ProcessPool() as pool:
        line = shown.add_task("", total=1.0, state="")
        for number, method in enumerate(wanted, 1):
            which = f"method {number}/{len(wanted)}: {method}"
            shown.update(line, description=which, total=tuning.to_learn(method), completed=0)

            def show(now: Any, method: str = method) -> None:
                state = f"loss {now.loss:.3f}"
                shown.update(line, completed=tuning.learned(method), state=state)

            try:
                outcome = tuning.run(method, show, partial(note, shown), pool)
            except Exception as error:  # the others may still succeed
                failed.append(method)
                note(shown, failure_in_one_line(error, root / method))
                continue
            finally:
                if request.on is None:
                    release(method, tuning.launch.device)
            # In a terminal through the bars' console, which moves them out of the way.
            print_table(shown.console if console.is_terminal else console, _table(outcome))
            for trial in outcome.trials:
                if trial.failed:
                    note(shown, f"{_settings(trial)} failed: {trial.failed}")
    if failed:
        others = f"; what the others chose is in {root}" if len(failed) < len(wanted) else ""
        which = ", ".join(failed)
        raise RankupError(f"{len(failed)} of {len(wanted)} methods failed: {which}{others}")
    again = _as_options(outcome.shared)  # by all methods: `--try` is for all of them
    print_line(console, f"Chosen settings are in {root}: use them with --recipe {root}{again}")


def _as_options(settings: "Values") -> str:
    """As one types them.

    >>> _as_options({"weight_decay": 0.1, "reuse": False})
    ' --weight-decay 0.1 --no-reuse'
    """
    dashed = {name.replace("_", "-"): value for name, value in settings.items()}
    return "".join(
        f" --{'' if value else 'no-'}{name}" if isinstance(value, bool) else f" --{name} {value}"
        for name, value in dashed.items()
    )


def _settings(trial: "Trial") -> str:
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in trial.settings.items()
    )


def _table(outcome: "Outcome") -> "Table":
    from rich import box
    from rich.table import Table

    from rankup.runs.read import spread

    title = f"{outcome.method} on {outcome.stream}, scored on held-out training data"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("settings", overflow="fold")
    for heading in ("accuracy %", "forgetting"):
        table.add_column(heading, justify="right")
    if outcome.search is Search.asha:
        table.add_column("tasks", justify="right")
    for trial in sorted(outcome.trials, key=lambda trial: trial.score, reverse=True):
        if trial.failed:
            table.add_row(_settings(trial), "failed", "")
            continue
        cells = [_settings(trial), spread(trial.accuracy), spread(trial.forgetting)]
        if outcome.search is Search.asha:
            cells.append(str(trial.stopped or outcome.tasks))
        table.add_row(*cells)
    return table
