"""Comparing several methods on one stream. They run one after another; if one fails, the others
still run.

compare.json   the common settings, the methods and seeds, and why any methods failed
METHOD/seed-K  a run folder for each
"""

import gc
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from rankup.errors import RankupError, want_of_memory
from rankup.methods import method_info
from rankup.runs.comparison import (
    INDEX,
    Index,
    read_entry,
    read_index,
    seed_folder,
)
from rankup.runs.folder import RunError, check_folder, holds_anything, in_words, working_in
from rankup.runs.launch import Launch
from rankup.runs.many_seeds import groups_on_ray, run_seeds
from rankup.runs.process_pool import ProcessPool
from rankup.runs.ray_pool import RayPool
from rankup.runs.read import spread
from rankup.runs.seed_run import Progress, SeedRun
from rankup.storage.atomic import write_json
from rankup.storage.seal import sealed

TRACEBACK = "traceback.txt"  # in the folder of a method that failed unexpectedly

_LONGEST = 200  # characters of the message of an unexpected error


class Watch(Protocol):
    """Shows the progress of methods that run one after another."""

    def begin(self, method: str, learned: Mapping[int, int]) -> None: ...

    def show(self, now: Progress) -> None: ...

    def end(self) -> None: ...


class WatchAll(Protocol):
    """Shows the progress of runs that learn at the same time, by their names."""

    def show(self, name: str, tasks: int, now: Progress, /) -> None: ...

    def end(self, name: str, /) -> None: ...


class MethodRuns:
    """The runs of several methods in a folder, in which they begin or continue. Raises an error if
    they cannot, before anything is run or written.

    Args:
        launch: makes the runs.
        methods: the names of the methods.
        root: the folder.
        options: method options that were given, for all methods that have them.

    Attributes:
        index: the content of the folder's index.
        runs: the runs of each method, one per seed.
    """

    def __init__(
        self,
        launch: Launch,
        methods: Sequence[str],
        root: Path,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.root = root
        by_method = _by_method(methods, options or {})
        self._open = partial(_open, _asked(launch) | dict(options or {}), launch, methods, root)
        self.index = self._open()
        self.runs = {
            method: launch.of(
                method,
                by_method[method],
                {seed: seed_folder(root, method, seed) for seed in launch.seeds},
            )
            for method in methods
        }
        for run in (run for runs in self.runs.values() for run in runs):
            check_folder(run.config, run.folder, run.resume)

    @property
    def unfinished(self) -> dict[str, list[SeedRun]]:
        """The runs that have tasks left to learn, by method."""
        going = {
            method: [run for run in runs if run.unfinished] for method, runs in self.runs.items()
        }
        return {method: runs for method, runs in going.items() if runs}

    def run(self, watch: Watch, note: Callable[[str], None]) -> None:
        """Run all unfinished runs, method after method, and report each method's result.

        Args:
            watch: shows the progress.
            note: called with messages for the user.
        """
        with self._working(), ProcessPool() as pool:
            for method, runs in self.unfinished.items():
                self._begin(method)
                watch.begin(method, {run.config.seed: run.learned for run in runs})
                try:
                    failures = run_seeds(runs, on_progress=watch.show, note=note, pool=pool)
                    why = self._why(method, failures)
                except Exception as error:
                    why = failure_in_one_line(error, self.root / method)
                watch.end()
                self._end(method, why, note)
                release(method, runs[0].config.device)

    def run_on(self, pool: RayPool, watch: WatchAll, note: Callable[[str], None]) -> None:
        """Like `run`, but on a Ray cluster, with all methods at once."""
        with self._working():
            left, failures = self.unfinished, dict[SeedRun, str]()
            method_of = {run: method for method, runs in left.items() for run in runs}
            ended = set[SeedRun]()
            for method in left:
                self._begin(method)

            def name(run: SeedRun) -> str:
                return f"{method_of[run]}, seed {run.config.seed}"

            def hear(run: SeedRun, said: Progress | str) -> None:
                if isinstance(said, str):
                    note(f"{name(run)}: {said}")
                else:
                    watch.show(name(run), run.config.tasks, said)

            with closing(groups_on_ray(list(method_of), pool, hear)) as groups:
                for runs, outcome in groups:
                    method = method_of[runs[0]]
                    if isinstance(outcome, Exception):
                        why = failure_in_one_line(outcome, self.root / method)
                        outcome = dict.fromkeys(runs, why)
                    failures |= outcome
                    ended.update(runs)
                    for run in runs:
                        watch.end(name(run))
                    if ended.issuperset(left[method]):
                        failed = {run: failures[run] for run in left[method] if run in failures}
                        self._end(method, self._why(method, failed), note)

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Inside, the folder is locked, so that no other process writes to it."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot write to {self.root}: {error.strerror}") from error
        with working_in([self.root]):
            self.index = self._open()  # another process may have changed it by now
            self._write()
            yield

    def _begin(self, method: str) -> None:
        self.index.failed.pop(method, None)
        (self.root / method / TRACEBACK).unlink(missing_ok=True)

    def _end(self, method: str, why: str, note: Callable[[str], None]) -> None:
        """Record that a method has ended.

        Args:
            why: why it failed; empty if it did not.
        """
        if why:
            self.index.failed[method] = why
        self._write()
        note(f"{method} failed: {why}" if why else self._result(method))

    def _why(self, method: str, failures: Mapping[SeedRun, str]) -> str:
        """Why a method failed, by its seeds that did; empty if none did."""
        reasons = [f"seed {run.config.seed}: {why}" for run, why in failures.items()]
        if len(self.runs[method]) == 1:
            reasons = list(failures.values())
        more = f" (and {len(reasons) - 1} more {'seed' if len(reasons) == 2 else 'seeds'})"
        return reasons[0] + more * (len(reasons) > 1) if reasons else ""

    def _result(self, method: str) -> str:
        entry = read_entry(self.root, self.index, method)
        return (
            f"{method}: accuracy {spread(entry.accuracy)} %, forgetting {spread(entry.forgetting)}"
        )

    def _write(self) -> None:
        try:
            write_json(self.root / INDEX, sealed(asdict(self.index)))
        except OSError as error:
            raise RunError(f"cannot write to {self.root}: {error.strerror}") from error


def _by_method(methods: Sequence[str], options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The given options by method, each with those that it has."""
    by_method = {
        method: {
            item.name: options[item.name]
            for item in fields(method_info(method).options)
            if item.name in options
        }
        for method in methods
    }
    for name in options:
        if not any(name in known for known in by_method.values()):
            flag = name.replace("_", "-")
            raise RankupError(f"none of {', '.join(methods)} has an option --{flag}")
    return by_method


def _open(asked: Mapping[str, Any], launch: Launch, methods: Sequence[str], root: Path) -> Index:
    """The index of a new comparison, or that of a resumed one with the methods and seeds added."""
    index = Index(
        asked=dict(asked),
        seeds=list(launch.seeds),
        methods={method: method_info(method).continual for method in methods},
        failed={},
    )
    if not (root / INDEX).exists():
        if root.exists() and not root.is_dir():
            raise RunError(f"{root} is a file, not a folder: name a folder with --out")
        if root.exists() and holds_anything(root):
            raise RunError(f"{root} holds other files: name a new folder with --out")
        return index
    if not launch.request.resume:
        raise RunError(f"{root} already holds a comparison: add --resume to continue it, or --out")
    stored = read_index(root)
    for name in {**index.asked, **stored.asked}:
        before, now = stored.asked.get(name), index.asked.get(name)
        if before != now:
            raise RunError(
                f"{root} was started with {name} {in_words(before)}, not {in_words(now)}: "
                "continue with the same options, or start a new comparison with --out"
            )
    # A comparison may go on with more seeds and other methods.
    return Index(
        asked=index.asked,
        seeds=sorted({*stored.seeds, *index.seeds}),
        methods={**stored.methods, **index.methods},
        failed=stored.failed,
    )


def _asked(launch: Launch) -> dict[str, Any]:
    """The settings that all methods have in common."""
    request = launch.request
    return {
        "stream": request.stream,
        "net": request.net,
        "width": launch.width,
        "rank": launch.rank,
        "seeded": request.seeded,
        "tasks": launch.tasks,
        "device": launch.device,
        "recipe": request.recipe,
        **({"pretrained": True} if request.pretrained else {}),
        **({"per_class": request.per_class} if request.per_class else {}),
        **request.recipe_options,
    }


def failure_in_one_line(error: Exception, folder: Path) -> str:
    """A message for an error. The traceback of an unexpected error is written to the folder."""
    if isinstance(error, RankupError):
        return str(error)
    if sentence := want_of_memory(error):
        return sentence
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(traceback.format_exception(error))
    (folder / TRACEBACK).write_text(text, "utf-8", "backslashreplace")  # names may hold any bytes
    first = next(iter(str(error).strip().splitlines()), "")
    name = type(error).__name__
    what = f"{name}: {first[:_LONGEST]}" if first else name
    return f"{what} (see {folder / TRACEBACK})"


def release(what: str, device: str, again: str = "the same command with --resume") -> None:
    """Free the device memory that a run has used, because the next one may need all of it.

    Args:
        what: what has run, for the error message.
        again: the command that continues, for the error message.
    """
    gc.collect()
    if device == "cuda":
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            raise RankupError(
                f"the GPU has not responded since {what} failed; run {again} to continue, "
                f"without {what} if it fails again"
            ) from None
