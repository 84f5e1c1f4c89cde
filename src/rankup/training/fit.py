"""Training a grown network on a task by a recipe, and testing it."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rankup import seeds
from rankup.errors import RankupError, TaskStateError
from rankup.growing.supported import has_hooks
from rankup.layers.spec import FactoredSpec
from rankup.net.about import About
from rankup.net.network import IncrementalNet
from rankup.net.routers.base import Examples
from rankup.net.tasks import Uses
from rankup.rank import as_whole, tolerance_of
from rankup.training.batches import CALIBRATION, Feed
from rankup.training.checkpoint import Checkpoint
from rankup.training.class_means import start_heads_from_means
from rankup.training.distill import Teacher
from rankup.training.engine.mlp import ChainLearner, is_chain
from rankup.training.engine.rank import ApartLearner, RankLearner
from rankup.training.engine.select import Engine
from rankup.training.evaluate import check_logits, fraction_correct
from rankup.training.loop import Epoch, OnEpoch, learn
from rankup.training.memory_format import convolves, for_answers
from rankup.training.pruning import Pruning, with_held_out
from rankup.training.recipe import Recipe, recipe_for
from rankup.training.router_examples import divided
from rankup.utils.progress import can_show, progress_bar
from rankup.utils.torch_modes import evaluating, learning_on, modes_kept

if TYPE_CHECKING:
    from rankup.data.tasks import Task

_OTHER_MODULES = "; begin_task and commit_task accept any module"
_MEANS_OF = 4096  # training samples that a head may start from
_PAD = 64  # a GPU's tables are padded to a multiple of this many rows


class NetPupil:
    """A grown network that learns tasks by a recipe.

    Args:
        seed: for the order of samples, augmentation and dropout.
        reuse: whether selectors over factors of earlier tasks are learned; otherwise they are zero.
        teacher: a module whose answers are learned in place of labels; of a grown network, those of
            its task of the same name.
        uses: from which tasks' factors a task may select, as for `begin_task`.
    """

    def __init__(
        self,
        net: IncrementalNet,
        recipe: Recipe,
        seed: int,
        reuse: bool = True,
        teacher: nn.Module | None = None,
        uses: Uses = "all",
    ) -> None:
        self.net, self.recipe, self.seed, self.reuse = net, recipe, seed, reuse
        self.teacher, self.uses = teacher, uses
        self._examples: Examples | None = None  # of the open task, for a router
        self._opened: RankLearner | None = None  # the learner of the open task
        self._tolerance = tolerance_of(net.options.rank)  # None if no factors are dropped
        self._engine = Engine()  # for what is learned after dropping factors
        if teacher is not None and recipe.rotations:
            raise RankupError(
                "rotations need labels: a teacher has no answers for turned classes; leave one out"
            )
        if teacher is not None and recipe.loss != "cross-entropy":
            raise RankupError(
                f"a teacher's answers cannot be compared by {recipe.loss}: leave that loss out"
            )

    @property
    def learned(self) -> int:
        return len(self.net.tasks)

    @property
    def begins_afresh(self) -> bool:
        return self.learned == 0 or not self.uses or self.uses == "own"

    @property
    def draws_by(self) -> int | str:
        by_name = self.net.options.draws == "name" and self.net.learning is not None
        return self.net.learning if by_name else self.learned  # type: ignore[return-value]

    def begin(self, task: Task) -> RankLearner:
        self.open(task)
        try:
            self.prepare(task)
            self._opened = self._learner(task)
            return self._opened
        except BaseException:
            self.abandon()
            raise

    def open(self, task: Task) -> None:
        """Begin a task of the network, with the recipe's starting values."""
        net, recipe = self.net, self.recipe
        if has_hooks(net):  # steps call net.body
            raise RankupError("fit would bypass the network's hooks: put them on net.body")
        if net.is_undecided:  # fit gives all processes the same task
            net.distribute()
        net.begin_task(
            task.name,
            task.classes,
            uses=self.uses,
            about=About(
                task.class_names,
                recipe=vars(recipe),
                seed=self.seed,
                samples=len(task.train_y),
            ),
            selectors=recipe.selector_start() if self.reuse else 0.0,
            norms=recipe.norms,
            factors=(recipe.first_factors if self.begins_afresh else 0) or recipe.factors,
            rotations=recipe.rotations,
            views=recipe.views,
        )

    def prepare(self, task: Task, *, tried: bool = False) -> Feed:
        """Make the open task's feed, and start its head as the recipe says.

        Args:
            tried: whether the module is known to answer such inputs; otherwise that is checked.
        """
        net = self.net
        net.train()
        if self._tolerance is not None:
            task = with_held_out(task, net.options.seed)
        if net.routing is not None:
            task, self._examples = divided(task, self.recipe, net)
        self._feed = Feed(task, self.recipe, net.device, net.dtype, net.ranks)
        if not tried:
            self._check_answers(task)
        if self.recipe.head == "means":
            batches, rows = self._feed.train_turned(_MEANS_OF), task.classes * self._feed.turns
            start_heads_from_means(self.net, batches, rows)
        return self._feed

    def _check_answers(self, task: Task) -> None:
        """Raise if the module does not give logits, in evaluation or in training mode."""
        x, _ = next(self._feed.train(2))
        needed_by = "fit needs a module that"
        _refuse_other_arguments(self.net.body)
        with seeds.seeded_rng(self.net.device, 0):
            with torch.no_grad():
                answer = self.predict(x, self.learned)
                check_logits(answer, x, task, needed_by, _OTHER_MODULES)
            if len(x) > 1:  # batch norms cannot train on a single sample
                answer = self.net(x, self.learned)
                check_logits(answer, x, task, needed_by, _OTHER_MODULES)
                _refuse_reentrant(answer)
        self.net._shared.undo_trial()

    def _learner(self, task: Task) -> RankLearner:
        net, feed = self.net, self._feed
        pad = _PAD if net.device.type == "cuda" else 1
        if self.reuse and self.teacher is None and is_chain(net, feed):
            return ChainLearner(net, feed, pad)
        module = self.teacher
        if isinstance(module, IncrementalNet):
            module = module.merged(task.name, fold=True)
        teacher = None if module is None else Teacher(module, feed)
        return (RankLearner if self.reuse else ApartLearner)(net, feed, pad, teacher)

    def predict(self, x: Tensor, task: int) -> Tensor:
        with evaluating(self.net):
            logits: Tensor = self.net(for_answers(self.net.body, x), task)
        return logits

    def end(self) -> None:
        if self._tolerance is not None:
            learner = self._opened or self._learner(self._feed.task)
            Pruning(self, learner, self._engine).run(self._tolerance)
        generator = seeds.generator(self.net.options.seed, "calibrate", self.draws_by)
        batches = self._feed.sample(CALIBRATION, generator)
        if ranks := self.net.ranks:
            batches = islice(batches, ranks.rank, None, ranks.size)
        inputs = (for_answers(self.net.body, x) for x in batches)
        self.net.commit_task(calibrate=inputs, examples=self._examples)
        self._examples = self._opened = None

    def abandon(self) -> None:
        self._opened = None
        if self.net.learning is not None:
            self.net.abandon_task()


def _refuse_other_arguments(module: nn.Module) -> None:
    try:
        inspect.signature(module.forward).bind(object())
    except TypeError as error:
        raise RankupError(
            "fit calls a module with nothing but its inputs, which this one's forward does not "
            f"accept: {error}{_OTHER_MODULES}"
        ) from None


def _refuse_reentrant(answer: Tensor) -> None:
    """Raise if the module uses reentrant activation checkpoints, which block gradients silently."""
    nodes, visited = [answer.grad_fn], set[object]()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        if node.name() == "CheckpointFunctionBackward":
            raise RankupError(
                "fit cannot train through activation checkpoints with use_reentrant=True: set "
                "use_reentrant=False, as in docs/modules.md"
            )
        visited.add(node)
        nodes += [before for before, _ in node.next_functions]


def fit(
    net: IncrementalNet,
    task: Task,
    recipe: Recipe | None = None,
    *,
    uses: Uses = "all",
    seed: int | None = None,
    teacher: nn.Module | None = None,
    resume: Checkpoint | None = None,
    on_epoch: OnEpoch | None = None,
    progress: bool = True,
) -> IncrementalNet:
    """Begin a task, learn it, calibrate and commit; return the network in the mode it was in.

    >>> import rankup
    >>> net = rankup.grow(rankup.models.mlp(64, hidden=[32]), rankup.Rank(first=4, step=1))
    >>> for task in rankup.data.make_stream("s-digits"):
    ...     net = rankup.fit(net, task, rankup.Recipe(epochs=5))
    >>> net.tasks
    ['split 01', 'split 02', 'split 03', 'split 04', 'split 05']

    If the loss does not stay finite, or the task ends no better than guessing, the task is
    abandoned and `TaskFailed` says why; all earlier tasks are kept. The task is also abandoned
    when something else goes wrong, such as Ctrl-C.

    In a process group of torch.distributed every process calls this with the same network, task
    and recipe: batches are divided among them, and all end with the same bits.

    Args:
        net: a network that `grow` made, or `load` gave.
        task: what to learn, with a name that the network does not know yet.
        recipe: how; by default what `rankup run` takes for such a task and network, in float32.
            A `Recipe` of your own has plain defaults for whatever it leaves out.
        uses: from which tasks' factors it may select, besides its own: `"all"` before it, only its
            `"own"`, or those of a list of tasks. See `begin_task`.
        seed: for the order of samples, augmentation and dropout; by default the network's.
        teacher: a module that answers for the task already, or a grown network that has learned a
            task of that name. The task is then learned from its answers in place of labels, for
            inputs as the network gets them; `softness` of the recipe says how they are compared.
        on_epoch: called after each epoch with its progress and a `Checkpoint`, which may be kept.
        resume: a checkpoint of this task, to resume from as if nothing had happened.
        progress: show a bar in a terminal or notebook if it takes long, unless `on_epoch` is given.
    """
    check_arguments("fit takes", net, task, recipe)
    if not isinstance(teacher, nn.Module | None):
        raise RankupError(f"a teacher must be a module, got {type(teacher).__name__}")
    if not isinstance(resume, Checkpoint | None):
        raise RankupError(f"fit resumes from a Checkpoint, got {type(resume).__name__}")
    seed = net.options.seed if seed is None else as_whole("seed", seed)
    recipe = recipe or default_recipe(net, task)
    pupil = NetPupil(net, recipe, seed, teacher=teacher, uses=uses)

    def call_back(epoch: Epoch, checkpoint: Checkpoint) -> None:
        assert on_epoch is not None
        with modes_kept(net):
            on_epoch(epoch, checkpoint)
        if net.learning != task.name:
            raise TaskStateError(
                f"on_epoch committed or abandoned task {task.name!r}, which fit does itself once "
                "the task is learned: raise an exception there to stop early"
            )

    shows = progress and on_epoch is None and can_show()
    epochs = recipe.epochs - (resume.epoch if resume else 0)
    try:
        with (
            modes_kept(net),
            learning_on(net.device),
            progress_bar(f"learning {task.name}", epochs, shows) as advance,
        ):
            each = (lambda *_: advance(1)) if shows else on_epoch and call_back
            (failure,) = learn([pupil], [task], Engine(), [resume], [each])
    finally:
        net._shared.hold_modes()
    if failure is not None:
        raise failure
    return net


def default_recipe(net: IncrementalNet, task: Task) -> Recipe:
    """The recipe of `fit` if it is given none."""
    ranks = [layer.spec.rank for layer in net.parts if isinstance(layer.spec, FactoredSpec)]
    return recipe_for(
        "default",
        **data_traits([task]),
        net="mlp" if net.plan.chain else "resnet18" if convolves(net.body) else "other",
        learns_factors=any(rank.first + rank.step for rank in ranks),
        kept=net.options.base == "keep",
    )


def data_traits(tasks: Sequence[Task]) -> dict[str, Any]:
    """The arguments of `recipe_for` that describe the data. Natural images are three planes of
    bytes; of tasks that differ in size the mean counts, which does not depend on their order."""
    shape, dtype = tasks[0].train_x.shape[1:], tasks[0].train_x.dtype
    return {
        "colour": len(shape) == 3 and shape[0] == 3 and dtype == torch.uint8,
        "size": min(shape[-2:], default=1),
        "samples": round(statistics.mean(len(task.train_y) for task in tasks)),
    }


def accuracy(net: IncrementalNet, task: Task, recipe: Recipe | None = None) -> float:
    """The share of a task's test samples that the network answers correctly, from 0 to 1.

    >>> import rankup
    >>> net = rankup.grow(rankup.models.mlp(64, hidden=[32]), rankup.Rank(first=4, step=1))
    >>> task = rankup.data.make_stream("s-digits")[0]
    >>> rankup.accuracy(rankup.fit(net, task), task) > 0.9
    True

    Inputs go through the task's own transform, as in training.

    Args:
        recipe: what the task was learned with, if that scales pixels another way.
    """
    check_arguments("accuracy takes", net, task, recipe)
    if (known := net.classes.get(task.name, task.classes)) != task.classes:
        raise RankupError(
            f"the network knows task {task.name!r} with {known} classes, but this one has "
            f"{task.classes}"
        )
    feed = Feed(task, recipe or Recipe(), net.device, net.dtype)

    def predict(x: Tensor) -> Tensor:
        # A network that knows no task cannot be tried, and says so itself.
        logits: Tensor = net(for_answers(net.body, x) if net.tasks else x, task.name)
        check_logits(logits, x, task, "accuracy needs a module that")
        return logits

    with evaluating(net):
        return fraction_correct(predict, feed.test())


def check_arguments(wanted: str, net: object, task: object, recipe: object) -> None:
    from rankup.data.tasks import Task

    if not isinstance(net, IncrementalNet):
        raise RankupError(f"{wanted} a network made by rankup.grow, got {type(net).__name__}")
    if not isinstance(task, Task):
        raise RankupError(f"{wanted} a rankup.data.Task, got {type(task).__name__}")
    if not isinstance(recipe, Recipe | None):
        raise RankupError(f"{wanted} a rankup.Recipe, got {type(recipe).__name__}")
