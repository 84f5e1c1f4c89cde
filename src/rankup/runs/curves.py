"""Curves of a run in a tool such as TensorBoard."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rankup.runs.folder import RunConfig
from rankup.training.checkpoint import Checkpoint
from rankup.training.logs import Log, Tool
from rankup.training.loop import Epoch


class Curves:
    """Draws a run's curves, if it has a tool for it. The log is opened at the first point.

    Args:
        tool: the tool; None to draw nothing.
        config: the run's settings, which the log records.
        out: the run's folder, which names the log.
    """

    def __init__(self, tool: Tool | None, config: RunConfig, out: Path | None) -> None:
        self._tool, self._config, self._out = tool, config, out
        self._log: Log | None = None

    @property
    def log(self) -> Log | None:
        """The log, named after the run's folder, with its settings."""
        if self._log is None and self._tool is not None and self._out is not None:
            settings = {**asdict(self._config), **self._config.recipe}
            shown = {k: v for k, v in settings.items() if isinstance(v, str | int | float)}
            name = "/".join(self._out.absolute().parts[-2:])
            self._log = Log(self._tool, name=name, settings=shown)
        return self._log

    def epoch(self, epoch: Epoch, checkpoint: Checkpoint) -> None:
        if self.log is not None:
            self.log(epoch, checkpoint)

    def task(self, lines: Sequence[dict[str, Any]]) -> None:
        """Draw the results after a task, from the lines of all tasks learned."""
        if self.log is not None:
            self.log.scalars(_scalars(lines), len(lines))

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


@contextmanager
def closed_in_the_end(curves: Iterable[Curves]) -> Iterator[None]:
    try:
        yield
    finally:
        for each in curves:
            each.close()


def _scalars(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The last line's results by the names of their curves."""
    last = lines[-1]
    tasks = (line["task"] for line in lines)
    tested = {f"accuracy/{name}": a for name, a in zip(tasks, last["accuracy"], strict=True)}
    drawn = tested | {key: last[key] for key in ("average_accuracy", "forgetting")}
    return {key: value for key, value in drawn.items() if value is not None}
