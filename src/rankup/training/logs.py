"""Curves of training where people watch them: TensorBoard, Weights & Biases or MLflow."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from rankup.errors import RankupError

if TYPE_CHECKING:
    from rankup.training.checkpoint import Checkpoint
    from rankup.training.loop import Epoch

FOLDER = "logs"  # of the command line's logs

_PROJECT = "rankup"


class Tool(StrEnum):
    tensorboard = "tensorboard"
    wandb = "wandb"
    mlflow = "mlflow"


_EXTRAS = {Tool.tensorboard: "log", Tool.wandb: "wandb", Tool.mlflow: "mlflow"}


def check_tool(tool: Tool | str) -> Tool:
    """The tool of that name; refused if its package is missing."""
    if tool not in [*Tool]:
        raise RankupError(f"a log is for one of {', '.join(Tool)}, got {tool!r}")
    tool = Tool(tool)
    if find_spec(tool.value) is None:
        raise RankupError(
            f"a log for {tool} needs the package {tool}: pip install 'rankup[{_EXTRAS[tool]}]'"
        )
    return tool


class Log:
    """Writes curves for a tool; `fit` takes it as `on_epoch`, for any number of tasks.

    >>> import rankup
    >>> net = rankup.grow(rankup.models.mlp(64, hidden=[32]), rankup.Rank(4, 1))
    >>> with rankup.Log("tensorboard", "logs", name="digits") as log:  # doctest: +SKIP
    ...     for task in rankup.data.make_stream("s-digits"):
    ...         rankup.fit(net, task, on_epoch=log)
    ...         log.scalars({"accuracy": rankup.accuracy(net, task)}, step=len(net.tasks))

    Args:
        tool: tensorboard, wandb or mlflow.
        folder: where it writes: TensorBoard's files to a folder of the name in it, those of
            Weights & Biases and MLflow beside those of others. What these read from their own
            variables, such as WANDB_MODE and MLFLOW_TRACKING_URI, counts first.
        name: the run's.
        settings: shown beside the curves.
    """

    def __init__(
        self,
        tool: Tool | str,
        folder: str | os.PathLike[str] = FOLDER,
        *,
        name: str = "rankup",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        tool = check_tool(tool)
        try:
            self._writer = _WRITERS[tool](Path(folder), name, dict(settings or {}))
        except Exception as error:  # each has errors of its own, such as of a missing login
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise RankupError(f"{tool} cannot begin a log: {reason}") from error

    def __call__(self, epoch: Epoch, checkpoint: Checkpoint) -> None:
        """Write the loss of an epoch, in the curve of its task."""
        assert checkpoint.origin is not None
        self.scalars({f"loss/{checkpoint.origin.task}": epoch.loss}, step=epoch.number)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write a point of each curve."""
        self._writer.scalars(values, step)

    def close(self) -> None:
        """Write what is left, and end the run."""
        self._writer.close()

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()


class _Writer(Protocol):
    def __init__(self, folder: Path, name: str, settings: dict[str, Any]) -> None: ...

    def scalars(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class _TensorBoard:
    def __init__(self, folder: Path, name: str, settings: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(folder / name)
        if settings:
            lines = (f"    {key}: {value}" for key, value in settings.items())
            self._writer.add_text("settings", "\n".join(lines))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, folder: Path, name: str, settings: dict[str, Any]) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=name,
            dir=str(folder),
            config=settings,
            settings=wandb.Settings(silent=True),
            reinit="create_new",  # several may be open, as with several seeds
        )
        # Its own steps may only grow, but each task begins with its first epoch.
        self._run.define_metric("*", step_metric="step")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, folder: Path, name: str, settings: dict[str, Any]) -> None:
        from mlflow import MlflowClient

        folder.mkdir(parents=True, exist_ok=True)
        own = f"sqlite:///{folder.absolute() / 'mlflow.db'}"
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or own)
        wanted = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        known = self._client.get_experiment_by_name(wanted)
        experiment = known.experiment_id if known else self._client.create_experiment(wanted)
        self._run = self._client.create_run(experiment, run_name=name).info.run_id
        for key, value in settings.items():
            self._client.log_param(self._run, key, value)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for key, value in values.items():
            # Other signs it refuses.
            self._client.log_metric(self._run, re.sub(r"[^\w./ -]", "_", key), value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run)


_WRITERS: dict[Tool, type[_Writer]] = {
    Tool.tensorboard: _TensorBoard,
    Tool.wandb: _Wandb,
    Tool.mlflow: _MLflow,
}
