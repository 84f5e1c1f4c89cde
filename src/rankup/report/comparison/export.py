"""The table of a comparison as files: for a spreadsheet, for a document, for a paper."""

from __future__ import annotations

import csv
import io
import json
import statistics
from pathlib import Path

from rankup.report.comparison.text import (
    cells,
    columns,
    failures,
    headings,
    notes,
)
from rankup.runs.comparison import Comparison, Entry

_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "−": "$-$",
    "–": "--",
    "±": r"$\pm$",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


_RESULTS = (
    *("method", "continual", "seeds", "failed"),
    *("accuracy", "accuracy_std", "forgetting", "forgetting_std"),
    *("parameters", "buffer", "seconds"),
)


def write_tables(comparison: Comparison, path: Path) -> dict[str, str]:
    """Write files at this path with a suffix added, and return their names by suffix."""
    makers = {"csv": as_csv, "md": as_markdown, "tex": as_latex}
    names = {suffix: f"{path.name}.{suffix}" for suffix in makers}
    for suffix, make in makers.items():
        table = path.with_name(names[suffix])
        table.write_bytes(make(comparison).encode(errors="replace"))  # names may hold any bytes
    return names


def as_csv(comparison: Comparison) -> str:
    """A row for each method with all its settings; accuracy and forgetting in per cent."""
    rows = [{**_numbers(comparison, entry), **columns(entry)} for entry in comparison.ranked]
    names = dict.fromkeys((*_RESULTS, *(name for row in rows for name in row)))
    # What only some methods have comes last.
    names = dict.fromkeys(sorted(names, key=lambda name: name.startswith("options.")))
    file = io.StringIO()
    writer = csv.DictWriter(file, list(names), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def as_json(comparison: Comparison) -> str:
    """What the CSV holds, without settings, and the method that the others' differences are to."""
    reference = comparison.reference
    told = {
        "stream": comparison.stream,
        "seeds": comparison.seeds,
        "difference_to": reference and reference.method,
        "methods": [_numbers(comparison, entry) for entry in comparison.ranked],
    }
    return json.dumps(told)


def as_markdown(comparison: Comparison) -> str:
    names = headings(comparison)
    rows = [names, *(cells(comparison, entry) for entry in comparison.ranked)]
    first, *others = (f"| {' | '.join(_markdown(cell) for cell in row)} |" for row in rows)
    rule = f"|---|{'---:|' * (len(names) - 1)}"
    notes_below = [
        f"{_markdown(text)}." for text in ("; ".join(notes(comparison)), *failures(comparison))
    ]
    return "\n".join([first, rule, *others, "", *"\n\n".join(notes_below).split("\n"), ""])


def as_latex(comparison: Comparison) -> str:
    """A `tabular` with booktabs rules."""
    comments = [comparison.stream, *notes(comparison), *failures(comparison)]
    names = headings(comparison)
    lines = [
        r"% \usepackage{booktabs}",
        *(f"% {' '.join(text.split())}" for text in comments),
        rf"\begin{{tabular}}{{l{'r' * (len(names) - 1)}}}",
        r"\toprule",
        _latex_row(names),
        r"\midrule",
        *(_latex_row(cells(comparison, entry)) for entry in comparison.ranked),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _numbers(comparison: Comparison, entry: Entry) -> dict[str, str | int | float]:
    about: dict[str, str | int | float] = {
        "method": entry.method,
        "continual": "yes" if entry.continual else "no",
        "seeds": len(entry.runs),
        "failed": entry.failed,
    }
    if not entry.runs:
        return about
    return {
        **about,
        **_mean("accuracy", entry.accuracy),
        **(_mean("untold", entry.untold) if entry.untold else {}),
        **(_mean("guessed", entry.guessed) if entry.guessed else {}),
        **_mean("forgetting", entry.forgetting),
        "parameters": entry.parameters,
        "buffer": entry.buffer,
        "seconds": round(entry.seconds, 3),
        **_paired(comparison, entry),
    }


def _paired(comparison: Comparison, entry: Entry) -> dict[str, int | float]:
    difference = comparison.difference(entry)
    if difference is None:
        return {}
    return {
        "difference": round(100 * difference.mean, 4),
        "difference_error": round(100 * difference.error, 4),
        "difference_seeds": difference.seeds,
    }


def _mean(name: str, fractions: list[float]) -> dict[str, str | float]:
    deviation = round(100 * statistics.stdev(fractions), 4) if len(fractions) > 1 else ""
    return {name: round(100 * statistics.mean(fractions), 4), f"{name}_std": deviation}


def _markdown(text: str) -> str:
    """
    >>> print(_markdown("joint* a|b"))
    joint\\* a\\|b
    """
    return "".join(f"\\{c}" if c in r"\`*_{}[]<>#|" else c for c in " ".join(text.split()))


def _latex_row(row: tuple[str, ...]) -> str:
    return " & ".join(_latex(cell) for cell in row) + r" \\"


def _latex(text: str) -> str:
    r"""
    >>> print(_latex("a_b & 90.00 ± 2.00"))
    a\_b \& 90.00 $\pm$ 2.00
    """
    return "".join(_LATEX.get(character, character) for character in text)
