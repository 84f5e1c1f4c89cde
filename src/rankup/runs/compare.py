"""Several methods on one stream, one after another; if one fails, the others still run.

compare.json   what was asked for, with which methods and seeds, and why any methods failed
METHOD/seed-K  a run folder for each
"""

import gc
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from rankup.errors import RankupError, want_of_memory
from rankup.methods import method_info
from rankup.report.text import spread
from rankup.runs.comparison import (
    INDEX,
    Index,
    read_entry,
    read_index,
    seed_folder,
)
from rankup.runs.folder import RunError, check_folder, holds_anything, in_words, working_in
from rankup.runs.launch import Launch
from rankup.runs.many_seeds import Seed, run_seeds
from rankup.runs.records import read_lines
from rankup.runs.run import Progress
from rankup.storage.atomic import write_json

TRACEBACK = "traceback.txt"  # in the folder of a method that failed unexpectedly

_LONGEST = 200  # characters of an error message that is not ours


class Watch(Protocol):
    """An observer of the runs."""

    def begin(self, method: str, learned: Mapping[int, int]) -> None: ...

    def show(self, now: Progress) -> None: ...

    def end(self) -> None: ...


class MethodRuns:
    """A folder in which runs of several methods begin or go on; if they cannot, it is refused
    before anything is run or written.

    Args:
        options: method options that were given, for all methods that have them.
    """

    def __init__(
        self,
        launch: Launch,
        methods: Sequence[str],
        root: Path,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.root = root
        own = _own_options(methods, options or {})
        self._open = partial(_open, _asked(launch) | dict(options or {}), launch, methods, root)
        self.index = self._open()
        self.runs = {
            method: launch.of(
                method,
                own[method],
                {seed: seed_folder(root, method, seed) for seed in launch.seeds},
            )
            for method in methods
        }
        for seed in (seed for seeds in self.runs.values() for seed in seeds):
            check_folder(seed.config, seed.out, seed.resume)

    @property
    def unfinished(self) -> dict[str, list[Seed]]:
        """The runs that still have something to learn, by method."""
        going = {
            method: [seed for seed in seeds if len(read_lines(seed.out)) < seed.config.tasks]
            for method, seeds in self.runs.items()
        }
        return {method: seeds for method, seeds in going.items() if seeds}

    def run(self, watch: Watch, note: Callable[[str], None]) -> None:
        """Run what is unfinished, and report each method's result. The folder is locked meanwhile,
        so that no other process writes to it."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot write to {self.root}: {error.strerror}") from error
        with working_in([self.root]):
            self.index = self._open()  # another process may have changed it by now
            self._write()
            self._run_all(watch, note)

    def _run_all(self, watch: Watch, note: Callable[[str], None]) -> None:
        for method, seeds in self.unfinished.items():
            watch.begin(method, {seed.config.seed: len(read_lines(seed.out)) for seed in seeds})
            self.index.failed.pop(method, None)
            (self.root / method / TRACEBACK).unlink(missing_ok=True)
            if why := self._run(method, seeds, watch, note):
                self.index.failed[method] = why
            self._write()
            watch.end()
            note(f"{method} failed: {why}" if why else self._result(method))
            release(method, seeds[0].config.device)

    def _run(
        self, method: str, seeds: Sequence[Seed], watch: Watch, note: Callable[[str], None]
    ) -> str:
        """Run a method's seeds; return why it failed, if it did."""
        try:
            failures = run_seeds(seeds, on_progress=watch.show, note=note)
        except Exception as error:
            return failure_in_one_line(error, self.root / method)
        told = [f"seed {seed}: {why}" for seed, why in failures.items()]
        if len(self.runs[method]) == 1:
            told = list(failures.values())
        more = f" (and {len(told) - 1} more {'seed' if len(told) == 2 else 'seeds'})"
        return told[0] + more * (len(told) > 1) if told else ""

    def _result(self, method: str) -> str:
        entry = read_entry(self.root, self.index, method)
        return (
            f"{method}: accuracy {spread(entry.accuracy)} %, forgetting {spread(entry.forgetting)}"
        )

    def _write(self) -> None:
        try:
            write_json(self.root / INDEX, asdict(self.index))
        except OSError as error:
            raise RunError(f"cannot write to {self.root}: {error.strerror}") from error


def _own_options(methods: Sequence[str], given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The given options, sorted by the methods that have them."""
    own = {
        method: {
            item.name: given[item.name]
            for item in fields(method_info(method).options)
            if item.name in given
        }
        for method in methods
    }
    for name in given:
        if not any(name in options for options in own.values()):
            flag = name.replace("_", "-")
            raise RankupError(f"none of {', '.join(methods)} has an option --{flag}")
    return own


def _open(asked: Mapping[str, Any], launch: Launch, methods: Sequence[str], root: Path) -> Index:
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
    """What is asked of all methods alike."""
    request = launch.request
    return {
        "stream": request.stream,
        "net": request.net.value,
        "width": launch.width,
        "rank": launch.rank,
        "seeded": request.seeded,
        "tasks": launch.tasks,
        "device": launch.device,
        "recipe": request.recipe,
        **request.recipe_options,
    }


def failure_in_one_line(error: Exception, folder: Path) -> str:
    """Why something failed; an unexpected error leaves its traceback in the folder."""
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
    """Free the device memory a run left behind: the next one may need all of it."""
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
