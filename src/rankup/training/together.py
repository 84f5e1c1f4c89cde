"""Learning several tasks at once, on the base of one network. They cannot build on each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from rankup import seeds
from rankup.errors import RankupError, TaskStateError
from rankup.layers import RowsError, TaskNorm
from rankup.layers.substitute import reads_one_task
from rankup.net.network import IncrementalNet
from rankup.net.tasks import Uses, listed
from rankup.rank import as_whole
from rankup.training.engine.stacked import StackedBody, adopt, begun
from rankup.training.engine.together import TogetherSteps
from rankup.training.evaluate import fraction_correct, why_not_learned
from rankup.training.fit import NetPupil, check_arguments, default_recipe
from rankup.training.lanes import Lane, Samples, weights
from rankup.training.loop import SHOWN, Epoch, TaskFailed, diverged, peak_rate
from rankup.training.optim import rates
from rankup.training.recipe import Recipe
from rankup.utils.progress import can_show, progress_bar
from rankup.utils.signals import undisturbed
from rankup.utils.torch_modes import learning_on, modes_kept

if TYPE_CHECKING:
    from rankup.data.tasks import Task

OnTaskEpoch = Callable[[str, Epoch], None]

_ONE_BY_ONE = "learn its tasks one after another, with fit"
_LEAVING = 0.25  # on a GPU, the share of tasks that must be over to capture a graph without them


def fit_together(
    net: IncrementalNet,
    tasks: Iterable[Task],
    recipe: Recipe | None = None,
    *,
    uses: Uses = "own",
    seed: int | None = None,
    clip: float | None = None,
    half: bool = False,
    on_epoch: OnTaskEpoch | None = None,
    progress: bool = True,
) -> dict[str, TaskFailed]:
    """Learn several tasks at once, each as if it was learned alone; return why some failed.

    Every step runs the network's base once, on a batch with a part for each task. All else is a
    task's own: factors, selectors, biases, norms, head, the order of its samples, the optimiser's
    state, the schedule of its rate and its end. So a task ends where `fit` would end it, but for
    rounding and what dropout draws, and is stored, removed and joined like any other.

    >>> import rankup
    >>> net = rankup.grow(rankup.models.mlp(64), rankup.Rank(first=4, step=1), base="keep")
    >>> tasks = rankup.data.make_stream("s-digits")
    >>> rankup.fit_together(net, tasks, rankup.Recipe(epochs=5))
    {}
    >>> net.tasks
    ['split 01', 'split 02', 'split 03', 'split 04', 'split 05']

    A task that diverges or ends no better than guessing is abandoned, and all others are kept. The
    network itself stays as it is until the end, when the tasks are committed in the given order:
    if something stops this before, such as Ctrl-C, it knows those that were committed and no other.

    Args:
        net: a network with a kept base, or one that knows a task already.
        tasks: what to learn. Those whose inputs differ in shape or dtype share no batch.
        recipe: how; by default each task's own, as for `fit`.
        uses: from which tasks' factors all of them may select: only their `"own"`, or those of a
            list of tasks that the network knows.
        seed: for the order of samples and augmentation; by default the network's.
        clip: the largest norm of a task's gradient; longer ones are scaled down to it.
        half: whether to compute in float16, with a scale for each task's loss.
        on_epoch: called with a task's name and progress after each of its epochs.
        progress: show a bar, as `fit` does.
    """
    tasks = _checked(net, tasks, recipe, uses, clip)
    seed = net.options.seed if seed is None else as_whole("seed", seed)
    pupils = [NetPupil(net, recipe or default_recipe(net, t), seed, uses=uses) for t in tasks]
    failures = dict[str, TaskFailed]()
    shows = progress and on_epoch is None and can_show()
    title, epochs = f"learning {len(tasks)} tasks", sum(pupil.recipe.epochs for pupil in pupils)
    try:
        with (
            modes_kept(net),
            learning_on(net.device),
            progress_bar(title, epochs, shows) as advance,
        ):
            each: OnTaskEpoch | None = (lambda *_: advance(1)) if shows else on_epoch
            lanes, body = _opened(net, pupils, tasks, half)
            for group in _that_share_batches(net, lanes):
                _learn(body, group, clip, each)
            body.check_constants()
            for lane in lanes:
                lane.failure = lane.failure or _commit(lane)
                if lane.failure is not None:
                    failures[lane.task.name] = lane.failure
    finally:
        net._shared.hold_modes()
    return failures


def _checked(
    net: IncrementalNet,
    tasks: Iterable[Task],
    recipe: Recipe | None,
    uses: Uses,
    clip: float | None,
) -> list[Task]:
    if not isinstance(tasks, Iterable):
        raise RankupError(f"fit_together takes several tasks, got a {type(tasks).__name__}")
    listed_tasks = list(tasks)
    if not listed_tasks:
        raise RankupError("fit_together takes at least one task, got none")
    for task in listed_tasks:
        check_arguments("fit_together takes", net, task, recipe)
    if recipe is not None and recipe.rotations:
        raise RankupError(f"rotations are not for tasks learned at once: {_ONE_BY_ONE}")
    names = [task.name for task in listed_tasks]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise RankupError(
            f"tasks learned at once need names of their own, got {listed(twice)} twice"
        )
    if uses == "all":
        raise RankupError(
            "tasks learned at once cannot build on each other: they use their 'own' factors, or "
            "those of a list of tasks that the network knows"
        )
    if clip is not None and not 0 < clip < math.inf:
        raise RankupError(f"clip must be a positive number, got {clip!r}")
    _check_network(net)
    return listed_tasks


def _check_network(net: IncrementalNet) -> None:
    if net.ranks is not None or net.is_undecided:
        raise RankupError("fit_together runs in one process: give each its own tasks and network")
    if not net._shared.is_constant:
        raise RankupError(
            "tasks learned at once share what is constant, but this network's first task decides "
            "that: learn it with fit, or grow a module with base='keep'"
        )
    if net.options.draws == "number":
        raise RankupError(
            "tasks of a network of the first format version each use all before them: learn them "
            "one after another, with fit"
        )
    if reads_one_task(net.body):
        raise RankupError(
            "the module runs for one task at a time, as some of its parts compute with their "
            f"weights themselves: {_ONE_BY_ONE}"
        )


def _opened(
    net: IncrementalNet, pupils: Sequence[NetPupil], tasks: Sequence[Task], half: bool
) -> tuple[list[Lane], StackedBody]:
    """Begin and abandon each task in turn, to check that it can be learned and to copy its starting
    values."""
    lanes, tried, body = list[Lane](), set[object](), None
    for pupil, task in zip(pupils, tasks, strict=True):
        try:
            with undisturbed():
                pupil.open(task)
            kind, recipe = (task.train_x.shape[1:], task.train_x.dtype), pupil.recipe
            feed = pupil.prepare(task, tried=kind in tried)
            tried.add(kind)
            steps = rates(recipe, peak_rate(pupil), recipe.epochs * feed.steps_per_epoch)
            lanes.append(Lane(pupil, task, feed, begun(net), steps))
            low = torch.bfloat16 if recipe.precision == "bfloat16" else None
            body = body or StackedBody(net, torch.float16 if half else low)
        finally:
            pupil.abandon()
    assert body is not None
    return lanes, body


def _that_share_batches(net: IncrementalNet, lanes: Sequence[Lane]) -> list[list[Lane]]:
    """Groups of tasks that can share batches. With batch norms, they must have equally many samples
    in a batch: statistics would include what fills up a smaller part."""
    has_batch_norm = any(isinstance(n, TaskNorm) and n.wants_statistics for n in net.layers)
    groups: dict[object, list[Lane]] = {}
    for lane in lanes:
        x, feed = lane.feed.x, lane.feed
        transform = id(feed.task.transform) if feed.transforms_batches else None
        size = feed.batch_size if has_batch_norm else None
        key = x.shape[1:], x.dtype, transform, size, _shared_settings(lane.recipe)
        groups.setdefault(key, []).append(lane)
    return list(groups.values())


def _shared_settings(recipe: Recipe) -> Recipe:
    """A recipe with defaults for all that may differ between the tasks of a batch."""
    own = ("epochs", "batch", "lr", "first_lr", "schedule", "warmup", "weight_decay")
    starts = ("selectors", "norms", "factors", "first_factors")
    plain = Recipe()
    return replace(recipe, **{name: getattr(plain, name) for name in (*own, *starts)})


def _learn(
    body: StackedBody,
    lanes: list[Lane],
    clip: float | None,
    on_epoch: OnTaskEpoch | None,
) -> None:
    """Train a group of tasks until each is learned or has failed."""
    steps = TogetherSteps(
        body,
        [lane.start for lane in lanes],
        [lane.task.classes for lane in lanes],
        [lane.recipe for lane in lanes],
        clip=clip,
    )
    samples, at = Samples(lanes), 0
    _try(body, lanes)
    while lanes:
        count = min(lane.left_of_epoch(at) for lane in lanes if lane.learns(at))
        _run(steps, samples, lanes, at, count)
        at += count
        _end_epochs(steps, lanes, at, on_epoch)
        lanes = _without_those_that_end(steps, lanes, at)


def _try(body: StackedBody, lanes: Sequence[Lane]) -> None:
    """Raise if the module does not keep samples in the first dimension. Tried with two batch sizes,
    because another dimension may be as long as one of them by chance."""
    for few in (2, 3):
        rows = torch.arange(few, device=lanes[0].feed.device)
        found = (next(lane.feed.train(few))[0] for lane in lanes)
        x = torch.cat([each.index_select(0, rows % len(each)) for each in found])
        try:
            with seeds.seeded_rng(x.device, 0), torch.no_grad():
                body(x)
        except RowsError as error:
            raise RankupError(
                f"the module cannot run samples of several tasks in one pass ({error}): "
                f"{_ONE_BY_ONE}"
            ) from error


def _run(
    steps: TogetherSteps, samples: Samples, lanes: Sequence[Lane], at: int, count: int
) -> None:
    """Take `count` steps from step `at` on, all in one epoch of each task."""
    device, learns = lanes[0].feed.device, [lane.learns(at) for lane in lanes]
    zeros = [0.0] * count
    lr = [
        lane.rates[at : at + count] if is_learned else zeros
        for lane, is_learned in zip(lanes, learns, strict=True)
    ]
    steps.run(
        samples,
        samples.draws(lanes, at, count),
        weights(lanes, device),
        torch.tensor(lr, dtype=torch.float64, device=device).t()[:, :, None],
        torch.tensor(learns, device=device)[:, None],
        seeds.number(lanes[0].pupil.seed, "module", "together", at),
    )


def _end_epochs(
    steps: TogetherSteps, lanes: Sequence[Lane], at: int, on_epoch: OnTaskEpoch | None
) -> None:
    """For tasks that have come to the end of an epoch, check the loss and call `on_epoch`."""
    totals = steps.totals.tolist()
    for number, (lane, total) in enumerate(zip(lanes, totals, strict=True)):
        if not lane.learns(at - 1) or at % lane.steps_per_epoch:
            continue
        steps.totals[number] = 0
        epoch, loss = at // lane.steps_per_epoch, total / lane.steps_per_epoch
        if not math.isfinite(total):
            lane.failure = diverged(lane.task, epoch, loss, peak_rate(lane.pupil))
        elif on_epoch is not None:
            _call_back(on_epoch, steps, lane, number, epoch, loss)


def _call_back(
    on_epoch: OnTaskEpoch, steps: TogetherSteps, lane: Lane, number: int, epoch: int, loss: float
) -> None:
    is_now = True

    def accuracy() -> float:
        if not is_now:
            raise TaskStateError(
                f"an epoch of task {lane.task.name!r} can be asked for its accuracy only while "
                "on_epoch is called with it"
            )
        return fraction_correct(lambda x: steps.predict(number, x), lane.feed.train(SHOWN))

    try:
        with modes_kept(lane.pupil.net):
            on_epoch(lane.task.name, Epoch(epoch, lane.recipe.epochs, loss, accuracy))
    finally:
        is_now = False


def _without_those_that_end(steps: TogetherSteps, lanes: list[Lane], at: int) -> list[Lane]:
    """The tasks to go on with. On a GPU, tasks that are over stay in the batch until they are a
    quarter of it, because capturing a graph without them takes as long as many steps."""
    going = [number for number, lane in enumerate(lanes) if lane.learns(at)]
    over = len(lanes) - len(going)
    waits = steps.device.type == "cuda" and over < _LEAVING * len(lanes)
    if not over or (going and waits):
        return lanes
    for number, lane in enumerate(lanes):
        if number not in going and lane.failure is None:
            lane.learned = steps.learned(number)
    if going:
        steps.keep(going)
    return [lanes[number] for number in going]


def _commit(lane: Lane) -> TaskFailed | None:
    """Commit a task with what it has learned. Returns why that failed, or None."""
    assert lane.learned is not None
    pupil = lane.pupil
    try:
        with undisturbed():
            pupil.open(lane.task)
        adopt(pupil.net, lane.learned)
        if reason := why_not_learned(pupil, lane.feed):
            return TaskFailed(reason)
        pupil.end()
    except TaskStateError as error:
        return TaskFailed(str(error))
    finally:
        pupil.abandon()
    return None
