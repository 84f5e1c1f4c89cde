"""From a command-line request to runs of seeds: the device, streams, settings, folders."""

import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from rankup.data.heldout import hold_out
from rankup.data.streams import OWN, Stream, make_stream
from rankup.data.transforms import check_pad
from rankup.errors import RankupError
from rankup.methods import method_options
from rankup.methods.settings import Settings, settings_for, variant_of
from rankup.rank import parse_rank
from rankup.runs.folder import RunConfig
from rankup.runs.many_seeds import Seed
from rankup.runs.records import CONFIG, no_setting, read_config, setting
from rankup.runs.request import Device, Net, Request
from rankup.runs.run import versions
from rankup.training.fit import facts_of
from rankup.training.recipe import Recipe, recipe_for

_QUEUES = 32  # the most that a process can have
_ALL_QUEUES = 96  # for all processes together: twelve ran with eight each, none with 32 each


class Launch:
    """What all runs of one request share. Streams are made once for all methods.

    Args:
        at_once: how many runs there will be at the same time; by default one for each seed.
    """

    def __init__(self, request: Request, at_once: int | None = None) -> None:
        # Without this, matrix products in several CUDA streams are not deterministic.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        share_queues(1)
        self.request, self.at_once = request, at_once or request.seeds
        mlp = request.net is Net.mlp
        self.width = request.width or (256 if mlp else 20)
        self.rank = request.rank or ("11,1" if mlp else "0.1,0.02")
        rule = parse_rank(self.rank, request.seeded)
        self._learns_factors = bool(rule.first or rule.step)
        self.device = chosen_device(request.device)
        # Worker processes make their streams themselves: sending one would take longer.
        self._keeps_streams = self.at_once == 1 or self.device == "cuda"
        self._names = dict[int, list[str]]()
        self._data = dict[int, str]()
        self._made = dict[int, Stream]()
        whole = self._stream(request.seed, request.download)
        self._shape = whole[0].train_x.shape[1:]
        self._facts = facts_of(whole.tasks)  # before holding out, so that trials match later runs
        self._tasks_in_stream = len(whole) if request.first else None
        self._note(request.seed, whole)
        self.tasks = len(self._names[request.seed])
        for seed in self.seeds[1:]:
            self._note(seed, self._stream(seed))

    @property
    def seeds(self) -> range:
        return self.request.all_seeds

    def of(
        self,
        method: str,
        given: Mapping[str, Any],
        folders: Mapping[int, Path],
        *,
        settings: Settings | None = None,
    ) -> list[Seed]:
        """A method's runs, one for each seed, with the given options of its own, in the seeds'
        folders.

        Args:
            settings: the method's settings, if not those of `settings_for`.
        """
        asked = self.request
        if settings is None and asked.is_complete:
            settings = Settings({}, {})
        elif settings is None:
            variant = variant_of(method, self.rank, given)
            settings = settings_for(method, asked.stream, asked.net.value, asked.recipe, variant)
        chosen = replace(self._recipe(method), **{**settings.recipe, **asked.recipe_options})
        options = method_options(method, {**settings.options, **given})
        if chosen.crop:
            check_pad(chosen.crop, self._shape)
        return [
            Seed(
                RunConfig(
                    stream=asked.stream,
                    method=method,
                    options=asdict(options),
                    net=asked.net.value,
                    width=self.width,
                    rank=self.rank,
                    seeded=asked.seeded,
                    tasks=self.tasks,
                    seed=seed,
                    device=self.device,
                    threads=_threads(asked, out, alone=self.at_once == 1),
                    recipe={"name": asked.recipe, **asdict(chosen)},
                    task_names=self._names[seed],
                    versions=versions(),
                    held_out=asked.held_out,
                    data=self._data[seed],
                    tasks_in_stream=self._tasks_in_stream,
                    inputs=list(self._shape),
                ),
                asked.data,
                out,
                asked.resume,
                self._made.get(seed),
            )
            for seed, out in folders.items()
        ]

    def _stream(self, seed: int, download: bool = False) -> Stream:
        asked = self.request
        return make_stream(
            asked.stream, tasks=asked.tasks, seed=seed, data=asked.data, download=download
        )

    def _note(self, seed: int, whole: Stream) -> None:
        """Record what a seed's run has to know of its stream; keep the stream where it is used."""
        learned = self._learned(whole, seed)
        self._names[seed] = [task.name for task in learned]
        self._data[seed] = fingerprint(learned)
        if self._keeps_streams:
            self._made[seed] = learned

    def _learned(self, whole: Stream, seed: int) -> Stream:
        """The part of a stream to learn: its first tasks, without what is held out."""
        count, share = self.request.first, self.request.held_out
        part = whole.first(count) if count else whole
        return hold_out(part, share, seed) if share else part

    def _recipe(self, method: str) -> Recipe:
        """The recipe that a method's own settings override. Whether factors are only seeded matters
        to the rank update alone."""
        return recipe_for(
            self.request.base_recipe,
            **self._facts,
            net=self.request.net.value,
            learns_factors=method != "rank" or self._learns_factors,
            device=self.device,
        )


def share_queues(processes: int) -> None:
    """Get enough GPU queues for seeds that run side by side, when this many such processes use the
    GPU. Under NVIDIA's MPS the default is two, and five seeds of a deep network wait for each
    other; with 32 for each of twelve processes the GPU runs out of them and fails."""
    each = min(_QUEUES, max(1, _ALL_QUEUES // processes))
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(each))


def share_cores(processes: int) -> None:
    """Use only a share of a GPU's cores, when this many such processes use it under NVIDIA's MPS: a
    kernel that could spread over all cores keeps those of others from running beside it. Twelve
    processes with a quarter each ran 2.4 times as many small products per second as with all. Not
    for networks that fill a GPU, which compute in bfloat16: with shares of 40 and 60 % of an H200
    its products were wrong or NaN; with tf32 they were right."""
    os.environ.setdefault("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", str(min(100, 300 // processes)))


def fingerprint(stream: Stream) -> str:
    """A checksum of all samples of a data set of one's own, which may change; empty for the
    others, which do not."""
    if not stream.name.startswith(OWN):
        return ""
    sum_ = 0
    for task in stream:
        for tensor in (task.train_x, task.train_y, task.test_x, task.test_y):
            sum_ = zlib.crc32(tensor.contiguous().numpy().data, sum_)
    return f"{sum_:08x}"


def chosen_device(asked: Device) -> str:
    if asked is Device.cuda and not torch.cuda.is_available():
        raise RankupError("--device cuda was asked for, but torch sees no GPU")
    if asked is Device.auto:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked.value


def _threads(asked: Request, out: Path, alone: bool) -> int:
    """How many threads a run has: as many as before if it is resumed, because its bits depend on
    it. The steps of an MLP are too small for more than two, and several runs each get a process
    with one thread."""
    if asked.resume and (out / CONFIG).exists():
        before = _threads_before(out / CONFIG)
        if asked.threads not in (None, before):
            raise RankupError(
                f"{out} was started with threads {before}, not {asked.threads}, on which exact "
                "results depend: continue without --threads"
            )
        return before
    most = torch.get_num_threads()
    own = most if asked.net is not Net.mlp else min(2, most)
    return asked.threads or (own if alone else 1)


def _threads_before(path: Path) -> int:
    """The stored number, never a guess: a run whose settings are not all known does not go on."""
    expected = "a whole number of at least 1"
    threads: int = setting(path, read_config(path), "threads", int, expected)
    if threads < 1:
        raise no_setting(path, "threads", threads, expected)
    return threads
