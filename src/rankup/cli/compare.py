"""The command `rankup compare`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from rankup.cli.options import (
    one_of,
    refuse_factors,
    refuse_if_not_begun,
    refuse_softness,
    with_method_options,
    with_request,
)
from rankup.cli.report import show_comparison
from rankup.errors import RankupError
from rankup.methods import METHODS, all_methods, method_info
from rankup.runs.request import Request

ALL = "all"
Methods = Annotated[
    str,
    typer.Option(
        help="E.g. rank,finetune, or all; see `rankup methods`.",
        autocompletion=one_of([*METHODS, ALL]),
    ),
]


@with_method_options
@with_request
def compare(
    ctx: typer.Context,
    methods: Methods = ALL,
    out: Annotated[
        Path | None, typer.Option(help="Output folder, else runs/compare-STREAM[-NET].")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
    *,
    request: Request,
    method_options: dict[str, Any],
) -> None:
    """Run several methods with the same seeds and show them side by side.

    Every method uses its own settings, overridden by the options given here in all methods that
    have them. If one fails, the others continue. Writes a run folder METHOD/seed-K for each, a
    page, report.html, and the table as table.csv, table.md and table.tex. With several seeds it
    also says how far each method is from the first, paired over seeds.
    """
    names = chosen_methods(methods)
    if "rank" not in names:
        refuse_factors(ctx, "which is not compared")
    refuse_softness(ctx, method_options)
    from rankup.cli.progress import ExperimentBars, MethodBars, bars, note
    from rankup.runs.compare import MethodRuns
    from rankup.runs.comparison import is_comparison
    from rankup.runs.launch import Launch
    from rankup.runs.ray_pool import pool_on

    if request.resume and out:
        refuse_if_not_begun(ctx, "comparison", out, is_comparison(out))

    root = out or request.folder("compare")
    launch = Launch(request)
    runs = MethodRuns(launch, names, root, method_options)
    with bars() as bar, pool_on(request.on) as pool:
        left = runs.unfinished
        if pool is None:
            runs.run(MethodBars(bar, launch.tasks, len(left)), partial(note, bar))
        elif left:
            lines = ExperimentBars(bar, sum(map(len, left.values())))
            runs.run_on(pool, lines, partial(note, bar))
    comparison = show_comparison(root, root / "report.html", as_json)
    if failed := [entry.method for entry in comparison.failed if entry.method in names]:
        raise RankupError(f"{len(failed)} of {len(names)} methods failed: {', '.join(failed)}")


def chosen_methods(typed: str) -> list[str]:
    """The methods that are named, each once.

    >>> chosen_methods("finetune,rank")
    ['finetune', 'rank']
    """
    if typed == ALL:
        return list(all_methods())
    names = [name.strip() for name in typed.split(",")]
    for name in names:
        method_info(name)
        if names.count(name) > 1:
            raise RankupError(f"the method {name!r} is named {names.count(name)} times, not once")
    return names
