"""One HTML page about a comparison, and its table as files beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rankup.errors import RankupError
from rankup.report.comparison.export import write_tables
from rankup.report.comparison.plots import write_comparison_plots
from rankup.report.comparison.text import (
    cells,
    common_and_differing,
    failures,
    headings,
    notes,
    summary,
)
from rankup.report.page import PAGE, checked_page, embedded, plots_of, render
from rankup.runs.comparison import Comparison, Entry
from rankup.storage.atomic import write_file


def write_comparison(comparison: Comparison, page: Path) -> Path:
    """Write the page and its tables beside it, for a `report.html` also its plots; return the
    page's path."""
    tables = _tables_of(checked_page(page), comparison)
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        names = write_tables(comparison, tables)
        with plots_of(page) as drawn:
            plots = embedded(write_comparison_plots(comparison, drawn), drawn)
        text = _page(comparison, plots, names)
        write_file(page, text.encode(errors="replace"))  # names may hold any bytes
    except OSError as error:
        raise RankupError(f"the report {page} cannot be written: {error.strerror}") from error
    return page


def _tables_of(page: Path, comparison: Comparison) -> Path:
    """Where a page's tables are written, without their suffix: a page outside of the comparison's
    folder gives them its own name, as there may be other files beside it."""
    is_its_own = page.name == PAGE and page.parent.resolve() == comparison.path.resolve()
    return page.with_name("table") if is_its_own else page.with_suffix("")


def _page(comparison: Comparison, plots: dict[str, list[str]], tables: Mapping[str, str]) -> str:
    common, differing = common_and_differing(comparison)
    note = "; ".join(notes(comparison))
    return render(
        "comparison.html.j2",
        streams=comparison.stream,
        summary=summary(comparison),
        coloured=len(comparison.entries),
        headings=headings(comparison),
        ranked=[_row(comparison, entry) for entry in comparison.ranked],
        shown=[entry.name for entry in comparison.shown],
        seeds=comparison.seeds,
        notes=note[0].upper() + note[1:],
        failures=failures(comparison),
        common=common,
        differing=[
            {"number": entry.number, "name": entry.method, "settings": differing[entry.method]}
            for entry in comparison.entries
            if differing.get(entry.method)
        ],
        plots=plots,
        tables={
            # An unquoted "#" or ":" in a name would break the link.
            kind: {"name": name, "link": quote(os.fsencode(name))}
            for kind, name in tables.items()
        },
    )


def _row(comparison: Comparison, entry: Entry) -> dict[str, Any]:
    name, *others = cells(comparison, entry)
    return {
        "number": entry.number,
        "name": name,
        "cells": others,
        "has_results": bool(entry.runs),
    }
