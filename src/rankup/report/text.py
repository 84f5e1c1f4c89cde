"""Numbers and names as people read them, the same in the terminal and on the page."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rankup.runs.read import OfASeed, Run, by_setting, finished_groups, percent, spread

NOTHING = "–"  # in place of a missing setting or result
UNTOLD = ("untold %", "task guessed %")  # headings of what is known without the task
MOST_DESCRIBED = 3  # runs that the summary describes one by one


def signed(difference: float) -> str:
    """
    >>> signed(1.234), signed(-0.5), signed(-0.001)
    ('+1.23', '−0.50', '+0.00')
    """
    text = f"{difference:+.2f}"
    return "+0.00" if text == "-0.00" else text.replace("-", "−")


def mean_results(runs: Sequence[Run]) -> list[dict[str, str]]:
    """A row of a table for each setting that several seeds have finished."""
    groups = list(by_setting(runs).values())
    # Named without their seeds, which tell runs apart but not means.
    names = labels([replace(group[0], config=group[0].unseeded) for group in groups])
    return [
        {"name": f"{name}, {_mean_of(finished, group)}", **_means(finished)}
        for name, group in zip(names, groups, strict=True)
        for finished in finished_groups(group)  # all in one, if any
    ]


def _mean_of(finished: Sequence[Run], group: Sequence[Run]) -> str:
    kind = "seeds" if len(finished) == len(group) else "finished seeds"
    return f"mean of {len(finished)} {kind}"


def _means(group: Sequence[Run]) -> dict[str, str]:
    return {
        "accuracy": spread([run.matrix.average_accuracy() for run in group]),
        **dict(zip(("untold", "guessed"), untold_cells(group), strict=True)),
        "forgetting": spread([run.matrix.forgetting() for run in group]),
        "backward": spread([run.matrix.backward_transfer() for run in group]),
        "parameters": count(statistics.mean(run.parameters for run in group)),
        "buffer": count(statistics.mean(run.buffer for run in group)),
        "time": duration(statistics.mean(run.seconds for run in group)),
    }


def untold_cells(runs: Sequence[OfASeed]) -> tuple[str, str]:
    """Under `UNTOLD`: how often the runs were right without being told the task, and how often
    about the task."""
    both = [run.untold for run in runs], [run.guessed for run in runs]
    first, second = (
        spread([matrix.average_accuracy() for matrix in found if matrix]) if all(found) else NOTHING
        for found in both
    )
    return first, second


def count(numbers: float) -> str:
    """
    >>> count(109020.0)
    '109,020'
    """
    return f"{numbers:,.0f}"


def duration(seconds: float) -> str:
    """
    >>> duration(3.14159), duration(64.6), duration(7325)
    ('3.1 s', '1 min 05 s', '2 h 02 min')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def summary(runs: Sequence[Run]) -> str:
    """One sentence on how the runs went."""
    names = labels(runs)
    if [len(group) for group in finished_groups(runs)] == [len(runs)]:
        result = _means(runs)
        return (
            f"{runs[0].method} learned {_tasks(runs[0])} of {runs[0].stream} with {len(runs)} "
            f"seeds: average accuracy {result['accuracy']} %, forgetting {result['forgetting']}"
        )
    if len(runs) > MOST_DESCRIBED and not one_stream(runs):
        return f"{len(runs)} runs on {len({run.stream for run in runs})} streams"
    if len(runs) > MOST_DESCRIBED:
        return _best(runs)
    of_stream = f" of {runs[0].stream}" if one_stream(runs) else ""
    return "; ".join(
        f"{name} learned {_tasks(run)}{of_stream}: {_result(run)}"
        for name, run in zip(names, runs, strict=True)
    )


def _best(runs: Sequence[Run]) -> str:
    """One sentence on the best of many runs, among those that are finished."""
    finished = [index for index, run in enumerate(runs) if run.finished]
    if not finished:
        return f"None of {len(runs)} runs has learned all its tasks yet"
    best = max(finished, key=lambda index: runs[index].matrix.average_accuracy())
    of_which = "" if len(finished) == len(runs) else f", {len(finished)} of them finished,"
    name, result = labels(runs)[best], _result(runs[best])
    return f"Of {len(runs)} runs{of_which} the best on average is {name}: {result}"


def one_stream(runs: Sequence[Run]) -> bool:
    return len({run.stream for run in runs}) == 1


def labels(runs: Sequence[Run]) -> list[str]:
    """A short name for each run: its method, and as many settings as it takes to tell runs of the
    same method apart."""
    names = [run.method if one_stream(runs) else f"{run.method} on {run.stream}" for run in runs]
    configs = [settings(run.config) for run in runs]
    added: list[tuple[str, ...]] = [()] * len(runs)
    for key in dict.fromkeys(key for config in configs for key in config):
        known = list(zip(names, added, strict=True))
        longer = [
            (*extras, f"{key} {config[key]}")
            if known.count((name, extras)) > 1 and config.get(key, NOTHING) != NOTHING
            else extras
            for name, extras, config in zip(names, added, configs, strict=True)
        ]
        if len(set(zip(names, longer, strict=True))) > len(set(known)):
            added = longer
    full = [
        f"{name} ({', '.join(extras)})" if extras else name
        for name, extras in zip(names, added, strict=True)
    ]
    return [
        f"{name} #{full[: index + 1].count(name)}" if full.count(name) > 1 else name
        for index, name in enumerate(full)
    ]


def settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Every setting of a run as text, those of the recipe on the same level as the others."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if key == "versions" and isinstance(value, dict):
            flat |= {f"{name} version": plain(version) for name, version in value.items()}
        elif isinstance(value, dict):
            inner = {key if name == "name" else name: entry for name, entry in value.items()}
            flat |= {name: plain(entry) for name, entry in inner.items()}
        elif key != "task_names":
            flat[key] = plain(value)
    return flat


def plain(value: Any) -> str:
    if value is None or value == "":  # such as no teacher
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(plain(entry) for entry in value)
    return str(value)


def so_far(name: str, run: Run) -> str:
    """A run's name next to its results, with its progress if it is not finished."""
    return name if run.finished else f"{name}, {_tasks(run)}"


def _tasks(run: Run) -> str:
    done = len(run.tasks)
    if not run.finished:
        return f"{done} of {run.asked} tasks"
    return "1 task" if done == 1 else f"{done} tasks"


def _result(run: Run) -> str:
    average = percent(run.matrix.average_accuracy())
    return f"{average} % on average, forgetting {percent(run.matrix.forgetting())}"
