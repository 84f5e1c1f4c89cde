"""Tasks learned from another network's answers instead of labels."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankup
from helpers.calling import Call
from helpers.learning import F64, after_steps, assert_agree
from helpers.zoo import GPU, hashes
from rankup.data import Stream, make_stream, to_float
from rankup.errors import RankupError
from rankup.net.network import IncrementalNet
from rankup.rank import Rank
from rankup.training.batches import Feed, take
from rankup.training.distill import Teacher, divergence
from rankup.training.engine.cuda_graph import Graph
from rankup.training.engine.eager import Eager
from rankup.training.engine.learner import Form, Learner
from rankup.training.engine.rank import RankLearner
from rankup.training.fit import NetPupil
from rankup.training.recipe import Recipe

RECIPE = Recipe(epochs=4, batch=32, softness=2.0)


class Picture(nn.Module):
    """Convolutions and a norm, with a layer that would change answers in training."""

    def __init__(self) -> None:
        super().__init__()
        # In front of the norm a bias would have a gradient of pure rounding error, of which Adam
        # makes full-length steps.
        self.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4 * 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.relu(self.norm(self.conv(x)))).flatten(1))


def still() -> nn.Module:
    """The same without randomness."""
    module = Picture()
    module.drop = nn.Identity()
    return module


def flat() -> nn.Module:
    return rankup.models.mlp(64, hidden=[32, 32])


MODULES = [flat, Picture]


def grown(module: Callable[[], nn.Module], rank: Rank | None = None) -> IncrementalNet:
    return rankup.grow(module(), rank or Rank(4, 1))


@pytest.fixture(scope="module")
def stream() -> Stream:
    return make_stream("p-digits", tasks=2)


@pytest.fixture(scope="module")
def known(stream: Stream) -> IncrementalNet:
    """A teacher that has learned the stream."""
    net = grown(flat, Rank(0, 0, seeded=256))
    for task in stream:
        rankup.fit(net, task, Recipe(epochs=8, batch=64, lr=2e-2))
    return net


@pytest.mark.parametrize("softness", [1.0, 3.0])
def test_divergence_and_gradient_are_those_of_kl_div(softness: float) -> None:
    logits, wanted = torch.randn(2, 7, 5, dtype=torch.float64)
    logits.requires_grad_(True)
    soft = [(answers / softness).log_softmax(1) for answers in (logits, wanted)]
    expected = softness**2 * F.kl_div(*soft, reduction="batchmean", log_target=True)
    found = divergence(logits, wanted, softness)
    torch.testing.assert_close(found, expected)
    (grad,) = torch.autograd.grad(found, logits)
    ours, theirs = ((answers / softness).softmax(1) for answers in (logits, wanted))
    torch.testing.assert_close(grad, softness * (ours - theirs) / 7)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("crop", [0, 1])
def test_step_is_towards_answers_for_the_same_images(
    module: Callable[[], nn.Module], crop: int, stream: Stream, known: IncrementalNet
) -> None:
    recipe = replace(RECIPE, crop=crop, flip=crop > 0)
    net = grown(module)
    learner = NetPupil(net, recipe, 0, teacher=known).begin(stream[0])
    draw = {
        name: t[0] for name, t in learner.sample_epoch(torch.Generator().manual_seed(0)).items()
    }
    with learner.bound({}):
        torch.manual_seed(0)  # dropout's
        loss, grads = learner.gradient(draw)
    feed = Feed(stream[0], recipe, torch.device("cpu"))
    x = feed.batch(feed.x, draw)
    torch.manual_seed(0)
    expected = divergence(net(x, 0), known.eval()(x, 0), recipe.softness)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    for found, own in zip(grads, torch.autograd.grad(expected, [*net.parameters()]), strict=True):
        torch.testing.assert_close(found, own, rtol=1e-3, atol=1e-5)
    if crop:
        still = to_float(take(stream[0].train_x, draw["rows"]))
        assert not torch.allclose(expected, divergence(net(x, 0), known(still, 0), recipe.softness))


def test_labels_are_not_used(stream: Stream, known: IncrementalNet) -> None:
    task, nets = stream[0], []
    some = torch.arange(len(task.train_y)) % 4 == 0
    wrong = torch.where(some, (task.train_y + 1) % 10, task.train_y)
    for labels in (task.train_y, wrong):
        net = grown(flat)
        rankup.fit(net, replace(task, train_y=labels), RECIPE, teacher=known)
        nets.append(net)
    one, other = (net(to_float(task.test_x), task.name) for net in nets)
    assert torch.equal(one, other)
    learned = rankup.fit(grown(flat), task, RECIPE)(to_float(task.test_x), task.name)
    assert not torch.equal(one, learned)


def test_pupil_learns_its_teachers_answers(stream: Stream, known: IncrementalNet) -> None:
    net = grown(flat, Rank(16, 4))
    for task in stream:
        rankup.fit(net, task, replace(RECIPE, epochs=10), teacher=known)
    net.eval()
    for task in stream:
        x = to_float(task.test_x)
        assert task.transform is not None
        answers = [own(task.transform(x), task.name).argmax(1) for own in (net, known)]
        assert (answers[0] == answers[1]).float().mean() > 0.9


def same() -> nn.Module:
    """Gives the same answer to every input."""
    linear = nn.Linear(64, 10)
    nn.init.zeros_(linear.weight)
    return nn.Sequential(nn.Flatten(), linear)


def wise(task: rankup.Task) -> nn.Module:
    """A custom module that knows a task, in training mode."""
    teacher = Picture()
    optimiser = torch.optim.Adam(teacher.parameters(), 1e-2)
    assert task.transform is not None
    x, y = task.transform(to_float(task.train_x)), task.train_y
    for _ in range(10):
        optimiser.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        optimiser.step()
    return teacher


def test_teacher_is_not_modified(stream: Stream) -> None:
    teacher = wise(stream[0])
    before = copy.deepcopy(teacher.state_dict())
    rankup.fit(grown(flat), stream[0], RECIPE, teacher=teacher)
    assert teacher.training
    assert all(p.requires_grad for p in teacher.parameters())
    assert all(torch.equal(t, before[name]) for name, t in teacher.state_dict().items())


def test_teacher_is_in_evaluation_mode(stream: Stream) -> None:
    teacher, x = wise(stream[0]), to_float(stream[0].test_x[:8])
    own = Teacher(teacher, Feed(stream[0], RECIPE, torch.device("cpu"))).train()
    assert not torch.equal(teacher(x), teacher(x))  # it drops some of what it sees
    assert torch.equal(own(x), own(x))
    assert not own(x).requires_grad


@pytest.mark.parametrize(
    ("teacher", "why"),
    [
        (same(), "the teacher knows nothing about task 'permutation 01'"),
        (nn.Flatten(), r"a teacher that returns a tensor of logits, \[2, 10\] for 2 samples and"),
        (nn.Linear(7, 10), r"the teacher cannot answer inputs of shape \[2, 1, 8, 8\]: mat1 and"),
        (grown(flat), "permutation 01"),
    ],
)
def test_unsuitable_teacher_is_refused(teacher: nn.Module, why: str, stream: Stream) -> None:
    net = rankup.fit(grown(flat), stream[1], RECIPE)
    with pytest.raises(RankupError, match=why):
        rankup.fit(net, stream[0], RECIPE, teacher=teacher)
    assert net.tasks == [stream[1].name]
    assert net.learning is None


def test_teacher_must_be_a_module(stream: Stream) -> None:
    with pytest.raises(RankupError, match="a teacher must be a module, got str"):
        rankup.fit(grown(flat), stream[0], RECIPE, teacher="runs/large")  # type: ignore[arg-type]


def test_teacher_needs_cross_entropy(stream: Stream, known: IncrementalNet) -> None:
    with pytest.raises(RankupError, match="a teacher's answers cannot be compared by mse"):
        rankup.fit(grown(flat), stream[0], replace(RECIPE, loss="mse"), teacher=known)


SMALL = ["run", "--width", "16", "--device", "cpu", "--threads", "1"]


@pytest.fixture
def teacher(tmp_path: Path, known: IncrementalNet) -> Path:
    """A run's folder with a network that has learned the stream with seed 0."""
    rankup.save(known, tmp_path / "teacher" / "seed-0" / "net")
    return tmp_path / "teacher"


@pytest.mark.usefixtures("no_plots")
def test_run_learns_from_another_run(teacher: Path, tmp_path: Path, call: Call) -> None:
    learn = [*SMALL, "--tasks", "1", "--epochs", "3"]
    taught, plain = tmp_path / "taught", tmp_path / "plain"
    done = call(*learn, "--teacher", teacher, "--softness", "3", "--out", taught)
    assert done.code == 0, done.err
    assert call(*learn, "--out", plain).code == 0
    assert hashes(taught / "net") != hashes(plain / "net")
    # Resumed, it loads the teacher only if there is something left to learn.
    moved = teacher.rename(tmp_path / "elsewhere")
    more = ["run", "--resume", "--out", taught, "--tasks", "2"]
    lost = call(*more)
    assert lost.code != 0
    assert "is not the folder of a run by the rank update" in lost.err
    assert call(*more, "--teacher", "").code != 0  # begun with one, it must go on with one
    found = call(*more, "--teacher", moved)
    assert found.code == 0, found.err
    for file in (moved / "seed-0" / "net" / "tasks").iterdir():  # only its manifest is still read
        file.unlink()
    again = call("run", "--resume", "--out", taught)
    assert again.code == 0, again.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "3"], "has not learned task 'permutation 03'"),
        (["--teacher", "."], "is not the folder of a run by the rank update"),
        (["--seed", "7", "--teacher", "{}/seed-0"], "learned its tasks with seed 0, and with"),
        (["--pixels", "centred"], "learned from pixels 'unit', but would be asked with pixels"),
    ],
)
def test_unsuitable_teacher_of_a_run_is_refused(
    options: list[str], message: str, teacher: Path, tmp_path: Path, call: Call
) -> None:
    (teacher / "seed-0" / "config.json").write_text('{"recipe": {"pixels": "unit"}}')
    out = tmp_path / "taught"
    told = call(
        *(*SMALL, "--tasks", "2", "--teacher", teacher, "--out", out),
        *(option.format(teacher) for option in options),
    )
    assert told.code != 0
    assert message in told.err
    assert not out.exists()


@GPU
@pytest.mark.parametrize(
    ("module", "form"), [(flat, "vmap"), (flat, "branches"), (still, "branches")]
)
def test_graph_uses_the_teacher_of_each_task(
    module: Callable[[], nn.Module], form: Form, stream: Stream, known: IncrementalNet
) -> None:
    device, recipe = torch.device("cuda"), replace(RECIPE, flip=True, crop=1)
    found = []
    for captured in (False, True):
        graph: Graph | None = None
        for number, task in enumerate(stream):
            pupils: list[Learner] = []
            for seed in range(2):
                net = rankup.grow(module().to(F64), Rank(4, 1), seed=seed).to(device)
                net.begin_task(task.name, 10)
                feed = Feed(replace(task, transform=None), recipe, device, F64)
                taught = Teacher(known.merged(number), Feed(task, recipe, device, F64))
                pupils.append(RankLearner(net.train(), feed, 16, taught))
            if captured:
                graph = graph or Graph(form, pupils, None)
                graph.start(pupils)
            found.append(after_steps(graph or Eager(pupils), count=pupils[0].feed.steps_per_epoch))
    first, second, *others = found
    assert_agree(first, others[0])
    assert_agree(second, others[1])
    assert not torch.allclose(first[0], second[0])


class InPlace(nn.Module):
    """Scales its input in place, and has state that is not a tensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.inner(x.mul_(2))
        return answer

    def get_extra_state(self) -> object:
        return {"of": "its own"}

    def set_extra_state(self, state: object) -> None:
        pass


class Eyes(nn.Module):
    """Records what it sees, also through its copies."""

    seen: ClassVar[list[tuple[float, float]]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((float(x.min()), float(x.max())))
        return 5 * torch.stack([-x[:, 0], x[:, 0]], 1)


@pytest.mark.parametrize("who", ["pupil", "teacher"])
def test_pupil_and_teacher_may_change_their_inputs(who: str) -> None:
    Eyes.seen.clear()
    x = torch.rand(128, 8, generator=torch.Generator().manual_seed(0))
    x[:, 0] -= 0.5
    y = (x[:, 0] > 0).long()
    task = rankup.Task("signs", 2, x, y, x, y)
    body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    net = rankup.grow(InPlace(body) if who == "pupil" else body, Rank(4, 1))
    teacher = Eyes() if who == "pupil" else InPlace(Eyes())
    rankup.fit(net, task, Recipe(epochs=5, batch=32, lr=0.05), teacher=teacher)
    low, high = (-0.5, 1) if who == "pupil" else (-1, 2)
    assert len(Eyes.seen) > 20
    assert all(low <= least and most <= high for least, most in Eyes.seen)


class TwoInputs(nn.Module):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        (lambda: nn.LazyLinear(10), "the teacher is not initialised yet: run it once on an input"),
        (TwoInputs, "cannot answer inputs of shape .* missing 1 required positional argument"),
    ],
)
def test_teacher_that_cannot_answer_is_refused(
    teacher: Callable[[], nn.Module], message: str
) -> None:
    net = rankup.grow(flat(), Rank(2, 1))
    with pytest.raises(RankupError, match=message):
        rankup.fit(net, make_stream("p-digits", tasks=1)[0], RECIPE, teacher=teacher())
    assert net.tasks == []
    assert net.learning is None
