"""Modules that change their own buffers: nothing that was learned is forgotten through them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankup
from helpers.own_modules import RECIPE, halves
from rankup.layers.rounding import Store
from rankup.rank import Rank
from rankup.storage.manifest import MANIFEST, Manifest


class Averaging(nn.Module):
    """Centres its inputs by a running mean, as commonly written.

    Args:
        always: update in evaluation, too.
        assigned: assign a new tensor each time instead of changing the old one.
    """

    mean: Tensor

    def __init__(
        self, always: bool = False, assigned: bool = False, persistent: bool = True
    ) -> None:
        super().__init__()
        self.always, self.assigned = always, assigned
        self.register_buffer("mean", torch.zeros(12), persistent)
        self.hidden, self.head = nn.Linear(12, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.training or self.always:
            if self.assigned:
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            else:
                self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.head(self.hidden(x - self.mean).relu())


def grown(module: nn.Module, store: Store = "full") -> rankup.IncrementalNet:
    return rankup.grow(module, Rank(4, 1), head="head", store=store)


def moved(task: rankup.Task) -> rankup.Task:
    return replace(task, name="moved", train_x=task.train_x + 1, test_x=task.test_x + 1)


@pytest.mark.parametrize("assigned", [False, True])
def test_averages_are_constant_after_the_first_task(assigned: bool, tmp_path: Path) -> None:
    task = halves()
    net = grown(Averaging(assigned=assigned))
    rankup.fit(net, task, RECIPE)
    mean, answer = net.body.mean.clone(), net.eval()(task.test_x, 0)
    torch.testing.assert_close(mean, task.train_x.mean(0), atol=0.05, rtol=0)
    rankup.fit(net, moved(task), RECIPE)
    assert torch.equal(net.body.mean, mean)
    assert torch.equal(net.eval()(task.test_x, 0), answer)
    rankup.save(net, tmp_path)
    back = rankup.load(tmp_path, module=Averaging(assigned=assigned)).eval()
    x = moved(task).test_x
    assert torch.equal(back(x, 1), net(x, 1))


def test_growing_changes_nothing_of_what_it_is_given() -> None:
    module = Averaging()
    module.mean.fill_(3.0)
    net = grown(module.train())
    assert torch.equal(module.mean, torch.full((12,), 3.0))
    assert torch.equal(net.body.mean, module.mean)


def test_a_loaded_network_goes_on_as_it_would_have(tmp_path: Path) -> None:
    task = halves()
    net = rankup.fit(grown(Averaging()), task, RECIPE)
    rankup.save(net, tmp_path)
    back = rankup.load(tmp_path, module=Averaging())
    for each in (net, back):
        rankup.fit(each, moved(task), RECIPE)
    x = moved(task).test_x
    assert torch.equal(back.eval()(x, 1), net.eval()(x, 1))


def test_what_changes_all_the_same_is_refused_and_put_back() -> None:
    task = halves()
    net = grown(Averaging(always=True))
    with pytest.raises(rankup.TaskStateError, match="changes its buffer 'mean' even when it only"):
        rankup.fit(net, task, RECIPE)
    assert net.learning is None
    assert torch.equal(net.body.mean, torch.zeros(12))
    net.begin_task(task.name, task.classes)
    step(net, task)
    net.commit_task()
    mean = net.body.mean.clone()
    with pytest.raises(rankup.TaskStateError, match="changes its buffer 'mean' even when it only"):
        rankup.fit(net, replace(task, name="again"), RECIPE)
    net.begin_task("again", task.classes)
    step(net, replace(task, name="again"))
    with pytest.raises(rankup.TaskStateError, match="changed its buffer 'mean' while it learned"):
        net.commit_task()
    net.abandon_task()
    assert net.tasks == ["halves"]
    assert torch.equal(net.body.mean, mean)


def step(net: rankup.IncrementalNet, task: rankup.Task) -> None:
    """Take a step by hand, without inspecting the module first."""
    net.train()
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(3):
        optimiser.zero_grad()
        F.cross_entropy(net(task.train_x, task.name), task.train_y).backward()
        optimiser.step()


@pytest.mark.parametrize("store", ["full", "int8"])
@pytest.mark.parametrize("norm", [False, True])
def test_a_loop_by_hand_is_refused_once_and_earlier_answers_hold(norm: bool, store: Store) -> None:
    class Normed(Averaging):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(12) if norm else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x))

    task = halves()
    net = rankup.fit(grown(Normed(), store=store), task, RECIPE)
    answer = net.eval()(task.test_x, 0)
    known = next(part for part in net.parts if hasattr(part, "_updating"))
    known._updating.clear()  # as after loading
    batches = [task.train_x]
    net.begin_task("moved", 2)
    step(net, moved(task))
    with pytest.raises(rankup.TaskStateError, match="it is held constant from now on"):
        net.commit_task(calibrate=batches)
    assert torch.equal(net.eval()(task.test_x, 0), answer)
    net.abandon_task()
    net.begin_task("moved", 2)
    step(net, moved(task))
    net.commit_task(calibrate=batches)
    assert torch.equal(net.eval()(task.test_x, 0), answer)


@pytest.mark.parametrize("assigned", [False, True])
def test_what_no_file_holds_is_no_part_of_an_answer(assigned: bool, tmp_path: Path) -> None:
    task = halves()
    net = rankup.fit(grown(Averaging(assigned=assigned, persistent=False)), task, RECIPE)
    answer = net.eval()(task.test_x, 0)
    rankup.save(net, tmp_path)
    back = rankup.load(tmp_path, module=Averaging(persistent=False)).eval()
    assert torch.equal(back(task.test_x, 0), answer)
    rankup.fit(net, moved(task), RECIPE)
    assert torch.equal(net.eval()(task.test_x, 0), answer)


def test_what_is_kept_at_hand_may_grow() -> None:
    class Caching(Averaging):
        def __init__(self) -> None:
            super().__init__(persistent=False)
            self.register_buffer("places", torch.zeros(0), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            if len(self.places) < x.shape[1]:
                self.places = torch.arange(x.shape[1], dtype=x.dtype)
            return self.head(self.hidden(x + 0 * self.places).relu())

    task = halves()
    net = rankup.fit(grown(Caching()), task, RECIPE)
    assert len(net.body.places) == 12
    assert rankup.accuracy(net, task) > 0.8


def test_a_constant_buffer_may_hold_anything() -> None:
    class Masked(Averaging):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.tensor([-torch.inf, torch.nan, 0.0]))

    task = halves()
    net = rankup.fit(grown(Masked()), task, RECIPE)
    assert net.tasks == ["halves"]
    assert float(net.body.mask[0]) == -torch.inf


def test_a_buffer_that_learning_spoils_is_refused() -> None:
    class Spoiled(Averaging):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.training:
                self.mean.fill_(torch.nan)
            return y

    task = halves()
    net = grown(Spoiled())
    net.begin_task("halves", 2)
    net.train()(task.train_x, "halves")
    with pytest.raises(rankup.TaskStateError, match="mean holds values that are not finite"):
        net.commit_task()


class Moving(nn.Module):
    """Moves a parameter of its own while it learns, or whenever it runs."""

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.always = always
        self.centre = nn.Parameter(torch.zeros(16))
        self.hidden, self.head = nn.Linear(12, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.hidden(x)
        if self.training or self.always:
            with torch.no_grad():
                self.centre.lerp_(z.mean(0), 0.1)
        return self.head((z - self.centre).relu())


@pytest.mark.parametrize("base", ["new", "keep"])
def test_a_parameter_that_its_module_moves_is_constant_after_the_first_task(base: str) -> None:
    task = halves()
    net = rankup.grow(Moving(), Rank(4, 1), exclude="centre", head="head", base=base)  # type: ignore[arg-type]
    rankup.fit(net, task, RECIPE)
    before = net.eval()(task.test_x, task.name)
    if base == "new":  # steps move it too, so that it is not known yet
        net.train()
        net.begin_task("next", classes=2)
        net(task.train_x, "next").sum().backward()
        with pytest.raises(rankup.TaskStateError, match="changed its parameter 'centre' while it"):
            net.commit_task()
        net.abandon_task()
    rankup.fit(net, moved(task), RECIPE)
    assert torch.equal(net.eval()(task.test_x, task.name), before)


def test_a_parameter_that_changes_with_every_answer_is_refused() -> None:
    net = rankup.grow(Moving(always=True), Rank(4, 1), exclude="centre", head="head")
    with pytest.raises(rankup.TaskStateError, match="changes its parameter 'centre' even when"):
        rankup.fit(net, halves(), RECIPE)


def learn_by_hand(net: rankup.IncrementalNet, task: rankup.Task) -> None:
    net.begin_task("by hand", classes=2)
    net(task.train_x, "by hand").sum().backward()
    net.commit_task()


class Making(nn.Module):
    """Makes a layer when it first runs, or adds a buffer."""

    mean: Tensor | None

    def __init__(self, layer: bool) -> None:
        super().__init__()
        self.layer = layer
        self.hidden, self.between, self.head = nn.Linear(12, 16), None, nn.Linear(16, 2)
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        z = self.hidden(x)
        if self.layer:
            self.between = self.between or nn.Linear(16, 16)
            z = self.between(z)
        elif self.mean is None:
            self.mean = z.detach().mean(0)
        return self.head((z if self.layer else z - self.mean).relu())


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("layer", [False, True])
def test_what_a_module_makes_while_it_runs_is_refused(layer: bool, by_hand: bool) -> None:
    net, task = grown(Making(layer)), halves()
    made = "between.weight" if layer else "mean"
    with pytest.raises(rankup.TaskStateError, match=f"created '{made}' while it ran"):
        (learn_by_hand if by_hand else rankup.fit)(net, task)
    assert net.tasks == []


class Collecting(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, 16))
        self.hidden, self.head = nn.Linear(12, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.hidden(x)
        if self.training:
            self.seen = torch.cat([self.seen, z.detach()])[-50:]
        return self.head((z - self.seen.mean(0)).relu())


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_buffer_that_grows_is_refused(by_hand: bool) -> None:
    net, task = grown(Collecting()), halves()
    with pytest.raises(rankup.TaskStateError, match=r"'seen' from \[1, 16\] to \["):
        (learn_by_hand if by_hand else rankup.fit)(net, task)
    assert net.tasks == []
    if net.learning:
        net.abandon_task()
    assert net.body.seen.shape == (1, 16)


@pytest.mark.parametrize(
    "train", [nn.Module.train, lambda body: [p.train() for p in body.modules()]]
)
def test_the_mode_of_the_module_inside_changes_no_average(
    train: Callable[[nn.Module], Any],
) -> None:
    task = halves()
    net = grown(Averaging())
    rankup.fit(net, task, RECIPE)
    answer = net.eval()(task.test_x, 0)
    train(net.body)
    net(moved(task).test_x, 0)
    assert torch.equal(net.eval()(task.test_x, 0), answer)


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("base", ["new", "keep"])
def test_answering_in_training_mode_changes_no_later_answer(
    base: Any, persistent: bool, tmp_path: Path
) -> None:
    task = halves()
    # In evaluation mode while it learned, so that it has not been seen to change anything.
    net = rankup.grow(Averaging(persistent=persistent).eval(), Rank(4, 1), base=base, head="head")
    net.begin_task("halves", 2)
    net.commit_task()
    rankup.save(net, tmp_path)
    for each in (net, rankup.load(tmp_path, module=Averaging(persistent=persistent))):
        answer = each.eval()(task.test_x, 0)
        for _ in range(2):
            each.train()(task.test_x, 0)
        assert torch.equal(each.eval()(task.test_x, 0), answer)


def test_a_loop_of_ones_own_goes_on_with_a_loaded_network(tmp_path: Path) -> None:
    task = halves()
    net = rankup.fit(grown(Averaging()), task, RECIPE)
    rankup.save(net, tmp_path)
    back = rankup.load(tmp_path, module=Averaging())
    answer = back(task.test_x, 0)
    back.begin_task("moved", 2)
    step(back, moved(task))
    back.commit_task()
    assert torch.equal(back.eval()(task.test_x, 0), answer)
    rankup.save(back, tmp_path)
    assert rankup.verify(tmp_path)


def test_a_manifest_names_only_buffers_that_are_there(tmp_path: Path) -> None:
    rankup.save(rankup.fit(grown(Averaging()), halves(), RECIPE), tmp_path)
    manifest = Manifest.read(tmp_path)
    assert manifest.updating == ("mean",)
    (tmp_path / MANIFEST).write_bytes(replace(manifest, updating=("other",)).to_bytes())
    assert "no tensor 'other' that its module could change" in str(rankup.verify(tmp_path))


def test_an_answer_that_fails_in_training_mode_changes_nothing_either() -> None:
    class Failing(Averaging):
        def forward(self, x: Tensor) -> Tensor:
            answer = super().forward(x)
            if self.training:
                raise ValueError("only now")
            return answer

    x = halves().test_x
    net = grown(Failing().eval())
    net.begin_task("halves", 2)
    net.commit_task()
    answer = net(x, 0)
    with pytest.raises(ValueError, match="only now"):
        net.train()(x, 0)
    assert torch.equal(net.eval()(x, 0), answer)


def test_what_was_seen_to_change_in_an_answer_is_held_when_the_next_task_is_learned() -> None:
    task = halves()
    net = grown(Averaging().eval())
    net.begin_task("halves", 2)
    net.commit_task()
    net.train()(task.test_x, 0)
    net.begin_task("moved", 2)
    net(task.train_x, "moved").sum().backward()  # in training mode still
    net.commit_task()
    assert net.tasks == ["halves", "moved"]
