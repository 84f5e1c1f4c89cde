"""Turning a request into runs, with their device, streams, settings and folders; and `rankup.run`,
which learns a stream from Python."""

import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rankup.data.heldout import hold_out
from rankup.data.streams import STREAMS, Stream, make_stream
from rankup.data.transforms import check_pad
from rankup.errors import RankupError
from rankup.methods import method_options
from rankup.methods.base import Method
from rankup.methods.settings import Settings, apart, settings_for, variant_of
from rankup.rank import parse_rank
from rankup.runs.folder import RunConfig
from rankup.runs.nets import as_made, wanted_inputs
from rankup.runs.records import CONFIG, no_setting, read_config, setting
from rankup.runs.request import PUBLISHED_RANK, RANKS, WIDTHS, Device, Request, check_net
from rankup.runs.run import learn_run
from rankup.runs.seed_run import OnProgress, SeedRun, versions
from rankup.training.batches import why_unturnable
from rankup.training.fit import data_traits
from rankup.training.recipe import Recipe, recipe_for
from rankup.utils.torch_modes import learning_on

# Fields of a request that `run` takes as keywords.
_REQUESTED = {"net", "width", "rank", "seeded", "tasks", "recipe", "data", "download"}
_REQUESTED |= {"device", "threads", "pretrained", "per_class", "untold"}
# Settings that only the method rank has a use for.
_OF_FACTORS = {"rank", "seeded", "selectors", "factors", "first_factors"}

_QUEUES = 32  # of a GPU: the most that a process can have
_ALL_QUEUES = 96  # of all processes: twelve of them ran with eight each, but not with 32 each


class Launch:
    """Makes the runs of a request, for one method after another. Streams are made once for all.

    Args:
        at_once: how many runs there will be at the same time; by default one for each seed.
        stream: the stream of the only seed; by default it is made by name.

    Attributes:
        device: the name of the device, with `auto` resolved.
        width, rank: the request's, or the network's defaults.
        tasks: how many tasks each run learns.
    """

    def __init__(
        self, request: Request, at_once: int | None = None, stream: Stream | None = None
    ) -> None:
        # Without this, matrix products in several CUDA streams are not deterministic.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        share_queues(1)
        self.request, self.at_once = request, at_once or request.seeds
        self.width = request.width or WIDTHS.get(request.net, 0)
        self.rank = request.rank or RANKS.get(request.net, PUBLISHED_RANK)
        rule = parse_rank(self.rank, request.seeded)
        self._learns_factors = bool(rule.first or rule.step)
        self.device = chosen_device(request.device, request.on is not None)
        # Worker processes make their streams themselves, because sending them takes longer. The
        # nodes of a cluster may not have the data, so to them streams are sent.
        self._keeps_streams = self.at_once == 1 or self.device == "cuda" or bool(request.on)
        self._names = dict[int, list[str]]()
        self._data = dict[int, str]()
        self._made = dict[int, Stream]()
        self._inputs = wanted_inputs(request.net, request.pretrained)
        whole = stream or self._stream(request.seed, request.download)
        self._shape = whole[0].train_x.shape[1:]
        self._unturnable = why_unturnable(whole[0])
        made = as_made(self._inputs, whole[0])
        self._preprocessing = None if made is None else made.to_json()
        # Before holding out, so that trials match later runs.
        self._facts = data_traits(whole.tasks)
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
        options: Mapping[str, Any],
        folders: Mapping[int, Path | None],
        *,
        settings: Settings | None = None,
    ) -> list[SeedRun]:
        """A method's runs, one for each seed.

        Args:
            options: the method's own options, as far as they were given.
            folders: a folder for each seed; None to write nothing.
            settings: the method's settings; by default those of `settings_for`.
        """
        asked = self.request
        if settings is None and asked.is_complete:
            settings = Settings({}, {})
        elif settings is None:
            variant = variant_of(method, self.rank, options)
            settings = settings_for(method, asked.stream, asked.net, asked.recipe, variant)
        recipe = replace(self._recipe(method), **{**settings.recipe, **asked.recipe_options})
        all_options = method_options(method, {**settings.options, **options})
        if recipe.crop:
            check_pad(recipe.crop, self._shape)
        if recipe.rotations:
            self._refuse_rotations(method)
        return [
            SeedRun(
                RunConfig(
                    stream=asked.stream,
                    method=method,
                    options=asdict(all_options),
                    net=asked.net,
                    width=self.width,
                    rank=self.rank,
                    seeded=asked.seeded,
                    tasks=self.tasks,
                    seed=seed,
                    device=self.device,
                    threads=_threads(asked, out, alone=self.at_once == 1),
                    recipe={"name": asked.recipe, **asdict(recipe)},
                    task_names=self._names[seed],
                    versions=versions(),
                    held_out=asked.held_out,
                    data=self._data[seed],
                    tasks_in_stream=self._tasks_in_stream,
                    inputs=list(self._shape),
                    pretrained=asked.pretrained,
                    per_class=asked.per_class,
                    preprocessing=self._preprocessing,
                    untold=asked.untold,
                ),
                self._made.get(seed),
                out,
                asked.resume,
                asked.data,
            )
            for seed, out in folders.items()
        ]

    def _stream(self, seed: int, download: bool = False) -> Stream:
        asked = self.request
        return make_stream(
            asked.stream,
            tasks=asked.tasks,
            seed=seed,
            data=asked.data,
            download=download,
            inputs=self._inputs,
            per_class=asked.per_class,
        )

    def _note(self, seed: int, whole: Stream) -> None:
        """Record the task names and the checksum of a seed's stream, and keep it if it is used."""
        learned = self._part_to_learn(whole, seed)
        self._names[seed] = [task.name for task in learned]
        self._data[seed] = fingerprint(learned)
        if self._keeps_streams:
            self._made[seed] = learned

    def _part_to_learn(self, whole: Stream, seed: int) -> Stream:
        """The first tasks of a stream, without the samples that are held out."""
        count, share = self.request.first, self.request.held_out
        learned = whole.first(count) if count else whole
        return hold_out(learned, share, seed) if share else learned

    def _refuse_rotations(self, method: str) -> None:
        """Refuse methods other than rank, and streams whose inputs cannot be rotated."""
        if method != "rank":
            raise RankupError(f"rotations are for the method rank, {method} does not learn them")
        if self._unturnable is not None:
            raise RankupError(self._unturnable)

    def _recipe(self, method: str) -> Recipe:
        """The recipe on top of which a method's own settings come."""
        return recipe_for(
            self.request.base_recipe,
            **self._facts,
            net=self.request.net,
            learns_factors=method != "rank" or self._learns_factors,
            kept=method == "rank" and self.request.pretrained,
            device=self.device,
        )


def share_queues(processes: int) -> None:
    """Set how many queues of the GPU this process uses, when this many processes share it.

    Under NVIDIA's MPS the default is two, with which five seeds of a deep network wait for each
    other. With 32 for each of twelve processes the GPU runs out of them and fails.
    """
    queues = min(_QUEUES, max(1, _ALL_QUEUES // processes))
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(queues))


def share_cores(processes: int) -> None:
    """Set the share of a GPU's cores that this process uses, when this many processes share it
    under NVIDIA's MPS.

    A kernel that can spread over all cores keeps those of other processes from running beside it.
    Twelve processes with a quarter each ran 2.4 times as many small products per second as with
    all. Not for networks that fill a GPU, which compute in bfloat16: with shares of 40 and 60 % of
    an H200 its products were wrong or NaN; with tf32 they were right.
    """
    os.environ.setdefault("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", str(min(100, 300 // processes)))


def fingerprint(stream: Stream) -> str:
    """A checksum of all samples of the user's own data set; empty for built-in streams, whose data
    do not change."""
    if stream.name in STREAMS:
        return ""
    checksum = 0
    for task in stream:
        for tensor in (task.train_x, task.train_y, task.test_x, task.test_y):
            content = tensor.cpu().contiguous().flatten().view(torch.uint8)
            checksum = zlib.crc32(content.numpy().data, checksum)
    return f"{checksum:08x}"


def chosen_device(asked: Device, elsewhere: bool = False) -> str:
    """The name of the device to compute on.

    Args:
        elsewhere: whether runs are sent to a cluster, whose GPUs torch does not see here.
    """
    if asked is Device.cuda and not elsewhere and not can_compute_on("cuda"):
        raise RankupError("--device cuda was asked for, but torch sees no GPU")
    if asked is Device.auto:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked.value


def can_compute_on(device: str) -> bool:
    """Whether this process can compute on a device; on a cluster others may."""
    return device != "cuda" or torch.cuda.is_available()


def _threads(asked: Request, out: Path | None, alone: bool) -> int:
    """The number of threads of a run. A resumed one keeps the number that it was started with, on
    which its exact results depend. An MLP gets at most two, as its steps are too small for more,
    and each of several runs gets one.

    Args:
        alone: whether there are no other runs at the same time.
    """
    if asked.resume and out and (out / CONFIG).exists():
        before = _threads_before(out / CONFIG)
        if asked.threads not in (None, before):
            raise RankupError(
                f"{out} was started with threads {before}, not {asked.threads}, on which exact "
                "results depend: continue without --threads"
            )
        return before
    most = torch.get_num_threads()
    helpful = most if asked.net != "mlp" else min(2, most)
    return asked.threads or (helpful if alone else 1)


def _threads_before(path: Path) -> int:
    """The number of threads in a run's settings, which must not be missing or invalid."""
    expected = "a whole number of at least 1"
    threads: int = setting(path, read_config(path), "threads", int, expected)
    if threads < 1:
        raise no_setting(path, "threads", threads, expected)
    return threads


@dataclass(frozen=True)
class RunResult:
    """The result of `rankup.run`.

    Attributes:
        tasks: the names of the tasks learned.
        accuracy: a row per task learned: the accuracy on every task up to it, from 0 to 1.
        average_accuracy: the mean of the last row.
        untold: for each task learned, results without being told the task: `"accuracy"` and the
            share of right `"tasks"`, for every task up to it; None without `untold=True`.
        forgetting: how much accuracy tasks have lost on average since each was learned.
        parameters: how many float32 numbers the method stores.
        buffer: how many numbers it stores of samples to replay.
        seconds: how long each task took.
        method: the method itself; `method.predict(x, task)` answers for the task with that index,
            and the rank update has its network in `method.net`.
    """

    tasks: list[str]
    accuracy: list[list[float]]
    average_accuracy: float
    forgetting: float
    parameters: float
    buffer: float
    seconds: list[float]
    method: Method
    untold: list[dict[str, list[float]]] | None = None


def run(
    method: str = "rank",
    stream: str | Stream = "p-digits",
    *,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    on_progress: OnProgress | None = None,
    **settings: Any,
) -> RunResult:
    """Learn a stream with any method, as the command `rankup run` does.

    >>> import rankup
    >>> result = rankup.run("ewc", "s-digits", epochs=2, strength=10.0, width=16)
    >>> [len(row) for row in result.accuracy]
    [1, 2, 3, 4, 5]

    Args:
        method: its name; `rankup methods` lists them.
        stream: the name of a stream, see `rankup streams`, or a `rankup.data.Stream`.
        seed: the seed of all randomness.
        out: a folder to write, as by the command; by default nothing is written.
        resume: whether to continue the run in that folder.
        on_progress: called now and then with the task, the epoch, the loss and the accuracy.
        settings: anything else that the command takes, by the same names: the net and its width,
            the rank, the number of tasks, fields of the recipe (`rankup.Recipe`), the method's own
            options.
    """
    request, options = _as_request(stream, settings, seed=seed, resume=resume)
    if method != "rank" and (factors := settings.keys() & _OF_FACTORS):
        raise RankupError(f"{min(factors)} is for the method rank, {method} has no factors")
    method_options(method, options)
    made = stream if isinstance(stream, Stream) else None
    folder = None if out is None else Path(out)
    (seed_run,) = Launch(request, stream=made).of(method, options, {seed: folder})
    threads = torch.get_num_threads()
    try:
        with learning_on(torch.device(seed_run.config.device)):
            seed_run.check()
            seed_run.warn_if_capped()
            learn_run(seed_run, on_progress)
    finally:
        torch.set_num_threads(threads)
    lines, matrix = seed_run.lines, seed_run.matrix
    return RunResult(
        tasks=[line["task"] for line in lines],
        accuracy=matrix.rows,
        average_accuracy=matrix.average_accuracy(),
        forgetting=matrix.forgetting(),
        parameters=lines[-1]["parameters"],
        buffer=lines[-1]["buffer"],
        seconds=[line["seconds"] for line in lines],
        method=seed_run.method,
        untold=[line["untold"] for line in lines] if request.untold else None,
    )


def _as_request(
    stream: str | Stream, settings: Mapping[str, Any], **others: Any
) -> tuple[Request, dict[str, Any]]:
    """Split settings into a request and the method's own options."""
    asked = {name: value for name, value in settings.items() if name in _REQUESTED}
    recipe, options = apart({k: v for k, v in settings.items() if k not in asked})
    if isinstance(stream, Stream) and asked.get("tasks") is not None:
        raise RankupError("tasks is for a stream that is named, not for one that is made")
    check_net(asked.get("net", "mlp"))
    if asked.get("device", Device.auto) not in list(Device):
        raise RankupError(f"device must be one of {', '.join(Device)}, got {asked['device']!r}")
    asked |= {"device": Device(asked["device"])} if "device" in asked else {}
    if asked.get("data") is not None:
        asked["data"] = Path(asked["data"])
    name = stream.name if isinstance(stream, Stream) else stream
    return Request(name, recipe_options=dict(recipe), **asked, **others), dict(options)
