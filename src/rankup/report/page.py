"""One self-contained HTML page about runs: no network, no script, light and dark."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rankup.errors import RankupError
from rankup.report import text
from rankup.report.figures import THEMES, colour, is_hollow
from rankup.report.plots import MOST_STACKED, write_plots
from rankup.runs.read import Run, percent
from rankup.storage.atomic import write_file

PAGE = "report.html"


def write_report(runs: Sequence[Run], path: str | os.PathLike[str]) -> Path:
    """Write the page to `path`, for a `report.html` also its plots beside it; return its path."""
    if not runs:
        raise RankupError("a report needs at least one run")
    page = checked_page(path)
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        with plots_of(page) as folder:
            plots = embedded(write_plots(runs, folder), folder)
        write_file(page, _page(runs, plots).encode(errors="replace"))  # names may hold any bytes
    except OSError as error:
        raise RankupError(f"the report {page} cannot be written: {error.strerror}") from error
    return page


def checked_page(path: str | os.PathLike[str]) -> Path:
    """The path if a page may be written there; other names may be those of a run's own files."""
    page = Path(path)
    if page.suffix.lower() not in (".html", ".htm"):
        raise RankupError(f"a report is a page whose name ends in .html, got {page}")
    return page


@contextmanager
def plots_of(page: Path) -> Iterator[Path]:
    """Where a page's plots are written: beside a `report.html`, otherwise in a temporary folder
    just to be embedded, as there may be other files with their names."""
    if page.name == PAGE:
        yield page.parent
        return
    with TemporaryDirectory() as folder:
        yield Path(folder)


def render(template: str, **context: Any) -> str:
    """A page from a template in this folder."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(
        themes=THEMES, colour=colour, is_hollow=is_hollow, **context
    )


def embedded(plots: Sequence[str], folder: Path) -> dict[str, list[str]]:
    """Plots as embedded in a page, each in light and in dark."""
    return {
        name: [_data((folder / f"{name}{theme.suffix}.png").read_bytes()) for theme in THEMES]
        for name in plots
    }


def _data(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _page(runs: Sequence[Run], plots: dict[str, list[str]]) -> str:
    return render(
        "page.html.j2",
        streams=", ".join(dict.fromkeys(run.stream for run in runs)),
        summary=text.summary(runs),
        runs=[_results(runs, index) for index in range(len(runs))],
        coloured=len(runs),
        means=text.mean_results(runs),
        untold=text.UNTOLD * any(run.untold for run in runs),
        tasks=_tasks(runs),
        settings=_settings(runs),
        plots=plots,
    )


def _results(runs: Sequence[Run], index: int) -> dict[str, Any]:
    run = runs[index]
    return {
        "number": index + 1,
        "name": text.labels(runs)[index],
        # For a few runs the summary says it.
        "progress": text.so_far("", run) if len(runs) > text.MOST_DESCRIBED else "",
        "accuracy": percent(run.matrix.average_accuracy()),
        **dict(zip(("untold", "guessed"), text.untold_cells([run]), strict=True)),
        "forgetting": percent(run.matrix.forgetting()),
        "backward": percent(run.matrix.backward_transfer()),
        "parameters": text.count(run.parameters),
        "buffer": text.count(run.buffer),
        "time": text.duration(run.seconds),
        "has_many_layers": len(run.selectors) > MOST_STACKED,
    }


def _tasks(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row for each task: its accuracy now and how much was forgotten, for each run."""
    rows = []
    classes = [[", ".join(line.get("classes", ())) for line in run.lines] for run in runs]
    # Where all tasks have the same classes, these say nothing about a task.
    telling = [names if len(set(names)) > 1 else [] for names in classes]
    for task in range(max(len(run.tasks) for run in runs)):
        shown = dict.fromkeys(names[task] for names in telling if task < len(names))
        names = dict.fromkeys(run.tasks[task] for run in runs if task < len(run.tasks))
        cells = []
        for run in runs:
            if task < len(run.tasks):
                now, learned = run.matrix.rows[-1][task], run.matrix.rows[task][task]
                cells.append((percent(now), percent(learned - now)))
            else:
                cells.append((text.NOTHING, text.NOTHING))
        rows.append({"name": " / ".join(names), "classes": list(shown), "cells": cells})
    return rows


def _settings(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row for each setting with the value of each run."""
    configs = [text.settings(run.config) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [(key, [config.get(key, text.NOTHING) for config in configs]) for key in keys]
    return [{"key": key, "values": values, "differs": len(set(values)) > 1} for key, values in rows]
